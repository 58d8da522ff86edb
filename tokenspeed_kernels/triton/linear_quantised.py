"""Dense projections with quantised weights, widened as they are multiplied, in tiles or in parts as in `linear`.

FP8: a step of the product stays within one block of 128 inputs. Where the sums of a program are few, block scales are
factors of a step's sums; where they are many, weights are scaled and rounded to the dtype of x before the product.

NVFP4: the two inputs of a byte are multiplied apart, even ones and odd ones, so that no bits of two bytes ever trade
places. Eight codes are a word, of which masks and shifts make twice four float8 numbers. A code times the scale of its
group has six significant bits: it is exact in every dtype of x.
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
    left: tl.constexpr = BLOCK_N >= 16  # of 8 rows only the right operand may be
    b_sum = tl.zeros([PARTS, BLOCK_N, BLOCK_M] if left else [PARTS, BLOCK_M, BLOCK_N], tl.float32)
    for i_step in range((IN + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K)):
        b_x = load_parts(x_ptr + o_m * x_stride, o_m < tokens, i_step, IN, BLOCK_K, PARTS)  # [P, BM, BK]
        b_w = load_parts(w_ptr + o_n * IN, o_n < OUT, i_step, IN, BLOCK_K, PARTS)  # [P, BN, BK]
        i_block = ((i_step * PARTS + tl.arange(0, PARTS)) * BLOCK_K // SCALE_BLOCK)[:, None]
        m_scale = (o_n < OUT)[None, :] & (i_block < in_blocks)
        p_scale = scale_ptr + (o_n // SCALE_BLOCK * in_blocks)[None, :] + i_block
        b_scale = tl.load(p_scale, mask=m_scale, other=0.0).to(tl.float32)  # [P, BN]
        b_w = b_w.to(tl.float16).to(b_x.dtype)  # over float16 is the fast way
        if left:
            b_sum += tl.dot(b_w, tl.permute(b_x, (0, 2, 1)), input_precision="ieee") * b_scale[:, :, None]
        else:
            b_sum += tl.dot(b_x, tl.permute(b_w, (0, 2, 1)), input_precision="ieee") * b_scale[:, None, :]
    b_sum = tl.sum(b_sum, 0)
    store_tile(tl.trans(b_sum) if left else b_sum, o_ptr, o_m, o_n, tokens, OUT)


@triton.jit
def _byte(b_word, INDEX: tl.constexpr):
    return ((b_word >> (8 * INDEX)) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _scaled(b_word, b_scale, GROUPED: tl.constexpr, FLAT: tl.constexpr, DTYPE: tl.constexpr):
    """Words of four float8 bytes times a scale of each eight bytes, [..., groups, 8] made [..., 8 * groups]."""
    b_first, b_second = tl.join(_byte(b_word, 0), _byte(b_word, 2)), tl.join(_byte(b_word, 1), _byte(b_word, 3))
    b_code = tl.reshape(tl.join(b_first, b_second), GROUPED).to(tl.float16)
    return tl.reshape(b_code * tl.expand_dims(b_scale, -1), FLAT).to(DTYPE)


@triton.jit
def _even_and_odd(b_word, b_scale, GROUPED: tl.constexpr, FLAT: tl.constexpr, DTYPE: tl.constexpr):
    """Codes times scales of words of eight codes: those of even inputs, and those of odd ones."""
    # Sign, exponent and mantissa of a code, put where a float8 has them, make 1/64 of its value.
    b_scale = b_scale.to(tl.float16) * 64.0
    b_even = (b_word & 0x07070707) << 2 | (b_word & 0x08080808) << 4
    b_odd = (b_word >> 2) & 0x1C1C1C1C | b_word & -0x7F7F7F80
    return _scaled(b_even, b_scale, GROUPED, FLAT, DTYPE), _scaled(b_odd, b_scale, GROUPED, FLAT, DTYPE)


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
        b_x_even, b_x_odd = tl.split(tl.reshape(b_x, [BLOCK_M, BLOCK_K // 2, 2]))
        b_even, b_odd = _even_and_odd(
            b_word, b_scale, [BLOCK_N, BLOCK_K // SCALE_GROUP, SCALE_GROUP // 2], [BLOCK_N, BLOCK_K // 2], b_x.dtype
        )
        b_sum = tl.dot(b_x_even, tl.trans(b_even), b_sum, input_precision="ieee")
        b_sum = tl.dot(b_x_odd, tl.trans(b_odd), b_sum, input_precision="ieee")
    store_tile(b_sum * tl.load(global_scale_ptr), o_ptr, o_m, o_n, tokens, OUT)


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
        b_x_even, b_x_odd = tl.split(tl.reshape(b_x, [PARTS, BLOCK_M, BLOCK_K // 2, 2]))
        b_even, b_odd = _even_and_odd(
            b_word,
            b_scale,
            [PARTS, BLOCK_N, BLOCK_K // SCALE_GROUP, SCALE_GROUP // 2],
            [PARTS, BLOCK_N, BLOCK_K // 2],
            b_x.dtype,
        )
        b_sum = tl.dot(b_even, tl.permute(b_x_even, (0, 2, 1)), b_sum, input_precision="ieee")
        b_sum = tl.dot(b_odd, tl.permute(b_x_odd, (0, 2, 1)), b_sum, input_precision="ieee")
    store_tile(tl.trans(tl.sum(b_sum, 0)) * tl.load(global_scale_ptr), o_ptr, o_m, o_n, tokens, OUT)


def _space(dims: Dims) -> Iterator[Config]:
    tokens = dims["tokens"]
    if dims["bytes"] == 4:
        yield parts(16, 16, 32, 8, 8, 2)
        yield tiles(32, 32, 32, 4, 2)
    elif tokens <= 16:
        yield parts(tokens, 16, 128, 2, 2, 4)
        yield parts(tokens, 16, 128, 4, 4, 4)
        yield parts(tokens, 16, 128, 8, 8, 3)
        yield parts(tokens, 32, 128, 4, 4, 3)
        yield tiles(16, 32, 128, 4, 4)
        yield tiles(16, 32, 128, 4, 5)
    elif tokens <= 64:
        yield parts(32, 16, 128, 4, 4, 3)
        yield parts(32, 32, 128, 2, 4, 3)
        yield tiles(64, 32, 128, 4, 4)
        yield tiles(64, 64, 128, 4, 3)
    else:
        yield tiles(128, 128, 64, 8, 3)
        yield tiles(128, 128, 64, 8, 4)
        yield tiles(256, 128, 64, 8, 3)
        yield tiles(256, 128, 64, 8, 4)


def _fp8_space(dims: Dims) -> Iterator[Config]:
    yield from (config for config in _space(dims) if not (dims["float16"] and config["BLOCK_M"] > 128))
    if dims["tokens"] <= 16 and dims["bytes"] == 2:
        yield parts(16, 8, 128, 8, 8, 3)
        if dims["tokens"] <= 8:
            yield parts(8, 16, 128, 8, 8, 6)


def _nvfp4_space(dims: Dims) -> Iterator[Config]:
    yield from _space(dims)
    if dims["tokens"] <= 16 and dims["bytes"] == 2:
        yield parts(dims["tokens"], 16, 256, 4, 4, 3)
        yield parts(dims["tokens"], 16, 256, 2, 2, 4)


def _default(platform: Platform, dims: Dims) -> Config:
    """What the formats have in common."""
    amd, tokens, narrow = platform.vendor == "amd", dims["tokens"], dims["out"] <= 8192
    if dims["bytes"] == 4:
        return parts(16, 16, 32, 8, 8, 2) if tokens <= 64 and narrow else tiles(32, 32, 32, 4, 2)
    if amd:
        few = parts(16, 16, 128, 4, 4, 2) if narrow else tiles(16, 32, 128, 4, 2)
        return few if tokens <= 16 else tiles(64, 32, 128, 4, 2) if tokens <= 64 else tiles(128, 128, 64, 8, 2)
    return parts(32, 16, 128, 4, 4, 3) if tokens <= 64 and narrow else tiles(256, 128, 64, 8, 3)


def _fp8_default(platform: Platform, dims: Dims) -> Config:
    tokens, narrow = dims["tokens"], dims["out"] <= 8192
    if tokens > 64 and dims["float16"]:  # keeps the sums of a step apart
        return tiles(128, 128, 64, 8, 2 if platform.vendor == "amd" else 3)
    if platform.vendor == "amd" or dims["bytes"] == 4 or tokens > 64:
        return _default(platform, dims)
    if tokens <= 8:
        return parts(8, 16, 128, 8, 8, 3) if narrow else parts(8, 16, 128, 2, 2, 4)
    if tokens <= 16:
        return parts(16, 8, 128, 8, 8, 3) if narrow else tiles(16, 32, 128, 4, 4)
    return _default(platform, dims) if narrow else tiles(64, 64, 128, 4, 3)


def _nvfp4_default(platform: Platform, dims: Dims) -> Config:
    tokens = dims["tokens"]
    if platform.vendor == "nvidia" and platform.arch != "sm_90a" and dims["bytes"] == 2 and tokens > 64:
        return tiles(128, 128, 64, 8, 4)  # larger: Triton 3.6 has the sums twice in tensor memory
    if platform.vendor == "amd" or dims["bytes"] == 4 or tokens > 64:
        return _default(platform, dims)
    return parts(tokens, 16, 256, 4, 4, 3) if tokens <= 16 else tiles(64, 32, 128, 4, 4)


FP8 = Tunable("linear_fp8_block", _fp8_space, _fp8_default)
NVFP4 = Tunable("linear_nvfp4", _nvfp4_space, _nvfp4_default)


@portable(linear_quantised.linear_fp8_block)
def linear_fp8_block(x: Tensor, weight: Tensor, scale: Tensor, *, out: Tensor | None = None) -> Tensor:
    tokens, (outputs, inputs) = x.shape[0], weight.shape
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device) if out is None else out
    if out.numel():
        dims = {"tokens": token_bucket(tokens), "out": outputs, "in": inputs, "bytes": x.element_size()}
        config = FP8.pick(x.device, **dims, float16=int(x.dtype == torch.float16))
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
            x, words, scale, global_scale, out, tokens, x.stride(0), outputs, inputs, NVFP4_GROUP, GROUP,
            **config,
        )  # fmt: skip
    return out
