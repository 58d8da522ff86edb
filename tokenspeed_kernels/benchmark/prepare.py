"""Compiles ahead, in parallel, what calls will launch: timing then finds it in Triton's cache.

The process that times makes each call's arguments on the device and hands on their outlines. Workers need neither the
device nor the memory: they run launchers on meta tensors with a driver that compiles for the device's platform and
launches nothing (`triton.offline`). What fails there is compiled, or fails, where it is timed.
"""

import itertools
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenspeed_registry import Contract, Kernel, Platform
from tokenspeed_registry.compiled import KernelCall, on_meta
from tokenspeed_registry.registry import default_registry
from tokenspeed_registry.scope import Outline

PARTS = 4
"""Processes that share the configurations of one kernel and call."""


@dataclass(frozen=True)
class Task:
    """One kernel, by name, and the outlines of a call's arguments.

    `part`: also every `PARTS`-th of the configurations that it could be given.
    """

    kernel: str
    arguments: Mapping[str, Any]
    platform: Platform
    part: int | None = None


def compile_all(tasks: Iterable[Task], jobs: int, done: Callable[[], None] = lambda: None) -> str | None:
    """Runs tasks as they come in `jobs` processes; what went wrong, if anything. `done` is called after each."""
    context = multiprocessing.get_context("spawn")  # forked processes cannot use CUDA
    try:
        with ProcessPoolExecutor(jobs, context) as pool:
            running: list[Future[int]] = [pool.submit(compile_task, task) for task in tasks]
            for each in as_completed(running):
                each.result()
                done()
    except BrokenProcessPool:
        return "a process that compiled ahead died; the rest compiled when it was timed"
    return None


def tasks_of(kernel: Kernel, outlines: Mapping[str, Any], platform: Platform, tunes: bool) -> list[Task]:
    """The tasks of one call; `tunes`: with every configuration."""
    return [Task(kernel.name, outlines, platform, part) for part in (range(PARTS) if tunes else [None])]


def outlines_of(contract: Contract, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as they travel to other processes: outlines of tensors; host tensors, which launchers read, whole."""

    def travelling(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if name in contract.host:
            return value.numpy()
        return Outline(value.shape, value.stride(), value.dtype, value.is_cpu)

    return {name: travelling(name, value) for name, value in arguments.items()}


def compile_task(task: Task) -> int:
    """How many launches were compiled, or found compiled."""
    import tokenspeed_kernels  # noqa: F401  declares the ops
    from tokenspeed_kernels.triton import tuning

    torch.set_num_threads(1)
    (kernel,) = (kernel for kernel in default_registry.kernels() if kernel.name == task.kernel)
    call = on_meta(default_registry.contract(kernel.op), {name: _arrived(v) for name, v in task.arguments.items()})
    with tuning.asked() as asked:
        compiled = _launch(kernel, call, task.platform, {})
    if task.part is None:
        return compiled
    forced = itertools.islice(_alternatives(asked), task.part, None, PARTS)
    return compiled + sum(_launch(kernel, call, task.platform, configs) for configs in forced)


def _arrived(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    return value.like("meta") if isinstance(value, Outline) else value


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
