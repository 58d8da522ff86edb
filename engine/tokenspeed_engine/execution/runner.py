"""The executor: plans in, results out, on one device."""

import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from tokenspeed_engine.control import PendingStep, StepPlan, StepResult
from tokenspeed_engine.execution.buckets import Buckets, BucketSteps
from tokenspeed_engine.execution.layout import Shape, Undone, shape_of
from tokenspeed_engine.execution.ledger import Ledger
from tokenspeed_engine.execution.sampling import Download, Outcome
from tokenspeed_engine.execution.step import StepFunction
from tokenspeed_engine.execution.transfers import Mover, Work
from tokenspeed_engine.execution.upload import Arrays, upload
from tokenspeed_engine.models.families import Caches, CacheSizes, Model, ModelDescription


class ModelRunner:
    """Runs plans whose pages and slots are those of `caches`, made for `sizes`.

    On an accelerator `submit` queues the work and returns. On a CPU a thread of the runner's own does it.

    Args:
        num_host_snapshots: room for `Offload`.
        max_length: tokens of the longest sequence that will come.
        buckets: run decode steps in fixed shapes, on an accelerator as CUDA graphs.
    """

    def __init__(
        self,
        description: ModelDescription,
        model: Model,
        caches: Caches,
        sizes: CacheSizes,
        device: torch.device,
        *,
        num_host_snapshots: int = 0,
        max_length: int,
        buckets: bool = False,
    ) -> None:
        self._sizes = sizes
        self._device = device
        self._function = StepFunction(description, model, caches, sizes)
        self._ledger: Ledger | None = None
        if description.has_state:
            scratch = range(sizes.num_slots, sizes.num_slots + sizes.num_rows * sizes.num_drafts, sizes.num_drafts or 1)
            self._ledger = Ledger(sizes.verify, sizes.num_drafts, sizes.replay_capacity, scratch)
        self._mover = Mover(model, caches, self._ledger, num_host_snapshots, device)
        self._buckets: BucketSteps | None = None
        if buckets:
            shapes = Buckets(sizes.num_rows, max_length, sizes.num_drafts, description.path_lengths)
            self._buckets = BucketSteps(self._function, shapes, self._undoes, device)
        self._worker = ThreadPoolExecutor(1, "executor") if device.type == "cpu" else None

    @property
    def _undoes(self) -> bool:
        """Whether rows say what they take back."""
        return self._ledger is not None and self._sizes.num_drafts > 0

    def submit(self, plan: StepPlan) -> PendingStep:
        """Begins a step. The one before must be over: its tokens decide what this one runs."""
        try:
            work = self._prepare(plan)
            if self._worker is None:
                return _Launched(work())
            # The registry's choices and traces of the caller hold for what runs on its behalf.
            return _Working(self._worker.submit(contextvars.copy_context().run, work))
        except Exception as error:
            return _Broken(error)

    def _prepare(self, plan: StepPlan) -> "Callable[[], Download | None]":
        """What the host has to do: the bookkeeping of slots, in order, and the step's arrays."""
        moves = self._mover.plan(plan.transfers)
        if not plan.rows:
            return partial(self._run, plan, moves, None)
        bucket = None if self._buckets is None else self._buckets.shape(plan)
        shape = bucket or shape_of(plan)
        undone = self._undo(plan, shape.q_len, moves)
        arrays = self._function.lay_out(plan, shape, undone if self._undoes else None)
        return partial(self._run, plan, moves, partial(self._outcome, plan, shape, arrays, bucket is not None))

    def _run(self, plan: StepPlan, moves: Sequence[Work], step: "Callable[[], Outcome] | None") -> Download | None:
        with torch.inference_mode():
            for move in moves:
                move()
            return None if step is None else Download(plan, step())

    def _outcome(self, plan: StepPlan, shape: Shape, arrays: Arrays, bucket: bool) -> Outcome:
        if bucket and self._buckets is not None:
            return self._buckets.run(shape, arrays)
        return self._function.run(self._function.inputs(plan, shape, upload(arrays, self._device)))

    def _undo(self, plan: StepPlan, q_len: int, moves: list[Work]) -> list[Undone]:
        """One a row; what must be done before rows that are no decodes joins `moves`."""
        ledger, drafts = self._ledger, self._sizes.num_drafts
        if ledger is None:
            return []
        ledger.running(row.slot for row in plan.rows)
        undone = []
        for row in plan.rows:
            end = row.start + len(row.tokens)
            if row.decode:
                if len(row.tokens) > 1 + drafts:
                    raise ValueError(f"a row has {len(row.tokens) - 1} drafts; caches were made for {drafts}")
                undo = ledger.undo(row.slot, row.start)
                if drafts:
                    targets = ledger.decode(row.slot, undo, row.start, len(row.tokens), q_len)
                    undone.append(Undone(undo.dropped, undo.kept, undo.initial, targets))
                    continue
            elif not row.fresh:
                moves += self._mover.settle([(row.slot, row.start)])
            ledger.settled(row.slot, end)
            undone.append(Undone(0, 0, row.slot, ()))
        return undone


@dataclass(frozen=True)
class _Launched:
    """Work that is queued on a device."""

    download: Download | None

    def result(self) -> StepResult:
        return _result(self.download)


@dataclass(frozen=True)
class _Working:
    """Work in the runner's thread."""

    future: "Future[Download | None]"

    def result(self) -> StepResult:
        return _result(self.future.result())


@dataclass(frozen=True)
class _Broken:
    """A step that could not begin."""

    error: Exception

    def result(self) -> StepResult:
        raise self.error


def _result(download: Download | None) -> StepResult:
    return StepResult(()) if download is None else download.result()
