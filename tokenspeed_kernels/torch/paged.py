"""Addressing that the plain-torch kernels share: packed sequences, paged caches, pools with padding indices.

Nothing here waits for the device: padding is handled by masks, not by selecting what is left.
"""

import torch
from torch import Tensor


def token_sequences(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """For each of `tokens` packed tokens: its sequence and its index in that sequence, both int64 [tokens]."""
    token = torch.arange(tokens, device=cu_seqlens.device)
    offsets = cu_seqlens.long()
    sequence = torch.searchsorted(offsets[1:], token, right=True)
    return sequence, token - offsets[sequence]


def token_positions(cu_seqlens: Tensor, seq_lens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """For each packed token: its sequence and its position, where the tokens are the last ones of their sequences.

    `seq_lens` [seqs] counts these tokens too. Positions are negative where a sequence is shorter than its tokens.
    """
    sequence, index = token_sequences(cu_seqlens, tokens)
    before = seq_lens.long() - cu_seqlens.long().diff()
    return sequence, before[sequence] + index


def pad_sequences(cu_seqlens: Tensor, longest: int) -> Tensor:
    """Packed token of each place in a padded batch, int64 [seqs, longest]; -1 past a sequence's end."""
    place = torch.arange(longest, device=cu_seqlens.device)
    offsets = cu_seqlens.long()
    return (offsets[:-1, None] + place).masked_fill(place >= offsets.diff()[:, None], -1)


def reachable_pages(page_table: Tensor, seq_lens: Tensor, page: int) -> Tensor:
    """`page_table` without the columns that no sequence reaches; on a device, where that would sync, as it is."""
    if page_table.device.type != "cpu" or page_table.numel() == 0:
        return page_table
    return page_table[:, : -(-int(seq_lens.max()) // page)]


def gather_rows(pool: Tensor, index: Tensor) -> Tensor:
    """`pool[index]`, zero where an index is -1: [*index.shape, *pool.shape[1:]]."""
    if pool.shape[0] == 0:
        return pool.new_zeros(*index.shape, *pool.shape[1:])
    rows = pool[index.long().clamp_min(0)]
    return rows.masked_fill_((index < 0).reshape(index.shape + (1,) * (pool.dim() - 1)), 0)


def wide_rows(pool: Tensor, index: Tensor) -> Tensor:
    """`pool[index]` in float32, of any content where an index is -1: [*index.shape, *pool.shape[1:]].

    For pools of float8_e4m3fn too, on which torch cannot fill by a mask.
    """
    if pool.shape[0] == 0:
        return pool.new_zeros(*index.shape, *pool.shape[1:], dtype=torch.float32)
    return pool[index.long().clamp_min(0)].to(torch.float32)


def gather_pages(cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: Tensor | None = None) -> Tensor:
    """Each sequence's cached rows in order, float32 [seqs, max_pages*page, ...], from a cache [pages, page, ...].

    They are multiplied by `scale` [1]. Rows at and past `seq_lens` [seqs] are zero, whatever the cache holds there: a
    NaN times a weight of zero is NaN.
    """
    rows = wide_rows(cache, page_table).flatten(1, 2)
    if scale is not None:
        rows *= scale
    past = torch.arange(rows.shape[1], device=rows.device) >= seq_lens[:, None]
    return rows.masked_fill_(past.reshape(past.shape + (1,) * (rows.dim() - 2)), 0)


def scatter_rows(pool: Tensor, index: tuple[Tensor, ...], rows: Tensor) -> None:
    """`pool[index] = rows` but for rows whose first index is negative; other indices must be distinct.

    `index` holds int tensors [count], `rows` is [count, ...]. A skipped row writes once more what the first row that
    is not skipped writes (where there is none: what lies at 0), so that no two writes to one place differ.
    """
    count = rows.shape[0]
    if count == 0 or pool.numel() == 0:
        return
    kept = index[0] >= 0
    source = torch.where(kept, torch.arange(count, device=rows.device), kept.int().argmax())
    places = tuple(part.long()[source].clamp_min(0) for part in index)
    some = kept.any().reshape((1,) * rows.dim())
    pool.index_put_(places, torch.where(some, rows[source].to(pool.dtype), pool[places]))


def scatter_slots(cache: Tensor, slots: Tensor, rows: Tensor, scale: Tensor | None = None) -> None:
    """Writes `rows` [count, ...] to slots (page·page_size + offset; -1: skipped) of a cache [pages, page, ...].

    They are divided by `scale` [1] before their one rounding to the dtype of the cache.
    """
    page = cache.shape[1]
    places = slots.div(page, rounding_mode="floor"), slots.remainder(page)
    scatter_rows(cache, places, narrowed(rows if scale is None else rows.float() / scale, cache.dtype))


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` rounded to `dtype`; float8_e4m3fn saturates, which torch's own conversion does in some versions only."""
    if dtype == torch.float8_e4m3fn:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)
