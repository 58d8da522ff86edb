"""RMS norms: a program takes whole rows, several where rows are short and many, and reads each once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import norm
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.device import compute_units, platform_for


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x_ptr,  # [rows, GROUPS, DIM], of unit stride in the last dim
    residual_ptr,  # the same, gains x
    weight_ptr,  # [GROUPS, DIM]
    out_ptr,  # [rows, GROUPS, DIM]
    rows,
    x_row,
    x_group,
    residual_row,
    eps,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    ADDED: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # every group of every row counts
    o_row, o_group = o_r // GROUPS, o_r % GROUPS
    o_d = tl.arange(0, BLOCK)[None, :]
    inside = (o_row < rows) & (o_d < DIM)
    b_w = tl.load(weight_ptr + o_group * DIM + o_d, mask=inside, other=0.0).to(tl.float32)
    b_x = tl.load(x_ptr + o_row * x_row + o_group * x_group + o_d, mask=inside, other=0.0)  # [ROWS, BLOCK]
    if ADDED:
        p_residual = residual_ptr + o_row * residual_row + o_d
        b_residual = tl.load(p_residual, mask=inside, other=0.0)
        b_x = (b_residual.to(tl.float32) + b_x.to(tl.float32)).to(b_x.dtype)
        tl.store(p_residual, b_x, mask=inside)
    wide = b_x.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / DIM + eps)
    if ZERO_CENTRED:
        b_w += 1.0
    normed = wide * inverse[:, None] * b_w
    tl.store(out_ptr + o_r * DIM + o_d, normed.to(out_ptr.dtype.element_ty), mask=inside)


@portable(norm.rms_norm)
def rms_norm(x: Tensor, weight: Tensor, *, eps: float, zero_centred: bool, out: Tensor | None = None) -> Tensor:
    return _launch(x, None, weight, eps, zero_centred, out)


@portable(norm.add_rms_norm)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, zero_centred: bool, out: Tensor | None = None
) -> Tensor:
    return _launch(x, residual, weight, eps, zero_centred, out)


@portable(norm.grouped_rms_norm)
def grouped_rms_norm(x: Tensor, weight: Tensor, *, eps: float, zero_centred: bool, out: Tensor | None = None) -> Tensor:
    return _launch(x, None, weight, eps, zero_centred, out)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centred: bool, out: Tensor | None
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if not out.numel():
        return out
    rows, groups, dim = x.shape[0], x.shape[1] if x.dim() == 3 else 1, x.shape[-1]
    block = triton.next_power_of_2(dim)
    # Two vector loads a thread where there are rows enough to fill the device with such programs.
    several = max(2048 // block, 1)
    if rows * groups < 4 * several * compute_units(x.device):
        several = 1
    warps = min(max(several * block // 512, 1), 16)
    if platform_for(x.device).limits.warp_size == 64:
        warps = (warps + 1) // 2
    _rms_norm[(triton.cdiv(rows * groups, several),)](
        x,
        x if residual is None else residual,
        weight,
        out,
        rows,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        0 if residual is None else residual.stride(0),
        eps,
        groups,
        dim,
        residual is not None,
        zero_centred,
        several,
        block,
        num_warps=warps,
    )
    return out
