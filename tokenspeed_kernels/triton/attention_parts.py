"""What attention kernels over packed tokens and paged caches share.

Tiles of packed rows: sequence s begins at tile `cu_seqlens[s] * group // BM + s`, so that a grid of
`tokens * group // BM + seqs` programs, which no content changes, has a tile for all rows of every sequence.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.triton.device import platform_for


@triton.jit
def sequence_of(
    cu_ptr, place, seqs, first_token, last_token, GROUP: tl.constexpr, BM: tl.constexpr, SPREAD: tl.constexpr
):
    """The sequence that has the tile numbered `place`, or, without `SPREAD`, the row.

    `cu_ptr` [seqs+1]: packed tokens, of `GROUP` rows each, `BM` rows a tile; counted from `first_token` on, as if there
    were none before it and past `last_token`.
    """
    before = 0
    for first in range(0, seqs, 256):
        o_seq = first + 1 + tl.arange(0, 256)
        starts = tl.load(cu_ptr + o_seq, mask=o_seq < seqs, other=0)
        starts = (tl.minimum(tl.maximum(starts, first_token), last_token) - first_token) * GROUP // BM
        if SPREAD:
            starts += o_seq
        before += tl.sum(((starts <= place) & (o_seq < seqs)).to(tl.int32))
    return before


@triton.jit
def queries(p_q, mask, scale, k_scale_ptr, DOT: tl.constexpr):
    """Queries [BM, BD] in the dtype of the products, and what makes their products scores in base 2, [BM, 1]."""
    q, factor = operand(tl.load(p_q, mask=mask, other=0.0), DOT)
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr)
    return q, factor * (scale * 1.4426950408889634)


@triton.jit
def softmax_step(scores, v, peak, total, acc, PRECISION: tl.constexpr):
    """One tile of keys in a running softmax: scores [BM, BN] in base 2, values [BN, BD]."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that sees nothing yet
    fade = tl.exp2(peak - shift)
    weights = tl.exp2(scores - shift[:, None])
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return new_peak, total, acc


@triton.jit
def store_attended(
    o_ptr, lse_ptr, row, inside, peak, total, acc, v_scale_ptr, DIM: tl.constexpr, BD: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """What a running softmax gives, to rows [BM] of `o_ptr` [rows, DIM] and `lse_ptr`.

    With `SPLIT`, LSEs are in base 2, and outputs of none are left out.
    """
    some = total > 0
    total = tl.where(some, total, 1.0)
    acc /= total[:, None]
    if v_scale_ptr is not None:
        acc *= tl.load(v_scale_ptr)
    lse = tl.where(some, peak + tl.log2(total), float("-inf"))
    if SPLIT:
        tl.store(lse_ptr + row, lse, mask=inside)
        inside &= some
    else:
        tl.store(lse_ptr + row, lse * 0.6931471805599453, mask=inside)
    o_d = tl.arange(0, BD)
    p_o = o_ptr + row[:, None] * DIM + o_d[None, :]
    tl.store(p_o, acc.to(o_ptr.dtype.element_ty), mask=inside[:, None] & (o_d < DIM)[None, :])


@triton.jit
def _rows_of(
    cache_ptr, page, row, i_head, cached, page_stride, row_stride, head_stride, DIM: tl.constexpr, BD: tl.constexpr,
    PER_TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Rows [BN, BD] of a head; `page` is one `PER_TILE` or one a row."""
    o_d = tl.arange(0, BD)
    place = page * page_stride + i_head.to(tl.int64) * head_stride
    offset = row[:, None] * row_stride + o_d[None, :]
    p_rows = cache_ptr + place + offset if PER_TILE else (cache_ptr + place)[:, None] + offset
    if MASKED or BD != DIM:
        return tl.load(p_rows, mask=cached[:, None] & (o_d < DIM)[None, :], other=0.0)
    return tl.load(p_rows)


@triton.jit
def attend_pages(
    q, k_ptr, v_ptr, p_table, i_head, first, end, visible, peak, total, acc, scale,
    k_page, k_row, k_head, v_page, v_row, v_head,
    DIM: tl.constexpr, PAGE: tl.constexpr, DOT: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The keys from `first` up to `end`; without `MASKED` they fill tiles and all rows see all."""
    PER_TILE: tl.constexpr = PAGE % BN == 0
    for i_key in range(first, end, BN):
        o_key = i_key + tl.arange(0, BN)
        cached = o_key < end
        if PER_TILE:
            page = tl.load(p_table + i_key // PAGE).to(tl.int64)
            row = i_key % PAGE + tl.arange(0, BN)
        else:
            page = tl.load(p_table + o_key // PAGE, mask=cached, other=0).to(tl.int64)
            row = o_key % PAGE
        if WIDE:
            row = row.to(tl.int64)
        k = _rows_of(k_ptr, page, row, i_head, cached, k_page, k_row, k_head, DIM, BD, PER_TILE, MASKED).to(DOT)
        v = _rows_of(v_ptr, page, row, i_head, cached, v_page, v_row, v_head, DIM, BD, PER_TILE, MASKED).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # [BM, BN]
        if MASKED:
            seen = (o_key[None, :] < visible[:, None]) & cached[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        peak, total, acc = softmax_step(scores, v, peak, total, acc, PRECISION)
    return peak, total, acc


@triton.jit
def operand(q, DOT: tl.constexpr):
    """Queries [BM, BD] in the dtype of the products and what their scores are to be multiplied by, [BM, 1].

    A float16 product of bfloat16 queries is exact if a power of two brings each row below 2.
    """
    factor = tl.full([q.shape[0], 1], 1.0, tl.float32)
    if q.dtype != DOT and tl.float16 == DOT:
        largest = tl.max(tl.abs(q.to(tl.float32)), 1)
        exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
        factor = exponent.to(tl.float32, bitcast=True)[:, None]
        q = q.to(tl.float32) * (0x7F000000 - exponent).to(tl.float32, bitcast=True)[:, None]
    return q.to(DOT), factor


def product_dtype(q: Tensor, cache: Tensor) -> tl.dtype:
    """What the operands of the matrix products are: the cache's rows are exact in it.

    float16 for a float8_e4m3fn cache, to which devices convert faster than to bfloat16.
    """
    if cache.dtype == torch.float8_e4m3fn:
        return tl.float32 if q.dtype == torch.float32 else tl.float16
    if q.dtype != cache.dtype:
        return tl.float32
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}.get(q.dtype, tl.float32)


def precision(device: torch.device) -> str:
    """How float32 operands are multiplied: by three products of their TF32 halves, exact to 2^-21, or else as they are.

    AMD's matrix units take float32; NVIDIA's do not, and without them a tile of this size does not fit the registers.
    """
    return "ieee" if platform_for(device).vendor == "amd" else "tf32x3"
