"""The products of experts with the tokens that chose them, for weights of any of three formats.

Three launches: gate and up projection with what joins them, down projection with the routing weight, and the sum over
a token's experts. In the first two a program takes a block of pairs of one expert (see `moe_align`) and a tile of its
matrix's rows. Weights are the left operand, so that a matrix unit's 64 rows are rows of the matrix however few tokens
there are: every weight is read once for up to BLOCK_M tokens, and widened in registers.

NVFP4: a 32-bit word holds eight codes. Two of them become the bits of two 16-bit floats in three operations, 2^14
(float16) or 2^126 (bfloat16) times too small; the group's scale, times a power of two that keeps the product in range,
is exact in those dtypes, and so is its product with a code. The rest of the power goes into the global scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.triton.device import bucket, platform_for
from tokenspeed_kernels.triton.moe_align import Aligned, align
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
def _rows(p_x, valid, o_k, K: tl.constexpr, EVEN: tl.constexpr):
    """Columns `o_k` of the rows of tokens at `p_x` [BM]."""
    if EVEN:
        b_x = tl.load(p_x[:, None] + o_k[None, :], mask=valid[:, None], other=0.0)
    else:
        b_x = tl.load(p_x[:, None] + o_k[None, :], mask=valid[:, None] & (o_k < K)[None, :], other=0.0)
    return b_x  # [BM, BK]


@triton.jit
def _columns(p_w, o_k, K: tl.constexpr, EVEN: tl.constexpr):
    """Columns `o_k`, of K, of the rows of weights at `p_w` [BN]."""
    if EVEN:
        b_w = tl.load(p_w[:, None] + o_k[None, :])
    elif p_w.dtype.element_ty == tl.int32:
        b_w = tl.load(p_w[:, None] + o_k[None, :], mask=(o_k < K)[None, :], other=0)
    else:
        b_w = tl.load(p_w[:, None] + o_k[None, :], mask=(o_k < K)[None, :], other=0.0)
    return b_w  # [BN, BK]


# Each of these multiplies rows of a matrix, from `p_w` [BN], with rows of tokens, from `p_x` [BM] and, where TWO, from
# `p_x2` [BM2], to float32 [BN, BM] and [BN, BM2].


@triton.jit
def _plain(p_x, valid, p_x2, valid2, p_w, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TWO: tl.constexpr):
    b_acc = tl.zeros([BN, p_x.shape[0]], tl.float32)
    b_acc2 = tl.zeros([BN, p_x2.shape[0]], tl.float32)
    for k in range(0, K, BK):
        o_k = k + tl.arange(0, BK)
        b_w = _columns(p_w, o_k, K, K % BK == 0)
        b_x = _rows(p_x, valid, o_k, K, K % BK == 0)
        b_acc = tl.dot(b_w, tl.trans(b_x), b_acc, input_precision="ieee")
        if TWO:
            b_x2 = _rows(p_x2, valid2, o_k, K, K % BK == 0)
            b_acc2 = tl.dot(b_w, tl.trans(b_x2), b_acc2, input_precision="ieee")
    return b_acc, b_acc2


@triton.jit
def _fp8_block(
    p_x, valid, p_x2, valid2, p_w, p_scale, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TWO: tl.constexpr
):
    """Each 128 columns' product is multiplied by their scale, from `p_scale` [BN]; BK divides 128."""
    b_acc = tl.zeros([BN, p_x.shape[0]], tl.float32)
    b_acc2 = tl.zeros([BN, p_x2.shape[0]], tl.float32)
    for k in range(0, K, BK):
        o_k = k + tl.arange(0, BK)
        b_w = _columns(p_w, o_k, K, K % BK == 0).to(p_x.dtype.element_ty)
        b_scale = tl.load(p_scale + k // 128).to(tl.float32)
        b_x = _rows(p_x, valid, o_k, K, K % BK == 0)
        b_acc += tl.dot(b_w, tl.trans(b_x), input_precision="ieee") * b_scale[:, None]
        if TWO:
            b_x2 = _rows(p_x2, valid2, o_k, K, K % BK == 0)
            b_acc2 += tl.dot(b_w, tl.trans(b_x2), input_precision="ieee") * b_scale[:, None]
    return b_acc, b_acc2


@triton.jit
def _two_bytes(b_words, PLACE: tl.constexpr, wide: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr):
    """E4M3 numbers PLACE and PLACE + 2 of each word [BN, BW], next to each other: [BN, 2*BW]."""
    b_moved = b_words << (8 - 8 * PLACE)
    if wide == tl.bfloat16:
        b_bits = ((b_moved >> 4) & 0x07F007F0) | (b_moved & -0x7FFF8000)
        b_factor = tl.full([1, 1], 2.0**120, wide)
    else:
        b_bits = ((b_moved >> 1) & 0x3F803F80) | (b_moved & -0x7FFF8000)
        b_factor = tl.full([1, 1], 2.0**8, wide)
    b_high = (b_bits >> 16).to(tl.uint16).to(wide, bitcast=True) * b_factor
    b_low = b_bits.to(tl.uint16).to(wide, bitcast=True) * b_factor
    return tl.reshape(tl.join(b_low, b_high), [BN, 2 * BW])


@triton.jit
def _halves(b_x):
    """Columns 2c and 2c + 1 of rows [BM, BK]."""
    return tl.split(tl.reshape(b_x, [b_x.shape[0], b_x.shape[1] // 2, 2]))


@triton.jit
def _fp8_words(
    p_x, valid, p_x2, valid2, p_w, p_scale, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TWO: tl.constexpr
):
    """As `_fp8_block`, from words of four numbers: number 2c + place of a row is in column c of its place."""
    dtype: tl.constexpr = p_x.dtype.element_ty
    wide: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    b_acc = tl.zeros([BN, p_x.shape[0]], tl.float32)
    b_acc2 = tl.zeros([BN, p_x2.shape[0]], tl.float32)
    for k in range(0, K, BK):
        o_k = k + tl.arange(0, BK)
        b_words = _columns(p_w, k // 4 + tl.arange(0, BK // 4), K // 4, K % BK == 0)  # [BN, BK/4]
        b_scale = tl.load(p_scale + k // 128).to(tl.float32)
        b_w0 = _two_bytes(b_words, 0, wide, BN, BK // 4).to(dtype)
        b_w1 = _two_bytes(b_words, 1, wide, BN, BK // 4).to(dtype)
        b_x0, b_x1 = _halves(_rows(p_x, valid, o_k, K, K % BK == 0))
        b_product = tl.dot(b_w0, tl.trans(b_x0), input_precision="ieee")
        b_product = tl.dot(b_w1, tl.trans(b_x1), b_product, input_precision="ieee")
        b_acc += b_product * b_scale[:, None]
        if TWO:
            b_x0, b_x1 = _halves(_rows(p_x2, valid2, o_k, K, K % BK == 0))
            b_product2 = tl.dot(b_w0, tl.trans(b_x0), input_precision="ieee")
            b_product2 = tl.dot(b_w1, tl.trans(b_x1), b_product2, input_precision="ieee")
            b_acc2 += b_product2 * b_scale[:, None]
    return b_acc, b_acc2


@triton.jit
def _two_codes(b_words, b_scale, PLACE: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr):
    """Codes PLACE and PLACE + 4 of each word [BN, BW], times its scale, next to each other: [BN, 2*BW]."""
    wide: tl.constexpr = b_scale.dtype
    b_codes = (b_words >> 8 if PLACE >= 2 else b_words) & (0x00F000F0 if PLACE % 2 else 0x000F000F)
    if wide == tl.bfloat16:
        # A code times 2^12 + 2^6 has its sign where the float has it, and its other bits where those are; no carry.
        b_bits = (b_codes * (0x1040 >> 4 * (PLACE % 2))) & -0x7E3F7E40
    else:
        b_bits = ((b_codes << (12 - 4 * (PLACE % 2))) & -0x7FFF8000) | ((b_codes << (9 - 4 * (PLACE % 2))) & 0x0E000E00)
    b_high = (b_bits >> 16).to(tl.uint16).to(wide, bitcast=True) * b_scale
    b_low = b_bits.to(tl.uint16).to(wide, bitcast=True) * b_scale
    return tl.reshape(tl.join(b_low, b_high), [BN, 2 * BW])


@triton.jit
def _quarters_product(b_w0, b_w1, b_w2, b_w3, b_x, b_acc):
    """Code 4c + place of a row is in column c of its place."""
    b_even, b_odd = tl.split(tl.reshape(b_x, [b_x.shape[0], b_x.shape[1] // 4, 2, 2]))
    b_x0, b_x2 = tl.split(b_even)
    b_x1, b_x3 = tl.split(b_odd)
    b_acc = tl.dot(b_w0, tl.trans(b_x0), b_acc, input_precision="ieee")
    b_acc = tl.dot(b_w1, tl.trans(b_x1), b_acc, input_precision="ieee")
    b_acc = tl.dot(b_w2, tl.trans(b_x2), b_acc, input_precision="ieee")
    return tl.dot(b_w3, tl.trans(b_x3), b_acc, input_precision="ieee")


@triton.jit
def _nvfp4(
    p_x, valid, p_x2, valid2, p_w, p_scale, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TWO: tl.constexpr
):
    """From words of eight codes and a scale for each 16 columns; not yet times the global scale."""
    dtype: tl.constexpr = p_x.dtype.element_ty
    wide: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    BITS: tl.constexpr = 118 if dtype == tl.bfloat16 else 7  # 448 * 2^118 and 448 * 2^7 are in range
    BEYOND: tl.constexpr = 8 if dtype == tl.bfloat16 else 7  # 126 - 118 and 14 - 7
    b_acc = tl.zeros([BN, p_x.shape[0]], tl.float32)
    b_acc2 = tl.zeros([BN, p_x2.shape[0]], tl.float32)
    for k in range(0, K, BK):
        o_k = k + tl.arange(0, BK)
        b_words = _columns(p_w, k // 8 + tl.arange(0, BK // 8), K // 8, K % BK == 0)  # [BN, BK/8]
        b_scale = _columns(p_scale, k // 16 + tl.arange(0, BK // 16), K // 16, K % BK == 0)  # [BN, BK/16]
        b_scale = (b_scale.to(tl.float32) * 2.0**BITS).to(wide)
        b_scale = tl.reshape(tl.broadcast_to(b_scale[:, :, None], [BN, BK // 16, 2]), [BN, BK // 8])  # a word's
        b_w0 = _two_codes(b_words, b_scale, 0, BN, BK // 8).to(dtype)
        b_w1 = _two_codes(b_words, b_scale, 1, BN, BK // 8).to(dtype)
        b_w2 = _two_codes(b_words, b_scale, 2, BN, BK // 8).to(dtype)
        b_w3 = _two_codes(b_words, b_scale, 3, BN, BK // 8).to(dtype)
        b_acc = _quarters_product(b_w0, b_w1, b_w2, b_w3, _rows(p_x, valid, o_k, K, K % BK == 0), b_acc)
        if TWO:
            b_acc2 = _quarters_product(b_w0, b_w1, b_w2, b_w3, _rows(p_x2, valid2, o_k, K, K % BK == 0), b_acc2)
    return b_acc * 2.0**BEYOND, b_acc2 * 2.0**BEYOND


@triton.jit
def _products(
    p_x,  # [BM]
    valid,  # [BM]
    p_x2,  # [BM2]
    valid2,  # [BM2]
    w_ptr,
    scale_ptr,
    i_matrix,  # int64
    o_row,  # [BN]
    ROWS: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TWO: tl.constexpr,
):
    """Rows `o_row` of the matrices `i_matrix` [BN] or [1] of ROWS rows and K columns, times rows of tokens."""
    o_all = i_matrix * ROWS + o_row
    if FORMAT == "plain":
        b_acc, b_acc2 = _plain(p_x, valid, p_x2, valid2, w_ptr + o_all * K, K, BN, BK, TWO)
    elif FORMAT == "nvfp4":
        p_scale = scale_ptr + o_all * (K // 16)
        b_acc, b_acc2 = _nvfp4(p_x, valid, p_x2, valid2, w_ptr + o_all * (K // 8), p_scale, K, BN, BK, TWO)
    else:
        p_scale = scale_ptr + (i_matrix * ((ROWS + 127) // 128) + o_row // 128) * ((K + 127) // 128)
        if w_ptr.dtype.element_ty == tl.int32:
            b_acc, b_acc2 = _fp8_words(p_x, valid, p_x2, valid2, w_ptr + o_all * (K // 4), p_scale, K, BN, BK, TWO)
        else:
            b_acc, b_acc2 = _fp8_block(p_x, valid, p_x2, valid2, w_ptr + o_all * K, p_scale, K, BN, BK, TWO)
    return b_acc, b_acc2


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
    BM2: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    HALF: tl.constexpr = BN // 2
    o_slot, valid, o_pair = _slots(order_ptr, begin, end, ALIGNED, BM)
    o_slot2, valid2, o_pair2 = _slots(order_ptr, begin + BM, end, ALIGNED, BM2 if BM2 else 1)
    o_n = tl.arange(0, BN)
    b_acc, b_acc2 = _products(
        x_ptr + (o_pair // TOP_K).to(tl.int64) * x_stride,
        valid,
        x_ptr + (o_pair2 // TOP_K).to(tl.int64) * x_stride,
        valid2,
        w_ptr,
        scale_ptr,
        expert.to(tl.int64) * 2 + o_n // HALF,
        tl.minimum(i_tile * HALF + o_n % HALF, INTER - 1),
        INTER,
        HIDDEN,
        FORMAT,
        BN,
        BK,
        BM2 > 0,
    )
    _store_inner(b_acc, o_slot, valid, inner_ptr, global_scale_ptr, expert, i_tile, INTER, FORMAT)
    if BM2:
        _store_inner(b_acc2, o_slot2, valid2, inner_ptr, global_scale_ptr, expert, i_tile, INTER, FORMAT)


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
    """`BLOCK_N` counts rows of the gate and of up. What is left of an expert's pairs may be a narrower block."""
    TILES: tl.constexpr = (2 * INTER + BLOCK_N - 1) // BLOCK_N
    NARROW: tl.constexpr = 128 if BLOCK_M == 192 else BLOCK_M // 2
    i_tile = tl.program_id(0) % TILES
    expert, begin, end = _block(ids_ptr, table_ptr, tl.program_id(0) // TILES, first_expert, ALIGNED)
    if (expert >= 0) & (expert < EXPERTS):
        if BLOCK_M >= 64 and end - begin <= NARROW:
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
                NARROW,
                0,
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
                128 if BLOCK_M == 192 else BLOCK_M,
                64 if BLOCK_M == 192 else 0,
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
    BM2: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    o_slot, valid, o_pair = _slots(order_ptr, begin, end, ALIGNED, BM)
    o_slot2, valid2, o_pair2 = _slots(order_ptr, begin + BM, end, ALIGNED, BM2 if BM2 else 1)
    o_row = i_tile * BN + tl.arange(0, BN)
    b_acc, b_acc2 = _products(
        inner_ptr + o_slot.to(tl.int64) * INTER,
        valid,
        inner_ptr + o_slot2.to(tl.int64) * INTER,
        valid2,
        w_ptr,
        scale_ptr,
        expert.to(tl.int64),
        tl.minimum(o_row, HIDDEN - 1),
        HIDDEN,
        INTER,
        FORMAT,
        BN,
        BK,
        BM2 > 0,
    )
    _store_parts(b_acc, o_pair, valid, parts_ptr, weights_ptr, global_scale_ptr, expert, o_row, HIDDEN, FORMAT)
    if BM2:
        _store_parts(b_acc2, o_pair2, valid2, parts_ptr, weights_ptr, global_scale_ptr, expert, o_row, HIDDEN, FORMAT)


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
    NARROW: tl.constexpr = 128 if BLOCK_M == 192 else BLOCK_M // 2
    i_tile = tl.program_id(0) % TILES
    expert, begin, end = _block(ids_ptr, table_ptr, tl.program_id(0) // TILES, first_expert, ALIGNED)
    if (expert >= 0) & (expert < EXPERTS):
        if BLOCK_M >= 64 and end - begin <= NARROW:
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
                NARROW,
                0,
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
                128 if BLOCK_M == 192 else BLOCK_M,
                64 if BLOCK_M == 192 else 0,
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
        blocks = align(ids, first_expert, experts, _block_m(tokens * top_k, experts, x.device))
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
    return {"hidden": hidden, "inter": inter, "block_m": blocks.block_m, "itemsize": x.element_size()}


def _block_m(pairs: int, experts: int, device: torch.device) -> int:
    """Pairs a block: few more than an expert has, and no fewer than a matrix instruction takes on its narrow side."""
    least = 16 if platform_for(device).vendor == "amd" else 8
    mean = bucket(pairs) // bucket(experts)
    return least if mean <= 4 else min(max(mean, 16), 192)


def _space(dims: Dims) -> list[Config]:
    return []


def _default(format: str) -> Any:
    def default(platform: Platform, dims: Dims) -> Mapping[str, int]:
        if dims["itemsize"] == 4:
            return {"BLOCK_N": 32, "BLOCK_K": 64, "num_warps": 4, "num_stages": 2}
        stages = 2 if platform.vendor == "amd" else 4
        block_k = {"plain": 64, "fp8_block": 128, "nvfp4": 256}[format]
        if dims["block_m"] >= 64:
            return {"BLOCK_N": 128, "BLOCK_K": min(block_k, 64), "num_warps": 8, "num_stages": min(stages, 3)}
        return {"BLOCK_N": 64, "BLOCK_K": block_k, "num_warps": 4, "num_stages": stages}

    return default


FORMATS = ("plain", "fp8_block", "nvfp4")
UP = {name: Tunable(f"moe_gate_up_{name}", space=_space, default=_default(name)) for name in FORMATS}
DOWN = {name: Tunable(f"moe_down_{name}", space=_space, default=_default(name)) for name in FORMATS}
