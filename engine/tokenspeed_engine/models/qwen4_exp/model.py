"""The text model of `qwen4_exp`, from token ids to logits, over the public ops alone."""

import torch
from torch import Tensor

from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_engine.execution.batch import Batch
from tokenspeed_engine.models.qwen4_exp.caches import Caches
from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig
from tokenspeed_engine.models.qwen4_exp.layers import Layer
from tokenspeed_engine.models.qwen4_exp.residual import Mixer, Streams
from tokenspeed_engine.models.qwen4_exp.step import make_step
from tokenspeed_kernels.linear import embedding, linear


class Qwen4ExpModel:
    """Weights in the shapes in which the ops take them."""

    def __init__(self, config: Qwen4ExpConfig, weights: Weights) -> None:
        self.config = config
        self.embed_tokens = weights["embed_tokens"]
        self.layers = [Layer(config, weights, layer) for layer in range(config.num_hidden_layers)]
        self.final_mix = Mixer(config, weights, "hyper_connection_mixer.", injects=False)
        self.lm_head = self.embed_tokens if config.tie_word_embeddings else weights["lm_head"]

    def forward(self, batch: Batch, caches: Caches) -> Tensor:
        """Logits Float32 [R, vocab] after the batch's R sampled tokens; `caches` advance in place."""
        step = make_step(batch)
        streams = Streams.of_embeddings(embedding(batch.ids, self.embed_tokens), self.config.hc_count)
        for layer in self.layers:
            layer(streams, step, caches)
        if batch.sampled.shape[0] == 0:
            return torch.empty(0, self.config.vocab_size, dtype=torch.float32, device=batch.ids.device)
        return linear(streams.rows(batch.sampled).mix(self.final_mix), self.lm_head).float()
