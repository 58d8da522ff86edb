"""Full attention: grouped query heads over paged keys, sparse past the indexer's budget, with a gated output."""

import torch
from torch import Tensor

from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_engine.execution.batch import Batch
from tokenspeed_engine.models.linear import loaded, stacked
from tokenspeed_engine.models.qwen4_exp.caches import AttentionCache, Caches
from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig
from tokenspeed_engine.models.qwen4_exp.indexer import Indexer
from tokenspeed_engine.models.qwen4_exp.step import Step
from tokenspeed_kernels.attention import kv_cache_write, paged_attention
from tokenspeed_kernels.moe import sigmoid_mul
from tokenspeed_kernels.norm import grouped_rms_norm
from tokenspeed_kernels.rope import rope
from tokenspeed_kernels.sparse import sparse_attention


class Attention:
    """The mixer of a full-attention layer: the one whose caches have number `layer`, its weights named `prefix`…."""

    def __init__(self, config: Qwen4ExpConfig, weights: Weights, layer: int, prefix: str) -> None:
        self.layer = layer
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.scale = config.head_dim**-0.5
        self.eps = config.rms_norm_eps
        # On disk each head has its query rows, then its gate rows. Queries beside keys take one norm and one RoPE.
        query, gate = weights[f"{prefix}q_proj"].view(self.heads, 2, self.dim, -1).unbind(1)
        parts = [
            torch.cat([query.flatten(0, 1), weights[f"{prefix}k_proj"]]),
            weights[f"{prefix}v_proj"],
            gate.flatten(0, 1),
            *([weights[f"{prefix}indexer.index_qk_proj"]] if config.has_indexer else []),
        ]
        self.in_proj = stacked(weights, parts)
        self.in_widths = [part.shape[0] for part in parts]
        norms = [(weights[f"{prefix}q_norm"], self.heads), (weights[f"{prefix}k_norm"], self.kv_heads)]
        self.qk_norm = torch.cat([norm.repeat(heads, 1) for norm, heads in norms])
        self.o_proj = loaded(weights, f"{prefix}o_proj")
        self.inv_freq = rotary_frequencies(config, self.qk_norm.device)
        self.indexer = Indexer(config, weights, f"{prefix}indexer.", self.inv_freq) if config.has_indexer else None

    def __call__(self, u: Tensor, step: Step, caches: Caches) -> Tensor:
        """u: [T, hidden]. Returns [T, hidden]; the new keys and values go to the layer's pages."""
        batch, cache = step.batch, caches.attention[self.layer]
        qk, v, gate, *index = self.in_proj(u).split_with_sizes(self.in_widths, dim=-1)
        qk = qk.view(-1, self.heads + self.kv_heads, self.dim)
        qk = grouped_rms_norm(qk, self.qk_norm, eps=self.eps, zero_centred=True)
        q, k = rope(qk, batch.positions, self.inv_freq).split_with_sizes([self.heads, self.kv_heads], dim=1)
        kv_cache_write(k, v.view(k.shape), batch.slot_mapping, cache.k, cache.v)
        blocks = None
        if self.indexer is not None and cache.index is not None:
            blocks = self.indexer(index[0], batch, cache.index)
        attended = self._attend(q, blocks, batch, cache)
        return self.o_proj(sigmoid_mul(attended.flatten(1), gate))

    def _attend(self, q: Tensor, blocks: Tensor | None, batch: Batch, cache: AttentionCache) -> Tensor:
        sequences = batch.sequences
        if blocks is None or self.indexer is None:
            attended, _ = paged_attention(
                q,
                cache.k,
                cache.v,
                sequences.page_table,
                sequences.cu_seqlens,
                sequences.seq_lens,
                scale=self.scale,
                max_q_len=batch.max_q_len,
            )
        else:
            attended, _ = sparse_attention(
                q,
                cache.k,
                cache.v,
                sequences.page_table,
                blocks,
                sequences.cu_seqlens,
                sequences.seq_lens,
                ratio=self.indexer.ratio,
                scale=self.scale,
            )
        return attended


def rotary_frequencies(config: Qwen4ExpConfig, device: torch.device) -> Tensor:
    """Radians a token of each pair of rotary dims, Float32 [rotary_dim / 2] whatever the model's dtype."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=device) / config.rotary_dim
    return 1.0 / config.rope_parameters.rope_theta**exponents
