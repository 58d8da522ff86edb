"""Rotary embedding: a program turns some heads of some tokens, whose cosines and sines it computes once."""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.rope import rope as rope_op
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.device import bucket, compute_units

_ELEMENTS = 2048
"""What a program of one warp takes, where there is enough for all."""


@triton.jit
def _cos_sin(angle):
    """Both, of float32 angles of any size: quarter turns are taken off in float64, of the rest a series is summed."""
    wide = angle.to(tl.float64)
    quarters = tl.floor(wide * 0.6366197723675814 + 0.5)
    x = (wide - quarters * 1.5707963267948966).to(tl.float32)  # of at most π/4
    y = x * x
    cos = 1.0 + y * (-1 / 2 + y * (1 / 24 + y * (-1 / 720 + y * (1 / 40320 - y * (1 / 3628800)))))
    sin = x + x * y * (-1 / 6 + y * (1 / 120 + y * (-1 / 5040 + y * (1 / 362880))))
    quarter = quarters.to(tl.int64) & 3
    odd = quarter % 2 == 1
    return (
        tl.where((quarter == 1) | (quarter == 2), -1.0, 1.0) * tl.where(odd, sin, cos),
        tl.where(quarter >= 2, -1.0, 1.0) * tl.where(odd, cos, sin),
    )


@triton.jit(do_not_specialize=["tokens"])
def _rope(
    x_ptr,  # [tokens, HEADS, DIM], of unit stride in the last dim
    positions_ptr,  # [tokens]
    inv_freq_ptr,  # [HALF]
    out_ptr,  # [tokens, HEADS, DIM]
    tokens,
    x_token,
    x_head,
    factor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    head_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    i_token = tl.program_id(0).to(tl.int64) // head_blocks * BLOCK_T
    o_token = i_token + tl.arange(0, BLOCK_T)
    o_head = (tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    o_pair = tl.arange(0, PAIRS)
    alive = o_token < tokens

    position = tl.load(positions_ptr + o_token, mask=alive, other=0).to(tl.float32)
    inv_freq = tl.load(inv_freq_ptr + o_pair, mask=o_pair < HALF, other=0.0)
    cos, sin = _cos_sin(position[:, None] * inv_freq[None, :])  # [BT, PAIRS]
    # Models keep cosine and sine in x's dtype.
    dtype = x_ptr.dtype.element_ty
    cos = (cos * factor).to(dtype).to(tl.float32)[:, None, :]
    sin = (sin * factor).to(dtype).to(tl.float32)[:, None, :]

    row = alive[:, None, None] & (o_head < HEADS)[None, :, None]
    p_x = x_ptr + o_token[:, None, None] * x_token + o_head[None, :, None] * x_head
    p_out = out_ptr + (o_token[:, None, None] * HEADS + o_head[None, :, None]) * DIM
    if INTERLEAVED:
        o_turned = tl.arange(0, 2 * PAIRS)[None, None, :]
        inside = row & (o_turned < 2 * HALF)
        b_x = tl.load(p_x + o_turned, mask=inside, other=0.0).to(tl.float32)  # [BT, BH, 2 * PAIRS]
        b_first, b_second = tl.split(tl.reshape(b_x, [BLOCK_T, BLOCK_H, PAIRS, 2]))
        b_turned = tl.join(b_first * cos - b_second * sin, b_first * sin + b_second * cos)
        b_turned = tl.reshape(b_turned, [BLOCK_T, BLOCK_H, 2 * PAIRS])
        tl.store(p_out + o_turned, b_turned.to(dtype), mask=inside)
    else:
        o_first = o_pair[None, None, :]
        inside = row & (o_first < HALF)
        b_first = tl.load(p_x + o_first, mask=inside, other=0.0).to(tl.float32)  # [BT, BH, PAIRS]
        b_second = tl.load(p_x + HALF + o_first, mask=inside, other=0.0).to(tl.float32)
        tl.store(p_out + o_first, (b_first * cos - b_second * sin).to(dtype), mask=inside)
        tl.store(p_out + HALF + o_first, (b_first * sin + b_second * cos).to(dtype), mask=inside)
    if REST != 0:
        o_rest = 2 * HALF + tl.arange(0, REST)[None, None, :]
        inside = row & (o_rest < DIM)
        tl.store(p_out + o_rest, tl.load(p_x + o_rest, mask=inside), mask=inside)  # [BT, BH, REST]


@portable(rope_op)
def rope(
    x: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    *,
    style: Literal["neox", "interleaved"] = "neox",
    factor: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if out.numel():
        (tokens, heads, dim), half = x.shape, inv_freq.shape[0]
        many = out.numel() >= 4 * _ELEMENTS * compute_units(x.device)
        elements = _ELEMENTS if many else _ELEMENTS // 8
        block_h = min(bucket(heads), max(elements // bucket(dim), 1))
        block_t = max(elements // (block_h * bucket(dim)), 1)
        _rope[(triton.cdiv(tokens, block_t) * triton.cdiv(heads, block_h),)](
            x, positions, inv_freq, out, tokens, x.stride(0), x.stride(1), factor,
            heads, dim, half, style == "interleaved", block_t, block_h, bucket(half),
            bucket(dim - 2 * half) if dim > 2 * half else 0,
            num_warps=1,
        )  # fmt: skip
    return out
