"""The second sublayer: one wide MLP in the first layers, a mixture of experts in the others.

Both yield a rank's part of a sum.
"""

import torch
from torch import Tensor

from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_engine.models.deepseek_v3.config import DeepseekV3Config
from tokenspeed_engine.models.experts import Experts
from tokenspeed_engine.models.linear import loaded
from tokenspeed_engine.parallel.ranks import Ranks
from tokenspeed_kernels.linear import linear
from tokenspeed_kernels.moe import moe_route_grouped, silu_mul


class Mlp:
    """down(silu(gate u) · up u)."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self.gate_up = loaded(weights, f"{prefix}gate_up_proj")
        self.down = loaded(weights, f"{prefix}down_proj")

    def __call__(self, u: Tensor) -> Tensor:
        """[T, hidden] of [T, hidden]."""
        return self.down(silu_mul(self.gate_up(u)))


class MixtureOfExperts:
    """A few of many experts, chosen by biased sigmoid scores, plus a shared MLP that every token goes through."""

    def __init__(self, config: DeepseekV3Config, weights: Weights, prefix: str, ranks: Ranks) -> None:
        self.top_k, self.groups, self.top_groups = config.num_experts_per_tok, config.n_group, config.topk_group
        self.renormalise, self.scaling = config.norm_topk_prob, config.routed_scaling_factor
        self.router = weights[f"{prefix}gate"]
        self.bias = weights[f"{prefix}gate.e_score_correction_bias"]
        self.experts = Experts(weights, f"{prefix}experts.", ranks.part(config.n_routed_experts).start)
        self.shared = Mlp(weights, f"{prefix}shared_experts.")

    def __call__(self, u: Tensor) -> Tensor:
        """[T, hidden] of [T, hidden]."""
        scores, experts = moe_route_grouped(
            linear(u, self.router, dtype=torch.float32),
            self.bias,
            top_k=self.top_k,
            groups=self.groups,
            top_groups=self.top_groups,
            renormalise=self.renormalise,
            scaling=self.scaling,
        )
        return self.experts(u, scores, experts) + self.shared(u)
