"""The text model of `qwen4_exp`, from token ids to logits, over the public ops alone."""

import torch
from torch import Tensor

from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_engine.execution.batch import Batch, Settling
from tokenspeed_engine.models.families import Forward
from tokenspeed_engine.models.head import OutputHead
from tokenspeed_engine.models.qwen4_exp.caches import Caches
from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig
from tokenspeed_engine.models.qwen4_exp.layers import DRAFT_PREFIX, Layer
from tokenspeed_engine.models.qwen4_exp.lookup import Lookups, LookupStream
from tokenspeed_engine.models.qwen4_exp.mtp import DraftHead
from tokenspeed_engine.models.qwen4_exp.residual import Mixer, Streams
from tokenspeed_engine.models.qwen4_exp.step import make_step
from tokenspeed_engine.parallel.ranks import ALONE, Ranks
from tokenspeed_kernels.linear import embedding


class Qwen4ExpModel:
    """Weights in the shapes in which the ops take them. `config`: of the rank's share."""

    def __init__(self, config: Qwen4ExpConfig, weights: Weights, ranks: Ranks = ALONE) -> None:
        self.config = config
        self.embed_tokens = weights["embed_tokens"]
        self.layers = [Layer(config, weights, layer, ranks) for layer in range(config.num_hidden_layers)]
        self.final_mix = Mixer(config, weights, "hyper_connection_mixer.", injects=False)
        self.head = OutputHead(weights, config.vocab_size, config.tie_word_embeddings, ranks)
        self.ngram_blocks = [layer.ngram for layer in self.layers if layer.ngram is not None]
        device = self.embed_tokens.device
        self.lookup_stream = LookupStream(any(block.table.device != device for block in self.ngram_blocks), device)
        self.draft_head: DraftHead | None = None
        if any(name.startswith(DRAFT_PREFIX) for name in weights.tensors):
            self.draft_head = DraftHead(config, weights, self.head, ranks)

    def forward(self, batch: Batch, caches: Caches) -> Forward:
        """Logits Float32 [R, vocab] after the batch's R sampled tokens; `caches` advance in place.

        With a draft head, also the streams [T, streams, hidden] before the final mix.
        """
        step = make_step(batch, self._look_up(batch))
        streams = Streams.of_embeddings(embedding(batch.ids, self.embed_tokens), self.config.hc_count)
        for layer in self.layers:
            layer(streams, step, caches)
        hidden = None if self.draft_head is None else streams.settled()
        return Forward(self._logits(streams.rows(batch.sampled)), hidden)

    def settle(self, settling: Settling, caches: Caches) -> None:
        """Brings the states of slots into plain form, as after their accepted tokens."""
        for layer in self.layers:
            layer.settle(settling, caches)

    def _look_up(self, batch: Batch) -> Lookups | None:
        """Asks for the embeddings of all n-gram blocks."""
        if not self.ngram_blocks:
            return None
        tokens = batch.ids.shape[0]
        dtype, device = self.embed_tokens.dtype, self.embed_tokens.device
        embedded = {
            block.layer: torch.empty(tokens, block.width, dtype=dtype, device=device) for block in self.ngram_blocks
        }

        def look_up() -> None:
            for block in self.ngram_blocks:
                block.look_up(batch, embedded[block.layer])

        return self.lookup_stream.run(embedded, look_up)

    def _logits(self, streams: Streams) -> Tensor:
        return self.head(streams.mix(self.final_mix)) if streams.count else self.head.nothing()
