"""Dense projections with quantised weights in plain torch: the whole weight is widened for the call."""

import torch
from torch import Tensor

from tokenspeed_kernels import linear_quantised
from tokenspeed_kernels.quantise import from_fp8_block, from_nvfp4
from tokenspeed_kernels.torch.linear import project, reads_past_rows
from tokenspeed_registry import copy_into, kernel


@kernel(linear_quantised.linear_fp8_block, backend="torch")
def linear_fp8_block(x: Tensor, weight: Tensor, scale: Tensor, *, out: Tensor | None = None) -> Tensor:
    projected = _project(x, from_fp8_block(weight, scale))
    return projected if out is None else copy_into(out, projected)


@kernel(linear_quantised.linear_nvfp4, backend="torch")
def linear_nvfp4(
    x: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor, *, out: Tensor | None = None
) -> Tensor:
    projected = _project(x, from_nvfp4(weight, scale, global_scale))
    return projected if out is None else copy_into(out, projected)


def _project(x: Tensor, weight: Tensor) -> Tensor:
    return project(x, weight.to(widened(x, x.shape[1])), None, x.dtype)


def widened(x: Tensor, *widths: int) -> torch.dtype:
    """The dtype for dequantised weights with rows of these widths beside `x`; small weights would vanish in float16."""
    return torch.bfloat16 if x.dtype == torch.bfloat16 and not reads_past_rows(x, *widths) else torch.float32
