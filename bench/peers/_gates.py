"""Peers that make the delta rule's gates by themselves get projections which give ours."""

from typing import Any

import torch
from torch import Tensor


def projections(g: Tensor, beta: Tensor, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """`a`, `b` with g = −softplus(a), beta = sigmoid(b); `A_log` and `dt_bias` zero, of one number a head."""
    decay = (-g).clamp_min(1e-6)
    zero = torch.zeros(g.shape[-1], device=g.device)
    return {
        "a": (decay + torch.log(-torch.expm1(-decay))).to(dtype),
        "b": torch.logit(beta.clamp(1e-6, 1 - 1e-6)).to(dtype),
        "A_log": zero,
        "dt_bias": zero,
    }
