"""Multi-head latent attention: a token is cached as one latent and one rotated key that all heads share.

Two forms of the same maths. Decodes read each cached row once and are bound by that, so W_K moves to the query and W_V
behind the sum (absorbed). Prefills are bound by arithmetic, so latents become keys and values of every head, which are
narrower than a cached row (expanded).
"""

import torch
from torch import Tensor

from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_engine.models.deepseek_v3.caches import Caches
from tokenspeed_engine.models.deepseek_v3.config import DeepseekV3Config
from tokenspeed_engine.models.deepseek_v3.rotary import Rotary
from tokenspeed_engine.models.deepseek_v3.step import Step
from tokenspeed_engine.models.linear import loaded, stacked
from tokenspeed_kernels.mla import merge_states, mla_cache_write, mla_decode, mla_prefill
from tokenspeed_kernels.mla_forms import mla_absorb_query, mla_cache_read, mla_value_up
from tokenspeed_kernels.norm import rms_norm

LATENT_NORM_EPS = 1e-6
"""That of the norms of both latents, which is no field of the configuration."""


class LatentAttention:
    """The first sublayer of every layer."""

    def __init__(self, config: DeepseekV3Config, weights: Weights, layer: int, rotary: Rotary) -> None:
        prefix = f"layers.{layer}.self_attn."
        self.layer = layer
        self.heads, self.latent = config.num_attention_heads, config.kv_lora_rank
        self.nope, self.rope, self.v_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.scale = config.softmax_scale
        self.rotary = rotary
        low_rank = config.q_lora_rank is not None
        query = f"{prefix}{'q_a_proj' if low_rank else 'q_proj'}"
        self.in_proj = stacked(weights, [query, f"{prefix}kv_a_proj_with_mqa"])
        self.in_widths = [weights[query].shape[0], self.latent, self.rope]
        self.q_up = (weights[f"{prefix}q_a_layernorm"], loaded(weights, f"{prefix}q_b_proj")) if low_rank else None
        self.kv_norm = weights[f"{prefix}kv_a_layernorm"]
        self.kv_up = loaded(weights, f"{prefix}kv_b_proj")
        # Absorbed, W_K and W_V multiply one by one, in no format but the model's own.
        per_head = self.kv_up.dequantised(self.kv_norm.dtype).view(self.heads, self.nope + self.v_dim, self.latent)
        self.w_k, self.w_v = per_head.split_with_sizes([self.nope, self.v_dim], dim=1)
        self.o_proj = loaded(weights, f"{prefix}o_proj")

    def __call__(self, u: Tensor, step: Step, caches: Caches) -> Tensor:
        """u: [T, hidden]. Returns [T, hidden]; the rows of the new tokens go to the layer's pages."""
        batch, cache, decodes = step.batch, caches.latents[self.layer], step.decode_tokens
        q, latent, k_rope = self.in_proj(u).split_with_sizes(self.in_widths, dim=-1)
        if self.q_up is not None:
            norm, up = self.q_up
            q = up(rms_norm(q, norm, eps=LATENT_NORM_EPS, zero_centred=False))
        q_nope, q_rope = q.view(-1, self.heads, self.nope + self.rope).split_with_sizes([self.nope, self.rope], dim=-1)
        latent = rms_norm(latent, self.kv_norm, eps=LATENT_NORM_EPS, zero_centred=False)
        q_rope = self.rotary(q_rope, batch.positions)
        k_rope = self.rotary(k_rope.unsqueeze(1), batch.positions).squeeze(1)
        mla_cache_write(latent, k_rope, batch.slot_mapping, cache)
        attended = []
        if decodes:
            attended.append(self._absorbed(q_nope[:decodes], q_rope[:decodes], step, cache))
        if step.has_prefills:
            q = torch.cat([q_nope[decodes:], q_rope[decodes:]], dim=-1)
            attended.append(self._expanded(q, latent[decodes:], k_rope[decodes:], step, cache))
        return self.o_proj(torch.cat(attended).flatten(1))

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, step: Step, cache: Tensor) -> Tensor:
        """Values [tokens, heads, v_dim] of the decode rows."""
        q = mla_absorb_query(q_nope, q_rope, self.w_k)
        if step.alignment is not None:
            q = q.index_select(0, step.alignment.there)
        latents, _ = mla_decode(
            q.view(step.decodes, step.q_len, *q.shape[1:]),
            cache,
            step.decode_page_table,
            step.decode_seq_lens,
            latent=self.latent,
            scale=self.scale,
        )
        latents = latents.flatten(0, 1)
        if step.alignment is not None:
            latents = latents.index_select(0, step.alignment.back)
        return mla_value_up(latents, self.w_v)

    def _expanded(self, q: Tensor, latent: Tensor, k_rope: Tensor, step: Step, cache: Tensor) -> Tensor:
        """Values [tokens, heads, v_dim] of the prefill rows, over the step's own tokens and then over earlier ones."""
        k, v = self._keys_and_values(latent, k_rope)
        state = mla_prefill(q, k, v, step.cu_seqlens, step.cu_seqlens, scale=self.scale, causal=True)
        for part in step.prefix:
            rows = mla_cache_read(
                cache, step.page_table, part.cu_seqlens, part.first, rows=part.rows, dtype=latent.dtype
            )
            k, v = self._keys_and_values(*rows.split_with_sizes([self.latent, self.rope], dim=-1))
            earlier = mla_prefill(q, k, v, step.cu_seqlens, part.cu_seqlens, scale=self.scale, causal=False)
            state = merge_states(*state, *earlier)
        return state[0]

    def _keys_and_values(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """[N, heads, nope + rope] and [N, heads, v_dim] of N cached rows."""
        kv = self.kv_up(latent).view(-1, self.heads, self.nope + self.v_dim)
        k_nope, v = kv.split_with_sizes([self.nope, self.v_dim], dim=-1)
        return torch.cat([k_nope, k_rope.unsqueeze(1).expand(-1, self.heads, -1)], dim=-1), v
