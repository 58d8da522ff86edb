"""Conditions between the fields of a configuration, each with a message that begins with the field to change."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenspeed_engine.models.deepseek_v3.config import DeepseekV3Config


def find_problems(config: "DeepseekV3Config") -> list[str]:
    """Everything wrong with a configuration whose fields are valid one by one."""
    return [*_whole(config), *_attention(config), *_rope(config), *_experts(config)]


def _whole(config: "DeepseekV3Config") -> Iterator[str]:
    if config.hidden_act not in ("silu", "swish"):
        yield f"hidden_act: must be silu, got {config.hidden_act!r}"
    outside = [token for token in config.eos_token_ids if not 0 <= token < config.vocab_size]
    if outside:
        yield f"eos_token_id: {outside} not in a vocabulary of {config.vocab_size}"


def _attention(config: "DeepseekV3Config") -> Iterator[str]:
    if config.attention_bias:
        yield "attention_bias: biases are not supported"
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if kv_heads not in (None, heads):
        yield f"num_key_value_heads: latent attention has as many as num_attention_heads, {heads}, got {kv_heads}"
    if config.qk_rope_head_dim % 2:
        yield f"qk_rope_head_dim: must be even, got {config.qk_rope_head_dim}"


def _rope(config: "DeepseekV3Config") -> Iterator[str]:
    rope = config.rope_parameters
    if rope.rope_type not in ("default", "yarn"):
        yield f"rope_parameters.rope_type: must be default or yarn, got {rope.rope_type!r}"
    if rope.partial_rotary_factor != 1:
        yield f"rope_parameters.partial_rotary_factor: must be 1, got {rope.partial_rotary_factor}"
    if rope.rope_type == "yarn":
        if rope.factor is None:
            yield "rope_parameters.factor: missing, yarn needs it"
        if rope.rope_theta <= 1:
            yield f"rope_parameters.rope_theta: yarn needs more than 1, got {rope.rope_theta}"


def _experts(config: "DeepseekV3Config") -> Iterator[str]:
    if config.moe_layer_freq != 1:
        yield f"moe_layer_freq: must be 1, got {config.moe_layer_freq}"
    if config.scoring_func != "sigmoid":
        yield f"scoring_func: must be sigmoid, got {config.scoring_func!r}"
    if config.topk_method != "noaux_tc":
        yield f"topk_method: must be noaux_tc, got {config.topk_method!r}"
    experts, groups = config.n_routed_experts, config.n_group
    if experts % groups:
        yield f"n_routed_experts: {experts} is not a multiple of n_group, {groups}"
        return
    if groups > 1 and experts < 2 * groups:
        yield f"n_group: {groups} groups of {experts} experts have fewer than 2 each, by which groups are ranked"
    if config.topk_group > groups:
        yield f"topk_group: {config.topk_group} is more than n_group, {groups}"
    elif config.num_experts_per_tok > config.topk_group * (experts // groups):
        within = config.topk_group * (experts // groups)
        yield f"num_experts_per_tok: {config.num_experts_per_tok} is more than topk_group groups have, {within}"
