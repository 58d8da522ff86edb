"""Root-mean-square normalisation in plain torch."""

import torch
from torch import Tensor

from tokenspeed_kernels import norm
from tokenspeed_registry import copy_into, kernel


@kernel(norm.rms_norm, backend="torch")
def rms_norm(x: Tensor, weight: Tensor, *, eps: float, zero_centred: bool, out: Tensor | None = None) -> Tensor:
    normed = _normalise(x, weight, eps, zero_centred)
    return normed if out is None else copy_into(out, normed)


@kernel(norm.add_rms_norm, backend="torch")
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, zero_centred: bool, out: Tensor | None = None
) -> Tensor:
    residual += x  # torch adds half precision in float32
    normed = _normalise(residual, weight, eps, zero_centred)
    return normed if out is None else copy_into(out, normed)


@kernel(norm.grouped_rms_norm, backend="torch")
def grouped_rms_norm(x: Tensor, weight: Tensor, *, eps: float, zero_centred: bool, out: Tensor | None = None) -> Tensor:
    normed = _normalise(x, weight, eps, zero_centred)
    return normed if out is None else copy_into(out, normed)


def _normalise(x: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> Tensor:
    wide = x.float()
    scale = weight.float() + 1.0 if zero_centred else weight.float()
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse * scale).to(x.dtype)
