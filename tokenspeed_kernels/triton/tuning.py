"""Compile-time choices of a kernel: tile sizes, warps, stages. Tuned once for a device and kept on disk.

    DECODE = Tunable("gdn_decode", space=lambda dims: [...], default=lambda platform, dims: {...})
    ...
    step[grid](..., **DECODE.pick(q.device, batch=bucket(batch), heads=heads))

A call tunes nothing, so that it never runs a trial on live buffers and every rank takes the same: `pick` looks into
the user's table of this device, then into the table shipped with the package, then asks `default`. Tables are made by
`tokenspeed-kernels tune` (see `benchmark.tune`), which makes its own tensors.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tokenspeed_kernels.triton.device import platform_for
from tokenspeed_registry.platform import Platform

Config = Mapping[str, Any]
"""Keyword arguments of a launch: constexprs of the kernel, `num_warps`, `num_stages`."""
Dims = Mapping[str, int]
SHIPPED = Path(__file__).parent / "tables"
SAME_ARCH = {"sm_90a": "nvidia-h200"}
"""By arch: the device whose table serves others of it, that have none of their own."""

_forced: ContextVar[Mapping[str, Config] | None] = ContextVar("tokenspeed_triton_forced", default=None)
_asked: ContextVar[dict[str, tuple["Tunable", dict[str, int]]] | None]
_asked = ContextVar("tokenspeed_triton_asked", default=None)


class Tunable:
    """The choices of one kernel. `space` lists all worth trying for some dims; `default` is right without any table."""

    def __init__(
        self, name: str, space: Callable[[Dims], Iterable[Config]], default: Callable[[Platform, Dims], Config]
    ) -> None:
        self.name = name
        self.space = space
        self.default = default
        self._chosen: dict[tuple[Any, ...], Config] = {}

    def pick(self, device: torch.device, **dims: int) -> Config:
        """The configuration for a call of these dims: static ones, and buckets of dynamic ones."""
        if _forced.get() is not None or _asked.get() is not None:
            return self._watched(device, dims)
        key = (device.type, device.index, *dims.values())
        chosen = self._chosen.get(key)
        if chosen is None:
            chosen = self._choose(device, dims)
            if device.type == "cuda":  # other devices stand for whatever platform is planned for
                self._chosen[key] = chosen
        return chosen

    def _watched(self, device: torch.device, dims: dict[str, int]) -> Config:
        asked = _asked.get()
        if asked is not None:
            asked[self.name] = (self, dims)
        return (_forced.get() or {}).get(self.name) or self._choose(device, dims)

    def _choose(self, device: torch.device, dims: dict[str, int]) -> Config:
        platform = platform_for(device)
        default = self.default(platform, dims)
        for table in tables(platform):
            known = table.get(self.name, {}).get(describe(dims))
            if known is not None and known.keys() == default.keys():  # else it is of an older source
                return known
        return default


def describe(dims: Dims) -> str:
    """Dims as a table's key."""
    return ", ".join(f"{name}={size}" for name, size in dims.items())


def device_slug(platform: Platform) -> str:
    """What a device's table is named by: `nvidia-h200`; the arch where the device was not seen."""
    return (platform.device or platform.arch).lower().replace(" ", "-")


@cache
def user_table(platform: Platform) -> Path:
    """Where the table of this user, device and Triton version lies; it need not exist."""
    import triton

    from tokenspeed_registry.registry import default_registry

    version = ".".join(triton.__version__.split(".")[:2])
    return default_registry.settings.cache / "tuning" / f"{device_slug(platform)}-triton-{version}.json"


@cache
def tables(platform: Platform) -> tuple[Mapping[str, Mapping[str, Config]], ...]:
    """The tables for a platform, best first: the user's, the device's shipped one, one of a device of the same arch."""
    shipped = [device_slug(platform), *filter(None, [SAME_ARCH.get(platform.arch)])]
    paths = dict.fromkeys([user_table(platform), *(SHIPPED / f"{name}.json" for name in shipped)])
    return tuple(json.loads(path.read_text())["choices"] for path in paths if path.exists())


@contextmanager
def forced(**configs: Config) -> Iterator[None]:
    """Kernels named take these configurations in the block."""
    token = _forced.set({**(_forced.get() or {}), **configs})
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def asked() -> Iterator[dict[str, tuple[Tunable, dict[str, int]]]]:
    """Collects, by name, which choices the calls in the block ask for, and for which dims."""
    token = _asked.set({})
    try:
        found = _asked.get()
        assert found is not None
        yield found
    finally:
        _asked.reset(token)
