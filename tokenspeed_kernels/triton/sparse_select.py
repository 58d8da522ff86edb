"""The choice of blocks: an exact selection by the bits of the scores.

A program holds up to BLOCK scores of one row in registers and finds the score of rank `top_k`, two bits of its
order-preserving integer a step, by counting. What is above it is chosen, and of what equals it the first blocks; so the
choice depends on the row alone, whatever its width. Wider rows are cut: each program keeps the best of its part, and
the kernel runs again over what they kept.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import sparse, sparse_select
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.device import bucket
from tokenspeed_kernels.triton.selection import order_key, threshold_of
from tokenspeed_kernels.triton.sparse import NOT_EMPTY, write_scores
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry import Dim
from tokenspeed_registry.platform import Platform

_SCORES = 1 << 23
"""Scores that lie in memory at a time in `select_blocks`: 32 MiB, which stay in the L2 of the larger devices."""


@triton.jit(do_not_specialize=["parts"])
def _topk(
    score_ptr,  # [rows, width]
    id_ptr,  # [rows, width], or none: the places
    reach_ptr,  # [rows], or none: how many of a row's scores there are
    o_ptr,  # [rows, parts, TOP_K]
    o_score_ptr,  # the same, or none
    width,
    parts,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64) // parts
    i_part = tl.program_id(0) % parts
    o_n = i_part * BLOCK + tl.arange(0, BLOCK)
    end = width
    if reach_ptr is not None:
        end = tl.load(reach_ptr + i_row)
    score = tl.load(score_ptr + i_row * width + o_n, mask=o_n < end, other=float("-inf"))
    key = tl.where(score == float("-inf"), 0, order_key(score))
    wanted = tl.minimum(tl.sum((key > 0).to(tl.int32), 0), TOP_K)

    threshold = threshold_of(key, wanted)
    above = key > threshold
    equal = (key == threshold) & (key > 0)
    before = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    above_before = (before & 0xFFFF) - above.to(tl.int32)
    equal_before = (before >> 16) - equal.to(tl.int32)
    spare = wanted - tl.sum(above.to(tl.int32), 0)
    chosen = above | (equal & (equal_before < spare))
    place = (i_row * parts + i_part) * TOP_K + above_before + tl.minimum(equal_before, spare)
    ids = o_n
    if id_ptr is not None:
        ids = tl.load(id_ptr + i_row * width + o_n, mask=chosen, other=0)
    tl.store(o_ptr + place, ids, mask=chosen)
    o_k = tl.arange(0, BK)
    p_rest = (i_row * parts + i_part) * TOP_K + o_k
    rest = (o_k >= wanted) & (o_k < TOP_K)
    tl.store(o_ptr + p_rest, tl.full([BK], -1, tl.int32), mask=rest)
    if o_score_ptr is not None:
        tl.store(o_score_ptr + place, score, mask=chosen)
        tl.store(o_score_ptr + p_rest, tl.full([BK], float("-inf"), tl.float32), mask=rest)


def _space(dims: Dims) -> Iterable[Config]:
    """Parts keep a quarter of their scores at most."""
    widths = {min(dims["width"], max(most, 4 * dims["top_k"])) for most in (2048, 4096, 8192)}
    return [_config(block, scores) for block in sorted(widths) for scores in (8, 16, 32)]


def _default(platform: Platform, dims: Dims) -> Config:
    return _config(min(dims["width"], max(4096, 4 * dims["top_k"])), 16)


def _config(block: int, scores: int) -> Config:
    """`scores`: how many a lane of 32 holds."""
    return {"BLOCK": block, "num_warps": min(max(block // (32 * scores), 1), 16)}


MOST = 8192
"""Blocks that a token may choose: parts of twice as many fit a program, so that each pass leaves fewer."""
TOPK = Tunable("topk_blocks", space=_space, default=_default)


def _choose(scores: Tensor, top_k: int, out: Tensor, reach: Tensor | None) -> None:
    """The best of `scores` [rows, width] to `out` [rows, top_k]."""
    rows, width = scores.shape
    ids: Tensor | None = None
    kept = triton.next_power_of_2(top_k)
    while True:
        config = TOPK.pick(scores.device, width=min(max(bucket(width), 256), 1 << 14), top_k=kept)
        parts = triton.cdiv(width, config["BLOCK"])
        best, best_scores = out, None
        if parts > 1:
            best = torch.empty(rows, parts * top_k, dtype=torch.int32, device=scores.device)
            best_scores = torch.empty(rows, parts * top_k, device=scores.device)
        _topk[(rows * parts,)](scores, ids, reach, best, best_scores, width, parts, top_k, BK=kept, **config)
        if best_scores is None:
            return
        scores, ids, reach, width = best_scores, best, None, parts * top_k


@portable(sparse.topk_blocks, constraints=[Dim("top_k") <= MOST])
def topk_blocks(scores: Tensor, *, top_k: int, out: Tensor | None = None) -> Tensor:
    blocks = torch.empty(scores.shape[0], top_k, dtype=torch.int32, device=scores.device) if out is None else out
    if scores.numel() == 0:
        return blocks.fill_(-1)
    _choose(scores, top_k, blocks, None)
    return blocks


@portable(sparse_select.select_blocks, constraints=[*NOT_EMPTY, Dim("top_k") <= MOST])
def select_blocks(
    q: Tensor,
    block_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    *,
    ratio: int,
    top_k: int,
    max_blocks: int,
    out: Tensor | None = None,
) -> Tensor:
    tokens = q.shape[0]
    blocks = torch.empty(tokens, top_k, dtype=torch.int32, device=q.device) if out is None else out
    if tokens == 0 or max_blocks == 0:
        return blocks.fill_(-1)
    slab = min(tokens, max(_SCORES // max_blocks, 1))
    scores = torch.empty(slab, max_blocks, device=q.device)
    reach = torch.empty(slab, dtype=torch.int32, device=q.device)
    for first in range(0, tokens, slab):
        some = range(first, min(first + slab, tokens))
        rows = slice(0, len(some))
        write_scores(q, block_cache, page_table, cu_seqlens, seq_lens, ratio, some, scores[rows], reach[rows])
        _choose(scores[rows], top_k, blocks[some.start : some.stop], reach[rows])
    return blocks
