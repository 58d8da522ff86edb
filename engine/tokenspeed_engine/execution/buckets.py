"""Decode steps in a few fixed shapes, so that a CUDA graph of each can serve any step that fits into it.

On a device a bucket's first step captures its graph; on a CPU buckets only pad, which makes the same tokens.
"""

from collections.abc import Iterable
from typing import Any

import torch

from tokenspeed_engine.control import StepPlan
from tokenspeed_engine.execution.layout import Shape, shape_of
from tokenspeed_engine.execution.sampling import Outcome
from tokenspeed_engine.execution.step import Inputs, StepFunction
from tokenspeed_engine.execution.upload import Arena, Arrays

_SHORTEST = 1024
"""Tokens of the least bucket by length."""


class Buckets:
    """Which shape a step takes. Batches go in powers of two, lengths in powers of four.

    `path_lengths`: further lengths, beyond which the model computes in another way.
    """

    def __init__(self, max_batch: int, max_length: int, num_drafts: int, path_lengths: Iterable[int]) -> None:
        self._batches = _grown(1, 2, max_batch)
        self._lengths = sorted({*_grown(_SHORTEST, 4, max_length), *(n for n in path_lengths if n < max_length)})
        self._num_drafts = num_drafts

    def shape(self, plan: StepPlan) -> Shape | None:
        """The bucket of a plan, None for one that has none: with prefills, or larger than the sizes given."""
        own = shape_of(plan)
        if not plan.rows or plan.num_decodes < len(plan.rows) or own.decodes > self._batches[-1]:
            return None
        if own.q_len > 1 + self._num_drafts or own.longest > self._lengths[-1]:
            return None
        q_len = 1 if own.q_len == 1 else 1 + self._num_drafts
        return Shape(
            decodes=next(size for size in self._batches if size >= own.decodes),
            q_len=q_len,
            ragged=any(len(row.tokens) < q_len for row in plan.rows),
            longest=next(length for length in self._lengths if length >= own.longest),
        )


class BucketStep:
    """One shape's tensors at fixed addresses and, on a device, its graph."""

    def __init__(
        self, function: StepFunction, shape: Shape, drafts_run: bool, device: torch.device, memory: Any
    ) -> None:
        """`drafts_run`: whether rows come with `Undone`. `memory`: the pool that graphs share."""
        self._function = function
        nobody = StepPlan((), 0)
        padding = function.lay_out(nobody, shape, [] if drafts_run else None)
        self._arena = Arena(padding, device)
        self._inputs: Inputs = function.inputs(nobody, shape, self._arena.fill(padding))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outcome: Outcome | None = None
        if device.type == "cuda":
            self._capture(memory)

    def run(self, arrays: Arrays) -> Outcome:
        """Runs the step of these arrays. Where there is a graph, the next run overwrites the outcome."""
        self._arena.fill(arrays)
        if self._graph is None or self._outcome is None:
            return self._function.run(self._inputs)
        self._graph.replay()
        return self._outcome

    def _capture(self, memory: Any) -> None:
        """Records a run of padding alone, which touches no slot and no page, after one that warms kernels up."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._function.run(self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=memory):
            self._outcome = self._function.run(self._inputs)


class BucketSteps:
    """The steps of all shapes met so far."""

    def __init__(self, function: StepFunction, buckets: Buckets, drafts_run: bool, device: torch.device) -> None:
        self._function = function
        self._buckets = buckets
        self._drafts_run = drafts_run
        self._device = device
        self._memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._steps: dict[Shape, BucketStep] = {}

    def shape(self, plan: StepPlan) -> Shape | None:
        return self._buckets.shape(plan)

    def run(self, shape: Shape, arrays: Arrays) -> Outcome:
        """Runs a step of one of the shapes, which is made where it is met first."""
        if shape not in self._steps:
            self._steps[shape] = BucketStep(self._function, shape, self._drafts_run, self._device, self._memory)
        return self._steps[shape].run(arrays)


def _grown(first: int, factor: int, last: int) -> list[int]:
    """first, first · factor and so on below `last`, and `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return [*sizes, last]
