"""Attention of each token over its chosen blocks.

A program takes one token's query heads of one key/value head, which share the choice, and walks over its entries in
tiles of BN keys: block of the entry → page → row. The tail is an entry more. Where there are few tokens, the entries
are split among programs (see `attention_splits`).
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import sparse
from tokenspeed_kernels.triton.attention_parts import (
    precision,
    product_dtype,
    queries,
    sequence_of,
    softmax_step,
    store_attended,
)
from tokenspeed_kernels.triton.attention_splits import combine, partials, split_count
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.device import compute_units
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry import Dim
from tokenspeed_registry.platform import Platform


@triton.jit
def _place(
    p_block, p_table, i_key, end, complete, position,
    PAGE: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Page, -1 for none, and row of the `BN` keys from `i_key` on: those of the chosen blocks, then of the tail."""
    o_key = i_key + tl.arange(0, BN)
    is_tail = o_key >= TOP_K * RATIO
    block = tl.load(p_block + o_key // RATIO, mask=(o_key < end) & ~is_tail, other=-1)
    block = tl.where(block < complete, block, -1)
    block = tl.where(is_tail, complete, block)
    key = block * RATIO + o_key % RATIO
    wanted = (o_key < end) & (block >= 0) & (key <= position)
    page = tl.load(p_table + key // PAGE, mask=wanted, other=-1).to(tl.int64)
    return page, (key % PAGE).to(tl.int64)


@triton.jit(do_not_specialize=["seqs", "tokens", "splits", "table_seq"])
def _sparse_attention(
    q_ptr,  # [tokens, HEADS, DIM]
    k_ptr,  # [pages, PAGE, KV_HEADS, DIM]
    v_ptr,
    table_ptr,  # [seqs, max_pages]
    block_ptr,  # [tokens, TOP_K]
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
    RATIO: tl.constexpr,
    TOP_K: tl.constexpr,
    DOT: tl.constexpr,  # dtype of the products' operands
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,  # whether outputs are partial, their LSE in base 2
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    i_split = tl.program_id(1)
    i_head = tl.program_id(0) % KV_HEADS
    i_token = tl.program_id(0) // KV_HEADS
    i_seq = sequence_of(cu_ptr, i_token, seqs, 0, tokens, 1, 1, False)
    position = tl.load(len_ptr + i_seq) - tl.load(cu_ptr + i_seq + 1) + i_token
    complete = tl.maximum(position + 1, 0) // RATIO

    o_m = tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    of_group = o_m < GROUP
    token = i_token.to(tl.int64)
    head = i_head * GROUP + o_m
    p_q = q_ptr + token * q_token + head[:, None] * q_head + o_d[None, :]  # [BM, BD]
    q, factor = queries(p_q, of_group[:, None] & (o_d < DIM)[None, :], scale, k_scale_ptr, DOT)
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)

    ENTRIES: tl.constexpr = (TOP_K + 1) * RATIO  # places of keys; the last `RATIO` are the tail's
    if SPLIT:
        share = tl.cdiv(tl.cdiv(ENTRIES, BN), splits) * BN
        first = i_split * share
        end = tl.minimum(first + share, ENTRIES)
    else:
        first = 0
        end = ENTRIES
    end = tl.where(position < 0, first, end)
    p_table = table_ptr + i_seq.to(tl.int64) * table_seq
    p_block = block_ptr + token * TOP_K
    page, row = _place(p_block, p_table, first, end, complete, position, PAGE, RATIO, TOP_K, BN)
    for i_key in range(first, end, BN):
        # The next tile's places are asked for before this one's rows are used.
        next_page, next_row = _place(p_block, p_table, i_key + BN, end, complete, position, PAGE, RATIO, TOP_K, BN)
        cached = page >= 0
        p_k = k_ptr + (page * k_page + row * k_row + i_head.to(tl.int64) * k_head)[:, None] + o_d[None, :]  # [BN, BD]
        p_v = v_ptr + (page * v_page + row * v_row + i_head.to(tl.int64) * v_head)[:, None] + o_d[None, :]
        mask = cached[:, None] & (o_d < DIM)[None, :]
        k = tl.load(p_k, mask=mask, other=0.0).to(DOT)
        v = tl.load(p_v, mask=mask, other=0.0).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor  # [BM, BN]
        scores = tl.where(cached[None, :], scores, float("-inf"))
        peak, total, acc = softmax_step(scores, v, peak, total, acc, PRECISION)
        page, row = next_page, next_row

    o_row = (i_split.to(tl.int64) * tokens + token) * HEADS + head
    store_attended(o_ptr, lse_ptr, o_row, of_group, peak, total, acc, v_scale_ptr, DIM, BD, SPLIT)


def _space(dims: Dims) -> Iterable[Config]:
    if dims["bytes"] == 4:
        return [_config(bn, 8, 2, 4) for bn in (32, 64)]
    tiles = ((64, 2, 2), (32, 2, 2), (32, 4, 2), (32, 4, 3))
    return [_config(*tile, waves) for tile in tiles for waves in (2, 4, 8)]


def _default(platform: Platform, dims: Dims) -> Config:
    if dims["bytes"] == 4:
        return _config(32, 8, 2, 4)
    if platform.vendor == "amd":
        return _config(32, 4, 2, 8)
    if dims["cached"] == 1:  # spills under Triton 3.9, and pays: 4 warps, which spill none, take a fifth longer on H200
        return _config(64, 2, 2, 8)
    return _config(32, 2, 2, 4)


def _config(bn: int, warps: int, stages: int, waves: int) -> Config:
    """`waves`: programs a compute unit for which entries are split."""
    return {"BN": bn, "num_warps": warps, "num_stages": stages, "waves": waves}


SPARSE = Tunable("sparse_attention", space=_space, default=_default)


@portable(sparse.sparse_attention, constraints=[Dim("dim") >= 1, Dim("dim") <= 256, Dim("page") >= 1])
def sparse_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    blocks: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    *,
    ratio: int,
    scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = q.shape
    page, kv_heads = k_cache.shape[1:3]
    top_k = blocks.shape[1]
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(tokens, heads, device=q.device)
    attended, lse = out
    if q.numel() == 0:
        return attended, lse.fill_(-torch.inf)
    dot = product_dtype(q, k_cache)
    config = dict(SPARSE.pick(q.device, dim=dim, bytes=dot.primitive_bitwidth // 8, cached=k_cache.element_size()))
    most = triton.cdiv((top_k + 1) * ratio, 2 * config["BN"])
    splits = split_count(most, tokens * kv_heads, config.pop("waves") * compute_units(q.device))
    parts, lses = partials(splits, tokens, heads, dim, q.device) if splits > 1 else out
    _sparse_attention[(tokens * kv_heads, splits)](
        q, k_cache, v_cache, page_table, blocks, cu_seqlens, seq_lens, k_scale, v_scale, parts, lses,
        scale, page_table.shape[0], tokens, splits, *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
        page_table.stride(0), heads, kv_heads, dim, page, ratio, top_k, dot, precision(q.device), splits > 1,
        max(triton.next_power_of_2(dim), 16), max(triton.next_power_of_2(heads // kv_heads), 16), **config,
    )  # fmt: skip
    if splits > 1:
        combine(parts, lses, attended, lse)
    return attended, lse
