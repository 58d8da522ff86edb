"""Splits: several programs share the keys of a row, where few rows would leave the device idle.

Each leaves a normalised output and a log-sum-exp in base 2; `combine` adds them up in the order of the splits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLITS = 64
"""The most splits that `combine` adds up."""


def split_count(most: int, programs: int, wanted: int) -> int:
    """How many splits of the keys make `programs` about `wanted`, from 1 to `most`."""
    return max(min(wanted // programs, most, SPLITS), 1)


def partials(splits: int, tokens: int, heads: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for what `splits` programs a row leave."""
    shape = splits, tokens, heads
    return torch.empty(*shape, dim, device=device), torch.empty(*shape, device=device)


@triton.jit(do_not_specialize=["rows", "splits"])
def _combine(
    part_ptr,  # [splits, rows, DIM]
    part_lse_ptr,  # [splits, rows], base 2
    o_ptr,  # [rows, DIM]
    lse_ptr,  # [rows], base e
    rows,
    splits,
    DIM: tl.constexpr,
    MOST: tl.constexpr,  # at least `splits`
    BD: tl.constexpr,
    BS: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    o_split = tl.arange(0, MOST)
    lses = tl.load(part_lse_ptr + o_split * rows.to(tl.int64) + i_row, mask=o_split < splits, other=float("-inf"))
    peak = tl.max(lses, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2(lses - shift), 0)
    acc = tl.zeros([BD], tl.float32)
    for first in range(0, splits, BS):
        o_s = first + tl.arange(0, BS)
        lse = tl.load(part_lse_ptr + o_s * rows.to(tl.int64) + i_row, mask=o_s < splits, other=float("-inf"))
        p_part = part_ptr + (o_s[:, None] * rows.to(tl.int64) + i_row) * DIM + o_d[None, :]  # [BS, BD]
        # An empty split has written nothing.
        part = tl.load(p_part, mask=(lse > float("-inf"))[:, None] & (o_d < DIM)[None, :], other=0.0)
        acc += tl.sum(part * tl.exp2(lse - shift)[:, None], 0)
    some = total > 0
    total = tl.where(some, total, 1.0)
    tl.store(o_ptr + i_row * DIM + o_d, (acc / total).to(o_ptr.dtype.element_ty), mask=o_d < DIM)
    tl.store(lse_ptr + i_row, tl.where(some, (shift + tl.log2(total)) * 0.6931471805599453, float("-inf")))


def combine(parts: Tensor, part_lses: Tensor, attended: Tensor, lse: Tensor) -> None:
    """`attended` [tokens, heads, dim], `lse` [tokens, heads] of `parts` [splits, tokens, heads, dim] and theirs."""
    splits, tokens, heads, dim = parts.shape
    rows = tokens * heads
    block = triton.next_power_of_2(dim)
    _combine[(rows,)](parts, part_lses, attended, lse, rows, splits, dim, SPLITS, block, 16, num_warps=4)
