"""Dense projections with quantised weights, widened as they are multiplied, in tiles or in parts as in `linear`.

FP8: a step of the product stays within one block of 128 inputs. Where the sums of a program are few, block scales are
factors of a step's sums; where they are many, weights are scaled and rounded to the dtype of x before the product.

NVFP4: WAYDOC
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import linear_quantised
from tokenspeed_kernels.quantise import FP8_BLOCK, NVFP4_GROUP
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.linear import (
    GROUP,
    load_parts,
    load_step,
    parts,
    programs,
    store_tile,
    tile_of_program,
    tiles,
    token_bucket,
)
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry.platform import Platform


@triton.jit(do_not_specialize=["tokens"])
def _fp8_tile(
    x_ptr,  # [tokens, IN], rows x_stride apart
    w_ptr,  # [OUT, IN]
    scale_ptr,  # [blocks of OUT, blocks of IN]
    o_ptr,  # [tokens, OUT]
    tokens,
    x_stride,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
):
    o_m, o_n = tile_of_program(tokens, OUT, BLOCK_M, BLOCK_N, GROUP)
    p_scale = scale_ptr + o_n // SCALE_BLOCK * ((IN + SCALE_BLOCK - 1) // SCALE_BLOCK)
    # A widened weight is best the left operand, which may come from registers, if it has rows enough for that.
    left: tl.constexpr = BLOCK_N >= 64
    b_sum = tl.zeros([BLOCK_N, BLOCK_M] if left else [BLOCK_M, BLOCK_N], tl.float32)
    for i_step in range((IN + BLOCK_K - 1) // BLOCK_K):
        b_x = load_step(x_ptr + o_m * x_stride, o_m < tokens, i_step, IN, BLOCK_K)  # [BM, BK]
        b_w = load_step(w_ptr + o_n * IN, o_n < OUT, i_step, IN, BLOCK_K).to(tl.float16)  # [BN, BK]
        b_scale = tl.load(p_scale + i_step * BLOCK_K // SCALE_BLOCK, mask=o_n < OUT, other=0.0).to(tl.float32)
        # In float16 scaled weights might vanish.
        if b_x.dtype == tl.float16 or not left:
            b_w = b_w.to(b_x.dtype)
            if left:
                b_sum += tl.dot(b_w, tl.trans(b_x), input_precision="ieee") * b_scale[:, None]
            else:
                b_sum += tl.dot(b_x, tl.trans(b_w), input_precision="ieee") * b_scale[None, :]
        else:
            b_w = (b_w.to(tl.float32) * b_scale[:, None]).to(b_x.dtype)
            b_sum = tl.dot(b_w, tl.trans(b_x), b_sum, input_precision="ieee")
    store_tile(tl.trans(b_sum) if left else b_sum, o_ptr, o_m, o_n, tokens, OUT)


@triton.jit(do_not_specialize=["tokens"])
def _fp8_parts(
    x_ptr,  # [tokens, IN], rows x_stride apart
    w_ptr,  # [OUT, IN]
    scale_ptr,  # [blocks of OUT, blocks of IN]
    o_ptr,  # [tokens, OUT]
    tokens,
    x_stride,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
):
    o_m, o_n = tile_of_program(tokens, OUT, BLOCK_M, BLOCK_N, GROUP)
    in_blocks: tl.constexpr = (IN + SCALE_BLOCK - 1) // SCALE_BLOCK
    b_sum = tl.zeros([PARTS, BLOCK_N, BLOCK_M], tl.float32)
    for i_step in range((IN + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K)):
        b_x = load_parts(x_ptr + o_m * x_stride, o_m < tokens, i_step, IN, BLOCK_K, PARTS)  # [P, BM, BK]
        b_w = load_parts(w_ptr + o_n * IN, o_n < OUT, i_step, IN, BLOCK_K, PARTS)  # [P, BN, BK]
        i_block = ((i_step * PARTS + tl.arange(0, PARTS)) * BLOCK_K // SCALE_BLOCK)[:, None]
        m_scale = (o_n < OUT)[None, :] & (i_block < in_blocks)
        p_scale = scale_ptr + (o_n // SCALE_BLOCK * in_blocks)[None, :] + i_block
        b_scale = tl.load(p_scale, mask=m_scale, other=0.0).to(tl.float32)  # [P, BN]
        b_w = b_w.to(tl.float16).to(b_x.dtype)  # over float16 is the fast way
        b_sum += tl.dot(b_w, tl.permute(b_x, (0, 2, 1)), input_precision="ieee") * b_scale[:, :, None]
    store_tile(tl.trans(tl.sum(b_sum, 0)), o_ptr, o_m, o_n, tokens, OUT)


@triton.jit
def _byte(b_word, INDEX: tl.constexpr):
    return ((b_word >> (8 * INDEX)) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _scaled(b_word, b_scale, DTYPE: tl.constexpr):
    """Of words of four float8 bytes [..., W] and a scale of each eight of them [..., W / 2], the products [..., 4 W]."""
    b_first, b_second = tl.join(_byte(b_word, 0), _byte(b_word, 2)), tl.join(_byte(b_word, 1), _byte(b_word, 3))
    lead: tl.constexpr = b_scale.shape[:-1]
    groups: tl.constexpr = b_scale.shape[-1]
    b_code = tl.reshape(tl.join(b_first, b_second), lead + [groups, 8]).to(tl.float16)
    return tl.reshape(b_code * tl.expand_dims(b_scale, -1), lead + [8 * groups]).to(DTYPE)


@triton.jit
def _even_and_odd(b_word, b_scale, DTYPE: tl.constexpr):
    """Codes times scales of words of eight codes: of even inputs, and of odd ones."""
    # Sign, exponent and mantissa of a code, put where a float8 has them, make 1/64 of its value.
    b_scale = b_scale.to(tl.float16) * 64.0
    b_even = _scaled((b_word & 0x07070707) << 2 | (b_word & 0x08080808) << 4, b_scale, DTYPE)
    b_odd = _scaled((b_word >> 2) & 0x1C1C1C1C | b_word & -0x7F7F7F80, b_scale, DTYPE)
    return b_even, b_odd


@triton.jit
def _quarter(b_word, b_scale, INDEX: tl.constexpr, DTYPE: tl.constexpr):
    """2^-8 of the values of codes INDEX and INDEX + 4 of words of eight codes: [..., 2 W]."""
    half: tl.constexpr = tl.bfloat16 if DTYPE == tl.bfloat16 else tl.float16
    up: tl.constexpr = 6 if DTYPE == tl.bfloat16 else 9
    mask: tl.constexpr = 0x70007 << up
    if up >= 4 * INDEX:
        b_size = b_word << (up - 4 * INDEX)
    else:
        b_size = b_word >> (4 * INDEX - up)
    b_bits = b_size & mask | b_word << (12 - 4 * INDEX) & -0x7FFF8000
    b_low = b_bits.to(tl.int16).to(half, bitcast=True)
    b_high = (b_bits >> 16).to(tl.int16).to(half, bitcast=True)
    lead: tl.constexpr = b_scale.shape[:-1]
    groups: tl.constexpr = b_scale.shape[-1]
    b_code = tl.reshape(tl.join(b_low, b_high), lead + [groups, 4])
    return tl.reshape(b_code * tl.expand_dims(b_scale, -1), lead + [4 * groups]).to(DTYPE)


@triton.jit
def _quarter_scale(b_scale, DTYPE: tl.constexpr):
    """Of codes' bits as they stand, 2^-126 or 2^-14 of their values, the scales that make 2^-8 of the product."""
    b_scale = b_scale.to(tl.float16)
    return (b_scale.to(tl.float32) * 2.0**118).to(tl.bfloat16) if DTYPE == tl.bfloat16 else b_scale * 64.0


@triton.jit
def _quarters(b_x):
    """Inputs 0 and 4, 1 and 5, 2 and 6, 3 and 7 of each eight."""
    lead: tl.constexpr = b_x.shape[:-1]
    eighths: tl.constexpr = b_x.shape[-1] // 8
    b_even, b_odd = tl.split(tl.reshape(b_x, lead + [eighths, 2, 2, 2]))
    b_0, b_2 = tl.split(b_even)
    b_1, b_3 = tl.split(b_odd)
    flat: tl.constexpr = lead + [2 * eighths]
    return tl.reshape(b_0, flat), tl.reshape(b_1, flat), tl.reshape(b_2, flat), tl.reshape(b_3, flat)


@triton.jit(do_not_specialize=["tokens"])
def _nvfp4_tile(
    x_ptr,  # [tokens, IN], rows x_stride apart
    w_ptr,  # [OUT, IN / 8] words of eight codes
    scale_ptr,  # [OUT, IN / SCALE_GROUP]
    global_scale_ptr,  # [1]
    o_ptr,  # [tokens, OUT]
    tokens,
    x_stride,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    GROUP: tl.constexpr,
    WAY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
):
    o_m, o_n = tile_of_program(tokens, OUT, BLOCK_M, BLOCK_N, GROUP)
    groups: tl.constexpr = IN // SCALE_GROUP
    b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_step in range((IN + BLOCK_K - 1) // BLOCK_K):
        b_x = load_step(x_ptr + o_m * x_stride, o_m < tokens, i_step, IN, BLOCK_K)  # [BM, BK]
        b_word = load_step(w_ptr + o_n * (IN // 8), o_n < OUT, i_step, IN // 8, BLOCK_K // 8)
        b_scale = load_step(scale_ptr + o_n * groups, o_n < OUT, i_step, groups, BLOCK_K // SCALE_GROUP)
        if WAY == 0:
            b_x_even, b_x_odd = tl.split(tl.reshape(b_x, [BLOCK_M, BLOCK_K // 2, 2]))
            b_even, b_odd = _even_and_odd(b_word, b_scale, b_x.dtype)  # [BN, BK / 2]
            b_sum = tl.dot(b_x_even, tl.trans(b_even), b_sum, input_precision="ieee")
            b_sum = tl.dot(b_x_odd, tl.trans(b_odd), b_sum, input_precision="ieee")
        else:
            b_scale = _quarter_scale(b_scale, b_x.dtype)
            b_x0, b_x1, b_x2, b_x3 = _quarters(b_x)
            b_sum = tl.dot(b_x0, tl.trans(_quarter(b_word, b_scale, 0, b_x.dtype)), b_sum, input_precision="ieee")
            b_sum = tl.dot(b_x1, tl.trans(_quarter(b_word, b_scale, 1, b_x.dtype)), b_sum, input_precision="ieee")
            b_sum = tl.dot(b_x2, tl.trans(_quarter(b_word, b_scale, 2, b_x.dtype)), b_sum, input_precision="ieee")
            b_sum = tl.dot(b_x3, tl.trans(_quarter(b_word, b_scale, 3, b_x.dtype)), b_sum, input_precision="ieee")
    factor = tl.load(global_scale_ptr) * (1.0 if WAY == 0 else 256.0)
    store_tile(b_sum * factor, o_ptr, o_m, o_n, tokens, OUT)


@triton.jit(do_not_specialize=["tokens"])
def _nvfp4_parts(
    x_ptr,  # [tokens, IN], rows x_stride apart
    w_ptr,  # [OUT, IN / 8] words of eight codes
    scale_ptr,  # [OUT, IN / SCALE_GROUP]
    global_scale_ptr,  # [1]
    o_ptr,  # [tokens, OUT]
    tokens,
    x_stride,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    GROUP: tl.constexpr,
    WAY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
):
    o_m, o_n = tile_of_program(tokens, OUT, BLOCK_M, BLOCK_N, GROUP)
    groups: tl.constexpr = IN // SCALE_GROUP
    b_sum = tl.zeros([PARTS, BLOCK_N, BLOCK_M], tl.float32)
    for i_step in range((IN + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K)):
        b_x = load_parts(x_ptr + o_m * x_stride, o_m < tokens, i_step, IN, BLOCK_K, PARTS)  # [P, BM, BK]
        b_word = load_parts(w_ptr + o_n * (IN // 8), o_n < OUT, i_step, IN // 8, BLOCK_K // 8, PARTS)
        b_scale = load_parts(scale_ptr + o_n * groups, o_n < OUT, i_step, groups, BLOCK_K // SCALE_GROUP, PARTS)
        if WAY == 0:
            b_x_even, b_x_odd = tl.split(tl.reshape(b_x, [PARTS, BLOCK_M, BLOCK_K // 2, 2]))
            b_even, b_odd = _even_and_odd(b_word, b_scale, b_x.dtype)  # [P, BN, BK / 2]
            b_sum = tl.dot(b_even, tl.permute(b_x_even, (0, 2, 1)), b_sum, input_precision="ieee")
            b_sum = tl.dot(b_odd, tl.permute(b_x_odd, (0, 2, 1)), b_sum, input_precision="ieee")
        else:
            b_scale = _quarter_scale(b_scale, b_x.dtype)
            b_x0, b_x1, b_x2, b_x3 = _quarters(b_x)
            b_sum = tl.dot(
                _quarter(b_word, b_scale, 0, b_x.dtype), tl.permute(b_x0, (0, 2, 1)), b_sum, input_precision="ieee"
            )
            b_sum = tl.dot(
                _quarter(b_word, b_scale, 1, b_x.dtype), tl.permute(b_x1, (0, 2, 1)), b_sum, input_precision="ieee"
            )
            b_sum = tl.dot(
                _quarter(b_word, b_scale, 2, b_x.dtype), tl.permute(b_x2, (0, 2, 1)), b_sum, input_precision="ieee"
            )
            b_sum = tl.dot(
                _quarter(b_word, b_scale, 3, b_x.dtype), tl.permute(b_x3, (0, 2, 1)), b_sum, input_precision="ieee"
            )
    factor = tl.load(global_scale_ptr) * (1.0 if WAY == 0 else 256.0)
    store_tile(tl.trans(tl.sum(b_sum, 0)) * factor, o_ptr, o_m, o_n, tokens, OUT)


def _space(dims: Dims) -> Iterator[Config]:
    tokens = dims["tokens"]
    if dims["bytes"] == 4:
        yield parts(16, 16, 64, 4, 4, 2)
        yield tiles(32, 32, 64, 4, 2)
    elif tokens <= 16:
        yield parts(tokens, 16, 128, 4, 4, 4)
        yield parts(tokens, 16, 128, 8, 8, 3)
        yield parts(tokens, 16, 128, 8, 8, 5)
        yield parts(tokens, 32, 128, 4, 4, 3)
        yield parts(tokens, 32, 128, 2, 2, 5)
        yield tiles(16, 16, 128, 4, 6)
        yield tiles(16, 32, 128, 4, 4)
        yield tiles(16, 32, 128, 4, 5)
    elif tokens <= 64:
        yield parts(tokens, 32, 128, 2, 4, 3)
        yield tiles(64, 32, 128, 4, 4)
        yield tiles(64, 64, 128, 4, 3)
        yield tiles(64, 128, 128, 8, 3)
    else:
        yield tiles(128, 128, 64, 8, 3)
        yield tiles(128, 128, 64, 8, 4)
        yield tiles(256, 128, 64, 8, 3)
        yield tiles(256, 128, 64, 8, 4)


def _default(platform: Platform, dims: Dims) -> Config:
    amd = platform.vendor == "amd"
    if dims["bytes"] == 4:
        few = dims["tokens"] <= 64 and dims["out"] <= 4096
        return parts(16, 16, 64, 4, 4, 2) if few else tiles(32, 32, 64, 4, 2)
    if dims["tokens"] <= 16:
        return parts(16 if amd else dims["tokens"], 16, 128, 4, 4, 2 if amd else 4)
    if dims["tokens"] <= 64:
        return tiles(64, 32, 128, 4, 2) if amd else tiles(64, 64, 128, 4, 3)
    return tiles(128, 128, 64, 8, 2) if amd else tiles(256, 128, 64, 8, 3)


FP8 = Tunable("linear_fp8_block", _space, _default)
NVFP4 = Tunable("linear_nvfp4", _space, _default)
WAY = [0]


@portable(linear_quantised.linear_fp8_block)
def linear_fp8_block(x: Tensor, weight: Tensor, scale: Tensor, *, out: Tensor | None = None) -> Tensor:
    tokens, (outputs, inputs) = x.shape[0], weight.shape
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device) if out is None else out
    if out.numel():
        dims = {"tokens": token_bucket(tokens), "out": outputs, "in": inputs, "bytes": x.element_size()}
        config = FP8.pick(x.device, **dims)
        kernel = _fp8_tile if config["PARTS"] == 1 else _fp8_parts
        kernel[programs(tokens, outputs, config)](
            x, weight, scale, out, tokens, x.stride(0), outputs, inputs, FP8_BLOCK, GROUP, **config
        )
    return out


@portable(linear_quantised.linear_nvfp4)
def linear_nvfp4(
    x: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor, *, out: Tensor | None = None
) -> Tensor:
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device) if out is None else out
    if out.numel():
        dims = {"tokens": token_bucket(tokens), "out": outputs, "in": inputs, "bytes": x.element_size()}
        config = NVFP4.pick(x.device, **dims)
        kernel = _nvfp4_tile if config["PARTS"] == 1 else _nvfp4_parts
        words = weight.view(torch.int32)
        kernel[programs(tokens, outputs, config)](
            x, words, scale, global_scale, out, tokens, x.stride(0), outputs, inputs, NVFP4_GROUP, GROUP, WAY[0],
            **config,
        )  # fmt: skip
    return out
