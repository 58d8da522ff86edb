"""Triton kernels that measure a device: one reads memory as fast as it goes, one copies it, one does nothing."""

import torch
import triton
import triton.language as tl

CONFIGS = ((2, 4096), (4, 4096), (8, 2048), (8, 4096), (2, 16384), (1 << 20, 1024), (1 << 20, 4096), (1 << 20, 16384))
"""Programs a compute unit, and elements that each loads at once: the fastest is what a device can do."""


@triton.jit  # type: ignore[untyped-decorator]
def _read(x_ptr, out_ptr, tiles, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program adds up every so many-th tile and stores one number, so that nothing is left out as unused."""
    o_tile = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i_tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        total += tl.load(x_ptr + i_tile.to(tl.int64) * BLOCK + o_tile)  # type: ignore[attr-defined]
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))


@triton.jit  # type: ignore[untyped-decorator]
def _copy(x_ptr, out_ptr, tiles, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    o_tile = tl.arange(0, BLOCK)
    for i_tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at = i_tile.to(tl.int64) * BLOCK + o_tile  # type: ignore[attr-defined]
        tl.store(out_ptr + at, tl.load(x_ptr + at))


@triton.jit
def _empty(out_ptr):  # type: ignore[no-untyped-def]
    pass


def read(x: torch.Tensor, sums: torch.Tensor, units: int, config: tuple[int, int]) -> None:
    """Reads all of float32 `x`, whose size is a multiple of every block. `sums`: room for a number a program."""
    programs, block = config
    tiles = x.numel() // block
    _read[(min(tiles, programs * units),)](x, sums, tiles, block, num_warps=8)


def copy(x: torch.Tensor, target: torch.Tensor, units: int, config: tuple[int, int]) -> None:
    """As `read`, and writes what it read."""
    programs, block = config
    tiles = x.numel() // block
    _copy[(min(tiles, programs * units),)](x, target, tiles, block, num_warps=8)


def empty(x: torch.Tensor) -> None:
    """Launches what does nothing."""
    _empty[(1,)](x, num_warps=1)
