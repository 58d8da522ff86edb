"""One layer: an n-gram block in some, a token mixer, a mixture of experts, all on the residual streams."""

from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_engine.models.qwen4_exp.attention import Attention
from tokenspeed_engine.models.qwen4_exp.caches import Caches
from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig
from tokenspeed_engine.models.qwen4_exp.gdn import GatedDeltaNet
from tokenspeed_engine.models.qwen4_exp.moe import MixtureOfExperts
from tokenspeed_engine.models.qwen4_exp.ngram import NgramBlock
from tokenspeed_engine.models.qwen4_exp.residual import Mixer, Streams
from tokenspeed_engine.models.qwen4_exp.step import Step


class Layer:
    """Layer number `layer`, from 0."""

    def __init__(self, config: Qwen4ExpConfig, weights: Weights, layer: int) -> None:
        index = config.ngram_index(layer)
        self.ngram = None if index is None else NgramBlock(config, weights, layer, index)
        self.token_mix = Mixer(config, weights, f"layers.{layer}.attn_hyper_connection.")
        linear_attention = config.layer_types[layer] == "linear_attention"
        self.token_mixer: GatedDeltaNet | Attention = (
            GatedDeltaNet(config, weights, layer) if linear_attention else Attention(config, weights, layer)
        )
        self.expert_mix = Mixer(config, weights, f"layers.{layer}.mlp_hyper_connection.")
        self.experts = MixtureOfExperts(config, weights, layer)

    def __call__(self, streams: Streams, step: Step, caches: Caches) -> None:
        if self.ngram is not None:
            self.ngram(streams.settled(), step, caches)
        streams.add(self.token_mixer(streams.mix(self.token_mix), step, caches))
        streams.add(self.experts(streams.mix(self.expert_mix)))
