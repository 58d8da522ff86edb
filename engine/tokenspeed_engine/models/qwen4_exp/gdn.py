"""Linear attention: a gated delta rule behind a short convolution, with a gated norm on its output."""

from typing import Literal, cast

import torch
from torch import Tensor

from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_engine.execution.batch import Settling
from tokenspeed_engine.models.linear import loaded, stacked
from tokenspeed_engine.models.qwen4_exp.caches import Caches, DeltaCache
from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig
from tokenspeed_engine.models.qwen4_exp.conv import ShortConvolution
from tokenspeed_engine.models.qwen4_exp.step import Step
from tokenspeed_kernels.gdn import gated_rms_norm, gdn_decode, gdn_prefill
from tokenspeed_kernels.gdn_inputs import gdn_inputs_prefill, gdn_inputs_update
from tokenspeed_kernels.gdn_speculative import gdn_fold, gdn_verify, gdn_verify_replay


class GatedDeltaNet:
    """The mixer of a linear-attention layer."""

    def __init__(self, config: Qwen4ExpConfig, weights: Weights, layer: int) -> None:
        prefix = f"layers.{layer}.linear_attn."
        self.layer = layer
        self.k_heads, self.v_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.d_k, self.d_v = config.linear_key_head_dim, config.linear_value_head_dim
        self.scale = self.d_k**-0.5
        self.eps = config.rms_norm_eps
        self.output_gate = cast(Literal["sigmoid", "silu"], config.output_gate)
        parts = [f"{prefix}in_proj_{part}" for part in ("qkv", "z", "b", "a")]
        self.in_proj = stacked(weights, parts)
        self.in_widths = [weights[part].shape[0] for part in parts]
        self.qkv_widths = [config.linear_key_dim, config.linear_key_dim, config.linear_value_dim]
        self.conv = ShortConvolution(weights[f"{prefix}conv1d"], dilation=1)
        self.a_log, self.dt_bias = weights[f"{prefix}A_log"], weights[f"{prefix}dt_bias"]
        self.norm = weights[f"{prefix}norm"]
        self.out_proj = loaded(weights, f"{prefix}out_proj")

    def __call__(self, u: Tensor, step: Step, caches: Caches) -> Tensor:
        """u: [T, hidden]. Returns [T, hidden]; the layer's state and history advance in place."""
        cache = caches.delta[self.layer]
        qkv, z, b, a = self.in_proj(u).split_with_sizes(self.in_widths, dim=-1)
        qkv, g, beta = self._inputs(qkv, a, b, cache.conv, step)
        q, k, v = qkv.split_with_sizes(self.qkv_widths, dim=-1)
        tokens = u.shape[0]
        q, k = q.view(tokens, self.k_heads, self.d_k), k.view(tokens, self.k_heads, self.d_k)
        v, z = v.view(tokens, self.v_heads, self.d_v), z.view(tokens, self.v_heads, self.d_v)
        o = self._delta_rule(q, k, v, g, beta, cache, step)
        o = gated_rms_norm(o, z, self.norm, eps=self.eps, activation=self.output_gate)
        return self.out_proj(o.flatten(1))

    def _inputs(self, qkv: Tensor, a: Tensor, b: Tensor, history: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [T, channels] after the short convolution, and the gates [T, v_heads]."""
        y = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
        n = step.decode_tokens
        if n:
            gdn_inputs_update(
                step.by_row(qkv),
                step.by_row(a),
                step.by_row(b),
                self.conv.weight,
                history,
                step.decode_slots,
                self.a_log,
                self.dt_bias,
                dropped=step.decode_dropped,
                out=(step.by_row(y), step.by_row(g), step.by_row(beta)),
            )
        if step.has_prefills:
            gdn_inputs_prefill(
                qkv[n:],
                a[n:],
                b[n:],
                self.conv.weight,
                history,
                step.prefill_slots,
                step.prefill_cu_seqlens,
                step.prefill_fresh,
                self.a_log,
                self.dt_bias,
                out=(y[n:], g[n:], beta[n:]),
            )
        return y, g, beta

    def _delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cache: DeltaCache, step: Step
    ) -> Tensor:
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        n = step.decode_tokens
        if n:
            self._decode(q, k, v, g, beta, o, cache, step)
        if step.has_prefills:
            gdn_prefill(
                q[n:],
                k[n:],
                v[n:],
                g[n:],
                beta[n:],
                cache.state,
                step.prefill_slots,
                step.prefill_cu_seqlens,
                step.prefill_fresh,
                scale=self.scale,
                out=o[n:],
            )
        return o

    def _decode(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, o: Tensor, cache: DeltaCache, step: Step
    ) -> None:
        """The decode rows' part, into `o`; in a form that can be taken back where drafts are run."""
        rollback, n = step.batch.rollback, step.decode_tokens
        if rollback is None:
            gdn_decode(
                q[:n], k[:n], v[:n], g[:n], beta[:n], cache.state, step.decode_slots, scale=self.scale, out=o[:n]
            )
            return
        q, k, v, g, beta, o = (step.by_row(x) for x in (q, k, v, g, beta, o))
        if cache.kept is None:
            gdn_verify(q, k, v, g, beta, cache.state, rollback.initial, rollback.targets, scale=self.scale, out=o)
        else:
            gdn_verify_replay(
                q,
                k,
                v,
                g,
                beta,
                cache.state,
                cache.kept.k,
                cache.kept.v,
                cache.kept.g,
                cache.kept.beta,
                step.decode_slots,
                rollback.kept,
                scale=self.scale,
                out=o,
            )

    def settle(self, settling: Settling, caches: Caches) -> None:
        """Leaves state and history of each slot as after its accepted tokens."""
        cache = caches.delta[self.layer]
        self.conv.settle(cache.conv, settling)
        if cache.kept is None:
            cache.state[settling.slots] = cache.state[settling.initial]
        else:
            kept = cache.kept
            gdn_fold(cache.state, kept.k, kept.v, kept.g, kept.beta, settling.slots, settling.kept)
