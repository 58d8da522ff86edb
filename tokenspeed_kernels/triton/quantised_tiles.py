"""Weights of a tile, as they lie in memory, made 16-bit floats in registers, two at a time.

A 32-bit word holds two pairs of FP8 numbers, or four of NVFP4 codes, that lie 16 bits apart. A pair takes few
operations to become two 16-bit floats, each in its half of a word. What is next to each other then was not so in the
row of weights: the columns of what it is multiplied with are taken apart likewise, by `halves` or `quarters`.

FP8: sign, exponent and mantissa go where a 16-bit float has them, and a multiplication by a power of two, 2^8 (float16)
or 2^120 (bfloat16), puts the exponent's bias right, of numbers below the normal ones too. (The code of NaN is not one.)

NVFP4: two codes become the bits of two 16-bit floats in three operations, 2^14 (float16) or 2^126 (bfloat16) times too
small; the group's scale, times a power of two that keeps the product in range, is exact in those dtypes, and so is its
product with a code. The rest of the power, `nvfp4_rest`, is a factor of the sum.

Tiles are [..., columns], with any number of dimensions before. `dtype` is that of x; where it is float32, weights are
widened to float16 here.
"""

import torch
import triton
import triton.language as tl

from tokenspeed_kernels.triton.device import interpreted, platform_for


def has_ptx(device: torch.device) -> bool:
    """Whether a kernel there may have an instruction of NVIDIA's in it."""
    return platform_for(device).vendor == "nvidia" and not interpreted()


@triton.jit
def halves(b_x):
    """Columns 2c and 2c + 1: what `fp8_pairs` 0 and 1 are multiplied with."""
    return tl.split(tl.reshape(b_x, b_x.shape[:-1] + [b_x.shape[-1] // 2, 2]))  # noqa: RUF005


@triton.jit
def quarters(b_x):
    """Columns 4c, 4c + 1, 4c + 2 and 4c + 3: what `nvfp4_pairs` 0 to 3 are multiplied with."""
    b_even, b_odd = halves(b_x)
    b_x0, b_x2 = halves(b_even)
    b_x1, b_x3 = halves(b_odd)
    return b_x0, b_x1, b_x2, b_x3


@triton.jit
def _floats(b_bits, dtype: tl.constexpr):
    """The 16-bit floats in words [..., W], low one first: [..., 2*W]."""
    b_low = b_bits.to(tl.uint16).to(dtype, bitcast=True)
    b_high = (b_bits >> 16).to(tl.uint16).to(dtype, bitcast=True)
    return tl.reshape(tl.join(b_low, b_high), b_bits.shape[:-1] + [2 * b_bits.shape[-1]])  # noqa: RUF005


@triton.jit
def _twice(b):
    """Each of [..., W] two times: [..., 2*W]. Not joined with itself: that would want both in one thread."""
    b_both = tl.broadcast_to(tl.expand_dims(b, -1), b.shape + [2])  # noqa: RUF005
    return tl.reshape(b_both, b.shape[:-1] + [2 * b.shape[-1]])  # noqa: RUF005


@triton.jit
def _times(b_floats, b_factor, PTX: tl.constexpr):
    """Product of 16-bit floats, two next to each other at a time."""
    if PTX and b_floats.dtype == tl.bfloat16:
        # ptxas makes one multiplication of two as well, but moves each of them to another register before.
        b_product = tl.inline_asm_elementwise(
            "mul.bf16x2 $0, $1, $2;", "=r,r,r", [b_floats, b_factor], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        b_product = b_floats * b_factor
    return b_product


@triton.jit
def fp8_pairs(b_words, PLACE: tl.constexpr, dtype: tl.constexpr):
    """E4M3 numbers PLACE, 0 or 1, and PLACE + 2 of each word [..., W], next to each other: [..., 2*W]."""
    b_moved = b_words << (8 - 8 * PLACE)
    if dtype == tl.bfloat16:
        b_bits = ((b_moved >> 4) & 0x07F007F0) | (b_moved & -0x7FFF8000)
        b_pairs = _floats(b_bits, tl.bfloat16) * tl.full([], 2.0**120, tl.bfloat16)
    else:
        b_bits = ((b_moved >> 1) & 0x3F803F80) | (b_moved & -0x7FFF8000)
        b_pairs = _floats(b_bits, tl.float16) * tl.full([], 2.0**8, tl.float16)
    return b_pairs


@triton.jit
def nvfp4_scales(b_scale, dtype: tl.constexpr):
    """E4M3 scales [..., groups] as `nvfp4_pairs` takes them, of each of a group's two words: [..., 2*groups]."""
    if dtype == tl.bfloat16:
        b_scale = (b_scale.to(tl.float32) * 2.0**118).to(tl.bfloat16)
    else:
        b_scale = (b_scale.to(tl.float32) * 2.0**7).to(tl.float16)
    return _twice(b_scale)


@triton.jit
def nvfp4_pairs(b_words, b_scale, PLACE: tl.constexpr, PTX: tl.constexpr):
    """Codes PLACE, 0 to 3, and PLACE + 4 of each word [..., W], times its scale, next to each other: [..., 2*W]."""
    b_codes = (b_words >> 8 if PLACE >= 2 else b_words) & (0x00F000F0 if PLACE % 2 else 0x000F000F)
    if b_scale.dtype == tl.bfloat16:
        # A code times 2^12 + 2^6 has its sign where the float has it, and its other bits where those are; no carry.
        b_bits = (b_codes * (0x1040 >> 4 * (PLACE % 2))) & -0x7E3F7E40
    else:
        b_bits = ((b_codes << (12 - 4 * (PLACE % 2))) & -0x7FFF8000) | ((b_codes << (9 - 4 * (PLACE % 2))) & 0x0E000E00)
    return _times(_floats(b_bits, b_scale.dtype), _twice(b_scale), PTX)


@triton.jit
def nvfp4_rest(dtype: tl.constexpr):
    """What a sum of products with `nvfp4_pairs` is to be multiplied by, besides the global scale."""
    return 2.0**8 if dtype == tl.bfloat16 else 2.0**7
