"""Block-sparse attention with an indexer in plain torch."""

import torch
import torch.nn.functional as F
from tokenspeed_registry import copy_into, kernel
from torch import Tensor

from tokenspeed_kernels import sparse
from tokenspeed_kernels.torch.paged import gather_rows, paged_rows, scatter_rows, token_positions

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
        block_keys = _rotate(_rms_norm(means, weight, eps), block * ratio, inv_freq)
        column = (block // blocks).clamp_max(page_table.shape[1] - 1)
        page = page_table.long()[sequence, column].masked_fill((slot < 0) | (position % ratio != ratio - 1), -1)
        scatter_rows(block_cache, (page, block % blocks), block_keys)
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
    _, heads, dim = q.shape
    blocks = block_cache.shape[1]
    scores = torch.full((q.shape[0], max_blocks), -torch.inf, device=q.device) if out is None else out.fill_(-torch.inf)
    starts = cu_seqlens.tolist()
    for seq, length in enumerate(seq_lens.tolist()):
        start, end, count = starts[seq], starts[seq + 1], min(length // ratio, max_blocks)
        if start == end or count == 0:
            continue
        pages = page_table[seq, : -(-count // blocks)]
        keys = gather_rows(block_cache, pages).flatten(0, 1)[:count].float()
        block = torch.arange(count, device=q.device)
        lacking = pages.repeat_interleave(blocks)[:count] < 0
        tile = max(1, TILE // (heads * count))
        for first in range(start, end, tile):
            last = min(first + tile, end)
            dots = q[first:last].reshape(-1, dim).float() @ keys.T
            summed = dots.relu_().view(last - first, heads, count).sum(dim=1).mul_(dim**-0.5)
            complete = (torch.arange(first, last, device=q.device) + (length - end + 1)) // ratio
            scores[first:last, :count] = summed.masked_fill_((block >= complete[:, None]) | lacking, -torch.inf)
    return scores


@kernel(sparse.topk_blocks, backend="torch")
def topk_blocks(scores: Tensor, *, top_k: int, out: Tensor | None = None) -> Tensor:
    best, blocks = scores.topk(min(top_k, scores.shape[1]), dim=-1)
    blocks = blocks.int().masked_fill_(best == -torch.inf, -1)
    blocks = F.pad(blocks, (0, top_k - blocks.shape[1]), value=-1)
    return blocks if out is None else out.copy_(blocks)


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
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = q.shape
    _, page, kv_heads, _ = k_cache.shape
    result = (torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(tokens, heads, dtype=torch.float))
    attended, lse = result if out is None else out
    if page_table.shape[1] == 0:
        return attended.zero_(), lse.fill_(-torch.inf)
    sequence, position = token_positions(cu_seqlens, seq_lens, tokens)
    keys = _attended_keys(blocks, position, ratio, page_table.shape[1] * page // ratio)
    places = page_table[sequence[:, None], keys.clamp_min(0) // page]
    keys = keys.masked_fill_(places < 0, -1)
    grouped = q.unflatten(1, (kv_heads, heads // kv_heads))
    tile = max(1, TILE // max(1, keys.shape[1] * kv_heads * dim))
    for rows in (slice(first, first + tile) for first in range(0, tokens, tile)):
        where = page_table, sequence[rows, None], keys[rows]
        k, v = (paged_rows(cache, *where).float() for cache in (k_cache, v_cache))
        logits = torch.einsum("tkgd,tnkd->tkgn", grouped[rows].float() * scale, k)
        logits.masked_fill_((keys[rows] < 0)[:, None, None], -torch.inf)
        total = logits.logsumexp(dim=-1, keepdim=True)
        # −inf − −inf is NaN: a token without any key has weights of zero.
        weights = (logits - total.masked_fill(total == -torch.inf, 0.0)).exp_()
        attended[rows] = torch.einsum("tkgn,tnkd->tkgd", weights, v).flatten(1, 2)
        lse[rows] = total.flatten(1)
    return attended, lse


def _attended_keys(blocks: Tensor, position: Tensor, ratio: int, limit: int) -> Tensor:
    """Positions of the keys of each token, in any order, [tokens, keys]; a negative one is none."""
    complete = ((position + 1) // ratio)[:, None]
    chosen = blocks.long().masked_fill(blocks >= complete, -1)
    if limit < chosen.shape[1]:  # no sequence has more blocks than that: drop filling
        chosen = chosen.topk(limit, dim=-1).values
    of_blocks = chosen.unsqueeze(-1) * ratio + torch.arange(ratio, device=blocks.device)
    of_blocks = of_blocks.masked_fill_(chosen.unsqueeze(-1) < 0, -1).flatten(1)
    tail = complete * ratio + torch.arange(ratio - 1, device=blocks.device)
    return torch.cat([of_blocks, tail.masked_fill_(tail > position[:, None], -1)], dim=1)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zero-centred RMS norm in float32, rounded once."""
    wide = x.float()
    return (wide * (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * (1 + weight.float())).to(x.dtype)


def _rotate(x: Tensor, position: Tensor, inv_freq: Tensor) -> Tensor:
    """RoPE in NeoX pairs over the first 2·half dims of x [rows, dim]; cosines and result are rounded to its dtype."""
    half = inv_freq.shape[0]
    angle = position.float()[:, None] * inv_freq
    cos, sin = angle.cos().to(x.dtype).float(), angle.sin().to(x.dtype).float()
    a, b, rest = x.float().tensor_split([half, 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x.dtype)
