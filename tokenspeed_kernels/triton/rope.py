"""Rotary embedding: an elementwise pass over rows of a head of a token."""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.rope import rope as rope_op
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.device import compute_units


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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A row is a head of a token. Each element is computed from itself and its partner, whose cache lines it shares.
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    o_token, o_head = o_r // HEADS, o_r % HEADS
    o_d = tl.arange(0, BLOCK)[None, :]
    alive = o_token < tokens
    turned = o_d < 2 * HALF
    if INTERLEAVED:
        o_pair, is_second, o_partner = o_d // 2, o_d % 2 == 1, o_d ^ 1
    else:
        is_second = o_d >= HALF
        o_pair = tl.where(is_second, o_d - HALF, o_d)
        o_partner = tl.where(is_second, o_d - HALF, o_d + HALF)
    p_x = x_ptr + o_token * x_token + o_head * x_head
    b_x = tl.load(p_x + o_d, mask=alive & (o_d < DIM), other=0.0)  # [ROWS, BLOCK]
    b_partner = tl.load(p_x + o_partner, mask=alive & turned, other=0.0).to(tl.float32)
    position = tl.load(positions_ptr + o_token, mask=alive, other=0).to(tl.float32)
    angle = position * tl.load(inv_freq_ptr + o_pair, mask=turned, other=0.0)
    # Models keep cosine and sine in x's dtype.
    cos = (tl.cos(angle) * factor).to(b_x.dtype).to(tl.float32)
    sin = (tl.sin(angle) * factor).to(b_x.dtype).to(tl.float32)
    rotated = b_x.to(tl.float32) * cos + tl.where(is_second, b_partner, -b_partner) * sin
    result = tl.where(turned, rotated, b_x.to(tl.float32))
    tl.store(out_ptr + o_r * DIM + o_d, result.to(b_x.dtype), mask=alive & (o_d < DIM))


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
        tokens, heads, dim = x.shape
        block = triton.next_power_of_2(dim)
        rows = max(1024 // block, 1)
        if tokens * heads < 4 * rows * compute_units(x.device):
            rows = 1
        _rope[(triton.cdiv(tokens * heads, rows),)](
            x,
            positions,
            inv_freq,
            out,
            tokens,
            x.stride(0),
            x.stride(1),
            factor,
            heads,
            dim,
            inv_freq.shape[0],
            style == "interleaved",
            rows,
            block,
            num_warps=min(max(rows * block // 256, 1), 4),
        )
    return out
