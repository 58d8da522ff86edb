"""Compiles ahead, in parallel and without the device, what calls will launch: timing then finds it in Triton's cache.

Each worker runs launchers on meta tensors with a driver that compiles for the device's platform and launches nothing
(`triton.offline`). What fails here is compiled, or fails, where it is timed.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_kernels.parallel import each
from tokenspeed_registry import Kernel, Platform
from tokenspeed_registry.cases import Case, case_set
from tokenspeed_registry.compiled import KernelCall, on_meta
from tokenspeed_registry.registry import default_registry

PARTS = 4
"""Processes that share the configurations of one kernel and case."""


@dataclass(frozen=True)
class Task:
    """One kernel at one case. `part`: also every `PARTS`-th of the configurations that it could be given."""

    kernel: str
    case: Case
    platform: Platform
    part: int | None = None


def compile_all(calls: Sequence[tuple[str, Case]], platform: Platform, tunes: bool, jobs: int) -> str | None:
    """Compiles for calls, given as a kernel's name and a case, in `jobs` processes; what went wrong, if anything.

    `tunes`: with every configuration.
    """
    parts = range(PARTS) if tunes else [None]
    tasks = [Task(kernel, case, platform, part) for kernel, case in _spread(calls) for part in parts]
    try:
        each(compile_task, tasks, "compile", jobs)
    except BrokenProcessPool:
        return "a process that compiled ahead died; the rest compiled when it was timed"
    return None


def compile_task(task: Task) -> int:
    """How many launches were compiled, or found compiled."""
    from tokenspeed_kernels.triton import tuning

    torch.set_num_threads(1)
    (kernel,) = (kernel for kernel in default_registry.kernels() if kernel.name == task.kernel)
    contract = default_registry.contract(kernel.op)
    try:
        call = on_meta(contract, case_set(contract).blank(contract, task.case))
    except Exception:  # the case itself is wrong; timing says so
        return 0
    with tuning.asked() as asked:
        compiled = _launch(kernel, call, task.platform, {})
    if task.part is None:
        return compiled
    forced = itertools.islice(_alternatives(asked), task.part, None, PARTS)
    return compiled + sum(_launch(kernel, call, task.platform, configs) for configs in forced)


def _launch(kernel: Kernel, call: KernelCall, platform: Platform, forced: Mapping[str, Any]) -> int:
    from tokenspeed_kernels.triton import tuning
    from tokenspeed_kernels.triton.offline import offline

    args, kwargs = call
    try:
        with offline(platform) as launches, tuning.forced(**forced):
            kernel.function(*args, **kwargs)
        return len(launches)
    except Exception:  # timing will find it out, and say it
        return 0


def _alternatives(asked: Mapping[str, tuple[Any, Mapping[str, int]]]) -> Iterator[dict[str, Any]]:
    """Each configuration of each choice, the others at what they are by default."""
    for name, (tunable, dims) in asked.items():
        for config in tunable.space(dims):
            yield {name: config}


def _spread(calls: Sequence[tuple[str, Case]]) -> list[tuple[str, Case]]:
    """The first call of every kernel, then the second: those of one kernel often compile to the same."""
    seen: dict[str, int] = {}
    ranked = []
    for kernel, case in calls:
        seen[kernel] = seen.get(kernel, -1) + 1
        ranked.append((seen[kernel], (kernel, case)))
    return [call for _, call in sorted(ranked, key=lambda item: item[0])]
