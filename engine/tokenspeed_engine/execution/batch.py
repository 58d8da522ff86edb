"""One step's rows as the index tensors that ops take."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed_engine.control import Row, StepPlan


@dataclass(frozen=True)
class Batch:
    """Packed tokens of a step; S sequences (rows), T tokens. Decodes, of one token each, come first.

    ids, positions, slot_mapping: Int64 [T]. cu_seqlens: Int32 [S+1], offsets of the rows' tokens. seq_lens: Int32
    [S], tokens of each sequence with this step's. page_table: Int32 [S, P], −1 past a sequence's pages. slots: Int32
    [S]. fresh: Bool [S], whether the sequence starts here. context: Int64 [S, C], tokens before the row, oldest first,
    `context_fill` where there is none. sampled: Int64 [R], the token after which each sampling row samples.
    prefix_lens, known to the host: tokens that each row after the decodes had before this step.
    """

    ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    cu_seqlens: Tensor
    seq_lens: Tensor
    page_table: Tensor
    slots: Tensor
    fresh: Tensor
    context: Tensor
    sampled: Tensor
    num_decodes: int
    max_q_len: int
    max_seq_len: int
    prefix_lens: tuple[int, ...]

    @property
    def num_sequences(self) -> int:
        return self.slots.shape[0]


def make_batch(plan: StepPlan, page_size: int, context_tokens: int, context_fill: int, device: torch.device) -> Batch:
    """The tensors of a plan. `context_fill` stands for tokens before the start of a sequence."""
    rows = plan.rows
    lengths = [len(row.tokens) for row in rows]
    ends = [row.start + length for row, length in zip(rows, lengths, strict=True)]
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    pages = [row.pages[: -(-end // page_size)] for row, end in zip(rows, ends, strict=True)]
    width = max(map(len, pages))

    def tensor(values: list[int] | list[list[int]], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Batch(
        ids=tensor([token for row in rows for token in row.tokens], torch.int64),
        positions=tensor([position for row in rows for position in _positions(row)], torch.int64),
        slot_mapping=tensor(
            [row.pages[p // page_size] * page_size + p % page_size for row in rows for p in _positions(row)],
            torch.int64,
        ),
        cu_seqlens=tensor(offsets, torch.int32),
        seq_lens=tensor(ends, torch.int32),
        page_table=tensor([[*used, *[-1] * (width - len(used))] for used in pages], torch.int32),
        slots=tensor([row.slot for row in rows], torch.int32),
        fresh=torch.tensor([row.fresh for row in rows], dtype=torch.bool, device=device),
        context=tensor([_context(row, context_tokens, context_fill) for row in rows], torch.int64).view(
            len(rows), context_tokens
        ),
        sampled=tensor([end - 1 for row, end in zip(rows, offsets[1:], strict=True) if row.sample], torch.int64),
        num_decodes=plan.num_decodes,
        max_q_len=max(lengths),
        max_seq_len=max(ends),
        prefix_lens=tuple(row.start for row in rows[plan.num_decodes :]),
    )


def _positions(row: Row) -> range:
    return range(row.start, row.start + len(row.tokens))


def _context(row: Row, length: int, fill: int) -> list[int]:
    known = list(row.context[len(row.context) - min(length, len(row.context)) :])
    return [fill] * (length - len(known)) + known
