"""Down projection of pairs of a token and an expert, and the sum over a token's experts.

A program of the projection takes a block of pairs of one expert (see `moe_align`) and a tile of the matrix's rows. It
writes one row a pair, times the routing weight, in the dtype of the tokens and in the order of pairs; the sum adds up a
token's rows in the order of its experts.
"""

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.triton.moe_align import Aligned, block_at, slots
from tokenspeed_kernels.triton.moe_choices import DOWN, dims
from tokenspeed_kernels.triton.moe_products import Matrices, products
from tokenspeed_kernels.triton.quantised_tiles import has_ptx


@triton.jit
def _tile(
    inner_ptr,
    matrices,  # w_ptr, scale_ptr, global_scale_ptr
    weights_ptr,
    parts_ptr,
    order_ptr,
    block,  # expert, begin, end
    i_tile,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    PTX: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    w_ptr, scale_ptr, global_scale_ptr = matrices
    expert, begin, end = block
    o_slot, valid, o_pair = slots(order_ptr, begin, end, ALIGNED, BM)
    p_inner = inner_ptr + o_slot.to(tl.int64) * INTER
    o_n = i_tile * BN + tl.arange(0, BN)
    i_matrix, o_row = expert.to(tl.int64), tl.minimum(o_n, HIDDEN - 1)
    b_acc = products(p_inner, valid, w_ptr, scale_ptr, i_matrix, o_row, HIDDEN, INTER, FORMAT, True, PTX, BN, BK)
    b_weight = tl.load(weights_ptr + o_pair, mask=valid, other=0.0)
    if FORMAT == "nvfp4":
        b_weight *= tl.load(global_scale_ptr + expert)
    b_part = tl.trans(b_acc) * b_weight[:, None]  # [BM, BN]
    p_part = parts_ptr + o_pair.to(tl.int64)[:, None] * HIDDEN + o_n[None, :]
    tl.store(p_part, b_part.to(parts_ptr.dtype.element_ty), mask=valid[:, None] & (o_n < HIDDEN)[None, :])


@triton.jit(do_not_specialize=["first_expert"])
def _down(
    inner_ptr,  # [pairs, INTER], in the order of slots, columns taken apart
    w_ptr,  # [EXPERTS, HIDDEN, INTER] of the format
    scale_ptr,  # fp8_block: [EXPERTS, HIDDEN/128, INTER/128], nvfp4: [EXPERTS, HIDDEN, INTER/16]
    global_scale_ptr,  # nvfp4: [EXPERTS]
    weights_ptr,  # [pairs]
    ids_ptr,
    order_ptr,
    table_ptr,
    parts_ptr,  # [pairs, HIDDEN], in the order of pairs
    first_expert,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    TILES: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    i_tile = tl.program_id(0) % TILES
    expert, begin, end = block_at(ids_ptr, table_ptr, tl.program_id(0) // TILES, first_expert, ALIGNED)
    w, block = (w_ptr, scale_ptr, global_scale_ptr), (expert, begin, end)
    if (expert >= 0) & (expert < EXPERTS):
        if BLOCK_M >= 64 and end - begin <= BLOCK_M // 2:
            _tile(
                inner_ptr, w, weights_ptr, parts_ptr, order_ptr, block, i_tile,
                HIDDEN, INTER, FORMAT, ALIGNED, PTX, BLOCK_M // 2, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            _tile(
                inner_ptr, w, weights_ptr, parts_ptr, order_ptr, block, i_tile,
                HIDDEN, INTER, FORMAT, ALIGNED, PTX, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip


@triton.jit(do_not_specialize=["first_expert"])
def _sum(
    parts_ptr,  # [tokens, TOP_K, HIDDEN]
    ids_ptr,  # [tokens, TOP_K]
    y_ptr,  # [tokens, HIDDEN]
    first_expert,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    TILES: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    i_token = (tl.program_id(0) // TILES).to(tl.int64)
    o_h = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    b_y = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + i_token * TOP_K + i) - first_expert
        here = (expert >= 0) & (expert < EXPERTS)
        p_part = parts_ptr + (i_token * TOP_K + i) * HIDDEN + o_h
        b_y += tl.load(p_part, mask=o_h < tl.where(here, HIDDEN, 0), other=0.0).to(tl.float32)
    tl.store(y_ptr + i_token * HIDDEN + o_h, b_y.to(y_ptr.dtype.element_ty), mask=o_h < HIDDEN)


def project_out(inner: Tensor, weights: Tensor, blocks: Aligned, w: Matrices, parts: Tensor) -> None:
    """Of each pair that has an expert here, its weight times down · inner."""
    hidden, inter = parts.shape[1], inner.shape[1]
    config = DOWN[w.format].pick(inner.device, **dims(inner, hidden, inter, blocks))
    _down[(triton.cdiv(hidden, config["BLOCK_N"]) * blocks.most,)](
        inner,
        w.down,
        w.down_scale,
        w.down_global_scale,
        weights,
        blocks.ids,
        blocks.order,
        blocks.table,
        parts,
        blocks.first_expert,
        blocks.experts,
        hidden,
        inter,
        w.format,
        blocks.aligned,
        has_ptx(inner.device),
        blocks.block_m,
        **config,
    )


def add_up(parts: Tensor, blocks: Aligned, y: Tensor) -> None:
    """Sums of the tokens' parts, of those that have an expert here."""
    (tokens, hidden), top_k = y.shape, blocks.ids.shape[1]
    width = min(triton.next_power_of_2(hidden), 1024 if tokens > 64 else 256)
    _sum[(tokens * triton.cdiv(hidden, width),)](
        parts,
        blocks.ids,
        y,
        blocks.first_expert,
        blocks.experts,
        top_k,
        hidden,
        width,
        num_warps=max(width // 256, 1),
    )
