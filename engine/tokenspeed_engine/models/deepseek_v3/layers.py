"""One layer: latent attention and an MLP or experts, each behind a norm of the residual."""

from torch import Tensor

from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_engine.models.deepseek_v3.attention import LatentAttention
from tokenspeed_engine.models.deepseek_v3.caches import Caches
from tokenspeed_engine.models.deepseek_v3.config import DeepseekV3Config
from tokenspeed_engine.models.deepseek_v3.moe import MixtureOfExperts, Mlp
from tokenspeed_engine.models.deepseek_v3.rotary import Rotary
from tokenspeed_engine.models.deepseek_v3.step import Step
from tokenspeed_engine.parallel.ranks import Ranks
from tokenspeed_kernels.norm import add_rms_norm, rms_norm


class Norm:
    """A norm of the residual, which first gains what the sublayer before it computed."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, residual: Tensor, output: Tensor | None) -> Tensor:
        """residual: [T, hidden], changed in place. output: [T, hidden], or None before the first sublayer."""
        if output is None:
            return rms_norm(residual, self.weight, eps=self.eps, zero_centred=False)
        return add_rms_norm(output, residual, self.weight, eps=self.eps, zero_centred=False)


class Layer:
    """Layer number `layer`, from 0. `config`: of the rank's share."""

    def __init__(self, config: DeepseekV3Config, weights: Weights, layer: int, rotary: Rotary, ranks: Ranks) -> None:
        self.ranks = ranks
        prefix = f"layers.{layer}."
        self.input_norm = Norm(weights[f"{prefix}input_layernorm"], config.rms_norm_eps)
        self.attention = LatentAttention(config, weights, layer, rotary)
        self.post_attention_norm = Norm(weights[f"{prefix}post_attention_layernorm"], config.rms_norm_eps)
        self.mlp: Mlp | MixtureOfExperts = (
            Mlp(weights, f"{prefix}mlp.")
            if config.is_dense(layer)
            else MixtureOfExperts(config, weights, f"{prefix}mlp.", ranks)
        )

    def __call__(self, residual: Tensor, output: Tensor | None, step: Step, caches: Caches) -> Tensor:
        """Takes the output of the layer before, not yet in the residual, and returns its own, likewise."""
        attended = self.ranks.sum(self.attention(self.input_norm(residual, output), step, caches))
        return self.ranks.sum(self.mlp(self.post_attention_norm(residual, attended)))
