"""The draft head's part of a step: it runs over the rows' own tokens, and then guesses token after token.

Where tokens are drafted past a sequence's pages, they lie on pages of the head's own cache that no plan names.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenspeed_engine.control import Row, StepPlan
from tokenspeed_engine.execution.batch import Batch, Sequences
from tokenspeed_engine.execution.layout import Shape, page_table
from tokenspeed_engine.execution.upload import Tensors, int32, int64
from tokenspeed_engine.execution.verify import Verified
from tokenspeed_engine.models.families import Caches, DraftHead, scratch_pages


@dataclass(frozen=True)
class Drafting:
    """What drafting needs beside a batch; R rows that sample, decodes first.

    following: Int64 [T − decode tokens], for each prefill token the one after it, −1 where that is sampled. sampled:
    Int64 [P], where among these the P sampled ones are. first: Int64 [R], the first token of each row from which one is
    sampled. slots: Int32 [R]. page_table: Int32 [R, pages], without gaps up to the last token drafted.
    """

    following: Tensor
    sampled: Tensor
    first: Tensor
    slots: Tensor
    page_table: Tensor


def lay_out_drafting(
    plan: StepPlan, shape: Shape, num_drafts: int, page_size: int, num_pages: int
) -> dict[str, NDArray[Any]]:
    """The arrays of `Drafting`; pages from `num_pages` on are those that no plan names."""
    prefills = plan.rows[plan.num_decodes :]
    following = [token for row in prefills for token in (*row.tokens[1:], -1 if row.sample else row.following)]
    ends = np.cumsum([len(row.tokens) for row in prefills], dtype=np.int64) - 1
    sampled = int64([end for row, end in zip(prefills, ends, strict=True) if row.sample])
    decoding: list[Row | None] = [*plan.rows[: plan.num_decodes], *[None] * (shape.decodes - plan.num_decodes)]
    rows = [*decoding, *(row for row in prefills if row.sample)]
    spare = scratch_pages(num_drafts, page_size)
    pages: list[Sequence[int]] = [
        () if row is None else (*row.pages, *range(num_pages + i * spare, num_pages + (i + 1) * spare))
        for i, row in enumerate(rows)
    ]
    width = -(-(shape.longest + num_drafts) // page_size)
    return {
        "drafting.following": int64(following),
        "drafting.sampled": sampled,
        "drafting.first": int64(
            [*range(0, shape.decodes * shape.q_len, shape.q_len), *(sampled + shape.decodes * shape.q_len)]
        ),
        "drafting.slots": int32([-1 if row is None else row.slot for row in rows]),
        "drafting.page_table": page_table([row[:width] for row in pages], width),
    }


def as_drafting(tensors: Tensors) -> Drafting:
    """The tensors of `lay_out_drafting`'s arrays."""
    return Drafting(*(tensors[f"drafting.{field.name}"] for field in dataclasses.fields(Drafting)))


def draft(
    head: DraftHead,
    hidden: Tensor,
    batch: Batch,
    verified: Verified,
    drafting: Drafting,
    num_drafts: int,
    page_size: int,
    caches: Caches,
) -> Tensor:
    """Int64 [R, num_drafts] guesses at what follows the tokens that the rows yield.

    `hidden`: what the model returned for the batch. Each guess is the most probable token given those before it.
    """
    decodes = batch.num_decodes
    following = drafting.following.index_copy(0, drafting.sampled, verified.tokens[decodes:, 0])
    last = drafting.first + verified.counts - 1  # the last token of each row that counts
    known = torch.cat([verified.tokens[:decodes].flatten(), following])
    out = head(hidden, dataclasses.replace(batch, ids=known, sampled=last), caches)
    drafts = [out.logits.argmax(-1)]
    position = batch.positions.index_select(0, last)
    for _ in range(num_drafts - 1):
        position = position + 1
        assert out.hidden is not None  # a head's own are what it goes on from
        out = head(out.hidden, _next(batch, drafting, drafts[-1], position, num_drafts, page_size), caches)
        drafts.append(out.logits.argmax(-1))
    return torch.stack(drafts, dim=1)


def _next(batch: Batch, drafting: Drafting, ids: Tensor, position: Tensor, num_drafts: int, page_size: int) -> Batch:
    """One token of each row, at `position` Int64 [R]."""
    rows = torch.arange(ids.shape[0] + 1, device=ids.device)
    padding = drafting.slots < 0
    page = drafting.page_table.gather(1, (position // page_size)[:, None]).squeeze(1)
    slot_mapping = torch.where(padding, -1, page * page_size + position % page_size)
    cu_seqlens = rows.to(torch.int32)
    seq_lens = torch.where(padding, 0, position + 1).to(torch.int32)
    return dataclasses.replace(
        batch,
        ids=torch.where(padding, -1, ids),
        positions=position,
        slot_mapping=slot_mapping,
        cu_seqlens=cu_seqlens,
        slots=drafting.slots,
        sequences=Sequences(cu_seqlens, seq_lens, drafting.page_table, drafting.slots),
        sampled=rows[:-1],
        lengths=None,
        rollback=None,
        num_decodes=ids.shape[0],
        q_len=1,
        max_q_len=1,
        max_seq_len=batch.max_seq_len + num_drafts,
        prefix_lens=(),
    )
