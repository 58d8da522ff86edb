"""Caches whose rows may be scaled and of another dtype than the model: what the references and contracts share.

Every op that writes such a cache stores x / scale, rounded once to the cache's dtype; every op that reads it multiplies
by the same scale. float8_e4m3fn saturates at ±448, so that what is stored of a number is a number; NaN stays NaN.
A scale is a float32 tensor of one element, positive and finite, on the device of the cache: it may change between
replays of a graph. None is 1.
"""

import torch
from torch import Tensor

from tokenspeed_registry import Signature
from tokenspeed_registry.tolerance import ACCUMULATE


def stored(values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What a cache of `dtype` holds of `values`."""
    wide = values.double() / (1.0 if scale is None else scale.double())
    if dtype == torch.float8_e4m3fn:
        limit = torch.finfo(dtype).max
        wide = wide.clamp(-limit, limit)
    return wide.to(dtype)


def loaded(rows: Tensor, scale: Tensor | None) -> Tensor:
    """What rows of a cache stand for, in float64."""
    return rows.double() * (1.0 if scale is None else scale.double())


def store_tolerance(s: Signature, cache: str, scale: str) -> float:
    """How far what is stored in `cache` may be from the reference's.

    Without a scale it is one rounding of what was given, the same on every device. A quotient is not: beside a tie its
    float32 error decides, which costs a whole step of the cache's dtype. One by a reciprocal is rounded twice.
    """
    return torch.finfo(s.dtype(cache)).eps + 2 * ACCUMULATE if s.given(scale) else 0.0
