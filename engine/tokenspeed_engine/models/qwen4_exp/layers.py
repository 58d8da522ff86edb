"""One layer: an n-gram block in some, a token mixer, a mixture of experts, all on the residual streams."""

from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_engine.execution.batch import Settling
from tokenspeed_engine.models.qwen4_exp.attention import Attention
from tokenspeed_engine.models.qwen4_exp.caches import Caches
from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig
from tokenspeed_engine.models.qwen4_exp.gdn import GatedDeltaNet
from tokenspeed_engine.models.qwen4_exp.moe import MixtureOfExperts
from tokenspeed_engine.models.qwen4_exp.ngram import NgramBlock
from tokenspeed_engine.models.qwen4_exp.residual import Mixer, Streams
from tokenspeed_engine.models.qwen4_exp.step import Step
from tokenspeed_engine.parallel.ranks import Ranks

DRAFT_PREFIX = "mtp."
"""Of the draft head's weights."""


class Layer:
    """Layer number `layer`, from 0; the draft head's comes after all others. `config`: of the rank's share."""

    def __init__(self, config: Qwen4ExpConfig, weights: Weights, layer: int, ranks: Ranks) -> None:
        self.ranks = ranks
        drafts = layer == config.num_hidden_layers
        prefix = f"{DRAFT_PREFIX}layers.0." if drafts else f"layers.{layer}."
        index = None if drafts else config.ngram_index(layer)
        self.ngram = None if index is None else NgramBlock(config, weights, layer, index, ranks)
        self.token_mix = Mixer(config, weights, f"{prefix}attn_hyper_connection.")
        self.token_mixer: GatedDeltaNet | Attention = (
            Attention(config, weights, layer, f"{prefix}self_attn.")
            if drafts or config.layer_types[layer] == "full_attention"
            else GatedDeltaNet(config, weights, layer)
        )
        self.expert_mix = Mixer(config, weights, f"{prefix}mlp_hyper_connection.")
        self.experts = MixtureOfExperts(config, weights, f"{prefix}mlp.", ranks)

    def __call__(self, streams: Streams, step: Step, caches: Caches) -> None:
        if self.ngram is not None:
            self.ngram(streams.settled(), step, caches)
        streams.add(self.ranks.sum(self.token_mixer(streams.mix(self.token_mix), step, caches)))
        streams.add(self.ranks.sum(self.experts(streams.mix(self.expert_mix))))

    def settle(self, settling: Settling, caches: Caches) -> None:
        """Brings what the layer keeps by slot into plain form. Attention has nothing to take back: see its caches."""
        if self.ngram is not None:
            self.ngram.settle(settling, caches)
        if isinstance(self.token_mixer, GatedDeltaNet):
            self.token_mixer.settle(settling, caches)
