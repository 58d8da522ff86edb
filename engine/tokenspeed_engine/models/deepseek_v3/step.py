"""A batch cut where attention changes its form, from decodes to prefills, and the prefixes of these in parts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tokenspeed_engine.execution.batch import Batch


@dataclass(frozen=True)
class PrefixPart:
    """Cached rows that are expanded together: of each prefill row a run of its earlier tokens, possibly none.

    first: Int32 [P], position where each run starts. cu_seqlens: Int32 [P+1], offsets of the runs among all `rows`.
    """

    rows: int
    first: Tensor
    cu_seqlens: Tensor


@dataclass(frozen=True)
class Step:
    """A batch, and the index tensors of its P prefill rows.

    The first `decodes` rows have one token each, and so are the first `decodes` tokens. cu_seqlens: Int32 [P+1],
    offsets among the tokens after the decodes. page_table: Int32 [P, pages]. prefix: what the prefill rows have in
    the caches from earlier steps, in parts.
    """

    batch: Batch
    decodes: int
    cu_seqlens: Tensor
    page_table: Tensor
    prefix: tuple[PrefixPart, ...]

    @property
    def has_prefills(self) -> bool:
        return self.batch.num_sequences > self.decodes


def make_step(batch: Batch, prefix_rows: int) -> Step:
    """Cuts a batch, with prefixes in parts of at most about `prefix_rows` rows. Done once for all layers."""
    decodes = batch.num_decodes
    return Step(
        batch=batch,
        decodes=decodes,
        cu_seqlens=batch.cu_seqlens[decodes:] - decodes,
        page_table=batch.page_table[decodes:],
        prefix=tuple(_prefix_parts(batch.prefix_lens, prefix_rows, batch.ids.device)),
    )


def _prefix_parts(lengths: Sequence[int], limit: int, device: torch.device) -> Iterator[PrefixPart]:
    """Parts that hold the same positions of all sequences."""
    sharing = sum(length > 0 for length in lengths)
    width = max(1, limit // max(1, sharing))
    for start in range(0, max(lengths, default=0), width):
        first = [min(start, length) for length in lengths]
        runs = [min(length - begin, width) for length, begin in zip(lengths, first, strict=True)]
        offsets = [0, *accumulate(runs)]
        yield PrefixPart(
            rows=offsets[-1],
            first=torch.tensor(first, dtype=torch.int32, device=device),
            cu_seqlens=torch.tensor(offsets, dtype=torch.int32, device=device),
        )
