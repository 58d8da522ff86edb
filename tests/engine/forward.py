"""Runs a model's forward pass by hand, without scheduler or sampling, over caches that start full of NaN.

Logits are collected at every position, to be held against those of one uncached pass.
"""

import dataclasses
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenspeed_engine.checkpoint.load import Weights, load_weights
from tokenspeed_engine.checkpoint.reader import Checkpoint
from tokenspeed_engine.control import Row, StepPlan
from tokenspeed_engine.execution.batch import Batch, Sequences
from tokenspeed_engine.execution.layout import as_batch, lay_out, shape_of
from tokenspeed_engine.execution.upload import upload
from tokenspeed_engine.models.families import CacheSizes, Model, ModelDescription, read_model

CPU = torch.device("cpu")


@functools.cache
def weights_of(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    draft_head: bool = False,
    device: torch.device = CPU,
    host: tuple[str, ...] = (),
) -> Weights:
    """All weights of a checkpoint, targets `host` in host memory; shared, so read only."""
    with Checkpoint.open(folder) as checkpoint:
        plan = read_model(folder).weight_plan(checkpoint.tensors, draft_head)
        return load_weights(checkpoint, plan, device, dtype, host)


@dataclass
class Text:
    """Known tokens on their way through the model. `logits` has a row [vocab] for each token that ran."""

    ids: tuple[int, ...]
    pages: tuple[int, ...]
    slot: int
    done: int = 0
    logits: list[Tensor] = field(default_factory=list)

    @property
    def left(self) -> int:
        return len(self.ids) - self.done


class Harness:
    """A model, its caches, and free pages and slots, which are handed out in shuffled order and never cleared."""

    def __init__(
        self,
        description: ModelDescription,
        model: Model,
        dtype: torch.dtype = torch.float32,
        *,
        page_size: int = 8,
        seed: int = 0,
    ) -> None:
        self.description = description
        self.model = model
        self.page_size = page_size
        num_pages, num_slots = 360 // page_size, 4
        sizes = CacheSizes(page_size, num_pages, num_slots, num_slots)
        self.caches: Any = description.allocate_caches(sizes, dtype, CPU)
        for pool in self.caches.tensors():
            pool.fill_(torch.nan)
        self.random = random.Random(seed)
        self.free_pages = self.random.sample(range(num_pages), num_pages)
        self.free_slots = self.random.sample(range(num_slots), num_slots)

    @classmethod
    def of_checkpoint(cls, folder: Path, *, page_size: int = 8, seed: int = 0) -> "Harness":
        description = read_model(folder)
        return cls(description, description.build(weights_of(folder)), page_size=page_size, seed=seed)

    def start(self, ids: Sequence[int]) -> Text:
        pages = [self.free_pages.pop() for _ in range(-(-len(ids) // self.page_size))]
        return Text(tuple(ids), tuple(pages), self.free_slots.pop())

    def finish(self, text: Text) -> None:
        self.free_pages += text.pages
        self.free_slots.append(text.slot)
        self.random.shuffle(self.free_pages)
        self.random.shuffle(self.free_slots)

    def batch(self, decodes: Sequence[Text], prefills: Sequence[tuple[Text, int]]) -> Batch:
        """One token of each of `decodes`, and of each of `prefills` as many as it says; all of them sampled."""
        rows = [self._row(text, 1, decode=True) for text in decodes]
        rows += [self._row(text, count, decode=False) for text, count in prefills]
        plan = StepPlan(tuple(rows), len(decodes))
        model = self.description
        shape = shape_of(plan)
        arrays = lay_out(plan, shape, None, self.page_size, model.context_tokens, model.context_fill)
        batch = as_batch(plan, shape, upload(arrays, CPU))
        return dataclasses.replace(batch, sampled=torch.arange(batch.ids.shape[0]))

    def run(self, decodes: Sequence[Text] = (), prefills: Sequence[tuple[Text, int]] = ()) -> None:
        """One step, whose logits go to the texts."""
        batch = self.batch(decodes, prefills)
        with torch.inference_mode():
            logits = self.model.forward(batch, self.caches).logits
        assert logits.dtype == torch.float32
        remaining = iter(logits)
        for text, count in [*((text, 1) for text in decodes), *prefills]:
            text.logits += [next(remaining) for _ in range(count)]
            text.done += count

    def _row(self, text: Text, count: int, decode: bool) -> Row:
        return Row(
            request_id="",
            tokens=text.ids[text.done : text.done + count],
            start=text.done,
            pages=text.pages,
            slot=text.slot,
            fresh=text.done == 0,
            context=text.ids[max(0, text.done - self.description.context_tokens) : text.done],
            sample=None,
            decode=decode,
        )


def with_padding(batch: Batch, context_fill: int = 0) -> Batch:
    """One decode row between two rows without a sequence, as a graph captured for a larger batch would run it."""

    def padded(tensor: Tensor, value: int) -> Tensor:
        rows = torch.full((1, *tensor.shape[1:]), value, dtype=tensor.dtype)
        return torch.cat([rows, tensor, rows])

    return dataclasses.replace(
        batch,
        ids=padded(batch.ids, -1),
        positions=padded(batch.positions, 0),
        slot_mapping=padded(batch.slot_mapping, -1),
        cu_seqlens=torch.arange(4, dtype=torch.int32),
        slots=padded(batch.slots, -1),
        sequences=Sequences(
            cu_seqlens=torch.arange(4, dtype=torch.int32),
            seq_lens=padded(batch.sequences.seq_lens, 0),
            page_table=padded(batch.sequences.page_table, -1),
            slots=padded(batch.sequences.slots, -1),
        ),
        fresh=padded(batch.fresh, 0),
        context=padded(batch.context, context_fill),
        sampled=torch.tensor([1]),
        num_decodes=3,
    )
