"""Experts with weights that stay quantised in memory; activations and sums do not.

The formats are those of `tokenspeed_kernels.quantise`, for each expert's gate, up and down projection as if it were a
matrix of its own. A kernel may widen a weight element by element as it multiplies, to the dtype of `x` and no further;
it never rounds `x`.

`weights`, `ids`: the weight of each chosen expert and its id, as routing returns them, in any order; an expert may
occur twice. `first_expert`: the id of the first expert in the matrices, where those are a rank's share of all. Any
other id (-1 for padding, or an expert that lives elsewhere) contributes nothing: neither its weight nor, for a token
without any expert here, its row of `x` is read, and such a token's output is zero.
"""

import torch
from jaxtyping import BFloat16, Float, Float8e4m3fn, Float32, Int32, UInt8
from torch import Tensor

from tokenspeed_kernels.linear_quantised import fp8_block_values, nvfp4_values
from tokenspeed_kernels.moe import experts_cost, sum_of_experts
from tokenspeed_registry import Signature, op, rounded_sum


def _tolerance(s: Signature, role: str) -> float:
    # Two projections in a row and the sum over experts; both matrices, gate and up, their product, down and the sum are
    # rounded.
    return rounded_sum(s.dtype(role), terms=s["hidden"] + s["inter"] + s["top_k"], roundings=6)


@op(
    family="moe",
    cases="tokenspeed_kernels.cases.moe_quantised:moe_experts_fp8_block",
    outputs=("y",),
    output_dtypes={"y": "x"},
    static=("hidden", "inter", "experts", "top_k", "inter_blocks", "hidden_blocks"),
    strided=("x",),
    same_dtype=(("gate_up_scale", "down_scale"),),
    where=("inter_blocks == (inter + 127) // 128", "hidden_blocks == (hidden + 127) // 128", "first_expert >= 0"),
    cost=lambda s: experts_cost(s, "gate_up", "gate_up_scale", "down", "down_scale"),
    tolerance=_tolerance,
)
def moe_experts_fp8_block(
    x: Float[Tensor, "tokens hidden"],
    gate_up: Float8e4m3fn[Tensor, "experts 2 inter hidden"],
    gate_up_scale: (
        Float32[Tensor, "experts 2 inter_blocks hidden_blocks"]
        | BFloat16[Tensor, "experts 2 inter_blocks hidden_blocks"]
    ),
    down: Float8e4m3fn[Tensor, "experts hidden inter"],
    down_scale: (
        Float32[Tensor, "experts hidden_blocks inter_blocks"] | BFloat16[Tensor, "experts hidden_blocks inter_blocks"]
    ),
    weights: Float32[Tensor, "tokens top_k"],
    ids: Int32[Tensor, "tokens top_k"],
    *,
    first_expert: int = 0,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "tokens hidden"]:
    """`moe_experts` with block-scaled FP8 weights: Σ w · down_e(silu(gate_e x) · up_e x).

    `x`: a row a token; may be strided between tokens. `gate_up`: of each expert the gate, then the up projection.
    `down`: of each expert the projection back to `hidden`. `gate_up_scale`, `down_scale`: by what to multiply each
    block of 128 · 128 weights (`weight_scale_inv` in checkpoints); the last blocks of rows and of columns may be cut. A
    rank's share of `inter` must begin where a block does, and a quarter of 640 does not: share out such experts whole.

    Sums are float32; what passes from one projection to the next may be rounded to x's dtype, as the result is. Raises
    `ArgumentError` for arguments that do not fit, also for a negative `first_expert`.

    Source: as `moe_experts`, with the weights of DeepSeek-V3 (arXiv:2412.19437), section 3.3.1.
    """
    experts = []
    for expert in range(gate_up.shape[0]):
        both = [fp8_block_values(gate_up[expert, half], gate_up_scale[expert, half]) for half in (0, 1)]
        experts.append((torch.cat(both), fp8_block_values(down[expert], down_scale[expert])))
    return sum_of_experts(x, weights, ids, first_expert, experts)


@op(
    family="moe",
    cases="tokenspeed_kernels.cases.moe_quantised:moe_experts_nvfp4",
    outputs=("y",),
    output_dtypes={"y": "x"},
    static=("hidden", "inter", "experts", "top_k"),
    strided=("x",),
    where=("hidden % 16 == 0", "inter % 16 == 0", "first_expert >= 0"),
    cost=lambda s: experts_cost(
        s, "gate_up", "gate_up_scale", "gate_up_global_scale", "down", "down_scale", "down_global_scale"
    ),
    tolerance=_tolerance,
)
def moe_experts_nvfp4(
    x: Float[Tensor, "tokens hidden"],
    gate_up: UInt8[Tensor, "experts 2 inter hidden//2"],
    gate_up_scale: Float8e4m3fn[Tensor, "experts 2 inter hidden//16"],
    gate_up_global_scale: Float32[Tensor, "experts 2"],
    down: UInt8[Tensor, "experts hidden inter//2"],
    down_scale: Float8e4m3fn[Tensor, "experts hidden inter//16"],
    down_global_scale: Float32[Tensor, "experts"],
    weights: Float32[Tensor, "tokens top_k"],
    ids: Int32[Tensor, "tokens top_k"],
    *,
    first_expert: int = 0,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "tokens hidden"]:
    """`moe_experts` with NVFP4 weights: Σ w · down_e(silu(gate_e x) · up_e x).

    `x`: a row a token; may be strided between tokens. `gate_up`: of each expert the gate, then the up projection, in
    E2M1 codes two a byte, that of input 2i in the low half. `down`: of each expert the projection back to `hidden`,
    likewise. `gate_up_scale`, `down_scale`: of each 16 inputs of a row (`weight_scale` in checkpoints), in row-major
    order. `gate_up_global_scale`: of each expert that of the gate and that of up (`weight_scale_2`), which most
    checkpoints, but not all, have equal. `down_global_scale`: of each expert that of its down projection.

    Sums are float32; what passes from one projection to the next may be rounded to x's dtype, as the result is. Raises
    `ArgumentError` for arguments that do not fit, also for widths not a multiple of 16 or a negative `first_expert`.

    Source: as `moe_experts`, with the weights of "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149).
    """
    experts = []
    for expert in range(gate_up.shape[0]):
        scales = gate_up_scale[expert], gate_up_global_scale[expert]
        both = [nvfp4_values(gate_up[expert, half], *(scale[half] for scale in scales)) for half in (0, 1)]
        experts.append((torch.cat(both), nvfp4_values(down[expert], down_scale[expert], down_global_scale[expert])))
    return sum_of_experts(x, weights, ids, first_expert, experts)
