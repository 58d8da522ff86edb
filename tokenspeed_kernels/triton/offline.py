"""Compiles what a call would launch, for any arch, on a machine without that device or any.

    with offline(known_platform("gfx950")) as launches:
        kernel.function(**arguments)          # on meta tensors
    launches[0].asm                           # Triton's CompiledKernel

Triton asks its active driver for the target and hands it the binary to load and launch; the driver here says what it
is told and launches nothing. So signatures and specialisation are Triton's own.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

from tokenspeed_kernels.triton.device import planned_for
from tokenspeed_registry.platform import Platform

_numbers = itertools.count(1 << 20)
"""Triton caches what it compiled by device number: no two uses share one."""


@contextmanager
def offline(platform: Platform) -> Iterator[list[Any]]:
    """Launches in the block compile for `platform` and run nothing; yields the list that they add themselves to."""
    stand_in = _Driver(platform)
    before = driver._active
    driver.set_active(stand_in)
    try:
        with planned_for(platform):
            yield stand_in.launches
    finally:
        driver._active = before


@contextmanager
def compiling_only(wanted: Callable[[str], bool]) -> Iterator[None]:
    """Launches in the block whose key is not `wanted` are neither compiled nor launched.

    A key names the function, what it is specialised to, and its options, but not the device.
    """

    def unwanted(*, fn: Any, compile: Mapping[str, Any], **_: object) -> bool:
        return not wanted(f"{fn.module}.{fn.name} {compile['key']}")

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = unwanted
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


class _Utils:
    """What Triton asks of a driver about the device, and to load a binary."""

    def __init__(self, platform: Platform) -> None:
        self._limits = platform.limits

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._limits.shared_memory_per_block,
            "multiprocessor_count": self._limits.compute_units,
            "warpSize": self._limits.warp_size,
            "max_num_regs": 65536,
        }

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[None, None, int, int, int]:
        return None, None, 0, 0, 1024

    def unload_module(self, module: object) -> None:
        pass


class _Driver(DriverBase):  # type: ignore[misc]
    def __init__(self, platform: Platform) -> None:
        self.utils = _Utils(platform)
        self.launches: list[Any] = []
        self._platform = platform
        self._number = next(_numbers)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Made once a compiled kernel: the one that was compiled last for this device of this source."""

        def launch(*args: Any) -> None:
            compiled = source.fn.device_caches[self._number][0].values()
            self.launches += [each for each in compiled if each.metadata is metadata and each not in self.launches]

        return launch

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        if self._platform.vendor == "amd":
            return GPUTarget("hip", self._platform.arch, self._platform.limits.warp_size)
        return GPUTarget("cuda", int(self._platform.arch.removeprefix("sm_").removesuffix("a")), 32)

    def get_current_device(self) -> int:
        return self._number

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return 9, 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_empty_cache_for_benchmark(self) -> Any:
        raise NotImplementedError

    def clear_cache(self, cache: object) -> None:
        pass
