"""What a launch must know of the chip: its platform, how many compute units, whether Triton interprets."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from tokenspeed_registry.platform import Platform, platform_of

# Triton's default changes with 3.10, and results depend on it: products and sums are fused into one rounding.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

_planned: ContextVar[Platform | None] = ContextVar("tokenspeed_triton_planned", default=None)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def platform_for(device: torch.device) -> Platform:
    """The platform whose limits a launch on `device` is planned against."""
    return _planned.get() or platform_of(device)


def compute_units(device: torch.device) -> int:
    """Multiprocessors or compute units of `device`; 4 where its platform has none, as in the interpreter."""
    return platform_for(device).limits.compute_units or 4


@contextmanager
def planned_for(platform: Platform) -> Iterator[None]:
    """Launches in the block are planned as if every device were of `platform`."""
    token = _planned.set(platform)
    try:
        yield
    finally:
        _planned.reset(token)


def bucket(size: int) -> int:
    """The power of two at or above `size`, at least 1: compile-time choices depend on dynamic sizes by it alone."""
    return 1 << max(size - 1, 0).bit_length()
