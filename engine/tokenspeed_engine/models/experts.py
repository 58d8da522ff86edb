"""The routed experts of a layer, in whatever format their weights came."""

from torch import Tensor

from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_kernels.moe import moe_experts
from tokenspeed_kernels.moe_quantised import moe_experts_fp8_block, moe_experts_nvfp4


class Experts:
    """Matrices of a rank's experts of one layer, from number `first` on; the others add nothing.

    `prefix` ends before gate_up_proj and down_proj.
    """

    def __init__(self, weights: Weights, prefix: str, first: int = 0) -> None:
        self.first = first
        self.gate_up = _matrices(weights, f"{prefix}gate_up_proj")
        self.down = _matrices(weights, f"{prefix}down_proj")
        if len(self.gate_up) != len(self.down):
            raise ValueError(f"{prefix}: gate_up_proj and down_proj come in different formats")

    def __call__(self, u: Tensor, probabilities: Tensor, ids: Tensor) -> Tensor:
        """Weighted sum [T, hidden] of the experts `ids` Int32 [T, k] of u [T, hidden]."""
        first = self.first
        match self.gate_up, self.down:
            case (gate_up,), (down,):
                return moe_experts(u, gate_up, down, probabilities, ids, first_expert=first)
            case (gate_up, gate_up_scale), (down, down_scale):
                return moe_experts_fp8_block(
                    u, gate_up, gate_up_scale, down, down_scale, probabilities, ids, first_expert=first
                )
            case (gate_up, gate_up_scale, gate_up_global), (down, down_scale, down_global):
                return moe_experts_nvfp4(
                    u,
                    gate_up,
                    gate_up_scale,
                    gate_up_global,
                    down,
                    down_scale,
                    down_global,
                    probabilities,
                    ids,
                    first_expert=first,
                )
            case _:
                raise AssertionError("a layer's matrices come in one format")


def _matrices(weights: Weights, name: str) -> tuple[Tensor, ...]:
    """The elements, and the scales where there are any: one tensor, in FP8 two, in NVFP4 three."""
    parts = (name, f"{name}.scale", f"{name}.global_scale")
    return tuple(weights[part] for part in parts if part in weights)
