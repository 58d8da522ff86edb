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

    The first `decodes` rows have `q_len` places each, and so the first `decode_tokens` tokens are theirs. cu_seqlens:
    Int32 [P+1], offsets among the tokens after those. page_table: Int32 [P, pages]. prefix: what the prefill rows have
    in the caches from earlier steps, in parts. alignment: see `Alignment`, None where no decode row is padded.
    """

    batch: Batch
    decodes: int
    q_len: int
    decode_page_table: Tensor
    decode_seq_lens: Tensor
    alignment: "Alignment | None"
    cu_seqlens: Tensor
    page_table: Tensor
    prefix: tuple[PrefixPart, ...]

    @property
    def has_prefills(self) -> bool:
        return self.batch.num_rows > self.decodes

    @property
    def decode_tokens(self) -> int:
        return self.decodes * self.q_len


@dataclass(frozen=True)
class Alignment:
    """Padding moved from the end of each decode row to its start, since attention takes a row's tokens to be its last.

    there: Int64 [decode tokens], which token comes to each place. back: Int64 [decode tokens], where it went.
    """

    there: Tensor
    back: Tensor


def make_step(batch: Batch, prefix_rows: int) -> Step:
    """Cuts a batch, with prefixes in parts of at most about `prefix_rows` rows. Done once for all layers."""
    decodes, sequences = batch.num_decodes, batch.sequences
    # What pads ragged rows are sequences of their own, which latent attention has no use for.
    stride = 1 if batch.lengths is None else 2
    page_table, seq_lens = sequences.page_table[: decodes * stride], sequences.seq_lens[: decodes * stride]
    if batch.lengths is not None:
        page_table, seq_lens = page_table[::2].contiguous(), seq_lens[::2].contiguous()
    return Step(
        batch=batch,
        decodes=decodes,
        q_len=batch.q_len,
        decode_page_table=page_table,
        decode_seq_lens=seq_lens,
        alignment=None if batch.lengths is None else _alignment(batch.lengths, batch.q_len),
        cu_seqlens=batch.cu_seqlens[decodes:] - batch.decode_tokens,
        page_table=sequences.page_table[decodes * stride :],
        prefix=tuple(_prefix_parts(batch.prefix_lens, prefix_rows, batch.ids.device)),
    )


def _alignment(lengths: Tensor, q_len: int) -> Alignment:
    row = torch.arange(lengths.shape[0], device=lengths.device)[:, None] * q_len
    place = torch.arange(q_len, device=lengths.device)
    shift = (q_len - lengths.long())[:, None]
    return Alignment((row + (place - shift) % q_len).flatten(), (row + (place + shift) % q_len).flatten())


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
            first=torch.tensor(first, dtype=torch.int32).to(device, non_blocking=True),
            cu_seqlens=torch.tensor(offsets, dtype=torch.int32).to(device, non_blocking=True),
        )
