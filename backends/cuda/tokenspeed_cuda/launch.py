"""Launching compiled CUDA C++: arguments and launch options.

    entry(grid, block, x, None, tokens, 1e-6, shared=4096, cluster=2, pdl=True)

Tensors pass as pointers (None as a null one), `int` and `bool` as 32-bit integers, `float` as float32, a `TensorMap` by
value, and what is of `ctypes` as it is. Kernels run on the current stream.
"""

import ctypes
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenspeed_cuda.driver import checked, cuda_driver

Macros = Mapping[str, int]
Size = int | tuple[int, ...]

_planned: ContextVar[tuple[str, list["Entry"]] | None] = ContextVar("tokenspeed_cuda_planned", default=None)
_overlaps: ContextVar[bool] = ContextVar("tokenspeed_cuda_overlaps", default=True)


@contextmanager
def planned_for(arch: str) -> Iterator[list["Entry"]]:
    """Launches in the block compile for `arch` and run nothing; yields the list of entries that they would launch."""
    token = _planned.set((arch, []))
    try:
        yield _planned.get()[1]  # type: ignore[index]
    finally:
        _planned.reset(token)


def planned_arch() -> str | None:
    """The arch that launches are only planned for; None where they run."""
    planned = _planned.get()
    return None if planned is None else planned[0]


@contextmanager
def one_after_another() -> Iterator[None]:
    """Launches in the block start only when the kernel before them has ended: to measure what `pdl` saves."""
    token = _overlaps.set(False)
    try:
        yield
    finally:
        _overlaps.reset(token)


@dataclass(eq=False)
class Entry:
    """A kernel of a cubin. `shared` is what the last launch asked for beside what the code declares, in bytes."""

    name: str
    arch: str
    macros: Macros
    cubin: bytes
    shared: int = 0
    _handle: Any = None
    _limits: dict[str, int] = field(default_factory=dict)
    _configs: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def __call__(
        self, grid: Size, block: Size, *args: Any, shared: int = 0, cluster: int = 1, pdl: bool = False
    ) -> None:
        """`grid` and `block`: blocks and threads in up to three dims; `shared`: dynamic shared memory, in bytes.

        `pdl`: the launch need not wait for the end of the kernel before it; it does so itself, by
        `griddepcontrol.wait`. Raises `RuntimeError` for a launch that the driver refuses.
        """
        planned = _planned.get()
        if planned is not None:
            self.shared = shared
            if self not in planned[1]:
                planned[1].append(self)
            return
        driver = cuda_driver()
        if self._handle is None:
            self._load(driver)
        if shared > self._limits.get("shared", 48 * 1024):
            self._allow(
                driver, "shared", driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared
            )
        if cluster > self._limits.get("cluster", 8):
            allowed = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            self._allow(driver, "cluster", allowed, 1)
            self._limits["cluster"] = 16
        storage, pointers = packed(args)
        config = self._config(driver, grid, block, shared, cluster, pdl and _overlaps.get())
        checked(driver.cuLaunchKernelEx(config, self._handle, ctypes.addressof(pointers), 0), self.name)
        del storage  # the driver has copied it

    def _load(self, driver: Any) -> None:
        torch.cuda.current_stream()  # makes torch's context current
        self._library = checked(driver.cuLibraryLoadData(self.cubin, [], [], 0, [], [], 0), self.name)
        kernel = checked(driver.cuLibraryGetKernel(self._library, self.name.encode()), self.name)
        self._handle = driver.CUfunction(int(kernel))
        self._kernel = kernel

    def _allow(self, driver: Any, limit: str, attribute: Any, value: int) -> None:
        device = checked(driver.cuCtxGetDevice(), self.name)
        checked(driver.cuKernelSetAttribute(attribute, value, self._kernel, device), self.name)
        self._limits[limit] = value

    def _config(self, driver: Any, grid: Size, block: Size, shared: int, cluster: int, pdl: bool) -> Any:
        stream = torch.cuda.current_stream().cuda_stream
        key = (grid, block, shared, cluster, pdl, stream)
        config = self._configs.get(key)
        if config is None:
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = _three(grid)
            config.blockDimX, config.blockDimY, config.blockDimZ = _three(block)
            config.sharedMemBytes, config.hStream = shared, driver.CUstream(stream)
            config.attrs = _attributes(driver, cluster, pdl)
            config.numAttrs = len(config.attrs)
            if len(self._configs) > 512:  # grids may be as many as token counts
                self._configs.clear()
            self._configs[key] = config
        return config


def _three(size: Size) -> tuple[int, int, int]:
    x, y, z = (*((size,) if isinstance(size, int) else size), 1, 1)[:3]
    return x, y, z


def _attributes(driver: Any, cluster: int, pdl: bool) -> list[Any]:
    attributes = []
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster, 1, 1
        attributes.append(attribute)
    if pdl:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    return attributes


def packed(args: Sequence[Any]) -> tuple[Any, Any]:
    """Storage of the arguments, each on a 64-byte line of its own or two, and an array of pointers to them."""
    values = [_bytes(arg) for arg in args]
    lines = [(len(value) + 63) // 64 for value in values]
    storage = ctypes.create_string_buffer(64 * (sum(lines) + 1))
    start = ctypes.addressof(storage)
    pointers = (ctypes.c_void_p * max(len(values), 1))()
    at = -start % 64
    for i, (value, line) in enumerate(zip(values, lines, strict=True)):
        ctypes.memmove(start + at, value, len(value))
        pointers[i] = start + at
        at += 64 * line
    return storage, pointers


def _bytes(arg: Any) -> bytes:
    if isinstance(arg, Tensor):
        return struct.pack("P", arg.data_ptr())
    if arg is None:
        return struct.pack("P", 0)
    if isinstance(arg, int):
        return struct.pack("i", arg)
    if isinstance(arg, float):
        return struct.pack("f", arg)
    return bytes(arg)
