"""silu(gate x) · up x of pairs of a token and an expert: the first of the experts' two products.

A program takes a block of pairs of one expert (see `moe_align`) and, of a tile of the inner columns, the rows of the
gate and of up. What it writes is one row a pair, in the dtype of the tokens and in the order of slots.

Quantised weights come several a word, and the columns that they are multiplied with have to be taken apart alike (see
`quantised_tiles`). Of the inner rows the columns are written so. Of x they are taken apart in registers, in every
program anew, or where blocks are many, by a launch before.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.triton.moe_align import Aligned, block_at, slots
from tokenspeed_kernels.triton.moe_choices import UP, dims
from tokenspeed_kernels.triton.moe_products import Matrices, products
from tokenspeed_kernels.triton.quantised_tiles import has_ptx


@triton.jit(do_not_specialize=["first_expert"])
def _take_apart(
    x_ptr,  # [tokens, HIDDEN], rows x_stride apart
    ids_ptr,  # [tokens, TOP_K]
    apart_ptr,  # [tokens, WAYS, HIDDEN / WAYS]
    x_stride,
    first_expert,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_POW2: tl.constexpr,
    HIDDEN: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every WAYS-th column next to each other; zeros for a token that has no expert here."""
    TILES: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    i_token = (tl.program_id(0) // TILES).to(tl.int64)
    i_tile = tl.program_id(0) % TILES
    o_top = tl.arange(0, TOP_POW2)
    b_place = tl.load(ids_ptr + i_token * TOP_K + o_top, mask=o_top < TOP_K, other=0) - first_expert
    b_here = (o_top < TOP_K) & (b_place >= 0) & (b_place < EXPERTS)
    width = tl.where(tl.max(b_here.to(tl.int32), 0) > 0, HIDDEN, 0)
    o_h = i_tile * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(x_ptr + i_token * x_stride + o_h, mask=o_h < width, other=0.0)
    b_x = tl.trans(tl.reshape(b_x, [BLOCK // WAYS, WAYS]))
    o_c = i_tile * (BLOCK // WAYS) + tl.arange(0, BLOCK // WAYS)
    p_apart = apart_ptr + i_token * HIDDEN + tl.arange(0, WAYS)[:, None] * (HIDDEN // WAYS) + o_c[None, :]
    tl.store(p_apart, b_x, mask=(o_c < HIDDEN // WAYS)[None, :])


@triton.jit
def _tile(
    x,  # x_ptr, x_stride
    weights,  # w_ptr, scale_ptr, global_scale_ptr
    inner_ptr,
    order_ptr,
    block,  # expert, begin, end
    i_tile,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    APART: tl.constexpr,
    PTX: tl.constexpr,
    WAYS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    HALF: tl.constexpr = BN // 2
    x_ptr, x_stride = x
    w_ptr, scale_ptr, global_scale_ptr = weights
    expert, begin, end = block
    o_slot, valid, o_pair = slots(order_ptr, begin, end, ALIGNED, BM)
    p_x = x_ptr + (o_pair // TOP_K).to(tl.int64) * x_stride
    o_n = tl.arange(0, BN)
    i_matrix = expert.to(tl.int64) * 2 + o_n // HALF
    o_row = tl.minimum(i_tile * HALF + o_n % HALF, INTER - 1)
    b_acc = products(p_x, valid, w_ptr, scale_ptr, i_matrix, o_row, INTER, HIDDEN, FORMAT, APART, PTX, BN, BK)
    b_gate, b_up = tl.split(tl.permute(tl.reshape(b_acc, [2, HALF, BM]), (2, 1, 0)))  # [BM, HALF]
    if FORMAT == "nvfp4":
        b_gate *= tl.load(global_scale_ptr + expert * 2)
        b_up *= tl.load(global_scale_ptr + expert * 2 + 1)
    b_inner = b_gate / (1.0 + tl.exp(-b_gate)) * b_up
    o_inner = i_tile * HALF + tl.arange(0, HALF)
    o_column = o_inner % WAYS * (INTER // WAYS) + o_inner // WAYS
    p_inner = inner_ptr + o_slot.to(tl.int64)[:, None] * INTER + o_column[None, :]
    tl.store(p_inner, b_inner.to(inner_ptr.dtype.element_ty), mask=valid[:, None] & (o_inner < INTER)[None, :])


@triton.jit(do_not_specialize=["first_expert"])
def _gate_up(
    x_ptr,  # [tokens, HIDDEN]; APART: [tokens, ways of gate_up, HIDDEN / ways]
    w_ptr,  # [EXPERTS, 2, INTER, HIDDEN] of the format
    scale_ptr,  # fp8_block: [EXPERTS, 2, INTER/128, HIDDEN/128], nvfp4: [EXPERTS, 2, INTER, HIDDEN/16]
    global_scale_ptr,  # nvfp4: [EXPERTS, 2]
    ids_ptr,
    order_ptr,
    table_ptr,
    inner_ptr,  # [pairs, WAYS, INTER / WAYS], in the order of slots
    x_stride,
    first_expert,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    WAYS: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    APART: tl.constexpr,
):
    """`BLOCK_N` counts rows of the gate and of up. What is left of an expert's pairs may be a block half as wide."""
    TILES: tl.constexpr = (2 * INTER + BLOCK_N - 1) // BLOCK_N
    i_tile = tl.program_id(0) % TILES
    expert, begin, end = block_at(ids_ptr, table_ptr, tl.program_id(0) // TILES, first_expert, ALIGNED)
    x, w, block = (x_ptr, x_stride), (w_ptr, scale_ptr, global_scale_ptr), (expert, begin, end)
    if (expert >= 0) & (expert < EXPERTS):
        if BLOCK_M >= 64 and end - begin <= BLOCK_M // 2:
            _tile(
                x, w, inner_ptr, order_ptr, block, i_tile,
                TOP_K, HIDDEN, INTER, FORMAT, ALIGNED, APART, PTX, WAYS, BLOCK_M // 2, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            _tile(
                x, w, inner_ptr, order_ptr, block, i_tile,
                TOP_K, HIDDEN, INTER, FORMAT, ALIGNED, APART, PTX, WAYS, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip


def project_in(x: Tensor, blocks: Aligned, w: Matrices, inner: Tensor) -> None:
    """silu(gate x) · up x of all pairs, in the order of their slots, columns taken apart for `project_out`."""
    hidden, inter = x.shape[1], inner.shape[1]
    config = UP[w.format].pick(x.device, **dims(x, hidden, inter, blocks))
    if config["APART"] and w.ways(w.gate_up) > 1:
        x = _apart(x, blocks, w.ways(w.gate_up))
    _gate_up[(triton.cdiv(2 * inter, config["BLOCK_N"]) * blocks.most,)](
        x,
        w.gate_up,
        w.gate_up_scale,
        w.gate_up_global_scale,
        blocks.ids,
        blocks.order,
        blocks.table,
        inner,
        x.stride(0),
        blocks.first_expert,
        blocks.experts,
        blocks.ids.shape[1],
        hidden,
        inter,
        w.format,
        blocks.aligned,
        w.ways(w.down),
        has_ptx(x.device),
        BLOCK_M=blocks.block_m,
        **config,
    )


def _apart(x: Tensor, blocks: Aligned, ways: int) -> Tensor:
    (tokens, hidden), top_k = x.shape, blocks.ids.shape[1]
    apart = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = min(triton.next_power_of_2(hidden), 1024)
    _take_apart[(tokens * triton.cdiv(hidden, width),)](
        x,
        blocks.ids,
        apart,
        x.stride(0),
        blocks.first_expert,
        blocks.experts,
        top_k,
        triton.next_power_of_2(top_k),
        hidden,
        ways,
        width,
    )
    return apart
