"""Rows of a table, read by neighbouring threads, 16 bytes each.

All reads of a program are issued before the first one is used: the table is too large for any cache, so only the number
of rows in flight hides its latency.

A table in host memory is read alike. Beside an H200, rows that are spread over gigabytes of it come several times
slower than the link allows, however many are in flight and whatever the size of the table's pages; rows close together
come at the link's rate. So what limits it is most likely the translation of addresses, which a kernel cannot help.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import ngram
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.device import bucket
from tokenspeed_kernels.triton.overlap import overlapping, wait_for_predecessor
from tokenspeed_kernels.triton.tuning import Dims, Tunable
from tokenspeed_registry import OnHost
from tokenspeed_registry.platform import Platform

_TILE = 8192
"""Table elements that a program may hold."""


@triton.jit
def _load_columns(p_row, present, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    o_d = FIRST + tl.arange(0, WIDTH)[None, :]
    return tl.load(p_row[:, None] + o_d, mask=present[:, None] & (o_d < DIM), other=0.0)  # [R, WIDTH]


@triton.jit
def _store_columns(p_row, inside, b_row, b_scale, FIRST: tl.constexpr, DIM: tl.constexpr, SCALES: tl.constexpr):
    o_d = FIRST + tl.arange(0, b_row.shape[1])[None, :]
    if SCALES != 0:
        b_row = b_row.to(tl.float32) * b_scale[:, None]
    if b_row.dtype != p_row.dtype.element_ty:
        b_row = b_row.to(tl.float32).to(p_row.dtype.element_ty)
    tl.store(p_row[:, None] + o_d, b_row, mask=inside[:, None] & (o_d < DIM))


@triton.jit
def copy_rows(
    rows,  # [R] int64, -1: none
    o_row,  # [R] int64, where in the output
    inside,  # [R]
    table_ptr,  # [table_rows, DIM]
    scale_ptr,  # [1] or [table_rows]
    o_ptr,  # [tokens * heads, DIM]
    table_rows,
    first_row,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Writes table[rows] * scale. A row is read as two pieces of a power of two, so that few threads idle."""
    local = rows - first_row
    present = (rows != -1) & (local >= 0) & (local < table_rows)
    p_row = table_ptr + local * DIM
    b_wide = _load_columns(p_row, present, 0, WIDE, DIM)
    if REST != 0:
        b_rest = _load_columns(p_row, present, WIDE, REST, DIM)
    b_scale = tl.zeros(rows.shape, tl.float32)
    if SCALES == 1:
        b_scale += tl.load(scale_ptr)
    if SCALES == 2:
        b_scale = tl.load(scale_ptr + local, mask=present, other=0.0)
    p_out = o_ptr + o_row * DIM
    _store_columns(p_out, inside, b_wide, b_scale, 0, DIM, SCALES)
    if REST != 0:
        _store_columns(p_out, inside, b_rest, b_scale, WIDE, DIM, SCALES)


@triton.jit(do_not_specialize=["row_count", "table_rows", "first_row"])
def _ngram_lookup(
    rows_ptr,  # [row_count]: a row a token and head
    table_ptr,
    scale_ptr,
    o_ptr,
    row_count,
    table_rows,
    first_row,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_predecessor(PDL)
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = o_row < row_count
    rows = tl.load(rows_ptr + o_row, mask=inside, other=-1)
    copy_rows(rows, o_row, inside, table_ptr, scale_ptr, o_ptr, table_rows, first_row, DIM, WIDE, REST, SCALES)


def _space(dims: Dims) -> Iterator[dict[str, int]]:
    # Of lookups and hashes alike: rows that a program copies.
    for rows, warps in ((16, 1), (16, 2), (32, 1), (32, 2), (64, 2), (64, 4), (128, 4)):
        if rows * dims["dim"] <= 2 * _TILE:
            yield {"rows": rows, "num_warps": warps}


def _default(platform: Platform, dims: Dims) -> dict[str, int]:
    rows = 32 if dims["rows"] > 1 << 12 else 16
    while rows > 1 and rows * dims["dim"] > _TILE:
        rows //= 2
    return {"rows": rows, "num_warps": 1 if rows * dims["dim"] <= 8192 else 4}


LOOKUP = Tunable("ngram_lookup", _space, _default)


def copy_config(table: Tensor, row_count: int) -> dict[str, Any]:
    rows = min(max(bucket(row_count), 1 << 9), 1 << 17)
    return dict(LOOKUP.pick(table.device, rows=rows, dim=table.shape[1], itemsize=table.element_size()))


def pieces(dim: int) -> dict[str, int]:
    """A row as a power of two of columns, and as many more as are left, rounded up to one."""
    wide = 1 << dim.bit_length() - 1
    return {"DIM": dim, "WIDE": wide, "REST": triton.next_power_of_2(dim - wide) if dim > wide else 0}


def scales_kind(scale: Tensor | None) -> int:
    return 0 if scale is None else min(scale.shape[0], 2)


def _ngram_lookup_rows(
    rows: Tensor,
    table: Tensor,
    scale: Tensor | None,
    *,
    dtype: torch.dtype,
    first_row: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    count, dim = rows.numel(), table.shape[1]
    out = torch.empty(rows.shape[0], rows.shape[1] * dim, dtype=dtype, device=rows.device) if out is None else out
    if out.numel():
        config = copy_config(table, count)
        block = config.pop("rows")
        _ngram_lookup[(triton.cdiv(count, block),)](
            rows, table, scale, out, count, table.shape[0], first_row or 0,
            **pieces(dim), SCALES=scales_kind(scale), ROWS=block, **config, **overlapping(rows.device),
        )  # fmt: skip
    return out


# A table in host memory is read by the same kernel, over the link.
ON_DEVICE, ON_HOST = ([OnHost("table").in_(host)] for host in (False, True))
ngram_lookup = portable(ngram.ngram_lookup, constraints=ON_DEVICE)(_ngram_lookup_rows)
ngram_lookup_host = portable(ngram.ngram_lookup, name="triton.ngram_lookup_host", constraints=ON_HOST)(
    _ngram_lookup_rows
)
