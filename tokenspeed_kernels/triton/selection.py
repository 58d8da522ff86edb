"""Exact selection by rank: scores as integers that compare as they do, and the threshold that some number reaches."""

import triton
import triton.language as tl


@triton.jit
def order_key(score):
    """uint32 that rises with a float32 score, above 0 for all but one NaN; zeros of both signs differ."""
    bits = score.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)


@triton.jit
def threshold_of(key, wanted):
    """A threshold that `wanted` of the keys, at most 2^15 in all, reach; if more do, fewer than that exceed it.

    Two bits a step, until the count fits.
    """
    threshold = tl.full([], 0, tl.uint32)
    unit = tl.full([], 1 << 30, tl.uint32)
    reached = wanted + 1
    while (unit > 0) & (reached != wanted):
        # Two counts share a word.
        low = (key >= threshold + unit).to(tl.int32) + tl.where(key >= threshold + 2 * unit, 1 << 16, 0)
        high = (key >= threshold + 3 * unit).to(tl.int32)
        low = tl.sum(low, 0)
        high = tl.sum(high, 0)
        if high >= wanted:
            threshold += 3 * unit
            reached = high
        elif low >> 16 >= wanted:
            threshold += 2 * unit
            reached = low >> 16
        elif low & 0xFFFF >= wanted:
            threshold += unit
            reached = low & 0xFFFF
        unit = unit >> 2
    return threshold
