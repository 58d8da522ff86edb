"""Block-sparse attention with an indexer in plain torch."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed_kernels import sparse, sparse_select
from tokenspeed_kernels.torch.norm import rms_norm
from tokenspeed_kernels.torch.paged import narrowed, reachable_pages, scatter_rows, token_positions, wide_rows
from tokenspeed_kernels.torch.rope import rope
from tokenspeed_kernels.torch.topk import largest
from tokenspeed_registry import copy_into, kernel

TILE = 2**23
"""Elements of the largest temporary, roughly: longer packed inputs are worked off in tiles of tokens."""


@kernel(sparse.index_cache_write, backend="torch")
def index_cache_write(
    raw_k: Tensor,
    ring: Tensor,
    block_cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    weight: Tensor,
    inv_freq: Tensor,
    *,
    ratio: int,
    eps: float,
) -> None:
    tokens, ring_rows, blocks = raw_k.shape[0], ring.shape[1], block_cache.shape[1]
    if tokens == 0 or ring.shape[0] == 0:
        return
    sequence, position = token_positions(cu_seqlens, seq_lens, tokens)
    slot = slots.long()[sequence].masked_fill(position < 0, -1)
    if page_table.shape[1] > 0:
        # Every token pools the `ratio` keys that end with its own; what does not complete a block is dropped.
        back = torch.arange(1 - ratio, 1, device=raw_k.device)
        window = position[:, None] + back
        token = torch.arange(tokens, device=raw_k.device)[:, None] + back
        here = token >= cu_seqlens.long()[sequence, None]
        old = ring[slot.clamp_min(0)[:, None], window % ring_rows]
        keys = torch.where(here.unsqueeze(-1), raw_k[token.clamp_min(0)], old)
        means = keys.float().mean(dim=1).to(raw_k.dtype)
        block = position.clamp_min(0) // ratio
        normed = rms_norm.function(means, weight, eps=eps, zero_centred=True)
        block_keys = rope.function(normed.unsqueeze(1), block * ratio, inv_freq).squeeze(1)
        column = (block // blocks).clamp_max(page_table.shape[1] - 1)
        page = page_table.long()[sequence, column].masked_fill((slot < 0) | (position % ratio != ratio - 1), -1)
        scatter_rows(block_cache, (page, block % blocks), narrowed(block_keys, block_cache.dtype))
    # Of tokens that meet in one row of the ring the last one stays.
    replaced = position + ring_rows < seq_lens.long()[sequence]
    scatter_rows(ring, (slot.masked_fill(replaced, -1), position % ring_rows), raw_k)


# The scores of a sequence are a matrix of their own, whose sizes only the host can pass to a matrix product. What lies
# on a device is read back once a call.
@kernel(sparse.index_scores, backend="torch", graph_capturable=False)
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
    scores = q.new_empty(q.shape[0], max_blocks, dtype=torch.float32) if out is None else out
    scores.fill_(-torch.inf)
    for tokens, tile in _score_tiles(q, block_cache, page_table, cu_seqlens, seq_lens, ratio, max_blocks):
        scores[tokens, : tile.shape[1]] = tile
    return scores


@kernel(sparse.topk_blocks, backend="torch")
def topk_blocks(scores: Tensor, *, top_k: int, out: Tensor | None = None) -> Tensor:
    blocks = _best_blocks(scores, top_k)
    return blocks if out is None else copy_into(out, blocks)


# As for `index_scores`.
@kernel(sparse_select.select_blocks, backend="torch", graph_capturable=False)
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
    blocks = q.new_empty(q.shape[0], top_k, dtype=torch.int32) if out is None else out
    blocks.fill_(-1)
    for tokens, tile in _score_tiles(q, block_cache, page_table, cu_seqlens, seq_lens, ratio, max_blocks):
        blocks[tokens] = _best_blocks(tile, top_k)
    return blocks


def _score_tiles(
    q: Tensor,
    block_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    ratio: int,
    max_blocks: int,
) -> Iterator[tuple[slice, Tensor]]:
    """Scores [tile, count] of runs of tokens of one sequence over the `count` blocks that it has, hidden ones −inf."""
    _, heads, dim = q.shape
    blocks = block_cache.shape[1]
    starts = cu_seqlens.tolist()
    for seq, length in enumerate(seq_lens.tolist()):
        start, end, count = starts[seq], starts[seq + 1], min(length // ratio, max_blocks)
        if start == end or count == 0:
            continue
        pages = page_table[seq, : -(-count // blocks)]
        keys = wide_rows(block_cache, pages).flatten(0, 1)[:count]
        block = torch.arange(count, device=q.device)
        lacking = pages.repeat_interleave(blocks)[:count] < 0
        tile = max(1, TILE // (heads * count))
        for first in range(start, end, tile):
            last = min(first + tile, end)
            dots = q[first:last].reshape(-1, dim).float() @ keys.T
            summed = dots.relu_().view(last - first, heads, count).sum(dim=1).mul_(dim**-0.5)
            complete = (torch.arange(first, last, device=q.device) + (length - end + 1)) // ratio
            hidden = (block >= complete[:, None]) | lacking
            yield slice(first, last), summed.masked_fill_(hidden, -torch.inf)


def _best_blocks(scores: Tensor, top_k: int) -> Tensor:
    """Blocks Int32 [rows, top_k] with the highest of `scores` [rows, blocks], −1 in the place of a hidden one.

    Rectified scores often tie at 0. What a token attends to must not depend on its batch, whose longest sequence sets
    the width of the scores, so each row is chosen from as if it stood alone.
    """
    count = min(top_k, scores.shape[1])
    # On a device by place, which needs no width from there.
    places = _topk_in_reach(scores, count) if scores.device.type == "cpu" else largest(scores, count)
    blocks = places.int().masked_fill_(scores.gather(1, places) == -torch.inf, -1)
    return F.pad(blocks, (0, top_k - count), value=-1)


def _topk_in_reach(scores: Tensor, count: int) -> Tensor:
    """torch.topk of each row up to its last visible block, one call a length: of ties, the choice of transformers."""
    after = torch.arange(1, scores.shape[1] + 1)
    reach = F.pad(torch.where(scores > -torch.inf, after, count), (1, 0), value=count).amax(1)
    places = torch.empty(scores.shape[0], count, dtype=torch.int64)
    for width in sorted(set(reach.tolist())):
        rows = reach == width
        places[rows] = scores[rows, :width].topk(count, dim=1).indices
    return places


@kernel(sparse.sparse_attention, backend="torch")
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
    cached, page, kv_heads, _ = k_cache.shape
    result = (torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(tokens, heads, dtype=torch.float))
    attended, lse = result if out is None else out
    table = reachable_pages(page_table, seq_lens, page).long()
    if table.shape[1] == 0:
        return attended.zero_(), lse.fill_(-torch.inf)
    per_page = page // ratio
    sequence, position = token_positions(cu_seqlens, seq_lens, tokens)
    block = _attended_blocks(blocks, position, ratio, table.shape[1] * per_page)
    column, row = block.clamp_min(0) // per_page, block.clamp_min(0) % per_page
    pages = table[sequence[:, None], column].masked_fill_(block < 0, -1)
    key = (block * ratio).unsqueeze(-1) + torch.arange(ratio, device=q.device)
    hidden = ((pages < 0).unsqueeze(-1) | (key > position[:, None, None])).flatten(1)
    k_blocks, v_blocks = (cache.view(cached, per_page, ratio, kv_heads, dim) for cache in (k_cache, v_cache))
    grouped = q.view(tokens, kv_heads, heads // kv_heads, dim)
    tile = max(1, TILE // (hidden.shape[1] * kv_heads * dim))
    for rows in (slice(first, first + tile) for first in range(0, tokens, tile)):
        place = pages[rows].clamp_min(0), row[rows]
        k, v = (cache[place].flatten(1, 2).float() for cache in (k_blocks, v_blocks))  # [tile, keys, kv_heads, dim]
        if k_scale is not None:
            k *= k_scale
        if v_scale is not None:
            v *= v_scale
        # A hidden value may be NaN, which a weight of zero does not undo.
        v.masked_fill_(hidden[rows, :, None, None], 0.0)
        for kv_head in range(kv_heads):
            of_head = slice(kv_head * (heads // kv_heads), (kv_head + 1) * (heads // kv_heads))
            logits = torch.bmm(grouped[rows, kv_head].float() * scale, k[:, :, kv_head].transpose(1, 2))
            logits.masked_fill_(hidden[rows, None], -torch.inf)
            total = logits.logsumexp(dim=-1)
            values = torch.bmm(logits.softmax(dim=-1), v[:, :, kv_head])
            attended[rows, of_head] = values.masked_fill_((total == -torch.inf).unsqueeze(-1), 0.0)
            lse[rows, of_head] = total
    return attended, lse


def _attended_blocks(blocks: Tensor, position: Tensor, ratio: int, limit: int) -> Tensor:
    """The blocks that each token attends to, [tokens, count]: the chosen ones, then the open one; -1 is none."""
    complete = ((position + 1) // ratio)[:, None]
    chosen = blocks.long().masked_fill(blocks >= complete, -1)
    if limit < chosen.shape[1]:  # no sequence has more blocks than that: drop filling
        chosen = chosen.topk(limit, dim=-1).values
    tail = complete.masked_fill(position[:, None] < complete * ratio, -1)
    return torch.cat([chosen, tail], dim=1)
