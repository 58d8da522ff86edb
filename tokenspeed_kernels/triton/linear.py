"""Dense projections as tiles of a matrix product, and rows of an embedding table.

A program makes one tile of the result over the inputs, or over one slice of them where tokens are so few that tiles
alone would not occupy the device; a second launch then adds the slices in their order, so that results never depend on
timing. Tiles of neighbouring programs share rows of x or of the weight, which stay in the cache.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.linear import embedding as embedding_op
from tokenspeed_kernels.linear import linear as linear_op
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.device import bucket
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry.platform import Platform

_GROUP = 8
"""Rows of tiles that are walked together."""
_COPIED = 2048
"""Elements that a program of the embedding copies."""


@triton.jit
def tile_of_program(tokens, OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of the program's tile: down a group of rows, then on to the next column."""
    tiles_m = tl.cdiv(tokens, BLOCK_M)
    tiles_n: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    i_tile = tl.program_id(0)
    i_first = i_tile // (GROUP * tiles_n) * GROUP
    rows = tl.minimum(tiles_m - i_first, GROUP)
    i_in_group = i_tile % (GROUP * tiles_n)
    return i_first + i_in_group % rows, i_in_group // rows


@triton.jit
def store_tile(
    b_acc, bias_ptr, o_ptr, o_m, o_n, tokens, OUT: tl.constexpr, HAS_BIAS: tl.constexpr, SLICES: tl.constexpr
):
    """Rounds a tile into the result, or keeps it as it is in its slice of the float32 partial sums."""
    inside = (o_m < tokens)[:, None] & (o_n < OUT)[None, :]
    if HAS_BIAS and SLICES == 1:
        b_acc += tl.load(bias_ptr + o_n, mask=o_n < OUT, other=0.0).to(tl.float32)[None, :]
    i_row = tl.program_id(1).to(tl.int64) * tokens + o_m
    p_out = o_ptr + i_row[:, None] * OUT + o_n[None, :]
    tl.store(p_out, b_acc.to(o_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _linear(
    x_ptr,  # [tokens, IN], rows x_stride apart
    w_ptr,  # [OUT, IN]
    bias_ptr,  # [OUT]
    o_ptr,  # [tokens, OUT], or [SLICES, tokens, OUT]
    tokens,
    x_stride,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    i_m, i_n = tile_of_program(tokens, OUT, BLOCK_M, BLOCK_N, GROUP)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    p_x = x_ptr + o_m.to(tl.int64)[:, None] * x_stride  # [BM, 1]
    p_w = w_ptr + o_n.to(tl.int64)[:, None] * IN  # [BN, 1]
    steps: tl.constexpr = (IN + BLOCK_K - 1) // BLOCK_K
    per_slice: tl.constexpr = (steps + SLICES - 1) // SLICES
    first = tl.program_id(1) * per_slice
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_k in range(first, tl.minimum(first + per_slice, steps)):
        o_k = (i_k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        b_x = tl.load(p_x + o_k, mask=(o_m < tokens)[:, None] & (o_k < IN), other=0.0)  # [BM, BK]
        b_w = tl.load(p_w + o_k, mask=(o_n < OUT)[:, None] & (o_k < IN), other=0.0)  # [BN, BK]
        if b_x.dtype != b_w.dtype:
            b_x, b_w = b_x.to(tl.float32), b_w.to(tl.float32)
        b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision="ieee")
    store_tile(b_acc, bias_ptr, o_ptr, o_m, o_n, tokens, OUT, HAS_BIAS, SLICES)


@triton.jit(do_not_specialize=["size"])
def _add_slices(
    partial_ptr,  # [SLICES, tokens, OUT]
    bias_ptr,  # [OUT]
    o_ptr,  # [tokens, OUT]
    size,
    OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    o_e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o_e < size
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i_slice in tl.static_range(SLICES):
        b_sum += tl.load(partial_ptr + tl.cast(i_slice, tl.int64) * size + o_e, mask=inside, other=0.0)
    if HAS_BIAS:
        b_sum += tl.load(bias_ptr + o_e % OUT, mask=inside, other=0.0).to(tl.float32)
    tl.store(o_ptr + o_e, b_sum.to(o_ptr.dtype.element_ty), mask=inside)


def add_slices(partial: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = the sum of partial [slices, tokens, out_features] over its slices, from the first to the last, + bias."""
    block = 256
    _add_slices[(triton.cdiv(out.numel(), block),)](
        partial, bias, out, out.numel(), out.shape[1], bias is not None, partial.shape[0], block, num_warps=2
    )


def token_bucket(tokens: int) -> int:
    """Buckets of token counts for which tiles are chosen: up to 16, 64, 512 and above."""
    return next((size for size in (16, 64, 512) if tokens <= size), 4096)


def slices_for(platform: Platform, dims: Dims, block_m: int, block_n: int, least: int) -> int:
    """Into how many slices of at least `least` inputs to cut: a power of two that gives each unit about two tiles."""
    tiles = triton.cdiv(dims["tokens"], block_m) * triton.cdiv(dims["out"], block_n)
    units = platform.limits.compute_units or 4
    slices = 1
    while tiles * slices < units and dims["in"] >= 2 * slices * least and slices < 16:
        slices *= 2
    return slices


def _config(m: int, n: int, k: int, slices: int, warps: int, stages: int) -> dict[str, int]:
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "SLICES": slices}
    return {**blocks, "num_warps": warps, "num_stages": stages}


def _space(dims: Dims) -> Iterator[Config]:
    if dims["tokens"] <= 64:
        rows = dims["tokens"]
        for n, slices in ((16, 1), (16, 4), (32, 1), (32, 4), (64, 1), (64, 4)):
            yield _config(rows, n, 128, slices, 4, 4)
            yield _config(rows, n, 256, slices, 4, 3)
        return
    yield _config(64, 128, 64, 1, 4, 4)
    yield _config(128, 64, 64, 1, 4, 4)
    yield _config(128, 128, 64, 1, 8, 4)
    yield _config(128, 128, 64, 1, 4, 3)
    yield _config(128, 256, 64, 1, 8, 3)
    yield _config(256, 128, 64, 1, 8, 3)


def _default(platform: Platform, dims: Dims) -> Config:
    amd = platform.vendor == "amd"
    if dims["bytes"] == 4:
        return _config(min(dims["tokens"], 32), 32, 32, slices_for(platform, dims, 32, 32, 256), 4, 2)
    if dims["tokens"] <= 64:
        return _config(dims["tokens"], 32, 128, slices_for(platform, dims, 64, 32, 512), 4, 2 if amd else 4)
    if dims["tokens"] <= 512:
        return _config(128, 64, 64, 1, 4, 2 if amd else 4)
    return _config(128, 128, 64, 1, 8, 2) if amd else _config(128, 256, 64, 1, 8, 3)


LINEAR = Tunable("linear", _space, _default)


@portable(linear_op)
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    out = torch.empty(tokens, outputs, dtype=dtype or x.dtype, device=x.device) if out is None else out
    if not out.numel():
        return out
    # Operands of two dtypes are multiplied as float32.
    width = x.element_size() if x.dtype == weight.dtype else 4
    config = LINEAR.pick(x.device, tokens=token_bucket(tokens), out=outputs, **{"in": inputs}, bytes=width)
    slices = config["SLICES"]
    result = out if slices == 1 else torch.empty(slices, tokens, outputs, dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(tokens, config["BLOCK_M"]) * triton.cdiv(outputs, config["BLOCK_N"])
    _linear[(tiles, slices)](
        x, weight, bias, result, tokens, x.stride(0), outputs, inputs, bias is not None, GROUP=_GROUP, **config
    )
    if slices > 1:
        add_slices(result, bias, out)
    return out


@triton.jit
def _embedding(ids_ptr, table_ptr, o_ptr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    i_token = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + i_token)
    b_row = tl.load(table_ptr + row * DIM + o_d, mask=o_d < tl.where(row < 0, 0, DIM), other=0.0)
    tl.store(o_ptr + i_token * DIM + o_d, b_row, mask=o_d < DIM)


@portable(embedding_op)
def embedding(ids: Tensor, table: Tensor, *, out: Tensor | None = None) -> Tensor:
    tokens, dim = ids.shape[0], table.shape[1]
    out = torch.empty(tokens, dim, dtype=table.dtype, device=table.device) if out is None else out
    if out.numel():
        block = min(bucket(dim), _COPIED)
        warps = min(max(block // 256, 1), 8)
        _embedding[(tokens, triton.cdiv(dim, block))](ids, table, out, dim, block, num_warps=warps)
    return out
