"""A projection in whatever format its weight came."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_kernels.linear import linear
from tokenspeed_kernels.linear_quantised import linear_fp8_block
from tokenspeed_kernels.quantise import FP8_BLOCK, from_fp8_block, to_fp8_block

_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Linear:
    """x · weightᵀ. weight: [out, in], of a float dtype, or in FP8 with `scale`, one a block of 128 · 128."""

    weight: Tensor
    scale: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, out] of [T, in], in x's dtype; x may be strided between tokens."""
        if self.scale is None:
            return linear(x, self.weight)
        return linear_fp8_block(x, self.weight, self.scale)

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] itself."""
        return self.weight if self.scale is None else from_fp8_block(self.weight, self.scale).to(dtype)


@dataclass(frozen=True)
class Apart:
    """Projections of one input that no single matrix can hold, run one by one."""

    parts: tuple[Linear, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """[T, sum of out] of [T, in]."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


Projection = Linear | Apart


def loaded(weights: Weights, name: str) -> Linear:
    """The projection `name` as it came, or quantised as it is loaded."""
    found = Linear(weights[name], weights.tensors.get(f"{name}.scale"))
    return found if found.scale is not None or not weights.quantise else quantised(found.weight)


def quantised(weight: Tensor) -> Linear:
    """A projection kept in FP8, of a weight [out, in] in a wider dtype."""
    return Linear(*to_fp8_block(weight))


def quantised_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 elements of a weight [out, in], and Float32 [out], what multiplies each row of them."""
    scale = (weight.float().abs().amax(dim=1) / torch.finfo(torch.float8_e4m3fn).max).clamp_min(_SMALLEST)
    return (weight.float() / scale[:, None]).to(torch.float8_e4m3fn), scale


def stacked(weights: Weights, parts: Sequence[Tensor | str]) -> Projection:
    """Projections of one input as one, by name or as weights [out, in] in a wider dtype; outputs lie side by side."""
    found = [
        Linear(weights[part], weights.tensors.get(f"{part}.scale")) if isinstance(part, str) else Linear(part)
        for part in parts
    ]
    if all(part.scale is None for part in found):
        weight = torch.cat([part.weight for part in found])
        return quantised(weight) if weights.quantise else Linear(weight)
    scales = [part.scale for part in found if part.scale is not None]
    # A block of scales covers 128 rows, so only what ends at such a row can have another below it.
    if len(scales) == len(found) and all(part.out_features % FP8_BLOCK == 0 for part in found[:-1]):
        return Linear(torch.cat([part.weight for part in found]), torch.cat(scales))
    return Apart(tuple(found))
