"""The executor of several ranks: each plan goes to all of them, and each runs it on its own part of the model.

What decides a plan's tokens, the logits, is the same on all ranks, bit for bit, so each samples the same ones and only
the first rank's are read. The next plan names the tokens that came of it, so ranks cannot drift apart.
"""

import pickle
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenspeed_engine.building import build_runner
from tokenspeed_engine.control import PendingStep, StepPlan, StepResult
from tokenspeed_engine.execution.runner import ModelRunner
from tokenspeed_engine.models.families import ModelDescription
from tokenspeed_engine.options import EngineOptions, Sizes
from tokenspeed_engine.parallel.ranks import Ranks
from tokenspeed_engine.parallel.workers import Workers


class ParallelExecutor:
    """The first rank's runner, and the workers that run all others."""

    def __init__(self, runner: ModelRunner, workers: Workers) -> None:
        self._runner = runner
        self._workers = workers

    def submit(self, plan: StepPlan) -> PendingStep:
        """Begins a step on all ranks. Raises RankFailedError from the first failure of any rank on."""
        self._workers.send(pickle.dumps(plan, pickle.HIGHEST_PROTOCOL))
        return _Step(self._runner.submit(plan), self._workers)

    def close(self) -> None:
        """Ends the workers."""
        self._workers.close()


@dataclass(frozen=True)
class _Step:
    """A step that all ranks run."""

    step: PendingStep
    workers: Workers

    def result(self) -> StepResult:
        try:
            result = self.step.result()
        except Exception as error:
            raise self.workers.failure(error) from error
        self.workers.check()
        return result


def launch(
    folder: Path, description: ModelDescription, options: EngineOptions, device: torch.device
) -> tuple[ParallelExecutor, Sizes]:
    """Starts `options.ranks` ranks, this process being the first, on `device`; the others on those after it.

    They load their parts at the same time. Raises as the building of a model does, ValueError for one that cannot be
    cut so, and RankFailedError.
    """
    description.on(Ranks(0, options.ranks))  # refused before anything is started
    first = device.index or 0
    if device.type == "cuda" and torch.cuda.device_count() < first + options.ranks:
        there = torch.cuda.device_count()
        raise ValueError(f"ranks: {options.ranks} devices from number {first} on are asked for, there are {there}")
    workers = Workers(folder, options, device)
    try:
        runner, sizes = build_runner(folder, description.on(workers.connect()), options, device)
        workers.await_ready()
    except BaseException:
        workers.close()
        raise
    return ParallelExecutor(runner, workers), sizes
