"""Rows of an expert's matrix times rows of tokens, for weights of three formats.

Weights are the left operand, so that the wide side of a matrix instruction is rows of the matrix however few tokens
there are. They are widened in registers, two at a time: a 32-bit word holds two pairs of FP8 numbers or four of NVFP4
codes that lie 16 bits apart, and a pair takes few operations to become two 16-bit floats. What is next to each other
then was not so in the row; columns of tokens are taken apart likewise.

FP8: sign, exponent and mantissa go where a 16-bit float has them, and a multiplication by a power of two, 2^8 (float16)
or 2^120 (bfloat16), puts the exponent's bias right, of numbers below the normal ones too. (The code of NaN is not one.)

NVFP4: a 32-bit word holds eight codes. Two of them become the bits of two 16-bit floats in three operations, 2^14
(float16) or 2^126 (bfloat16) times too small; the group's scale, times a power of two that keeps the product in range,
is exact in those dtypes, and so is its product with a code. The rest of the power goes into the global scale.
"""

import triton
import triton.language as tl


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
def _fp8_words(p_x, valid, p_w, p_scale, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """As `_fp8_block`, from words of four numbers: number 2c + place of a row is in column c of its place."""
    dtype: tl.constexpr = p_x.dtype.element_ty
    wide: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    b_acc = tl.zeros([BN, p_x.shape[0]], tl.float32)
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
    return b_acc


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
def _nvfp4(p_x, valid, p_w, p_scale, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """From words of eight codes and a scale for each 16 columns; not yet times the global scale."""
    dtype: tl.constexpr = p_x.dtype.element_ty
    wide: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    BITS: tl.constexpr = 118 if dtype == tl.bfloat16 else 7  # 448 * 2^118 and 448 * 2^7 are in range
    BEYOND: tl.constexpr = 8 if dtype == tl.bfloat16 else 7  # 126 - 118 and 14 - 7
    b_acc = tl.zeros([BN, p_x.shape[0]], tl.float32)
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
    return b_acc * 2.0**BEYOND


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
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Rows `o_row` of the matrices `i_matrix` [BN] or [1] of ROWS rows and K columns, times rows of tokens."""
    o_all = i_matrix * ROWS + o_row
    if FORMAT == "plain":
        b_acc = _plain(p_x, valid, w_ptr + o_all * K, K, BN, BK)
    elif FORMAT == "nvfp4":
        p_scale = scale_ptr + o_all * (K // 16)
        b_acc = _nvfp4(p_x, valid, w_ptr + o_all * (K // 8), p_scale, K, BN, BK)
    else:
        p_scale = scale_ptr + (i_matrix * ((ROWS + 127) // 128) + o_row // 128) * ((K + 127) // 128)
        if w_ptr.dtype.element_ty == tl.int32:
            b_acc = _fp8_words(p_x, valid, w_ptr + o_all * (K // 4), p_scale, K, BN, BK)
        else:
            b_acc = _fp8_block(p_x, valid, w_ptr + o_all * K, p_scale, K, BN, BK)
    return b_acc
