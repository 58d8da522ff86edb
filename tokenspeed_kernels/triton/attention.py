"""Dense attention over a paged cache.

A program takes a tile of BM rows, a row being one token's query of one head of a group, so that the heads of a group
share every key and value that is read; it walks over its share of the sequence's keys in tiles of BN. Where few rows
would leave the device idle, the keys are split among programs (see `attention_splits`).
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import attention
from tokenspeed_kernels.triton.attention_parts import (
    attend_pages,
    precision,
    product_dtype,
    queries,
    sequence_of,
    store_attended,
)
from tokenspeed_kernels.triton.attention_splits import combine, partials, split_count
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.device import bucket, compute_units
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry import Dim
from tokenspeed_registry.platform import Platform


@triton.jit
def _narrowed(x, scale_ptr, dtype: tl.constexpr):
    """float32 `x` over the scale, as a cache of `dtype` holds it: float8_e4m3fn saturates, NaN stays NaN."""
    if scale_ptr is not None:
        x = tl.div_rn(x, tl.load(scale_ptr))
    if dtype == tl.float8e4nv:
        x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    return x.to(dtype)


@triton.jit
def _kv_cache_write(
    k_ptr,  # [tokens, KV_HEADS, DIM]
    v_ptr,
    slot_ptr,  # [tokens]
    k_cache_ptr,  # [pages, PAGE, KV_HEADS, DIM]
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_token,
    k_head,
    v_token,
    v_head,
    k_cache_page,
    k_cache_row,
    k_cache_head,
    v_cache_page,
    v_cache_row,
    v_cache_head,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + i_token)
    if slot >= 0:
        page, row = slot // PAGE, slot % PAGE
        o_e = tl.arange(0, BLOCK)
        inside = o_e < KV_HEADS * DIM
        head, d = (o_e // DIM).to(tl.int64), o_e % DIM
        k = tl.load(k_ptr + i_token * k_token + head * k_head + d, mask=inside).to(tl.float32)
        v = tl.load(v_ptr + i_token * v_token + head * v_head + d, mask=inside).to(tl.float32)
        p_k = k_cache_ptr + page * k_cache_page + row * k_cache_row + head * k_cache_head + d
        p_v = v_cache_ptr + page * v_cache_page + row * v_cache_row + head * v_cache_head + d
        tl.store(p_k, _narrowed(k, k_scale_ptr, k_cache_ptr.dtype.element_ty), mask=inside)
        tl.store(p_v, _narrowed(v, v_scale_ptr, v_cache_ptr.dtype.element_ty), mask=inside)


@portable(attention.kv_cache_write)
def kv_cache_write(
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    tokens, kv_heads, dim = k.shape
    if k.numel() == 0 or k_cache.numel() == 0:
        return
    block = triton.next_power_of_2(kv_heads * dim)
    _kv_cache_write[(tokens,)](
        k, v, slot_mapping, k_cache, v_cache, k_scale, v_scale,
        *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
        k_cache.shape[1], kv_heads, dim, block, num_warps=min(max(block // 256, 1), 8),
    )  # fmt: skip


LEAST = 2
"""Tiles of keys that a split has at least."""


@triton.jit(do_not_specialize=["seqs", "tokens", "splits", "table_seq"])
def _paged_attention(
    q_ptr,  # [tokens, HEADS, DIM]
    k_ptr,  # [pages, PAGE, KV_HEADS, DIM]
    v_ptr,
    table_ptr,  # [seqs, max_pages]
    cu_ptr,  # [seqs+1]
    len_ptr,  # [seqs]
    k_scale_ptr,
    v_scale_ptr,
    o_ptr,  # [splits, tokens, HEADS, DIM]
    lse_ptr,  # [splits, tokens, HEADS]
    scale,
    seqs,
    tokens,
    splits,
    q_token,
    q_head,
    k_page,
    k_row,
    k_head,
    v_page,
    v_row,
    v_head,
    table_seq,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    DOT: tl.constexpr,  # dtype of the products' operands
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,  # whether offsets in a page pass 2^31
    SPLIT: tl.constexpr,  # whether outputs are partial, their LSE in base 2
    ONE_TILE: tl.constexpr,  # whether a tile holds all rows of any sequence
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    LEAST: tl.constexpr,  # tiles a split
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    i_split = tl.program_id(1)
    i_head = tl.program_id(0) % KV_HEADS
    # The last tiles of a prompt see the most keys: they start first.
    i_tile = tl.num_programs(0) // KV_HEADS - 1 - tl.program_id(0) // KV_HEADS
    if ONE_TILE:
        i_seq = i_tile
        i_row = 0
    else:
        i_seq = sequence_of(cu_ptr, i_tile, seqs, 0, tokens, GROUP, BM, True)
        i_row = (i_tile - (tl.load(cu_ptr + i_seq) * GROUP // BM + i_seq)) * BM
    start = tl.load(cu_ptr + i_seq)
    count = tl.load(cu_ptr + i_seq + 1) - start
    if i_row >= count * GROUP:
        return
    length = tl.load(len_ptr + i_seq)

    o_row = i_row + tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    o_token = o_row // GROUP
    inside = o_token < count
    token = start.to(tl.int64) + o_token
    head = i_head * GROUP + o_row % GROUP
    visible = length - count + 1 + o_token  # [BM]
    p_q = q_ptr + token[:, None] * q_token + head[:, None] * q_head + o_d[None, :]  # [BM, BD]
    q, factor = queries(p_q, inside[:, None] & (o_d < DIM)[None, :], scale, k_scale_ptr, DOT)
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)

    last_token = tl.minimum((i_row + BM - 1) // GROUP, count - 1)
    end = tl.maximum(length - count + 1 + last_token, 0)  # keys that some row of the tile sees
    first = 0
    if SPLIT:
        share = tl.maximum(tl.cdiv(tl.cdiv(end, BN), splits), LEAST) * BN
        first = i_split * share
        end = tl.minimum(end, first + share)
    # Keys that all rows see, in whole tiles.
    whole = tl.minimum(length - count + 1 + i_row // GROUP, end) - first
    edge = first + tl.maximum(whole, 0) // BN * BN
    p_table = table_ptr + i_seq.to(tl.int64) * table_seq
    peak, total, acc = attend_pages(
        q, k_ptr, v_ptr, p_table, i_head, first, edge, visible, peak, total, acc, factor,
        k_page, k_row, k_head, v_page, v_row, v_head, DIM, PAGE, DOT, BD, BN, PRECISION, WIDE, False,
    )  # fmt: skip
    peak, total, acc = attend_pages(
        q, k_ptr, v_ptr, p_table, i_head, edge, end, visible, peak, total, acc, factor,
        k_page, k_row, k_head, v_page, v_row, v_head, DIM, PAGE, DOT, BD, BN, PRECISION, WIDE, True,
    )  # fmt: skip

    row = (i_split.to(tl.int64) * tokens + token) * HEADS + head
    store_attended(o_ptr, lse_ptr, row, inside, peak, total, acc, v_scale_ptr, DIM, BD, SPLIT)


def _space(dims: Dims) -> Iterable[Config]:
    if dims["bytes"] == 4:
        return [_config(dims["rows"], bn, 8, 2, 4) for bn in (32, 64)]
    if dims["rows"] > 64:
        large = ((128, 64, 8, 2), (128, 32, 8, 3), (64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 4, 2))
        return [_config(*tile, 2) for tile in large]
    small = ((64, 2), (64, 3), (32, 3), (32, 4))
    return [_config(dims["rows"], bn, 4, stages, waves) for bn, stages in small for waves in (2, 4, 8)]


def _default(platform: Platform, dims: Dims) -> Config:
    amd = platform.vendor == "amd"
    if dims["bytes"] == 4:
        return _config(dims["rows"], 32, 8, 2, 4)
    if dims["rows"] > 64:
        # Spills on NVIDIA, outside of the loops: what the stores after them need.
        return _config(64, 64, 4, 2, 4) if amd else _config(128, 64, 8, 2, 4)
    # With a float8 cache 16 rows spill 32 bytes under Triton 3.9, and pay: 32 keys take 6 percent longer on H200.
    return _config(dims["rows"], 64 if dims["rows"] <= 32 else 32, 4, 2 if amd else 3, 4)


def _config(bm: int, bn: int, warps: int, stages: int, waves: int) -> Config:
    """`waves`: programs a compute unit for which keys are split."""
    return {"BM": bm, "BN": bn, "num_warps": warps, "num_stages": stages, "waves": waves}


PAGED = Tunable("paged_attention", space=_space, default=_default)


@portable(attention.paged_attention, constraints=[Dim("dim") >= 1, Dim("dim") <= 256, Dim("page") >= 1])
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_q_len: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = q.shape
    page, kv_heads = k_cache.shape[1:3]
    seqs, max_pages = page_table.shape
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(tokens, heads, device=q.device)
    attended, lse = out
    if q.numel() == 0:
        return attended, lse.fill_(-torch.inf)
    group = heads // kv_heads
    dot = product_dtype(q, k_cache)
    width = dot.primitive_bitwidth // 8
    rows = min(max(bucket(max_q_len * group), 16), 128 if width < 4 else 16)
    config = dict(PAGED.pick(q.device, rows=rows, dim=dim, bytes=width, cached=k_cache.element_size()))
    bm = config["BM"]
    one_tile = max_q_len * group <= bm
    tiles = seqs if one_tile else tokens * group // bm + seqs
    busy = min(tiles, seqs * triton.cdiv(max_q_len * group, bm)) * kv_heads
    most = triton.cdiv(max_pages * page, LEAST * config["BN"])
    splits = split_count(most, busy, config.pop("waves") * compute_units(q.device))
    wide = page * max(k_cache.stride(1), v_cache.stride(1)) >= 1 << 31
    parts, lses = partials(splits, tokens, heads, dim, q.device) if splits > 1 else out
    _paged_attention[(tiles * kv_heads, splits)](
        q, k_cache, v_cache, page_table, cu_seqlens_q, seq_lens, k_scale, v_scale, parts, lses,
        scale, seqs, tokens, splits, *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
        page_table.stride(0), heads, kv_heads, dim, page, dot, precision(q.device), wide, splits > 1, one_tile,
        max(triton.next_power_of_2(dim), 16), LEAST=LEAST, **config,
    )  # fmt: skip
    if splits > 1:
        combine(parts, lses, attended, lse)
    return attended, lse
