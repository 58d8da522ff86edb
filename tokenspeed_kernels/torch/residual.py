"""Gated residual in plain torch."""

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from tokenspeed_kernels import residual
from tokenspeed_registry import copy_into, kernel


@kernel(residual.residual_mix, backend="torch")
def residual_mix(
    x: Tensor,
    norm_weight: Tensor,
    w_down: Tensor,
    w_up: Tensor,
    w_inject: Tensor,
    *,
    eps: float,
    down_scale: Tensor | None = None,
    up_scale: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    results = _mix(x, norm_weight, (w_down, down_scale), (w_up, up_scale), w_inject, eps)
    return results if out is None else copy_into(out, results)


@kernel(residual.residual_inject, backend="torch")
def residual_inject(x: Tensor, y: Tensor, inject: Tensor) -> None:
    _inject(x, y, inject)


@kernel(residual.residual_inject_mix, backend="torch")
def residual_inject_mix(
    x: Tensor,
    y: Tensor,
    inject: Tensor,
    norm_weight: Tensor,
    w_down: Tensor,
    w_up: Tensor,
    w_inject: Tensor,
    *,
    eps: float,
    down_scale: Tensor | None = None,
    up_scale: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    _inject(x, y, inject)
    results = _mix(x, norm_weight, (w_down, down_scale), (w_up, up_scale), w_inject, eps)
    return results if out is None else copy_into(out, results)


def _inject(x: Tensor, y: Tensor, inject: Tensor) -> None:
    x.copy_(torch.addcmul(x.float(), inject.unsqueeze(-1), y.float().unsqueeze(1)))


Scaled = tuple[Tensor, Tensor | None]
"""A weight and what multiplies its rows."""


def _mix(
    x: Tensor, norm_weight: Tensor, down: Scaled, up: Scaled, w_inject: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    streams = x.shape[1]
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1 + norm_weight.float())
    flat = wide.to(x.dtype).flatten(1)  # [tokens streams*hidden]: the projections run in the weights' dtype
    low = silu(_project(flat, down) / streams).to(x.dtype)
    gate = torch.sigmoid(_project(low, up)).view_as(wide)
    mixed = (gate * wide).mean(1).to(x.dtype)
    return mixed, 2 * torch.sigmoid(linear(flat, w_inject).float() / streams)


def _project(x: Tensor, weight: Scaled) -> Tensor:
    """x Wᵀ in float32; the scale of a row of W multiplies its output."""
    values, scale = weight
    product = linear(x, values.to(x.dtype)).float()
    return product if scale is None else product * scale
