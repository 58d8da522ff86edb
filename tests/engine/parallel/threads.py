"""Ranks as threads of one process, each with a group, a model and a runner of its own: all that processes have."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tokenspeed_engine import EngineOptions, SamplingParams
from tokenspeed_engine.building import build_runner
from tokenspeed_engine.control import EngineCore, PendingStep, RequestOutput, StepPlan, StepResult
from tokenspeed_engine.models.families import read_model
from tokenspeed_engine.parallel.group import connect
from tokenspeed_engine.parallel.ranks import Ranks

CPU = torch.device("cpu")
Found = TypeVar("Found")


def on_ranks(size: int, work: Callable[[Ranks], Found]) -> list[Found]:
    """What `work` returns on each of `size` connected ranks, which run at the same time."""
    store = HashStore()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(Ranks(rank, size, connect(store, rank, size, CPU))), range(size)))


class ThreadedRanks:
    """An engine of `options.ranks` ranks, whose results must be the same to the last bit."""

    def __init__(self, folder: Path, options: EngineOptions) -> None:
        description = read_model(folder)
        built = on_ranks(options.ranks, lambda ranks: build_runner(folder, description.on(ranks), options, CPU))
        self.runners = [runner for runner, _ in built]
        assert len({sizes for _, sizes in built}) == 1
        self.core = EngineCore(built[0][1].control, self, vocab_size=description.config.vocab_size)
        self._numbers = itertools.count()

    def submit(self, plan: StepPlan) -> PendingStep:
        return _Together([runner.submit(plan) for runner in self.runners])

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[RequestOutput]]:
        """The outputs of each prompt."""
        outputs: dict[str, list[RequestOutput]] = {str(next(self._numbers)): [] for _ in prompts}
        for request, prompt in zip(outputs, prompts, strict=True):
            self.core.add(request, prompt, params)
        while self.core.has_work:
            for output in self.core.step():
                outputs[output.request_id].append(output)
        return list(outputs.values())


@dataclass(frozen=True)
class _Together:
    steps: Sequence[PendingStep]

    def result(self) -> StepResult:
        first, *others = [step.result() for step in self.steps]
        assert all(other == first for other in others)
        return first


def tokens_of(outputs: Sequence[RequestOutput]) -> tuple[int, ...]:
    """All tokens of a request."""
    return tuple(token for output in outputs for token in output.token_ids)
