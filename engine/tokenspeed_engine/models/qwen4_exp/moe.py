"""Mixture of experts: the likeliest few of many small MLPs, and a shared one with a gate."""

from torch import Tensor

from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig
from tokenspeed_kernels.linear import linear
from tokenspeed_kernels.moe import moe_experts, moe_route, sigmoid_mul, silu_mul


class MixtureOfExperts:
    """The second sublayer of every layer."""

    def __init__(self, config: Qwen4ExpConfig, weights: Weights, layer: int) -> None:
        prefix = f"layers.{layer}.mlp."
        self.top_k = config.num_experts_per_tok
        self.renormalise = config.norm_topk_prob
        self.router = weights[f"{prefix}gate"]
        self.gate_up = weights[f"{prefix}experts.gate_up_proj"]
        self.down = weights[f"{prefix}experts.down_proj"]
        self.shared_gate = weights[f"{prefix}shared_expert_gate"]
        self.shared_gate_up = weights[f"{prefix}shared_expert.gate_up_proj"]
        self.shared_down = weights[f"{prefix}shared_expert.down_proj"]

    def __call__(self, u: Tensor) -> Tensor:
        """[T, hidden] of [T, hidden]."""
        probabilities, experts = moe_route(linear(u, self.router), top_k=self.top_k, renormalise=self.renormalise)
        routed = moe_experts(u, self.gate_up, self.down, probabilities, experts)
        shared = linear(silu_mul(linear(u, self.shared_gate_up)), self.shared_down)
        return routed + sigmoid_mul(shared, linear(u, self.shared_gate))
