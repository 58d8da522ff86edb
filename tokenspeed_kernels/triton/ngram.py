"""n-gram embeddings: one launch hashes a program's tokens and copies the table rows that they name.

A program takes a few tokens with all their heads. Hashes are a tile [tokens, heads], one hash a thread; the rows of
the table are then read by neighbouring threads, 16 bytes each, and all reads of a program are issued before the first
one is used: the table is too large for any cache, so only the number of rows in flight hides its latency.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import ngram
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.device import bucket
from tokenspeed_kernels.triton.tuning import Dims, Tunable
from tokenspeed_registry import OnHost
from tokenspeed_registry.platform import Platform

_SEARCH = 128
"""Sequence ends that a step of the search for a token's sequence compares with."""
_TILE = 8192
"""Table elements that a program may hold."""


@triton.jit
def _sequence_of(o_t, cu_ptr, seqs, SEARCH: tl.constexpr):
    """The sequence of each token and its first token: a search of SEARCH + 1 branches, one step up to SEARCH ends."""
    sequence = tl.zeros_like(o_t)
    start = tl.zeros_like(o_t)
    if seqs > 1:
        stride = tl.full([], 1, tl.int64)
        while stride * SEARCH < seqs:
            stride *= SEARCH
        while stride > 0:
            i_end = sequence[:, None] + (tl.arange(0, SEARCH)[None, :] + 1) * stride  # [T, SEARCH]
            b_end = tl.load(cu_ptr + i_end, mask=i_end <= seqs, other=0x7FFFFFFF).to(tl.int64)
            before = b_end <= o_t[:, None]
            sequence += tl.sum(before.to(tl.int32), 1) * stride
            start = tl.maximum(start, tl.max(tl.where(before, b_end, 0), 1))
            stride //= SEARCH
    return sequence, start


@triton.jit
def _hash_tile(
    o_t,  # [T] int64
    ids_ptr,  # [tokens]
    context_ptr,  # [seqs, ORDER - 1]
    cu_ptr,  # [seqs + 1]
    multipliers_ptr,  # [ORDER]
    moduli_ptr,  # [HEADS]
    offsets_ptr,  # [HEADS]
    tokens,
    seqs,
    eos,
    ORDER: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """The table rows [T, LANES] of tokens and heads, -1 for padding and past the ends."""
    o_h = tl.arange(0, LANES)
    m_t = o_t < tokens
    m_h = o_h < HEADS
    modulus = tl.load(moduli_ptr + o_h, mask=m_h, other=1)[None, :]
    offset = tl.load(offsets_ptr + o_h, mask=m_h, other=0)[None, :]
    token = tl.load(ids_ptr + o_t, mask=m_t, other=-1)
    value = token * tl.load(multipliers_ptr)
    sequence, start = _sequence_of(o_t, cu_ptr, seqs, SEARCH)
    position = o_t - start
    eos = tl.zeros_like(o_t) + eos
    hashed = tl.zeros_like(modulus)
    ended = token != token
    for back in tl.static_range(1, ORDER):
        in_text = position >= back
        text = tl.load(ids_ptr + o_t - back, mask=m_t & (o_t >= back), other=-1)
        p_context = context_ptr + sequence * (ORDER - 1) + (ORDER - 1 - back) + position
        context = tl.load(p_context, mask=m_t & (position < back), other=-1)
        previous = tl.where(in_text, text, context)
        ended = ended | (previous == eos) | (previous == -1)
        value ^= tl.where(ended, eos, previous) * tl.load(multipliers_ptr + back)
        hashed = tl.where((o_h // (HEADS // (ORDER - 1)) == back - 1)[None, :], value[:, None], hashed)
    # Of -1 - h, which is not negative where h is, the remainder counts down from the last row.
    negative = hashed < 0
    remainder = (tl.where(negative, ~hashed, hashed).to(tl.uint64) % modulus.to(tl.uint64)).to(tl.int64)
    rows = tl.where(negative, modulus - 1 - remainder, remainder) + offset
    return tl.where((token != -1)[:, None] & m_h[None, :], rows, -1)


@triton.jit(do_not_specialize=["tokens", "seqs"])
def _ngram_hash(
    ids_ptr,
    context_ptr,
    cu_ptr,
    multipliers_ptr,
    moduli_ptr,
    offsets_ptr,
    o_ptr,  # [tokens, HEADS]
    tokens,
    seqs,
    eos,
    ORDER: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
    SEARCH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    o_t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    rows = _hash_tile(
        o_t, ids_ptr, context_ptr, cu_ptr, multipliers_ptr, moduli_ptr, offsets_ptr, tokens, seqs, eos,
        ORDER, HEADS, LANES, SEARCH,
    )  # fmt: skip
    o_h = tl.arange(0, LANES)[None, :]
    tl.store(o_ptr + o_t[:, None] * HEADS + o_h, rows, mask=(o_t < tokens)[:, None] & (o_h < HEADS))


@triton.jit
def _load_columns(p_row, present, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    o_d = FIRST + tl.arange(0, WIDTH)[None, :]
    return tl.load(p_row[:, None] + o_d, mask=present[:, None] & (o_d < DIM), other=0.0)  # [R, WIDTH]


@triton.jit
def _store_columns(p_row, inside, b_row, b_scale, FIRST: tl.constexpr, DIM: tl.constexpr, SCALES: tl.constexpr):
    o_d = FIRST + tl.arange(0, b_row.shape[1])[None, :]
    if SCALES != 0:
        b_row = b_row.to(tl.float32) * b_scale[:, None]
    if b_row.dtype != p_row.dtype.element_ty:
        b_row = b_row.to(tl.float32).to(p_row.dtype.element_ty)
    tl.store(p_row[:, None] + o_d, b_row, mask=inside[:, None] & (o_d < DIM))


@triton.jit
def _copy_rows(
    rows,  # [R] int64, -1: none
    o_row,  # [R] int64, where in the output
    inside,  # [R]
    table_ptr,  # [table_rows, DIM]
    scale_ptr,  # [1] or [table_rows]
    o_ptr,  # [tokens * heads, DIM]
    table_rows,
    first_row,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Writes table[rows] * scale. A row is read as two pieces of a power of two, so that few threads idle."""
    local = rows - first_row
    present = (rows != -1) & (local >= 0) & (local < table_rows)
    p_row = table_ptr + local * DIM
    b_wide = _load_columns(p_row, present, 0, WIDE, DIM)
    if REST != 0:
        b_rest = _load_columns(p_row, present, WIDE, REST, DIM)
    b_scale = tl.zeros(rows.shape, tl.float32)
    if SCALES == 1:
        b_scale += tl.load(scale_ptr)
    if SCALES == 2:
        b_scale = tl.load(scale_ptr + local, mask=present, other=0.0)
    p_out = o_ptr + o_row * DIM
    _store_columns(p_out, inside, b_wide, b_scale, 0, DIM, SCALES)
    if REST != 0:
        _store_columns(p_out, inside, b_rest, b_scale, WIDE, DIM, SCALES)


@triton.jit(do_not_specialize=["row_count", "table_rows", "first_row"])
def _ngram_lookup(
    rows_ptr,  # [row_count]: a row a token and head
    table_ptr,
    scale_ptr,
    o_ptr,
    row_count,
    table_rows,
    first_row,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
):
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = o_row < row_count
    rows = tl.load(rows_ptr + o_row, mask=inside, other=-1)
    _copy_rows(rows, o_row, inside, table_ptr, scale_ptr, o_ptr, table_rows, first_row, DIM, WIDE, REST, SCALES)


@triton.jit(do_not_specialize=["tokens", "seqs", "table_rows", "first_row"])
def _ngram_embed(
    ids_ptr,
    context_ptr,
    cu_ptr,
    multipliers_ptr,
    moduli_ptr,
    offsets_ptr,
    table_ptr,
    scale_ptr,
    o_ptr,
    tokens,
    seqs,
    table_rows,
    first_row,
    eos,
    ORDER: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
    SEARCH: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
    SCALES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    o_t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    rows = _hash_tile(
        o_t, ids_ptr, context_ptr, cu_ptr, multipliers_ptr, moduli_ptr, offsets_ptr, tokens, seqs, eos,
        ORDER, HEADS, LANES, SEARCH,
    )  # fmt: skip
    rows = tl.reshape(rows, [TOKENS * LANES])
    o_pair = tl.arange(0, TOKENS * LANES)
    i_token = tl.program_id(0).to(tl.int64) * TOKENS + o_pair // LANES
    i_head = o_pair % LANES
    inside = (i_token < tokens) & (i_head < HEADS)
    o_row = i_token * HEADS + i_head
    _copy_rows(rows, o_row, inside, table_ptr, scale_ptr, o_ptr, table_rows, first_row, DIM, WIDE, REST, SCALES)


def _space(dims: Dims) -> Iterator[dict[str, int]]:
    # Of lookups and hashes alike: rows that a program copies.
    for rows, warps in ((16, 1), (16, 2), (32, 1), (32, 2), (64, 2), (64, 4), (128, 4)):
        if rows * dims["dim"] <= 2 * _TILE:
            yield {"rows": rows, "num_warps": warps}


def _default(platform: Platform, dims: Dims) -> dict[str, int]:
    rows = 32 if dims["rows"] > 1 << 12 else 16
    while rows > 1 and rows * dims["dim"] > _TILE:
        rows //= 2
    return {"rows": rows, "num_warps": 1 if rows * dims["dim"] <= 8192 else 4}


LOOKUP = Tunable("ngram_lookup", _space, _default)


def _config(table: Tensor, row_count: int) -> dict[str, Any]:
    rows = min(max(bucket(row_count), 1 << 9), 1 << 17)
    return dict(LOOKUP.pick(table.device, rows=rows, dim=table.shape[1], itemsize=table.element_size()))


def _pieces(dim: int) -> dict[str, int]:
    """A row as a power of two of columns, and as many more as are left, rounded up to one."""
    wide = 1 << dim.bit_length() - 1
    return {"DIM": dim, "WIDE": wide, "REST": triton.next_power_of_2(dim - wide) if dim > wide else 0}


def _scales(scale: Tensor | None) -> int:
    return 0 if scale is None else min(scale.shape[0], 2)


@portable(ngram.ngram_hash)
def ngram_hash(
    ids: Tensor,
    context: Tensor,
    cu_seqlens: Tensor,
    multipliers: Tensor,
    moduli: Tensor,
    offsets: Tensor,
    *,
    eos: int,
    out: Tensor | None = None,
) -> Tensor:
    tokens, heads = ids.shape[0], moduli.shape[0]
    out = torch.empty(tokens, heads, dtype=torch.int64, device=ids.device) if out is None else out
    if tokens:
        lanes = triton.next_power_of_2(heads)
        block = max(32 // lanes, 1)
        _ngram_hash[(triton.cdiv(tokens, block),)](
            ids, context, cu_seqlens, multipliers, moduli, offsets, out, tokens, context.shape[0], eos,
            multipliers.shape[0], heads, lanes, _SEARCH, block, num_warps=1,
        )  # fmt: skip
    return out


def _ngram_lookup_rows(
    rows: Tensor,
    table: Tensor,
    scale: Tensor | None,
    *,
    dtype: torch.dtype,
    first_row: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    count, dim = rows.numel(), table.shape[1]
    out = torch.empty(rows.shape[0], rows.shape[1] * dim, dtype=dtype, device=rows.device) if out is None else out
    if out.numel():
        config = _config(table, count)
        block = config.pop("rows")
        _ngram_lookup[(triton.cdiv(count, block),)](
            rows, table, scale, out, count, table.shape[0], first_row or 0,
            **_pieces(dim), SCALES=_scales(scale), ROWS=block, **config,
        )  # fmt: skip
    return out


def _ngram_embed_tokens(
    ids: Tensor,
    context: Tensor,
    cu_seqlens: Tensor,
    multipliers: Tensor,
    moduli: Tensor,
    offsets: Tensor,
    table: Tensor,
    scale: Tensor | None,
    *,
    eos: int,
    dtype: torch.dtype,
    first_row: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    tokens, heads, dim = ids.shape[0], moduli.shape[0], table.shape[1]
    out = torch.empty(tokens, heads * dim, dtype=dtype, device=ids.device) if out is None else out
    if out.numel():
        lanes = triton.next_power_of_2(heads)
        config = _config(table, tokens * heads)
        block = max(config.pop("rows") // lanes, 1)
        _ngram_embed[(triton.cdiv(tokens, block),)](
            ids, context, cu_seqlens, multipliers, moduli, offsets, table, scale, out,
            tokens, context.shape[0], table.shape[0], first_row or 0, eos,
            multipliers.shape[0], heads, lanes, _SEARCH, **_pieces(dim), SCALES=_scales(scale), TOKENS=block, **config,
        )  # fmt: skip
    return out


# A table in host memory is read by the same kernels, over the link.
_ON_DEVICE, _ON_HOST = ([OnHost("table").in_(host)] for host in (False, True))
ngram_lookup = portable(ngram.ngram_lookup, constraints=_ON_DEVICE)(_ngram_lookup_rows)
ngram_embed = portable(ngram.ngram_embed, constraints=_ON_DEVICE)(_ngram_embed_tokens)
ngram_lookup_host = portable(ngram.ngram_lookup, name="triton.ngram_lookup_host", constraints=_ON_HOST)(
    _ngram_lookup_rows
)
ngram_embed_host = portable(ngram.ngram_embed, name="triton.ngram_embed_host", constraints=_ON_HOST)(
    _ngram_embed_tokens
)
