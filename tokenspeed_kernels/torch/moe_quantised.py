"""Experts with quantised weights in plain torch: the weights of an expert that has tokens are widened for the call."""

from torch import Tensor

from tokenspeed_kernels import moe_quantised
from tokenspeed_kernels.quantise import from_fp8_block, from_nvfp4
from tokenspeed_kernels.torch.linear_quantised import widened
from tokenspeed_kernels.torch.moe import Experts, sum_of_experts
from tokenspeed_registry import copy_into, kernel


# Not to be captured: see `sum_of_experts`.
@kernel(moe_quantised.moe_experts_fp8_block, backend="torch", graph_capturable=False)
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
    count, _, inter, hidden = gate_up.shape
    experts = Experts(
        count,
        inter,
        widened(x, hidden, inter),
        lambda e: from_fp8_block(gate_up[e], gate_up_scale[e]).flatten(0, 1),
        lambda e: from_fp8_block(down[e], down_scale[e]),
    )
    y = sum_of_experts(x, weights, ids, first_expert, experts)
    return y if out is None else copy_into(out, y)


@kernel(moe_quantised.moe_experts_nvfp4, backend="torch", graph_capturable=False)
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
    count, hidden, inter = gate_up.shape[0], down.shape[1], gate_up.shape[2]
    experts = Experts(
        count,
        inter,
        widened(x, hidden, inter),
        lambda e: from_nvfp4(gate_up[e], gate_up_scale[e], gate_up_global_scale[e]).flatten(0, 1),
        lambda e: from_nvfp4(down[e], down_scale[e], down_global_scale[e]),
    )
    y = sum_of_experts(x, weights, ids, first_expert, experts)
    return y if out is None else copy_into(out, y)
