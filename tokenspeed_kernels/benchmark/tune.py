"""Picks compile-time choices by time: every configuration is compiled, checked and timed as `bench` times kernels.

Which choices a case asks for, and for which dims, its first call tells. Several choices of one call are tuned one
after another, each with the best of those before it. Where several cases ask for one choice at the same dims, the
configuration wins that is best over all of them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenspeed_kernels.benchmark.cells import Cell
from tokenspeed_kernels.benchmark.errors import line_of, survive
from tokenspeed_kernels.benchmark.measure import Bench, Call
from tokenspeed_kernels.benchmark.rows import write_whole
from tokenspeed_kernels.triton import tuning
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable, describe
from tokenspeed_registry import Kernel, Platform

TIE = 0.01
"""Times nearer than this are one: the earliest configuration wins, the default first of all."""


@dataclass
class Choice:
    """One choice at some dims. `times`: of each case, microseconds by position in `configs`; None where it failed."""

    tunable: str
    dims: str
    configs: list[Config]
    times: dict[str, list[float | None]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> int | None:
        return pick([*self.times.values()])

    def row(self) -> dict[str, Any]:
        """For people: the configuration, its time and that of the default, summed over the cases."""
        best = self.best
        row: dict[str, Any] = {
            "choice": self.tunable,
            "dims": self.dims,
            "config": None,
            "us": None,
            "default_us": None,
        }
        if best is not None:
            row["config"] = dict(self.configs[best])
            row["us"] = sum(times[best] or 0.0 for times in self.times.values())
            if all(times[0] is not None for times in self.times.values()):
                row["default_us"] = sum(times[0] or 0.0 for times in self.times.values())
        failures = [f"{config}: {reason}" for config, reason in self.failures.items()]
        return {**row, "cases": len(self.times), "tried": len(self.configs), "failed": failures}


def pick(times: Sequence[Sequence[float | None]]) -> int | None:
    """The position of the best configuration over all cases: by the mean of the logarithms of its times.

    Only one that is right in every case can win; None where there is none.
    """
    scores = []
    for each in zip(*times, strict=True):
        known = [time for time in each if time is not None]
        complete = bool(known) and len(known) == len(each)
        scores.append(sum(map(math.log, known)) / len(known) if complete else math.inf)
    best = min(scores, default=math.inf)
    if best == math.inf:
        return None
    return next(index for index, score in enumerate(scores) if score <= best + math.log1p(TIE))


def ordered_configs(tunable: Tunable, platform: Platform, dims: Dims) -> list[Config]:
    """The default, then the space in its order."""
    default = dict(tunable.default(platform, dims))
    return [default, *(config for config in map(dict, tunable.space(dims)) if config != default)]


class Tuner:
    """Collects times over any number of cells."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.choices: dict[tuple[str, str], Choice] = {}
        self.skipped: list[str] = []

    def tune(self, cell: Cell, kernels: Sequence[Kernel]) -> None:
        """Times every configuration of what `kernels` ask for at this case. Raises `DeviceLostError`."""
        bench = self._bench
        for kernel in (each for each in kernels if each.compiler == "triton"):
            try:
                arguments = cell.source.arguments(cell.contract, cell.case, bench.device)
                signature = cell.source.describe(cell.contract, arguments)
                if not kernel.refusals(bench.platform, signature)[0]:
                    continue
                call = bench.prepare(cell, arguments, signature)
                with tuning.asked() as asked:
                    call.rotation.calls(kernel.function)[0]()
                self._descend(cell, kernel, call, dict(asked))
            except Exception as error:  # one cell that fails must not end the others
                survive(bench.device, error)
                self.skipped.append(f"{kernel.name}, {cell.shape}: {line_of(error)}")

    def _descend(
        self, cell: Cell, kernel: Kernel, call: Call, asked: Mapping[str, tuple[Tunable, dict[str, int]]]
    ) -> None:
        fixed: dict[str, Config] = {}
        for name, (tunable, dims) in asked.items():
            configs = ordered_configs(tunable, self._bench.platform, dims)
            if len(configs) == 1:
                continue
            choice = self.choices.setdefault((name, describe(dims)), Choice(name, describe(dims), configs))
            times = [self._time(cell, kernel, call, choice, {**fixed, name: config}, config) for config in configs]
            choice.times[f"{kernel.name}, {cell.shape}"] = times
            best = pick([times])
            if best is not None:
                fixed[name] = configs[best]

    def _time(
        self, cell: Cell, kernel: Kernel, call: Call, choice: Choice, forced: Mapping[str, Config], config: Config
    ) -> float | None:
        """Microseconds; None for a configuration that fails or computes something else."""
        try:
            with tuning.forced(**forced):
                timed, wrong = self._bench.time(cell, call, kernel)
        except Exception as error:  # too much shared memory, for example
            survive(self._bench.device, error)
            wrong = line_of(error)
        if wrong is None:
            return timed.us
        choice.failures[describe(config)] = wrong
        return None


def save(choices: Mapping[tuple[str, str], Choice], path: Path, facts: Mapping[str, Any]) -> None:
    """Writes the table, atomically; what it holds of other choices stays."""
    known = json.loads(path.read_text())["choices"] if path.exists() else {}
    for choice in choices.values():
        if choice.best is not None:
            known.setdefault(choice.tunable, {})[choice.dims] = dict(choice.configs[choice.best])
    ordered = {name: dict(sorted(known[name].items())) for name in sorted(known)}
    write_whole(path, json.dumps({**facts, "choices": ordered}, indent=1) + "\n")
