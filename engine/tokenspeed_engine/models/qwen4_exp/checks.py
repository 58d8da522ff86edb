"""Conditions between the fields of a configuration, each with a message that begins with the field to change."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig

INDEXER_FIELDS = (
    "indexer_n_heads",
    "indexer_kv_heads",
    "indexer_head_dim",
    "indexer_budget",
    "indexer_compress_ratio",
)


def find_problems(config: "Qwen4ExpConfig") -> list[str]:
    """Everything wrong with a configuration whose fields are valid one by one."""
    return [*_layers(config), *_attention(config), *_indexer(config), *_linear_attention(config), *_ngrams(config)]


def _layers(config: "Qwen4ExpConfig") -> Iterator[str]:
    if len(config.layer_types) != config.num_hidden_layers:
        yield f"layer_types: has {len(config.layer_types)} entries, num_hidden_layers is {config.num_hidden_layers}"
    if config.hidden_act not in ("silu", "swish"):
        yield f"hidden_act: must be silu, got {config.hidden_act!r}"
    if config.hc_count <= 1:
        yield f"hc_count: must be greater than 1, got {config.hc_count}"
    if config.num_experts_per_tok > config.num_experts:
        yield f"num_experts_per_tok: {config.num_experts_per_tok} is more than num_experts, {config.num_experts}"
    outside = [token for token in config.eos_token_ids if not 0 <= token < config.vocab_size]
    if outside:
        yield f"eos_token_id: {outside} not in a vocabulary of {config.vocab_size}"


def _attention(config: "Qwen4ExpConfig") -> Iterator[str]:
    if config.num_attention_heads % config.num_key_value_heads:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        yield f"num_attention_heads: {heads} is not a multiple of num_key_value_heads, {kv_heads}"
    if config.attention_bias:
        yield "attention_bias: biases are not supported"
    rope = config.rope_parameters
    if rope.rope_type != "default":
        yield f"rope_parameters.rope_type: must be default, got {rope.rope_type!r}"
    if config.rotary_dim < 2 or config.rotary_dim % 2:
        yield (
            f"rope_parameters.partial_rotary_factor: {rope.partial_rotary_factor} of head_dim {config.head_dim} "
            f"is {config.rotary_dim}, not an even number of dimensions"
        )


def _indexer(config: "Qwen4ExpConfig") -> Iterator[str]:
    missing = [field for field in INDEXER_FIELDS if getattr(config, field) is None]
    if len(missing) == len(INDEXER_FIELDS):
        return
    if missing:
        yield f"{missing[0]}: missing; the indexer needs all of {', '.join(INDEXER_FIELDS)}, or none"
    if config.indexer_kv_heads not in (None, 1):
        yield f"indexer_kv_heads: must be 1, got {config.indexer_kv_heads}"
    budget, ratio = config.indexer_budget, config.indexer_compress_ratio
    if budget is not None and ratio is not None and budget % ratio:
        yield f"indexer_budget: {budget} is not a multiple of indexer_compress_ratio, {ratio}"
    if config.indexer_head_dim is not None and config.rotary_dim > config.indexer_head_dim:
        yield f"indexer_head_dim: {config.indexer_head_dim} is less than the {config.rotary_dim} rotary dimensions"


def _linear_attention(config: "Qwen4ExpConfig") -> Iterator[str]:
    if config.linear_num_value_heads % config.linear_num_key_heads:
        heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
        yield f"linear_num_value_heads: {heads} is not a multiple of linear_num_key_heads, {key_heads}"
    if config.output_gate not in ("sigmoid", "silu"):
        field = "output_gate_type" if config.output_gate_type else "hidden_act"
        yield f"{field}: the output gate must be sigmoid or silu, got {config.output_gate!r}"
    if config.mamba_ssm_dtype != "float32":
        yield f"mamba_ssm_dtype: recurrent states are float32, got {config.mamba_ssm_dtype!r}"


def _ngrams(config: "Qwen4ExpConfig") -> Iterator[str]:
    if not config.ple_layer_ids:
        return
    if config.ngram_size < 2:
        yield f"ngram_size: must be at least 2, got {config.ngram_size}"
    elif config.ple_embed_dim % config.ngram_heads:
        yield f"ple_embed_dim: {config.ple_embed_dim} is not a multiple of the {config.ngram_heads} n-gram heads"
    if not config.eos_token_ids:
        yield "eos_token_id: missing; n-grams are cut at it"
    outside = [layer for layer in config.ple_layer_ids if not 1 <= layer <= config.num_hidden_layers]
    if outside:
        yield f"ple_layer_ids: {outside} not in 1 to {config.num_hidden_layers}"
        return
    kinds = config.layer_types
    full = [layer for layer in config.ple_layer_ids if layer <= len(kinds) and kinds[layer - 1] != "linear_attention"]
    if full:
        yield f"ple_layer_ids: {full} are not linear-attention layers"
