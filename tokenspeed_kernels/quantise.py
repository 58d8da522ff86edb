"""Weights to and from the two quantised formats that checkpoints come in: block-scaled FP8 and NVFP4.

A weight is a matrix [out, in], or a stack of them [..., out, in].

FP8: an element is a `float8_e4m3fn`, and each block of 128 · 128 elements has a scale; blocks at the last rows and
columns may be cut. Value = element · scale.

NVFP4: an element is a four-bit E2M1 code (sign, two bits of exponent, one of mantissa), two of them a byte: column 2i
in the low half, 2i+1 in the high. Each 16 columns of a row share a scale in `float8_e4m3fn`, each matrix one in
float32. Value = element · scale · global scale. Scales lie in plain row-major order, as on disk; a kernel that wants
them in the order of its matrix unit is fed by an op that reorders them once, at load.

Sources: DeepSeek-V3 (arXiv:2412.19437), section 3.3, for FP8; "Pretraining Large Language Models with NVFP4"
(arXiv:2509.25149), section 3, for NVFP4.
"""

import itertools

import torch
from torch import Tensor

FP8_BLOCK = 128
NVFP4_GROUP = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the E2M1 codes 0 to 7; codes 8 to 15 are the same, negative."""

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST = torch.finfo(torch.float32).tiny


def to_fp8_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises finite weights [..., out, in] of any float dtype, each block's largest becoming 448.

    Returns the elements, `float8_e4m3fn` [..., out, in], and the scales, float32 [..., ⌈out/128⌉, ⌈in/128⌉].
    """
    rows, columns = weight.shape[-2:]
    padding = (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK)
    padded = torch.nn.functional.pad(weight.float().abs(), padding)
    grid = (padded.shape[-2] // FP8_BLOCK, FP8_BLOCK, padded.shape[-1] // FP8_BLOCK, FP8_BLOCK)
    blocks = padded.reshape(*weight.shape[:-2], *grid)
    scale = (blocks.amax(dim=(-3, -1)) / _FP8_MAX).clamp_min(_SMALLEST)
    return (weight.float() / _spread_blocks(scale, rows, columns)).to(torch.float8_e4m3fn), scale


def from_fp8_block(weight: Tensor, scale: Tensor) -> Tensor:
    """The float32 values [..., out, in] of FP8 elements [..., out, in] and scales [..., ⌈out/128⌉, ⌈in/128⌉]."""
    return weight.float() * _spread_blocks(scale.float(), *weight.shape[-2:])


def to_nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises finite weights [..., out, in] of any float dtype, none of them empty.

    The largest of a matrix becomes 6 · 448 times the global scale, the largest of a group about 6 times its own. An
    element goes to the nearest code, halfway to the even one. A group too small for any scale becomes zeros.

    Raises `ValueError` where `in` is no multiple of 16.

    Returns the packed codes, uint8 [..., out, in/2], the scales, `float8_e4m3fn` [..., out, in/16], and the global
    scales, float32 [...], for a single matrix [1].
    """
    if weight.shape[-1] % NVFP4_GROUP:
        raise ValueError(f"weight: expected a multiple of {NVFP4_GROUP} columns, got shape {tuple(weight.shape)}")
    stack = weight.shape[:-2]
    groups = weight.float().reshape(*weight.shape[:-1], -1, NVFP4_GROUP)
    group_max = groups.abs().amax(dim=-1)
    global_scale = (group_max.amax(dim=(-2, -1)) / (E2M1[-1] * _FP8_MAX)).clamp_min(_SMALLEST)
    scale = (group_max / E2M1[-1] / global_scale[..., None, None]).to(torch.float8_e4m3fn)
    divisor = (scale.float() * global_scale[..., None, None])[..., None]
    codes = _nearest_e2m1(torch.where(divisor > 0, groups / divisor, torch.zeros_like(groups))).flatten(-2)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed, scale, global_scale.reshape(stack or (1,))


def from_nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """The float32 values [..., out, in] of what `to_nvfp4` returns, in its shapes."""
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float32, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    scales = scale.float() * global_scale.reshape(*packed.shape[:-2], 1, 1)
    return table[codes.int()] * scales.repeat_interleave(NVFP4_GROUP, dim=-1)


def _spread_blocks(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Each block's scale at each of its elements, [..., rows, columns]."""
    tall = scale.repeat_interleave(FP8_BLOCK, dim=-2)[..., :rows, :]
    return tall.repeat_interleave(FP8_BLOCK, dim=-1)[..., :columns]


def _nearest_e2m1(x: Tensor) -> Tensor:
    """The codes, uint8, nearest to `x`; beyond ±6 those of ±6."""
    middles = [(low + high) / 2 for low, high in itertools.pairwise(E2M1)]
    after_even, after_odd = (torch.tensor(middles[first::2], dtype=torch.float32, device=x.device) for first in (0, 1))
    # Halfway from an even code to an odd one stays at the even one; from an odd code it goes on to the next, even.
    magnitude = torch.bucketize(x.abs(), after_even) + torch.bucketize(x.abs(), after_odd, right=True)
    return (magnitude + 8 * x.signbit()).to(torch.uint8)
