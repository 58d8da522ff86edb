"""Constants of the n-gram hash, which a checkpoint's table was trained with and which follow from its config."""

import functools
import itertools
from dataclasses import dataclass

from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig
from tokenspeed_engine.splitmix64 import GAMMA, splitmix64

_INDEX_STRIDE = 10007

# The least composite that passes all of these is 318665857834031151167461 (Sorenson and Webster, 2015).
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


@dataclass(frozen=True)
class NgramHash:
    """The hash of one n-gram block.

    Token t−i is multiplied by `multipliers[i]`; head j looks up row (hash mod `moduli[j]`) + `offsets[j]` of a table of
    `rows` rows. Heads come by order: all of the bigrams', then all of the trigrams'.
    """

    multipliers: tuple[int, ...]
    moduli: tuple[int, ...]
    offsets: tuple[int, ...]
    rows: int


def ngram_hash(config: Qwen4ExpConfig, index: int) -> NgramHash:
    """The hash of the model's n-gram block number `index`, from 0."""
    first = index * config.ngram_heads
    moduli = primes_from(config.ngram_vocab_size_base, first + config.ngram_heads)[first:]
    *offsets, total = itertools.accumulate(moduli, initial=0)
    divisor = config.make_ngram_vocab_size_divisible_by
    return NgramHash(_multipliers(config, index), moduli, tuple(offsets), -(-total // divisor) * divisor)


def _multipliers(config: Qwen4ExpConfig, index: int) -> tuple[int, ...]:
    """Odd, and small enough that a token id times one of them stays below 2^63."""
    half = max(1, ((1 << 63) - 1) // config.vocab_size // 2)
    seed = config.seed + _INDEX_STRIDE * index
    return tuple(2 * (splitmix64(seed + GAMMA * (i + 1)) % half) + 1 for i in range(config.ngram_size))


@functools.cache
def primes_from(start: int, count: int) -> tuple[int, ...]:
    """The first `count` primes that are at least `start`."""
    return tuple(itertools.islice(filter(is_prime, itertools.count(start)), count))


def is_prime(n: int) -> bool:
    """Miller-Rabin with fixed witnesses, exact below 3e23."""
    if n < 2:
        return False
    for witness in _WITNESSES:
        if n % witness == 0:
            return n == witness
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_is_probable_prime(n, witness, odd, twos) for witness in _WITNESSES)


def _is_probable_prime(n: int, witness: int, odd: int, twos: int) -> bool:
    power = pow(witness, odd, n)
    if power in (1, n - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % n
        if power == n - 1:
            return True
    return False
