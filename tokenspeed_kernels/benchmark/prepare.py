"""Compiles ahead, in parallel, what calls will launch: timing then finds it in Triton's cache.

The process that times makes each call's arguments on the device and finds out what its launchers would compile; each
distinct launch then goes to one of several processes, whichever is idle. Those need neither the device nor the memory:
they run launchers on meta tensors with a driver that compiles for the device's platform and launches nothing
(`triton.offline`). What fails there fails again, and is said, where it is timed; what kills its process is not timed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenspeed_kernels.parallel import completed
from tokenspeed_registry import Contract, Kernel, Platform
from tokenspeed_registry.compiled import KernelCall, on_meta
from tokenspeed_registry.registry import default_registry
from tokenspeed_registry.scope import Outline, outlined


@dataclass(frozen=True)
class Task:
    """A launch that a kernel, by name, makes of a call with these arguments: the one that compiles under `key`.

    `forced`: configurations that the kernel is given, the others being what it takes by itself.
    """

    kernel: str
    arguments: Mapping[str, Any]
    platform: Platform
    forced: Mapping[str, Any]
    key: str

    def __str__(self) -> str:
        return f"{self.kernel}, {self.key.partition(' ')[0]}, {dict(self.forced)}"


@dataclass
class Ahead:
    """What a run compiles ahead; `tunes`: at every configuration that choices could take."""

    platform: Platform
    tunes: bool = False
    _needed: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    _planned: set[str] = field(default_factory=set)
    _lost: set[str] = field(default_factory=set)

    def tasks(self, kernel: Kernel, shape: str, arguments: Mapping[str, Any]) -> Iterator[Task]:
        """What the kernel's call of that name launches and nothing planned before does."""
        from tokenspeed_kernels.triton import tuning

        call = _call(kernel, arguments)
        needed = self._needed.setdefault((kernel.name, shape), set())
        with tuning.asked() as asked:
            keys = launched(kernel, call, self.platform)
        for forced in ({}, *(_alternatives(asked) if self.tunes else ())):
            keys = launched(kernel, call, self.platform, forced) if forced else keys
            needed |= keys
            for key in sorted(keys - self._planned):
                self._planned.add(key)
                yield Task(kernel.name, arguments, self.platform, forced, key)

    def compile(self, tasks: Iterable[Task], jobs: int, done: Callable[[], None] = lambda: None) -> None:
        """Runs tasks as they come in `jobs` processes; `done` is called after each."""

        def died(task: Task, how: str) -> int:
            self._lost.add(task.key)
            return 0

        for _ in completed(compile_task, tasks, jobs, died):
            done()

    def sort_out(self, kernels: Sequence[Kernel], shape: str) -> tuple[list[Kernel], list[Kernel]]:
        """Those whose calls of that name can be timed, and those that need what killed its process, twice."""
        lethal = [each for each in kernels if self._needed.get((each.name, shape), set()) & self._lost]
        return [each for each in kernels if each not in lethal], lethal


def outlines_of(contract: Contract, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as they travel to other processes: outlines of tensors; host tensors, which launchers read, whole."""

    def travelling(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if name in contract.host:
            return value.numpy()
        return Outline(value.shape, value.stride(), value.dtype, value.is_cpu)

    return {name: travelling(name, value) for name, value in arguments.items()}


def launched(kernel: Kernel, call: KernelCall, platform: Platform, forced: Mapping[str, Any] | None = None) -> set[str]:
    """The keys of what a call would compile; nothing is compiled. As far as it comes, where it fails."""
    keys: set[str] = set()

    def note(key: str) -> bool:
        keys.add(key)
        return False

    _launch(kernel, call, platform, forced or {}, note)
    return keys


def compile_task(task: Task) -> int:
    """How many launches were compiled, or found compiled: one, but for what fails."""
    import tokenspeed_kernels  # noqa: F401  declares the ops

    torch.set_num_threads(1)
    (kernel,) = (kernel for kernel in default_registry.kernels() if kernel.name == task.kernel)
    return _launch(kernel, _call(kernel, task.arguments), task.platform, task.forced, lambda key: key == task.key)


def _call(kernel: Kernel, arguments: Mapping[str, Any]) -> KernelCall:
    contract = default_registry.contract(kernel.op)
    arrived = {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in arguments.items()}
    return on_meta(contract, outlined(contract, arrived))


def _launch(
    kernel: Kernel, call: KernelCall, platform: Platform, forced: Mapping[str, Any], wanted: Callable[[str], bool]
) -> int:
    from tokenspeed_kernels.triton import tuning
    from tokenspeed_kernels.triton.offline import compiling_only, offline

    args, kwargs = call
    with offline(platform) as launches, compiling_only(wanted), tuning.forced(**forced):
        try:
            kernel.function(*args, **kwargs)
        except Exception:  # timing will find it out, and say it
            return 0
    return len(launches)


def _alternatives(asked: Mapping[str, tuple[Any, Mapping[str, int]]]) -> Iterator[dict[str, Any]]:
    """Each configuration of each choice, the others at what they are by default."""
    for name, (tunable, dims) in asked.items():
        for config in tunable.space(dims):
            yield {name: config}
