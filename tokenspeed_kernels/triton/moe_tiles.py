"""Experts in three launches: gate and up projection and what joins them, down projection with the routing weight, sum.

In the first two a program takes a block of pairs of one expert (see `moe_align`) and a tile of its matrix's rows, and
multiplies them as `moe_products` says: every weight is read once for a block. What it writes is one row a pair, in the
dtype of the tokens; the third launch adds up a token's rows in the order of its experts.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.triton.device import bucket, platform_for
from tokenspeed_kernels.triton.moe_align import Aligned, align
from tokenspeed_kernels.triton.moe_products import products
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry.platform import Platform


@triton.jit
def _block(ids_ptr, table_ptr, i_block, first_expert, ALIGNED: tl.constexpr):
    """The block's expert, or one out of range where there is no block; its first slot and that after its last."""
    if ALIGNED:
        there = i_block < tl.load(table_ptr)
        expert = tl.where(there, tl.load(table_ptr + 3 + i_block * 3), -1)
        begin = tl.load(table_ptr + 4 + i_block * 3)
        end = tl.load(table_ptr + 5 + i_block * 3)
    else:
        expert = tl.load(ids_ptr + i_block) - first_expert
        begin, end = i_block, i_block + 1
    return expert, begin, end


@triton.jit
def _slots(order_ptr, begin, end, ALIGNED: tl.constexpr, BM: tl.constexpr):
    """A block's slots, which of them are, and their pairs."""
    o_slot = begin + tl.arange(0, BM)
    valid = o_slot < end
    o_pair = o_slot
    if ALIGNED:
        o_pair = tl.load(order_ptr + o_slot, mask=valid, other=0)
    return o_slot, valid, o_pair


@triton.jit
def _store_inner(
    b_acc, o_slot, valid, inner_ptr, global_scale_ptr, expert, i_tile, INTER: tl.constexpr, FORMAT: tl.constexpr
):
    HALF: tl.constexpr = b_acc.shape[0] // 2
    b_gate, b_up = tl.split(tl.permute(tl.reshape(b_acc, [2, HALF, b_acc.shape[1]]), (2, 1, 0)))  # [BM, HALF]
    if FORMAT == "nvfp4":
        b_gate *= tl.load(global_scale_ptr + expert * 2)
        b_up *= tl.load(global_scale_ptr + expert * 2 + 1)
    b_inner = b_gate / (1.0 + tl.exp(-b_gate)) * b_up
    o_inner = i_tile * HALF + tl.arange(0, HALF)
    p_inner = inner_ptr + o_slot.to(tl.int64)[:, None] * INTER + o_inner[None, :]
    tl.store(p_inner, b_inner.to(inner_ptr.dtype.element_ty), mask=valid[:, None] & (o_inner < INTER)[None, :])


@triton.jit
def _store_parts(
    b_acc,
    o_pair,
    valid,
    parts_ptr,
    weights_ptr,
    global_scale_ptr,
    expert,
    o_row,
    HIDDEN: tl.constexpr,
    FORMAT: tl.constexpr,
):
    b_weight = tl.load(weights_ptr + o_pair, mask=valid, other=0.0)
    if FORMAT == "nvfp4":
        b_weight *= tl.load(global_scale_ptr + expert)
    b_part = tl.trans(b_acc) * b_weight[:, None]  # [BM, BN]
    p_part = parts_ptr + o_pair.to(tl.int64)[:, None] * HIDDEN + o_row[None, :]
    tl.store(p_part, b_part.to(parts_ptr.dtype.element_ty), mask=valid[:, None] & (o_row < HIDDEN)[None, :])


@triton.jit
def _gate_up_tile(
    x_ptr,
    w_ptr,
    scale_ptr,
    global_scale_ptr,
    order_ptr,
    inner_ptr,
    x_stride,
    expert,
    begin,
    end,
    i_tile,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    HALF: tl.constexpr = BN // 2
    o_slot, valid, o_pair = _slots(order_ptr, begin, end, ALIGNED, BM)
    o_n = tl.arange(0, BN)
    b_acc = products(
        x_ptr + (o_pair // TOP_K).to(tl.int64) * x_stride,
        valid,
        w_ptr,
        scale_ptr,
        expert.to(tl.int64) * 2 + o_n // HALF,
        tl.minimum(i_tile * HALF + o_n % HALF, INTER - 1),
        INTER,
        HIDDEN,
        FORMAT,
        BN,
        BK,
    )
    _store_inner(b_acc, o_slot, valid, inner_ptr, global_scale_ptr, expert, i_tile, INTER, FORMAT)


@triton.jit(do_not_specialize=["first_expert"])
def _gate_up(
    x_ptr,  # [tokens, HIDDEN]
    w_ptr,  # [EXPERTS, 2, INTER, HIDDEN] of the format
    scale_ptr,  # fp8_block: [EXPERTS, 2, INTER/128, HIDDEN/128], nvfp4: [EXPERTS, 2, INTER, HIDDEN/16]
    global_scale_ptr,  # nvfp4: [EXPERTS, 2]
    ids_ptr,
    order_ptr,
    table_ptr,
    inner_ptr,  # [pairs, INTER], in the order of slots
    x_stride,
    first_expert,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`BLOCK_N` counts rows of the gate and of up. What is left of an expert's pairs may be a block half as wide."""
    TILES: tl.constexpr = (2 * INTER + BLOCK_N - 1) // BLOCK_N
    i_tile = tl.program_id(0) % TILES
    expert, begin, end = _block(ids_ptr, table_ptr, tl.program_id(0) // TILES, first_expert, ALIGNED)
    if (expert >= 0) & (expert < EXPERTS):
        if BLOCK_M >= 64 and end - begin <= BLOCK_M // 2:
            _gate_up_tile(
                x_ptr,
                w_ptr,
                scale_ptr,
                global_scale_ptr,
                order_ptr,
                inner_ptr,
                x_stride,
                expert,
                begin,
                end,
                i_tile,
                TOP_K,
                HIDDEN,
                INTER,
                FORMAT,
                ALIGNED,
                BLOCK_M // 2,
                BLOCK_N,
                BLOCK_K,
            )
        else:
            _gate_up_tile(
                x_ptr,
                w_ptr,
                scale_ptr,
                global_scale_ptr,
                order_ptr,
                inner_ptr,
                x_stride,
                expert,
                begin,
                end,
                i_tile,
                TOP_K,
                HIDDEN,
                INTER,
                FORMAT,
                ALIGNED,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )


@triton.jit
def _down_tile(
    inner_ptr,
    w_ptr,
    scale_ptr,
    global_scale_ptr,
    weights_ptr,
    order_ptr,
    parts_ptr,
    expert,
    begin,
    end,
    i_tile,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    o_slot, valid, o_pair = _slots(order_ptr, begin, end, ALIGNED, BM)
    o_row = i_tile * BN + tl.arange(0, BN)
    b_acc = products(
        inner_ptr + o_slot.to(tl.int64) * INTER,
        valid,
        w_ptr,
        scale_ptr,
        expert.to(tl.int64),
        tl.minimum(o_row, HIDDEN - 1),
        HIDDEN,
        INTER,
        FORMAT,
        BN,
        BK,
    )
    _store_parts(b_acc, o_pair, valid, parts_ptr, weights_ptr, global_scale_ptr, expert, o_row, HIDDEN, FORMAT)


@triton.jit(do_not_specialize=["first_expert"])
def _down(
    inner_ptr,  # [pairs, INTER], in the order of slots
    w_ptr,  # [EXPERTS, HIDDEN, INTER] of the format
    scale_ptr,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    TILES: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    i_tile = tl.program_id(0) % TILES
    expert, begin, end = _block(ids_ptr, table_ptr, tl.program_id(0) // TILES, first_expert, ALIGNED)
    if (expert >= 0) & (expert < EXPERTS):
        if BLOCK_M >= 64 and end - begin <= BLOCK_M // 2:
            _down_tile(
                inner_ptr,
                w_ptr,
                scale_ptr,
                global_scale_ptr,
                weights_ptr,
                order_ptr,
                parts_ptr,
                expert,
                begin,
                end,
                i_tile,
                HIDDEN,
                INTER,
                FORMAT,
                ALIGNED,
                BLOCK_M // 2,
                BLOCK_N,
                BLOCK_K,
            )
        else:
            _down_tile(
                inner_ptr,
                w_ptr,
                scale_ptr,
                global_scale_ptr,
                weights_ptr,
                order_ptr,
                parts_ptr,
                expert,
                begin,
                end,
                i_tile,
                HIDDEN,
                INTER,
                FORMAT,
                ALIGNED,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )


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


@dataclass(frozen=True)
class Matrices:
    """Weights of all experts in one format, and what scales them; unused scales are any tensor."""

    format: str
    experts: int
    inter: int
    gate_up: Tensor
    gate_up_scale: Tensor
    gate_up_global_scale: Tensor
    down: Tensor
    down_scale: Tensor
    down_global_scale: Tensor


def sum_of_experts(
    x: Tensor, weights: Tensor, ids: Tensor, first_expert: int, w: Matrices, out: Tensor | None
) -> Tensor:
    """What `moe_experts` returns."""
    (tokens, hidden), top_k = x.shape, ids.shape[1]
    experts, inter = w.experts, w.inter
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if not y.numel():
        return y
    parts = torch.empty(tokens * top_k, hidden, dtype=x.dtype, device=x.device)
    if experts and top_k:
        blocks = align(ids, first_expert, experts, _block_m(w.format, tokens * top_k, experts, x.device))
        inner = torch.empty(tokens * top_k, inter, dtype=x.dtype, device=x.device)
        project_in(x, blocks, w, inner)
        project_out(inner, weights, blocks, w, parts)
    width = min(triton.next_power_of_2(hidden), 1024 if tokens > 64 else 256)
    _sum[(tokens * triton.cdiv(hidden, width),)](
        parts, ids, y, first_expert, experts, top_k, hidden, width, num_warps=max(width // 256, 1)
    )
    return y


def project_in(x: Tensor, blocks: Aligned, w: Matrices, inner: Tensor) -> None:
    """silu(gate x) · up x of all pairs, in the order of their slots."""
    hidden, inter = x.shape[1], inner.shape[1]
    config = UP[w.format].pick(x.device, **_dims(x, hidden, inter, blocks))
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
        blocks.block_m,
        **config,
    )


def project_out(inner: Tensor, weights: Tensor, blocks: Aligned, w: Matrices, parts: Tensor) -> None:
    """Of each pair that has an expert here, its weight times down · inner."""
    hidden, inter = parts.shape[1], inner.shape[1]
    config = DOWN[w.format].pick(inner.device, **_dims(inner, hidden, inter, blocks))
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
        blocks.block_m,
        **config,
    )


def _dims(x: Tensor, hidden: int, inter: int, blocks: Aligned) -> dict[str, int]:
    return {
        "hidden": hidden,
        "inter": inter,
        "block_m": blocks.block_m if blocks.aligned else 1,
        "itemsize": x.element_size(),
    }


def _block_m(format: str, pairs: int, experts: int, device: torch.device) -> int:
    """Pairs a block: few more than an expert has, and no fewer than a matrix instruction takes on its narrow side.

    What widens weights has fewer registers left for sums.
    """
    least = 16 if platform_for(device).vendor == "amd" else 8
    mean = bucket(pairs) // bucket(experts)
    return least if mean <= 4 else min(max(mean, 16), 128 if format == "plain" else 64)


_Choice = tuple[int, int, int, int]
"""BLOCK_N, BLOCK_K, num_warps, num_stages."""


def _config(choice: _Choice) -> dict[str, int]:
    return dict(zip(("BLOCK_N", "BLOCK_K", "num_warps", "num_stages"), choice, strict=True))


def _tunable(name: str, one: list[_Choice], few: list[_Choice], some: list[_Choice], many: list[_Choice]) -> Tunable:
    """Choices, the best first, for single pairs, for blocks of up to 16 pairs, up to 32, and for larger ones."""

    def choices(dims: Dims) -> list[_Choice]:
        if dims["itemsize"] == 4:
            return [(32, 64, 4, 2)]
        most = dims["block_m"]
        return one if most == 1 else few if most <= 16 else some if most <= 32 else many

    def default(platform: Platform, dims: Dims) -> Config:
        best = _config(choices(dims)[0])
        if platform.vendor == "amd":  # its warps are twice as wide, and its copies take no deep pipeline
            best |= {"num_warps": max(best["num_warps"], 4), "num_stages": 2}
        elif platform.arch != "sm_90a" and dims["block_m"] >= 128:  # sums pass from tensor memory to registers at once
            best["num_warps"] = 8
        return best

    return Tunable(name, space=lambda dims: [_config(choice) for choice in choices(dims)], default=default)


UP = {
    "plain": _tunable(
        "moe_gate_up_plain",
        one=[(64, 128, 4, 4), (32, 128, 4, 4), (64, 128, 4, 3)],
        few=[(64, 128, 4, 4), (64, 128, 4, 3), (128, 128, 4, 3)],
        some=[(64, 128, 4, 4), (128, 64, 4, 3), (128, 128, 4, 3)],
        many=[(256, 64, 8, 4), (128, 64, 8, 3), (128, 64, 4, 3)],
    ),
    "fp8_block": _tunable(
        "moe_gate_up_fp8_block",
        one=[(64, 128, 4, 4), (32, 128, 2, 4), (64, 128, 4, 3)],
        few=[(64, 128, 4, 4), (64, 128, 4, 3), (32, 128, 2, 4), (128, 128, 4, 3)],
        some=[(64, 128, 4, 4), (128, 128, 4, 3), (128, 128, 8, 3)],
        many=[(128, 128, 8, 3), (128, 128, 4, 3), (128, 64, 8, 3)],
    ),
    "nvfp4": _tunable(
        "moe_gate_up_nvfp4",
        one=[(64, 256, 2, 3), (32, 256, 2, 3), (64, 256, 4, 3)],
        few=[(64, 256, 2, 3), (64, 256, 2, 2), (128, 256, 4, 2), (64, 256, 4, 3)],
        some=[(64, 256, 4, 3), (128, 128, 4, 3), (128, 128, 8, 3)],
        many=[(128, 128, 8, 3), (128, 128, 4, 3), (128, 64, 8, 3)],
    ),
}
DOWN = {
    "plain": _tunable(
        "moe_down_plain",
        one=[(64, 128, 4, 3), (64, 64, 4, 4), (128, 128, 4, 3)],
        few=[(128, 128, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3)],
        some=[(64, 128, 4, 3), (128, 64, 4, 3), (128, 128, 4, 3)],
        many=[(128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3)],
    ),
    "fp8_block": _tunable(
        "moe_down_fp8_block",
        one=[(64, 128, 4, 3), (32, 128, 2, 4)],
        few=[(64, 128, 4, 3), (64, 128, 4, 4), (128, 128, 4, 3)],
        some=[(64, 128, 4, 3), (128, 128, 4, 3), (128, 128, 8, 3)],
        many=[(128, 128, 8, 3), (128, 64, 4, 3), (64, 128, 4, 3)],
    ),
    "nvfp4": _tunable(
        "moe_down_nvfp4",
        one=[(32, 128, 1, 4), (64, 128, 4, 3), (64, 128, 2, 3)],
        few=[(128, 128, 4, 3), (64, 128, 2, 3), (128, 128, 2, 3)],
        some=[(64, 128, 4, 3), (128, 128, 4, 3), (128, 128, 8, 3)],
        many=[(128, 128, 4, 3), (128, 64, 4, 3), (128, 128, 8, 3)],
    ),
}
