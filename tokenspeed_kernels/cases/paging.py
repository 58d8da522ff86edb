"""Index tensors and memory layouts that the case sets share: packed sequences, page tables, slots, strided views."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenspeed_kernels.scaled_cache import stored
from tokenspeed_registry.cases import Make


def cu_seqlens(lengths: Sequence[int]) -> Tensor:
    """Offsets of packed sequences, int32 [seqs+1]."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def page_table(
    make: Make, lengths: Sequence[int], page: int, *, spare_pages: int = 2, spare_columns: int = 1
) -> tuple[Tensor, int]:
    """A table int32 [seqs, max_pages] over pages in random order, and the number of pages of its cache.

    Every page belongs to one sequence or to none (`spare_pages`); table entries past a sequence's end are -1, in
    `spare_columns` for all sequences.
    """
    needed = [-(-length // page) for length in lengths]
    pages = sum(needed) + spare_pages
    order = make.permutation(pages)
    table = torch.full((len(lengths), max(needed, default=0) + spare_columns), -1, dtype=torch.int32)
    taken = 0
    for row, count in zip(table, needed, strict=True):
        row[:count] = order[taken : taken + count]
        taken += count
    return table, pages


def paged_cache(
    make: Make, table: Tensor, lengths: Sequence[int], pages: int, page: int, *row: int, dtype: torch.dtype
) -> Tensor:
    """A cache [pages, page, *row] with Gaussian rows where a sequence has tokens, and NaN everywhere else."""
    cache = make.normal(pages * page, *row)
    unused = torch.ones(pages * page, dtype=torch.bool)
    unused[token_slots(table, lengths, lengths, page)] = False
    cache[unused] = torch.nan
    return cache.reshape(pages, page, *row).to(dtype)


def scaled_cache(cache: Tensor, dtype: torch.dtype, scale: float | None) -> Tensor:
    """What a cache of `dtype` with this scale holds of the float32 values of `cache`."""
    return stored(cache, scale_tensor(scale), dtype)


def scale_tensor(scale: float | None) -> Tensor | None:
    """A scale as the ops take it."""
    return None if scale is None else torch.tensor([scale], dtype=torch.float32)


def add_extremes(*tokens: Tensor) -> None:
    """Puts NaN and numbers past the range of float8_e4m3fn among the values, and some below its normal numbers."""
    for x in tokens:
        flat = x.view(-1)
        flat[: len(flat) // 2] *= 1e-3
        for place, value in enumerate((1e4, torch.nan, -1e4)):
            flat[place * len(flat) // 3 :][:1] = value


def distinct_slots(make: Make, count: int, slots: int, *, padding: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
    """`count` different slots below `slots` in random order, `padding` of them (anywhere) replaced by -1."""
    chosen = make.permutation(max(slots, count), dtype)[:count]
    chosen[make.permutation(count, torch.int64)[:padding]] = -1
    return chosen


def token_slots(table: Tensor, lengths: Sequence[int], new: Sequence[int], page: int) -> Tensor:
    """Cache slots (page id·page + offset), int64, of the last `new` tokens of every sequence, packed."""
    slots = [
        entries[position // page] * page + position % page
        for entries, length, count in zip(table.tolist(), lengths, new, strict=True)
        for position in range(length - count, length)
    ]
    return torch.tensor(slots, dtype=torch.int64)


def strided(x: Tensor, *, dim: int = -1, extra: int = 3) -> Tensor:
    """`x` as a view into a larger buffer of NaN: what a slice of a fused projection or of a joint cache looks like.

    The buffer has `extra` more entries along `dim`, some before and some after; the last dim keeps unit stride.
    """
    shape = list(x.shape)
    shape[dim] += extra
    fill = torch.nan if x.is_floating_point() else -1
    view = torch.full(shape, fill, dtype=x.dtype).narrow(dim, extra // 2, x.shape[dim])
    view.copy_(x)
    return view
