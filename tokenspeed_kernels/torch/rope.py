"""Rotary position embedding in plain torch."""

from typing import Literal

import torch
from torch import Tensor

from tokenspeed_kernels.rope import rope as rope_op
from tokenspeed_registry import kernel


@kernel(rope_op, backend="torch")
def rope(
    x: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    *,
    style: Literal["neox", "interleaved"] = "neox",
    factor: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    half = inv_freq.shape[0]
    angle = positions.float()[:, None, None] * inv_freq
    cos, sin = ((part * factor).to(x.dtype).float() for part in (angle.cos(), angle.sin()))
    pairs, axis = ((2, half), -2) if style == "neox" else ((half, 2), -1)
    first, second = x[..., : 2 * half].float().reshape(*x.shape[:2], *pairs).unbind(axis)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), axis).flatten(-2).to(x.dtype)
    result = out if out is not None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    result[..., 2 * half :] = x[..., 2 * half :]
    result[..., : 2 * half] = turned
    return result
