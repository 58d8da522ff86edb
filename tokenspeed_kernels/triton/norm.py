"""RMS norms: a program a row and group."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import norm
from tokenspeed_kernels.triton.declare import portable


@triton.jit
def _rms_norm(
    x_ptr,  # [rows, groups, dim], contiguous in the last two
    w_ptr,  # [groups, dim]
    o_ptr,  # [rows, groups, dim]
    x_stride,
    eps,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_group = tl.program_id(1)
    o_d = tl.arange(0, BLOCK)
    inside = o_d < DIM
    x = tl.load(x_ptr + i_row * x_stride + i_group * DIM + o_d, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + i_group * DIM + o_d, mask=inside, other=0.0).to(tl.float32)
    if ZERO_CENTRED:
        w += 1.0
    y = x * (1.0 / tl.sqrt(tl.sum(x * x) / DIM + eps)) * w
    tl.store(o_ptr + (i_row * GROUPS + i_group) * DIM + o_d, y.to(o_ptr.dtype.element_ty), mask=inside)


def _launch(x: Tensor, weight: Tensor, eps: float, zero_centred: bool, groups: int, out: Tensor | None) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    dim = x.shape[-1]
    if out.numel():
        block = triton.next_power_of_2(dim)
        warps = min(max(block // 512, 1), 8)
        _rms_norm[(x.shape[0], groups)](
            x, weight, out, x.stride(0), eps, groups, dim, block, zero_centred, num_warps=warps
        )
    return out


@portable(norm.rms_norm)
def rms_norm(x: Tensor, weight: Tensor, *, eps: float, zero_centred: bool, out: Tensor | None = None) -> Tensor:
    return _launch(x, weight, eps, zero_centred, 1, out)


@portable(norm.grouped_rms_norm)
def grouped_rms_norm(x: Tensor, weight: Tensor, *, eps: float, zero_centred: bool, out: Tensor | None = None) -> Tensor:
    return _launch(x, weight, eps, zero_centred, x.shape[1], out)
