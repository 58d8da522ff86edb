"""Dense projections with weights that stay quantised in memory; activations and sums do not.

The formats are those of `tokenspeed_kernels.quantise`. A kernel may widen a weight element by element as it multiplies,
to the dtype of `x` and no further; it never rounds `x`.
"""

import torch
from jaxtyping import BFloat16, Float, Float8e4m3fn, Float32, UInt8
from torch import Tensor

from tokenspeed_kernels.quantise import FP8_BLOCK, NVFP4_GROUP
from tokenspeed_registry import Cost, Signature, op, rounded_sum


def _tolerance(s: Signature, role: str) -> float:
    # A dot product over the inputs, whose weights may be rounded to the dtype of x once they are scaled.
    return rounded_sum(s.dtype(role), terms=s["in_features"], roundings=2)


@op(
    family="linear",
    cases="tokenspeed_kernels.cases.linear_quantised:linear_fp8_block",
    outputs=("projected",),
    output_dtypes={"projected": "x"},
    static=("out_features", "in_features", "out_blocks", "in_blocks"),
    strided=("x",),
    where=("out_blocks == (out_features + 127) // 128", "in_blocks == (in_features + 127) // 128"),
    cost=lambda s: Cost(
        flops=2 * s["tokens"] * s.numel("weight"), nbytes=s.nbytes("x", "weight", "scale", "projected")
    ),
    tolerance=_tolerance,
)
def linear_fp8_block(
    x: Float[Tensor, "tokens in_features"],
    weight: Float8e4m3fn[Tensor, "out_features in_features"],
    scale: Float32[Tensor, "out_blocks in_blocks"] | BFloat16[Tensor, "out_blocks in_blocks"],
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "tokens out_features"]:
    """x · weightᵀ with block-scaled FP8 weights, summed in float32.

    `x`: a row a token; may be strided between tokens. `weight`: a row an output feature. `scale`: by what to multiply
    each block of 128 · 128 weights (`weight_scale_inv` in checkpoints); the last blocks of rows and of columns may be
    cut. Blocks begin at row 0 and column 0: a slice of a larger weight must begin where a block of it does.

    Returns the dtype of `x`. Raises `ArgumentError` for arguments that do not fit.

    Source: DeepSeek-V3 (arXiv:2412.19437), section 3.3.1, with activations as they are.
    """
    return x.double() @ fp8_block_values(weight, scale).T


@op(
    family="linear",
    cases="tokenspeed_kernels.cases.linear_quantised:linear_nvfp4",
    outputs=("projected",),
    output_dtypes={"projected": "x"},
    static=("out_features", "in_features"),
    strided=("x",),
    where=("in_features % 16 == 0",),
    cost=lambda s: Cost(
        flops=2 * s["tokens"] * s["in_features"] * s["out_features"],
        nbytes=s.nbytes("x", "weight", "scale", "global_scale", "projected"),
    ),
    tolerance=_tolerance,
)
def linear_nvfp4(
    x: Float[Tensor, "tokens in_features"],
    weight: UInt8[Tensor, "out_features in_features//2"],
    scale: Float8e4m3fn[Tensor, "out_features in_features//16"],
    global_scale: Float32[Tensor, "1"],
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "tokens out_features"]:
    """x · weightᵀ with NVFP4 weights, summed in float32.

    `x`: a row a token; may be strided between tokens. `weight`: a row an output feature, of E2M1 codes two a byte, that
    of input 2i in the low half. `scale`: of each 16 inputs of a row (`weight_scale` in checkpoints), in row-major
    order. `global_scale`: of the whole matrix (`weight_scale_2`): a value is code · scale · global_scale.

    Returns the dtype of `x`. Raises `ArgumentError` for arguments that do not fit, also where 16 does not divide the
    number of inputs.

    Source: "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149), section 3, with activations as they are.
    """
    return x.double() @ nvfp4_values(weight, scale, global_scale[0]).T


def fp8_block_values(weight: Tensor, scale: Tensor) -> Tensor:
    """Reference: the float64 values of an FP8 matrix [out, in] with scales [⌈out/128⌉, ⌈in/128⌉]."""
    block_of_row, block_of_column = (torch.arange(size) // FP8_BLOCK for size in weight.shape)
    return weight.double() * scale.double()[block_of_row][:, block_of_column]


def nvfp4_values(weight: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Reference: the float64 values of an NVFP4 matrix [out, in/2] with scales [out, in/16] and one of its own, []."""
    column = torch.arange(2 * weight.shape[1])
    code = weight[:, column // 2].int() >> (4 * (column % 2))
    sign, exponent, mantissa = 1.0 - 2.0 * (code >> 3 & 1), code >> 1 & 3, (code & 1).double()
    magnitude = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1))
    return sign * magnitude * scale.double()[:, column // NVFP4_GROUP] * global_scale.double()
