"""Scores of the blocks, by the indexer of block-sparse attention.

A program takes BT tokens of a sequence and a share of its blocks, in tiles of BN. One product of a tile of block keys
and all heads' queries, [BN, heads · BT], is rectified and summed over the heads, whose columns lie in one thread.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import sparse
from tokenspeed_kernels.triton.attention_parts import operand, precision, product_dtype, sequence_of
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.device import bucket, compute_units
from tokenspeed_kernels.triton.index_cache import index_cache_write  # noqa: F401  (its op is of this family)
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry import Dim
from tokenspeed_registry.platform import Platform


@triton.jit
def _queries(
    q_ptr, token, inside, i_head, q_token, q_head, HEADS: tl.constexpr, DIM: tl.constexpr, HG: tl.constexpr,
    BD: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Queries of `HG` heads from `i_head` on, head by head, [HG * BT, BD]; zero for a head or token that is none."""
    o_d = tl.arange(0, BD)
    head = i_head + tl.arange(0, HG)
    p_q = (q_ptr + token[None, :, None] * q_token + head[:, None, None] * q_head) + o_d[None, None, :]
    mask = inside[None, :, None] & (head < HEADS)[:, None, None] & (o_d < DIM)[None, None, :]
    return tl.reshape(tl.load(p_q, mask=mask, other=0.0), [HG * BT, BD])


@triton.jit(do_not_specialize=["seqs", "first_token", "last_token", "max_blocks", "share", "table_seq"])
def _index_scores(
    q_ptr,  # [tokens, HEADS, DIM]
    cache_ptr,  # [pages, BLOCKS, DIM]
    table_ptr,  # [seqs, max_pages]
    cu_ptr,  # [seqs+1]
    len_ptr,  # [seqs]
    o_ptr,  # [last_token - first_token, max_blocks]
    reach_ptr,  # [last_token - first_token], or none: then scores past a token's own blocks are written too
    seqs,
    first_token,
    last_token,
    max_blocks,
    share,  # blocks a program, a multiple of BN
    scale,
    q_token,
    q_head,
    table_seq,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCKS: tl.constexpr,
    RATIO: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    HG: tl.constexpr,  # heads a product
    BD: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
):
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i_share = tl.program_id(1) * share
    i_seq = sequence_of(cu_ptr, i_tile, seqs, first_token, last_token, 1, BT, True)
    begin = tl.load(cu_ptr + i_seq)
    end = tl.load(cu_ptr + i_seq + 1)
    start = tl.minimum(tl.maximum(begin, first_token), last_token)
    count = tl.minimum(tl.maximum(end, first_token), last_token) - start
    i_token = (i_tile - ((start - first_token) // BT + i_seq)) * BT
    if i_token >= count:
        return
    o_t = i_token + tl.arange(0, BT)
    inside = o_t < count
    token = start.to(tl.int64) + o_t
    position = tl.load(len_ptr + i_seq) - end + start + o_t
    complete = tl.minimum(tl.maximum(position + 1, 0) // RATIO, max_blocks)  # [BT]
    if reach_ptr is not None:
        tl.store(reach_ptr + (token - first_token), complete, mask=inside)
    seen = tl.max(tl.where(inside, complete, 0), 0)
    stop = tl.minimum(i_share + share, max_blocks)

    o_d = tl.arange(0, BD)
    p_table = table_ptr + i_seq.to(tl.int64) * table_seq
    p_row = o_ptr + (token - first_token) * max_blocks
    if HG >= HEADS:
        q, factor = operand(_queries(q_ptr, token, inside, 0, q_token, q_head, HEADS, DIM, HG, BD, BT), DOT)
    for i_block in range(i_share, tl.minimum(stop, seen), BN):
        o_block = i_block + tl.arange(0, BN)
        page = tl.load(p_table + o_block // BLOCKS, mask=o_block < seen, other=-1).to(tl.int64)
        p_key = cache_ptr + (page * BLOCKS + o_block % BLOCKS)[:, None] * DIM + o_d[None, :]  # [BN, BD]
        keys = tl.load(p_key, mask=(page >= 0)[:, None] & (o_d < DIM)[None, :], other=0.0).to(DOT)
        scores = tl.zeros([BN, BT], tl.float32)
        for i_head in tl.static_range(0, HEADS, HG):
            if HG < HEADS:
                q, factor = operand(
                    _queries(q_ptr, token, inside, i_head, q_token, q_head, HEADS, DIM, HG, BD, BT), DOT
                )
            dots = tl.maximum(tl.dot(keys, tl.trans(q), input_precision=PRECISION), 0.0)  # [BN, HG * BT]
            dots *= tl.trans(factor)
            scores += tl.sum(tl.reshape(dots, [BN, HG, BT]), 1)
        hidden = (page < 0)[:, None] | (o_block[:, None] >= complete[None, :])
        scores = tl.where(hidden, float("-inf"), scores * scale)
        mask = (o_block < stop)[:, None] & inside[None, :]
        tl.store(p_row[None, :] + o_block[:, None], scores, mask=mask)
    if reach_ptr is None:
        rest = i_share + tl.cdiv(tl.maximum(tl.minimum(stop, seen) - i_share, 0), BN) * BN
        for i_block in range(rest, stop, BN):
            o_block = i_block + tl.arange(0, BN)
            none = tl.full([BT, BN], float("-inf"), tl.float32)
            tl.store(p_row[:, None] + o_block[None, :], none, mask=inside[:, None] & (o_block < stop)[None, :])


def _space(dims: Dims) -> Iterable[Config]:
    if dims["bytes"] == 4:
        return [{"BT": _tile(dims), "BN": 64, "num_warps": 4, "num_stages": 2}]
    return [
        {"BT": _tile(dims), "BN": bn, "num_warps": warps, "num_stages": stages}
        for bn in (64, 128)
        for warps in (4, 8)
        for stages in (2, 3)
    ]


def _tile(dims: Dims) -> int:
    """Tokens a tile: heads · tokens are the columns of a product, 16 at least."""
    most = 128 if dims["bytes"] < 4 else 32
    return max(min(dims["run"], most // dims["heads"]), 16 // dims["heads"], 1)


def _default(platform: Platform, dims: Dims) -> Config:
    wide = dims["bytes"] < 4 and _tile(dims) * dims["heads"] < 128
    return {"BT": _tile(dims), "BN": 128 if wide else 64, "num_warps": 4, "num_stages": 2}


SCORES = Tunable("index_scores", space=_space, default=_default)


def write_scores(
    q: Tensor,
    block_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    ratio: int,
    tokens: range,
    scores: Tensor,
    reach: Tensor | None,
) -> None:
    """The scores of some tokens, [len(tokens), max_blocks]; with `reach`, that tells how many a row has, only those."""
    heads, dim = q.shape[1:]
    seqs, max_blocks = page_table.shape[0], scores.shape[1]
    dot = product_dtype(q, block_cache)
    group = min(triton.next_power_of_2(heads), 16)
    run = min(bucket(triton.cdiv(len(tokens), seqs)), 32)
    config = SCORES.pick(q.device, heads=group, dim=dim, run=run, bytes=dot.primitive_bitwidth // 8)
    tiles = len(tokens) // config["BT"] + seqs
    busy = min(tiles, triton.cdiv(len(tokens), config["BT"]) + seqs - 1)
    shares = min(max(8 * compute_units(q.device) // busy, 1), triton.cdiv(max_blocks, config["BN"]))
    share = triton.cdiv(triton.cdiv(max_blocks, shares), config["BN"]) * config["BN"]
    _index_scores[(tiles, triton.cdiv(max_blocks, share))](
        q, block_cache, page_table, cu_seqlens, seq_lens, scores, reach,
        seqs, tokens.start, tokens.stop, max_blocks, share, dim**-0.5, *q.stride()[:2], page_table.stride(0),
        heads, dim, block_cache.shape[1], ratio, dot, precision(q.device), group,
        max(triton.next_power_of_2(dim), 16), **config,
    )  # fmt: skip


NOT_EMPTY = Dim("heads") >= 1, Dim("dim") >= 1, Dim("blocks") >= 1


@portable(sparse.index_scores, constraints=NOT_EMPTY)
def index_scores(
    q: Tensor,
    block_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    *,
    ratio: int,
    max_blocks: int,
    out: Tensor | None = None,
) -> Tensor:
    tokens = q.shape[0]
    scores = torch.empty(tokens, max_blocks, device=q.device) if out is None else out
    if scores.numel():
        write_scores(q, block_cache, page_table, cu_seqlens, seq_lens, ratio, range(tokens), scores, None)
    return scores
