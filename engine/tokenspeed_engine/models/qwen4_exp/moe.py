"""Mixture of experts: the likeliest few of many small MLPs, and a shared one with a gate."""

from torch import Tensor

from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_engine.models.experts import Experts
from tokenspeed_engine.models.linear import loaded
from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig
from tokenspeed_engine.parallel.ranks import Ranks
from tokenspeed_kernels.linear import linear
from tokenspeed_kernels.moe import moe_route, sigmoid_mul, silu_mul


class MixtureOfExperts:
    """The second sublayer of every layer, a rank's part. `prefix`: of its weights, such as "layers.0.mlp."."""

    def __init__(self, config: Qwen4ExpConfig, weights: Weights, prefix: str, ranks: Ranks) -> None:
        self.top_k = config.num_experts_per_tok
        self.renormalise = config.norm_topk_prob
        self.router = weights[f"{prefix}gate"]
        self.experts = Experts(weights, f"{prefix}experts.", ranks.part(config.num_experts).start)
        self.shared_gate = weights[f"{prefix}shared_expert_gate"]
        self.shared_gate_up = loaded(weights, f"{prefix}shared_expert.gate_up_proj")
        self.shared_down = loaded(weights, f"{prefix}shared_expert.down_proj")

    def __call__(self, u: Tensor) -> Tensor:
        """[T, hidden] of [T, hidden], to be summed over the ranks."""
        probabilities, experts = moe_route(linear(u, self.router), top_k=self.top_k, renormalise=self.renormalise)
        routed = self.experts(u, probabilities, experts)
        shared = self.shared_down(silu_mul(self.shared_gate_up(u)))
        return routed + sigmoid_mul(shared, linear(u, self.shared_gate))
