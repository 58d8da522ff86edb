"""The portable public API: one module an op family, contract and reference side by side.

What holds of every op: tensors are contiguous, or where the op says "strided" at least in their last dim; they lie on
one device and do not require grad. A call that does not fit raises `ArgumentError`, and one that no kernel can serve
`NoKernelError`, before anything is written. What index tensors hold is checked only where that costs no sync: on the
CPU up to 64 elements, or always with `TOKENSPEED_KERNELS_DEBUG=1`; it then raises `ContentError`, an `ArgumentError`.
Elsewhere the caller vouches for it.
"""

import gc

# Declaring ops makes many small objects, all of which live on. A collection in the midst of it, which walks everything
# that torch has made before, would cost a third of the import and find nothing.
_collects = gc.isenabled()
gc.disable()

from tokenspeed_kernels.attention import kv_cache_write, paged_attention
from tokenspeed_kernels.conv import causal_conv_prefill, causal_conv_update
from tokenspeed_kernels.gdn import gated_rms_norm, gdn_decode, gdn_gates, gdn_prefill
from tokenspeed_kernels.gdn_inputs import gdn_inputs_prefill, gdn_inputs_update
from tokenspeed_kernels.gdn_speculative import gdn_fold, gdn_verify, gdn_verify_replay
from tokenspeed_kernels.linear import embedding, linear
from tokenspeed_kernels.linear_quantised import linear_fp8_block, linear_nvfp4
from tokenspeed_kernels.mla import merge_states, mla_cache_write, mla_decode, mla_prefill
from tokenspeed_kernels.mla_forms import mla_absorb_query, mla_cache_read, mla_value_up
from tokenspeed_kernels.moe import moe_experts, moe_route, moe_route_grouped, sigmoid_mul, silu_mul
from tokenspeed_kernels.moe_quantised import moe_experts_fp8_block, moe_experts_nvfp4
from tokenspeed_kernels.ngram import ngram_embed, ngram_hash, ngram_lookup
from tokenspeed_kernels.ngram_block import ngram_gate, ngram_inject
from tokenspeed_kernels.norm import add_rms_norm, grouped_rms_norm, rms_norm
from tokenspeed_kernels.residual import residual_inject, residual_inject_mix, residual_mix
from tokenspeed_kernels.rope import rope
from tokenspeed_kernels.sampling import logprobs, sample
from tokenspeed_kernels.sparse import index_cache_write, index_scores, sparse_attention, topk_blocks
from tokenspeed_kernels.sparse_select import select_blocks
from tokenspeed_registry import trace, use

if _collects:
    gc.enable()

__all__ = [
    "add_rms_norm",
    "causal_conv_prefill",
    "causal_conv_update",
    "embedding",
    "gated_rms_norm",
    "gdn_decode",
    "gdn_fold",
    "gdn_gates",
    "gdn_inputs_prefill",
    "gdn_inputs_update",
    "gdn_prefill",
    "gdn_verify",
    "gdn_verify_replay",
    "grouped_rms_norm",
    "index_cache_write",
    "index_scores",
    "kv_cache_write",
    "linear",
    "linear_fp8_block",
    "linear_nvfp4",
    "logprobs",
    "merge_states",
    "mla_absorb_query",
    "mla_cache_read",
    "mla_cache_write",
    "mla_decode",
    "mla_prefill",
    "mla_value_up",
    "moe_experts",
    "moe_experts_fp8_block",
    "moe_experts_nvfp4",
    "moe_route",
    "moe_route_grouped",
    "ngram_embed",
    "ngram_gate",
    "ngram_hash",
    "ngram_inject",
    "ngram_lookup",
    "paged_attention",
    "residual_inject",
    "residual_inject_mix",
    "residual_mix",
    "rms_norm",
    "rope",
    "sample",
    "select_blocks",
    "sigmoid_mul",
    "silu_mul",
    "sparse_attention",
    "topk_blocks",
    "trace",
    "use",
]
