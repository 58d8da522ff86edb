"""Dense projections with quantised weights: tiles of a matrix product whose weights are widened as they are multiplied.

The tiles, and the slices of the inputs where tokens are few, are those of `linear`. Weights are read in their stored
form and widened to the dtype of x, which is exact for all three: what a scale would add is left to float32.

FP8: a step of the product stays within one block of 128 inputs, so that block scales are factors of its float32 sums.

NVFP4: both inputs of a byte are multiplied apart, even ones and odd ones: no bits of two bytes ever trade places.
A code times its group's scale has six significant bits, so it is exact in every dtype of x.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import linear_quantised
from tokenspeed_kernels.quantise import FP8_BLOCK, NVFP4_GROUP
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.linear import add_slices, slices_for, store_tile, tile_of_program, token_bucket
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry.platform import Platform

_ROWS_TOGETHER = 8


@triton.jit(do_not_specialize=["tokens"])
def _linear_fp8_block(
    x_ptr,  # [tokens, IN], rows x_stride apart
    w_ptr,  # [OUT, IN]
    scale_ptr,  # [blocks of OUT, blocks of IN]
    o_ptr,  # [tokens, OUT], or [SLICES, tokens, OUT]
    tokens,
    x_stride,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAPPED: tl.constexpr,
    GROUP: tl.constexpr,
):
    i_m, i_n = tile_of_program(tokens, OUT, BLOCK_M, BLOCK_N, GROUP)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    p_x = x_ptr + o_m.to(tl.int64)[:, None] * x_stride  # [BM, 1]
    p_w = w_ptr + o_n.to(tl.int64)[:, None] * IN  # [BN, 1]
    steps: tl.constexpr = (IN + BLOCK_K - 1) // BLOCK_K
    in_blocks: tl.constexpr = (IN + SCALE_BLOCK - 1) // SCALE_BLOCK
    per_slice: tl.constexpr = (steps + SLICES - 1) // SLICES
    p_scale = scale_ptr + o_n // SCALE_BLOCK * in_blocks
    first = tl.program_id(1) * per_slice
    b_acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAPPED else [BLOCK_M, BLOCK_N], tl.float32)
    for i_k in range(first, tl.minimum(first + per_slice, steps)):
        o_k = (i_k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        b_x = tl.load(p_x + o_k, mask=(o_m < tokens)[:, None] & (o_k < IN), other=0.0)  # [BM, BK]
        b_w = tl.load(p_w + o_k, mask=(o_n < OUT)[:, None] & (o_k < IN), other=0.0)  # [BN, BK]
        b_scale = tl.load(p_scale + i_k * BLOCK_K // SCALE_BLOCK, mask=o_n < OUT, other=0.0).to(tl.float32)
        b_w = b_w.to(tl.float16)  # the fast way to all dtypes
        if b_x.dtype == tl.float16:  # in which scaled weights might vanish
            if SWAPPED:
                b_acc += tl.dot(b_w, tl.trans(b_x)) * b_scale[:, None]
            else:
                b_acc += tl.dot(b_x, tl.trans(b_w)) * b_scale[None, :]
        else:
            b_w = (b_w.to(tl.float32) * b_scale[:, None]).to(b_x.dtype)
            if SWAPPED:
                b_acc = tl.dot(b_w, tl.trans(b_x), b_acc, input_precision="ieee")
            else:
                b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision="ieee")
    if SWAPPED:
        b_acc = tl.trans(b_acc)
    store_tile(b_acc, o_ptr, o_ptr, o_m, o_n, tokens, OUT, False, SLICES)


@triton.jit
def _byte(b_word, INDEX: tl.constexpr):
    return ((b_word >> (8 * INDEX)) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _scaled_half(b_word, b_scale, DTYPE: tl.constexpr):
    """Of words of four float8 bytes [BN, W] and scales of each eight bytes [BN, W / 2], the products [BN, 4 W]."""
    b_first, b_second = tl.join(_byte(b_word, 0), _byte(b_word, 2)), tl.join(_byte(b_word, 1), _byte(b_word, 3))
    rows: tl.constexpr = b_word.shape[0]
    b_code = tl.reshape(tl.join(b_first, b_second), [rows, b_scale.shape[1], 8]).to(tl.float16)
    return tl.reshape(b_code * b_scale[:, :, None], [rows, 8 * b_scale.shape[1]]).to(DTYPE)


@triton.jit(do_not_specialize=["tokens"])
def _linear_nvfp4(
    x_ptr,  # [tokens, IN], rows x_stride apart
    w_ptr,  # [OUT, IN / 8]: words of eight codes
    scale_ptr,  # [OUT, IN / SCALE_GROUP]
    global_scale_ptr,  # [1]
    o_ptr,  # [tokens, OUT], or [SLICES, tokens, OUT]
    tokens,
    x_stride,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAPPED: tl.constexpr,
    GROUP: tl.constexpr,
):
    i_m, i_n = tile_of_program(tokens, OUT, BLOCK_M, BLOCK_N, GROUP)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    p_x = x_ptr + o_m.to(tl.int64)[:, None] * x_stride  # [BM, 1]
    p_w = w_ptr + o_n.to(tl.int64)[:, None] * (IN // 8)  # [BN, 1]
    p_scale = scale_ptr + o_n.to(tl.int64)[:, None] * (IN // SCALE_GROUP)  # [BN, 1]
    steps: tl.constexpr = (IN + BLOCK_K - 1) // BLOCK_K
    per_slice: tl.constexpr = (steps + SLICES - 1) // SLICES
    first = tl.program_id(1) * per_slice
    m_m, m_n = (o_m < tokens)[:, None], (o_n < OUT)[:, None]
    b_acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAPPED else [BLOCK_M, BLOCK_N], tl.float32)
    for i_k in range(first, tl.minimum(first + per_slice, steps)):
        o_k = (i_k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        o_word = (i_k * (BLOCK_K // 8) + tl.arange(0, BLOCK_K // 8))[None, :]
        o_group = (i_k * (BLOCK_K // SCALE_GROUP) + tl.arange(0, BLOCK_K // SCALE_GROUP))[None, :]
        b_x = tl.load(p_x + o_k, mask=m_m & (o_k < IN), other=0.0)  # [BM, BK]
        b_even, b_odd = tl.split(tl.reshape(b_x, [BLOCK_M, BLOCK_K // 2, 2]))
        b_word = tl.load(p_w + o_word, mask=m_n & (o_word < IN // 8), other=0)  # [BN, BK / 8]
        b_scale = tl.load(p_scale + o_group, mask=m_n & (o_group < IN // SCALE_GROUP), other=0.0)
        b_scale = b_scale.to(tl.float16) * 64.0  # [BN, BK / SCALE_GROUP]
        # Sign, exponent and mantissa of a code, put where a float8 has them, make 1/64 of its value.
        b_w_even = _scaled_half((b_word & 0x07070707) << 2 | (b_word & 0x08080808) << 4, b_scale, b_x.dtype)
        b_w_odd = _scaled_half((b_word >> 2) & 0x1C1C1C1C | b_word & -0x7F7F7F80, b_scale, b_x.dtype)
        if SWAPPED:
            b_acc = tl.dot(b_w_even, tl.trans(b_even), b_acc, input_precision="ieee")
            b_acc = tl.dot(b_w_odd, tl.trans(b_odd), b_acc, input_precision="ieee")
        else:
            b_acc = tl.dot(b_even, tl.trans(b_w_even), b_acc, input_precision="ieee")
            b_acc = tl.dot(b_odd, tl.trans(b_w_odd), b_acc, input_precision="ieee")
    b_acc *= tl.load(global_scale_ptr)
    if SWAPPED:
        b_acc = tl.trans(b_acc)
    store_tile(b_acc, o_ptr, o_ptr, o_m, o_n, tokens, OUT, False, SLICES)


def _config(m: int, n: int, k: int, slices: int, warps: int, stages: int, swapped: bool = False) -> dict[str, int]:
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "SLICES": slices, "SWAPPED": swapped}
    return {**blocks, "num_warps": warps, "num_stages": stages}


def _space(dims: Dims) -> Iterator[Config]:
    if dims["tokens"] <= 64:
        for n, slices in ((16, 1), (16, 4), (32, 1), (32, 4), (64, 1), (64, 4)):
            yield _config(dims["tokens"], n, 128, slices, 4, 4)
            yield _config(dims["tokens"], n, 128, slices, 4, 6)
        return
    yield _config(64, 128, 128, 1, 4, 3)
    yield _config(128, 64, 128, 1, 4, 3)
    yield _config(128, 128, 64, 1, 8, 3)
    yield _config(128, 128, 128, 1, 8, 3)
    yield _config(128, 256, 64, 1, 8, 3)


def _default(platform: Platform, dims: Dims) -> Config:
    amd = platform.vendor == "amd"
    if dims["bytes"] == 4:
        return _config(min(dims["tokens"], 32), 32, 32, slices_for(platform, dims, 32, 32, 256), 4, 2)
    if dims["tokens"] <= 64:
        return _config(dims["tokens"], 32, 128, slices_for(platform, dims, 64, 32, 512), 4, 2 if amd else 4)
    if dims["tokens"] <= 512:
        return _config(128, 64, 128, 1, 4, 2 if amd else 3)
    return _config(128, 128, 64, 1, 8, 2 if amd else 3)


FP8 = Tunable("linear_fp8_block", _space, _default)
NVFP4 = Tunable("linear_nvfp4", _space, _default)


def _plan(tunable: Tunable, x: Tensor, out: Tensor) -> tuple[Config, Tensor, tuple[int, int]]:
    """The choices for a call, where its tiles go, the result or slices of partial sums, and its programs."""
    (tokens, inputs), outputs = x.shape, out.shape[1]
    dims = {"tokens": token_bucket(tokens), "out": outputs, "in": inputs, "bytes": x.element_size()}
    config = tunable.pick(x.device, **dims)
    slices = config["SLICES"]
    result = out if slices == 1 else torch.empty(slices, tokens, outputs, dtype=torch.float32, device=x.device)
    return config, result, (triton.cdiv(tokens, config["BLOCK_M"]) * triton.cdiv(outputs, config["BLOCK_N"]), slices)


@portable(linear_quantised.linear_fp8_block)
def linear_fp8_block(x: Tensor, weight: Tensor, scale: Tensor, *, out: Tensor | None = None) -> Tensor:
    tokens, (outputs, inputs) = x.shape[0], weight.shape
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device) if out is None else out
    if out.numel():
        config, result, grid = _plan(FP8, x, out)
        _linear_fp8_block[grid](
            x, weight, scale, result, tokens, x.stride(0), outputs, inputs, FP8_BLOCK, GROUP=_ROWS_TOGETHER, **config
        )
        if result is not out:
            add_slices(result, None, out)
    return out


@portable(linear_quantised.linear_nvfp4)
def linear_nvfp4(
    x: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor, *, out: Tensor | None = None
) -> Tensor:
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device) if out is None else out
    if out.numel():
        config, result, grid = _plan(NVFP4, x, out)
        _linear_nvfp4[grid](
            x, weight.view(torch.int32), scale, global_scale, result, tokens, x.stride(0), outputs, inputs, NVFP4_GROUP,
            GROUP=_ROWS_TOGETHER, **config,
        )  # fmt: skip
        if result is not out:
            add_slices(result, None, out)
    return out
