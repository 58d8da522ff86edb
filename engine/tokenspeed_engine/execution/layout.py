"""A plan's rows as host arrays, under the names of the tensors that they become."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenspeed_engine.control import Row, StepPlan
from tokenspeed_engine.execution.batch import Batch, Rollback, Sequences
from tokenspeed_engine.execution.upload import Arrays, Tensors, int32, int64


@dataclass(frozen=True)
class Shape:
    """Sizes of a step: those of its own rows, or of a bucket that they fit into.

    decodes: decode rows, each with q_len places. ragged: some of them have fewer tokens. longest: tokens of the longest
    sequence.
    """

    decodes: int
    q_len: int
    ragged: bool
    longest: int


@dataclass(frozen=True)
class Undone:
    """`Rollback` of one row: what it takes back, and where the states after its tokens go."""

    dropped: int
    kept: int
    initial: int
    targets: tuple[int, ...]


def shape_of(plan: StepPlan) -> Shape:
    """The sizes of a plan's own rows."""
    lengths = [len(row.tokens) for row in plan.rows[: plan.num_decodes]]
    q_len = max(lengths, default=1)
    longest = max((row.start + len(row.tokens) for row in plan.rows), default=0)
    return Shape(plan.num_decodes, q_len, any(length < q_len for length in lengths), longest)


def lay_out(
    plan: StepPlan, shape: Shape, undone: Sequence[Undone] | None, page_size: int, context_tokens: int, fill: int
) -> dict[str, NDArray[Any]]:
    """All arrays of a `Batch`, its decode rows padded to `shape`.

    `undone`: one a row of the plan, or None where no drafts are ever run. `fill`: the id that stands for tokens before
    the start of a sequence.
    """
    decodes, q_len = shape.decodes, shape.q_len
    rows = [*plan.rows[: plan.num_decodes], *[None] * (decodes - plan.num_decodes), *plan.rows[plan.num_decodes :]]
    places = [q_len] * decodes + [len(row.tokens) for row in plan.rows[plan.num_decodes :]]
    offsets = [0, *accumulate(places)]
    arrays: dict[str, NDArray[Any]] = {
        "ids": np.full(offsets[-1], -1, np.int64),
        "positions": np.zeros(offsets[-1], np.int64),
        "slot_mapping": np.full(offsets[-1], -1, np.int64),
        "cu_seqlens": int32(offsets),
        "slots": int32([-1 if row is None else row.slot for row in rows]),
        "fresh": np.array([row is not None and row.fresh for row in rows], np.bool_),
        "context": np.full((len(rows), context_tokens), fill, np.int64),
        "sampled": int64(
            [
                *range(decodes * q_len),
                *(end - 1 for row, end in zip(rows, offsets[1:], strict=True) if row and row.sample and not row.decode),
            ]
        ),
    }
    for i, row in enumerate(rows):
        if row is not None:
            _place(arrays, i, row, offsets[i], page_size)
    arrays |= _sequences(rows, shape, offsets, page_size)
    if shape.ragged:
        arrays["lengths"] = int32([0 if row is None else len(row.tokens) for row in rows[:decodes]])
    if undone is not None:
        padding = Undone(0, 0, -1, (-1,) * q_len)
        each = [*undone[: plan.num_decodes], *[padding] * (decodes - plan.num_decodes), *undone[plan.num_decodes :]]
        arrays["dropped"] = int32([row.dropped for row in each])
        arrays["kept"] = int32([row.kept for row in each[:decodes]])
        arrays["initial"] = int32([row.initial for row in each[:decodes]])
        arrays["targets"] = int32([row.targets for row in each[:decodes]]).reshape(decodes, q_len)
    return arrays


def as_batch(plan: StepPlan, shape: Shape, tensors: Tensors) -> Batch:
    """The batch of arrays that `lay_out` made of the same plan and shape."""
    prefills = plan.rows[plan.num_decodes :]
    return Batch(
        **{
            name: tensors[name]
            for name in ("ids", "positions", "slot_mapping", "cu_seqlens", "slots", "fresh", "context", "sampled")
        },
        sequences=Sequences(
            tensors["sequences.cu_seqlens"],
            tensors["sequences.seq_lens"],
            tensors["sequences.page_table"],
            tensors["sequences.slots"],
        ),
        lengths=tensors.get("lengths"),
        rollback=(
            Rollback(tensors["dropped"], tensors["kept"], tensors["initial"], tensors["targets"])
            if "dropped" in tensors
            else None
        ),
        num_decodes=shape.decodes,
        q_len=shape.q_len,
        max_q_len=max([shape.q_len if shape.decodes else 1, *(len(row.tokens) for row in prefills)]),
        max_seq_len=shape.longest,
        prefix_lens=tuple(row.start for row in prefills),
    )


def page_table(rows: Sequence[Sequence[int]], width: int) -> NDArray[np.int32]:
    """[rows, width], −1 past a row's pages."""
    table = np.full((len(rows), width), -1, np.int32)
    for i, pages in enumerate(rows):
        table[i, : len(pages)] = pages
    return table


def _place(arrays: Arrays, i: int, row: Row, offset: int, page_size: int) -> None:
    """Fills in the tokens of row i, which begin at `offset`."""
    end = offset + len(row.tokens)
    positions = np.arange(row.start, row.start + len(row.tokens))
    first = row.start // page_size
    pages = int64(row.pages[first : int(positions[-1]) // page_size + 1])
    arrays["ids"][offset:end] = row.tokens
    arrays["positions"][offset:end] = positions
    arrays["slot_mapping"][offset:end] = pages[positions // page_size - first] * page_size + positions % page_size
    known = min(len(row.context), arrays["context"].shape[1])
    if known:
        arrays["context"][i, -known:] = row.context[-known:]


def _sequences(
    rows: Sequence[Row | None], shape: Shape, offsets: Sequence[int], page_size: int
) -> dict[str, NDArray[Any]]:
    """`Sequences`; where rows are ragged, what pads a decode row follows it as a sequence of its own."""
    bounds, lengths, slots = [0], [], []
    pages: list[Sequence[int]] = []
    for i, row in enumerate(rows):
        end = 0 if row is None else row.start + len(row.tokens)
        tokens = 0 if row is None else len(row.tokens)
        if shape.ragged and i < shape.decodes:
            bounds.append(offsets[i] + tokens)
            lengths += [end, 0]
            slots += [-1 if row is None else row.slot, -1]
            pages += [() if row is None else row.pages[: -(-end // page_size)], ()]
        else:
            lengths.append(end)
            slots.append(-1 if row is None else row.slot)
            pages.append(() if row is None else row.pages[: -(-end // page_size)])
        bounds.append(offsets[i + 1])
    return {
        "sequences.cu_seqlens": int32(bounds),
        "sequences.seq_lens": int32(lengths),
        "sequences.page_table": page_table(pages, -(-shape.longest // page_size)),
        "sequences.slots": int32(slots),
    }
