"""Rows of an expert's matrix times rows of tokens, for weights of three formats.

Weights are the left operand, so that the wide side of a matrix instruction is rows of the matrix however few tokens
there are; quantised ones are widened in registers, see `quantised_tiles`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.triton.quantised_tiles import (
    fp8_pairs,
    halves,
    nvfp4_pairs,
    nvfp4_rest,
    nvfp4_scales,
    quarters,
)


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

    def ways(self, weight: Tensor) -> int:
        """Into how many the columns are taken apart that one is multiplied with, see `quantised_tiles`."""
        return {"plain": 1, "fp8_block": 2, "nvfp4": 4}[self.format] if weight.dtype == torch.int32 else 1


@triton.jit
def _rows(p_x, valid, o_k, K: tl.constexpr, EVEN: tl.constexpr):
    """Columns `o_k` of the rows of tokens at `p_x` [BM]."""
    if EVEN:
        b_x = tl.load(p_x[:, None] + o_k[None, :], mask=valid[:, None], other=0.0)
    else:
        b_x = tl.load(p_x[:, None] + o_k[None, :], mask=valid[:, None] & (o_k < K)[None, :], other=0.0)
    return b_x  # [BM, BK]


@triton.jit
def _part(p_x, valid, k, i_part, PARTS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Of BK columns from `k` on, every PARTS-th from `i_part` on, of rows that are apart in memory."""
    o_c = k // PARTS + tl.arange(0, BK // PARTS)
    return _rows(p_x + i_part * (K // PARTS), valid, o_c, K // PARTS, K % BK == 0)  # [BM, BK/PARTS]


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


# Each of these multiplies rows of a matrix, from `p_w` [BN], with rows of tokens, from `p_x` [BM], to float32 [BN, BM].


@triton.jit
def _plain(p_x, valid, p_w, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    b_acc = tl.zeros([BN, p_x.shape[0]], tl.float32)
    for k in range(0, K, BK):
        o_k = k + tl.arange(0, BK)
        b_w = _columns(p_w, o_k, K, K % BK == 0)
        b_x = _rows(p_x, valid, o_k, K, K % BK == 0)
        b_acc = tl.dot(b_w, tl.trans(b_x), b_acc, input_precision="ieee")
    return b_acc


@triton.jit
def _fp8_block(p_x, valid, p_w, p_scale, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Each 128 columns' product is multiplied by their scale, from `p_scale` [BN]; BK divides 128."""
    b_acc = tl.zeros([BN, p_x.shape[0]], tl.float32)
    for k in range(0, K, BK):
        o_k = k + tl.arange(0, BK)
        b_w = _columns(p_w, o_k, K, K % BK == 0).to(p_x.dtype.element_ty)
        b_scale = tl.load(p_scale + k // 128).to(tl.float32)
        b_x = _rows(p_x, valid, o_k, K, K % BK == 0)
        b_acc += tl.dot(b_w, tl.trans(b_x), input_precision="ieee") * b_scale[:, None]
    return b_acc


@triton.jit
def _fp8_words(p_x, valid, p_w, p_scale, K: tl.constexpr, APART: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """As `_fp8_block`, from words of four numbers."""
    dtype: tl.constexpr = p_x.dtype.element_ty
    b_acc = tl.zeros([BN, p_x.shape[0]], tl.float32)
    for k in range(0, K, BK):
        b_words = _columns(p_w, k // 4 + tl.arange(0, BK // 4), K // 4, K % BK == 0)  # [BN, BK/4]
        b_scale = tl.load(p_scale + k // 128).to(tl.float32)
        if APART:
            b_x0 = _part(p_x, valid, k, 0, 2, K, BK)
            b_x1 = _part(p_x, valid, k, 1, 2, K, BK)
        else:
            b_x0, b_x1 = halves(_rows(p_x, valid, k + tl.arange(0, BK), K, K % BK == 0))
        b_product = tl.dot(fp8_pairs(b_words, 0, dtype).to(dtype), tl.trans(b_x0), input_precision="ieee")
        b_product = tl.dot(fp8_pairs(b_words, 1, dtype).to(dtype), tl.trans(b_x1), b_product, input_precision="ieee")
        b_acc += b_product * b_scale[:, None]
    return b_acc


@triton.jit
def _nvfp4(
    p_x,
    valid,
    p_w,
    p_scale,
    K: tl.constexpr,
    APART: tl.constexpr,
    PTX: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """From words of eight codes and a scale for each 16 columns; not yet times the global scale."""
    dtype: tl.constexpr = p_x.dtype.element_ty
    b_acc = tl.zeros([BN, p_x.shape[0]], tl.float32)
    for k in range(0, K, BK):
        b_words = _columns(p_w, k // 8 + tl.arange(0, BK // 8), K // 8, K % BK == 0)  # [BN, BK/8]
        b_scale = _columns(p_scale, k // 16 + tl.arange(0, BK // 16), K // 16, K % BK == 0)  # [BN, BK/16]
        b_scale = nvfp4_scales(b_scale, dtype)
        if APART:
            b_x0 = _part(p_x, valid, k, 0, 4, K, BK)
            b_x1 = _part(p_x, valid, k, 1, 4, K, BK)
            b_x2 = _part(p_x, valid, k, 2, 4, K, BK)
            b_x3 = _part(p_x, valid, k, 3, 4, K, BK)
        else:
            b_x0, b_x1, b_x2, b_x3 = quarters(_rows(p_x, valid, k + tl.arange(0, BK), K, K % BK == 0))
        b_w0 = nvfp4_pairs(b_words, b_scale, 0, PTX).to(dtype)
        b_w1 = nvfp4_pairs(b_words, b_scale, 1, PTX).to(dtype)
        b_w2 = nvfp4_pairs(b_words, b_scale, 2, PTX).to(dtype)
        b_w3 = nvfp4_pairs(b_words, b_scale, 3, PTX).to(dtype)
        b_acc = tl.dot(b_w0, tl.trans(b_x0), b_acc, input_precision="ieee")
        b_acc = tl.dot(b_w1, tl.trans(b_x1), b_acc, input_precision="ieee")
        b_acc = tl.dot(b_w2, tl.trans(b_x2), b_acc, input_precision="ieee")
        b_acc = tl.dot(b_w3, tl.trans(b_x3), b_acc, input_precision="ieee")
    return b_acc * nvfp4_rest(dtype)


@triton.jit
def products(
    p_x,  # [BM]
    valid,  # [BM]
    w_ptr,
    scale_ptr,
    i_matrix,  # int64
    o_row,  # [BN]
    ROWS: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    APART: tl.constexpr,
    PTX: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Rows `o_row` of the matrices `i_matrix` [BN] or [1] of ROWS rows and K columns, times rows of tokens."""
    o_all = i_matrix * ROWS + o_row
    if FORMAT == "plain":
        b_acc = _plain(p_x, valid, w_ptr + o_all * K, K, BN, BK)
    elif FORMAT == "nvfp4":
        p_scale = scale_ptr + o_all * (K // 16)
        b_acc = _nvfp4(p_x, valid, w_ptr + o_all * (K // 8), p_scale, K, APART, PTX, BN, BK)
    else:
        p_scale = scale_ptr + (i_matrix * ((ROWS + 127) // 128) + o_row // 128) * ((K + 127) // 128)
        if w_ptr.dtype.element_ty == tl.int32:
            b_acc = _fp8_words(p_x, valid, w_ptr + o_all * (K // 4), p_scale, K, APART, BN, BK)
        else:
            b_acc = _fp8_block(p_x, valid, w_ptr + o_all * K, p_scale, K, BN, BK)
    return b_acc
