"""The model `deepseek_v3`, from token ids to logits, over the public ops alone."""

from torch import Tensor

from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_engine.execution.batch import Batch, Settling
from tokenspeed_engine.models.deepseek_v3.caches import Caches
from tokenspeed_engine.models.deepseek_v3.config import DeepseekV3Config
from tokenspeed_engine.models.deepseek_v3.layers import Layer, Norm
from tokenspeed_engine.models.deepseek_v3.rotary import Rotary
from tokenspeed_engine.models.deepseek_v3.step import make_step
from tokenspeed_engine.models.families import DraftHead, Forward
from tokenspeed_engine.models.head import OutputHead
from tokenspeed_engine.parallel.ranks import ALONE, Ranks
from tokenspeed_kernels.linear import embedding

PREFIX_ROWS = 4096
"""Cached rows that a step expands at a time: keys and values of 128 heads take 448 MiB in bfloat16."""


class DeepseekV3Model:
    """Weights in the shapes in which the ops take them.

    `config`: of the rank's share. `prefix_rows` bounds what a long prefix takes in memory.
    """

    draft_head: DraftHead | None = None

    def __init__(
        self, config: DeepseekV3Config, weights: Weights, ranks: Ranks = ALONE, prefix_rows: int = PREFIX_ROWS
    ) -> None:
        self.config = config
        self.prefix_rows = prefix_rows
        self.embed_tokens = weights["embed_tokens"]
        rotary = Rotary(config, self.embed_tokens.device)
        self.layers = [Layer(config, weights, layer, rotary, ranks) for layer in range(config.num_hidden_layers)]
        self.norm = Norm(weights["norm"], config.rms_norm_eps)
        self.head = OutputHead(weights, config.vocab_size, config.tie_word_embeddings, ranks)

    def forward(self, batch: Batch, caches: Caches) -> Forward:
        """Logits Float32 [R, vocab] after the batch's R sampled tokens; `caches` advance in place."""
        step = make_step(batch, self.prefix_rows)
        residual = embedding(batch.ids, self.embed_tokens)
        output: Tensor | None = None
        for layer in self.layers:
            output = layer(residual, output, step, caches)
        assert output is not None  # there is at least one layer
        if batch.sampled.shape[0] == 0:
            return Forward(self.head.nothing(), None)
        hidden = self.norm(residual.index_select(0, batch.sampled), output.index_select(0, batch.sampled))
        return Forward(self.head(hidden), None)

    def settle(self, settling: Settling, caches: Caches) -> None:
        """Nothing is kept by slot."""
