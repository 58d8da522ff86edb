"""The SplitMix64 generator (Steele, Lea and Flood, 2014): seeds of samples, multipliers of n-gram hashes."""

GAMMA = 0x9E3779B97F4A7C15
"""What the generator adds to its state at each step."""
_MASK = (1 << 64) - 1


def splitmix64(value: int) -> int:
    """The generator's next output for state `value` mod 2^64."""
    value = (value + GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
