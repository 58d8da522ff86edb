"""Experts with weights widened in registers: see `moe_experts`."""

import torch
from torch import Tensor

from tokenspeed_kernels import moe_quantised
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.moe_experts import sum_of_experts
from tokenspeed_kernels.triton.moe_products import Matrices


@portable(moe_quantised.moe_experts_fp8_block)
def moe_experts_fp8_block(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    first_expert: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    experts, _, inter, _ = gate_up.shape
    up, back = _words(gate_up), _words(down)
    matrices = Matrices("fp8_block", experts, inter, up, gate_up_scale, gate_up_scale, back, down_scale, down_scale)
    return sum_of_experts(x, weights, ids, first_expert, matrices, out)


@portable(moe_quantised.moe_experts_nvfp4)
def moe_experts_nvfp4(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_global_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    down_global_scale: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    first_expert: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    experts, _, inter, _ = gate_up.shape
    words, down_words = gate_up.view(torch.int32), down.view(torch.int32)
    matrices = Matrices(
        "nvfp4", experts, inter, words, gate_up_scale, gate_up_global_scale, down_words, down_scale, down_global_scale
    )
    return sum_of_experts(x, weights, ids, first_expert, matrices, out)


def _words(weight: Tensor) -> Tensor:
    """Four numbers a word, where no word straddles rows."""
    return weight if weight.shape[-1] % 4 else weight.view(torch.int32)
