"""Dense projections as tiles of a matrix product, and rows of an embedding table.

Tiles: a program makes one tile of the result. Programs that follow each other share rows of x or of the weight, which
stay in the cache.

Parts: for few tokens and outputs. The call takes as long as the weight takes to arrive, and tiles alone would occupy
too little of the device for that. Each warp sums over inputs of its own, as one of a batch of products, and the program
adds up the warps at the end, always in the same order: more bytes are under way without a second launch.

Operands of two dtypes are multiplied as float32, which has no fast product. A float32 weight beside an x in bfloat16, a
router's, is split into three bfloat16 numbers instead, whose sum it is: three fast products, none of them rounded.
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

GROUP = 8
"""Rows of tiles that are walked together."""
_COPIED = 2048
"""Elements that a program of the embedding copies."""


@triton.jit
def tile_of_program(tokens, OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """The program's tokens and outputs: down a group of rows of tiles, then on to the next column."""
    tiles_m = tl.cdiv(tokens, BLOCK_M)
    tiles_n: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    i_first = tl.program_id(0) // (GROUP * tiles_n) * GROUP
    i_in_group = tl.program_id(0) % (GROUP * tiles_n)
    rows = tl.minimum(tiles_m - i_first, GROUP)
    o_m = (i_first + i_in_group % rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_in_group // rows * BLOCK_N + tl.arange(0, BLOCK_N)
    return o_m.to(tl.int64), o_n.to(tl.int64)


@triton.jit
def load_step(p_row, inside, i_step, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Columns of one step of rows that are `WIDTH` wide: [rows, BLOCK]."""
    o_c = (i_step * BLOCK + tl.arange(0, BLOCK))[None, :]
    return tl.load(p_row[:, None] + o_c, mask=inside[:, None] & (o_c < WIDTH), other=0.0)


@triton.jit
def load_parts(p_row, inside, i_step, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Columns of one step, cut into parts that follow each other: [PARTS, rows, BLOCK]."""
    o_c = (i_step * PARTS + tl.arange(0, PARTS))[:, None, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    return tl.load(p_row[None, :, None] + o_c, mask=inside[None, :, None] & (o_c < WIDTH), other=0.0)


@triton.jit
def store_tile(b_sum, o_ptr, o_m, o_n, tokens, OUT: tl.constexpr):
    p_out = o_ptr + o_m[:, None] * OUT + o_n[None, :]
    inside = (o_m < tokens)[:, None] & (o_n < OUT)[None, :]
    tl.store(p_out, b_sum.to(o_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_bias(bias_ptr, o_n, OUT: tl.constexpr):
    return tl.load(bias_ptr + o_n, mask=o_n < OUT, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["tokens"])
def _tile(
    x_ptr,  # [tokens, IN], rows x_stride apart
    w_ptr,  # [OUT, IN]
    bias_ptr,  # [OUT] or None
    o_ptr,  # [tokens, OUT]
    tokens,
    x_stride,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
):
    o_m, o_n = tile_of_program(tokens, OUT, BLOCK_M, BLOCK_N, GROUP)
    b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_step in range((IN + BLOCK_K - 1) // BLOCK_K):
        b_x = load_step(x_ptr + o_m * x_stride, o_m < tokens, i_step, IN, BLOCK_K)  # [BM, BK]
        b_w = load_step(w_ptr + o_n * IN, o_n < OUT, i_step, IN, BLOCK_K)  # [BN, BK]
        if SPLIT:
            for _ in tl.static_range(3):
                b_high = b_w.to(tl.bfloat16)
                b_sum = tl.dot(b_x, tl.trans(b_high), b_sum)
                b_w -= b_high.to(tl.float32)
        else:
            if b_x.dtype != b_w.dtype:
                b_x, b_w = b_x.to(tl.float32), b_w.to(tl.float32)
            b_sum = tl.dot(b_x, tl.trans(b_w), b_sum, input_precision="ieee")
    if bias_ptr is not None:
        b_sum += _load_bias(bias_ptr, o_n, OUT)
    store_tile(b_sum, o_ptr, o_m, o_n, tokens, OUT)


@triton.jit
def _add_product(b_sum, b_x, b_w, LEFT: tl.constexpr):
    """The sum of each part plus its x times its weight, that on the left or on the right."""
    if LEFT:
        b_sum = tl.dot(b_w, tl.permute(b_x, (0, 2, 1)), b_sum, input_precision="ieee")
    else:
        b_sum = tl.dot(b_x, tl.permute(b_w, (0, 2, 1)), b_sum, input_precision="ieee")
    return b_sum


@triton.jit(do_not_specialize=["tokens"])
def _parts(
    x_ptr,  # [tokens, IN], rows x_stride apart
    w_ptr,  # [OUT, IN]
    bias_ptr,  # [OUT] or None
    o_ptr,  # [tokens, OUT]
    tokens,
    x_stride,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
):
    o_m, o_n = tile_of_program(tokens, OUT, BLOCK_M, BLOCK_N, GROUP)
    left: tl.constexpr = BLOCK_N >= 16  # of 8 rows only the right operand may be
    b_sum = tl.zeros([PARTS, BLOCK_N, BLOCK_M] if left else [PARTS, BLOCK_M, BLOCK_N], tl.float32)
    for i_step in range((IN + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K)):
        b_x = load_parts(x_ptr + o_m * x_stride, o_m < tokens, i_step, IN, BLOCK_K, PARTS)  # [P, BM, BK]
        b_w = load_parts(w_ptr + o_n * IN, o_n < OUT, i_step, IN, BLOCK_K, PARTS)  # [P, BN, BK]
        if SPLIT:
            for _ in tl.static_range(3):
                b_high = b_w.to(tl.bfloat16)
                b_sum = _add_product(b_sum, b_x, b_high, left)
                b_w -= b_high.to(tl.float32)
        else:
            if b_x.dtype != b_w.dtype:
                b_x, b_w = b_x.to(tl.float32), b_w.to(tl.float32)
            b_sum = _add_product(b_sum, b_x, b_w, left)
    b_sum = tl.trans(tl.sum(b_sum, 0)) if left else tl.sum(b_sum, 0)
    if bias_ptr is not None:
        b_sum += _load_bias(bias_ptr, o_n, OUT)
    store_tile(b_sum, o_ptr, o_m, o_n, tokens, OUT)


def token_bucket(tokens: int) -> int:
    """For what number of tokens a call is tuned: 8, 16, 64, 512 or 4,096."""
    return next((size for size in (8, 16, 64, 512) if tokens <= size), 4096)


def tiles(m: int, n: int, k: int, warps: int, stages: int) -> Config:
    return parts(m, n, k, 1, warps, stages)


def parts(m: int, n: int, k: int, parts: int, warps: int, stages: int) -> Config:
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "PARTS": parts, "num_warps": warps, "num_stages": stages}


def programs(tokens: int, outputs: int, config: Config) -> tuple[int]:
    return (triton.cdiv(tokens, config["BLOCK_M"]) * triton.cdiv(outputs, config["BLOCK_N"]),)


def _space(dims: Dims) -> Iterator[Config]:
    tokens = dims["tokens"]
    if dims["split"]:
        yield parts(16, 8, 64, 8, 8, 4)
        yield parts(16, 8, 128, 4, 4, 3)
        yield parts(16, 16, 64, 8, 8, 3)
        yield tiles(64, 64, 64, 4, 3)
    elif dims["bytes"] == 4:
        yield parts(16, 16, 32, 8, 8, 2)
        yield tiles(32, 32, 32, 4, 2)
        yield tiles(32, 64, 32, 4, 2)
    elif tokens <= 16:
        yield parts(tokens, 16, 128, 4, 4, 3)
        yield parts(tokens, 16, 64, 4, 4, 4)
        yield parts(tokens, 16, 64, 4, 4, 6)
        yield parts(tokens, 32, 64, 4, 4, 4)
        yield tiles(16, 16, 256, 2, 3)
        yield tiles(16, 32, 128, 4, 4)
        yield tiles(16, 32, 128, 4, 5)
    elif tokens <= 64:
        yield parts(32, 32, 64, 4, 4, 3)
        yield tiles(64, 32, 128, 4, 4)
        yield tiles(64, 64, 64, 4, 4)
        yield tiles(64, 64, 128, 4, 4)
    else:
        yield tiles(64, 128, 64, 4, 4)
        yield tiles(128, 64, 64, 4, 4)
        yield tiles(128, 128, 64, 4, 3)
        yield tiles(128, 128, 64, 8, 4)
        yield tiles(256, 128, 64, 8, 3)


def _default(platform: Platform, dims: Dims) -> Config:
    amd, tokens = platform.vendor == "amd", dims["tokens"]
    if dims["split"]:
        few = parts(16, 16, 64, 4, 4, 2) if amd else parts(16, 8, 64, 8, 8, 4)
        return few if tokens <= 64 else tiles(64, 64, 64, 4, 2 if amd else 3)
    if dims["bytes"] == 4:
        return parts(16, 16, 32, 8, 8, 2) if tokens <= 64 and dims["out"] <= 4096 else tiles(32, 64, 32, 4, 2)
    if tokens <= 16:
        if dims["out"] > 8192:
            return tiles(16, 32, 128, 4, 2 if amd else 4)
        return parts(16 if amd else tokens, 16, 128, 4, 4, 2 if amd else 3)
    if tokens <= 64:
        return tiles(64, 64, 64, 4, 2 if amd else 4)
    if amd:
        return tiles(128, 128, 64, 8, 2)
    return tiles(128, 128, 64, 8, 4) if tokens <= 512 else tiles(128, 128, 64, 4, 3)


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
    if out.numel():
        width = x.element_size() if x.dtype == weight.dtype else 4
        split = x.dtype == torch.bfloat16 and weight.dtype == torch.float32
        dims = {"tokens": token_bucket(tokens), "out": outputs, "in": inputs, "bytes": width, "split": int(split)}
        config = LINEAR.pick(x.device, **dims)
        kernel = _tile if config["PARTS"] == 1 else _parts
        kernel[programs(tokens, outputs, config)](
            x, weight, bias, out, tokens, x.stride(0), outputs, inputs, split, GROUP, **config
        )
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
