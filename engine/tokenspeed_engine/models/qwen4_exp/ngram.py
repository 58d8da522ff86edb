"""The n-gram block: embeddings of the last few tokens, injected into the residual streams that ask for them."""

import torch
from torch import Tensor

from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_engine.execution.batch import Batch, Settling
from tokenspeed_engine.models.linear import loaded
from tokenspeed_engine.models.qwen4_exp.caches import Caches
from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig
from tokenspeed_engine.models.qwen4_exp.conv import ShortConvolution
from tokenspeed_engine.models.qwen4_exp.ngram_hash import ngram_hash
from tokenspeed_engine.models.qwen4_exp.step import Step
from tokenspeed_engine.parallel.ranks import Ranks
from tokenspeed_kernels.ngram import ngram_embed
from tokenspeed_kernels.ngram_block import ngram_gate, ngram_inject


class NgramBlock:
    """The n-gram block of layer `layer`, the `index`-th that the model has."""

    def __init__(self, config: Qwen4ExpConfig, weights: Weights, layer: int, index: int, ranks: Ranks) -> None:
        prefix = f"layers.{layer}.ple."
        self.layer = layer
        self.ranks = ranks
        self.eps = config.rms_norm_eps
        self.eos = config.hash_eos_token_id
        self.width = config.ple_embed_dim
        table = f"{prefix}ple_embedding.ngram_embedding"
        self.table, self.scale = weights[table], weights.tensors.get(f"{table}.scale")
        constants = ngram_hash(config, index)
        self.first_row = ranks.part(constants.rows).start if ranks.size > 1 else None
        self.multipliers, self.moduli, self.offsets = (
            torch.tensor(values, dtype=torch.int64, device=weights["embed_tokens"].device)
            for values in (constants.multipliers, constants.moduli, constants.offsets)
        )
        self.key_proj = loaded(weights, f"{prefix}key_proj")
        self.value_proj = loaded(weights, f"{prefix}value_proj")
        shape = (config.hc_count, config.hidden_size)
        self.norm_key = weights[f"{prefix}norm_key"].view(shape)
        self.norm_query = weights[f"{prefix}norm_query"].view(shape)
        self.norm_conv = weights[f"{prefix}norm_conv"].view(shape)
        self.conv = ShortConvolution(weights[f"{prefix}conv1d"], dilation=config.ngram_size)

    def look_up(self, batch: Batch, out: Tensor) -> None:
        """Fills out [T, width] with the embeddings of the batch's n-grams; those of other ranks' rows are zero."""
        ngram_embed(
            batch.ids,
            batch.context,
            batch.cu_seqlens,
            self.multipliers,
            self.moduli,
            self.offsets,
            self.table,
            self.scale,
            eos=self.eos,
            dtype=out.dtype,
            first_row=self.first_row,
            out=out,
        )

    def __call__(self, x: Tensor, step: Step, caches: Caches) -> None:
        """Adds to the streams x [T, streams, hidden] in place; the layer's history advances."""
        assert step.lookups is not None  # a model with such blocks looks up first
        embedded = self.ranks.sum(step.lookups.take(self.layer))
        key = self.key_proj(embedded).view(x.shape)
        value = self.value_proj(embedded)
        gated, conv_input = ngram_gate(x, key, value, self.norm_key, self.norm_query, self.norm_conv, eps=self.eps)
        convolved = self.conv(conv_input.flatten(1), caches.ngram[self.layer], step)
        ngram_inject(x, gated, convolved.view(x.shape))

    def settle(self, settling: Settling, caches: Caches) -> None:
        """Leaves the history of each slot as after its accepted tokens."""
        self.conv.settle(caches.ngram[self.layer], settling)
