"""How far a kernel may be from the float64 reference, from the dtype and the reduction length.

The error of an output element is |out − ref| / (|ref| + rms(ref)), the rms over the whole output: relative where the
element is of the output's typical size, absolute against that size where it is smaller, as cancellation demands.
"""

import math

import torch

ACCUMULATE = torch.finfo(torch.float32).eps / 2
"""Unit roundoff of the float32 accumulators that every kernel must use."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding once to `dtype`; 0 for integers and bool, which must be exact."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


def rounded_sum(dtype: torch.dtype, terms: int, roundings: int = 1) -> float:
    """Tolerance of a sum of `terms` products accumulated in float32 on whose path `roundings` values round to `dtype`.

    Rounding errors of a long sum add like a random walk, hence √terms; the factor 4 covers the largest of many
    elements. Each rounding to `dtype` costs its unit roundoff, doubled because products of rounded values add up.
    """
    return 2 * roundings * unit_roundoff(dtype) + 4 * math.sqrt(max(terms, 1)) * ACCUMULATE
