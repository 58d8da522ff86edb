"""The checkpoint of `deepseek_v3` as data: every tensor's name, shape and place.

Engine names are the checkpoint's without `model.` and `.weight`.
"""

from collections.abc import Iterator

from tokenspeed_engine.checkpoint.plan import Parameter, TargetDtype, Unserved, WeightPlan
from tokenspeed_engine.models.deepseek_v3.config import DeepseekV3Config
from tokenspeed_engine.models.layouts import expert_matrices, projection, scaled, single
from tokenspeed_engine.parallel.ranks import ALONE, Ranks

ROOT = "model."


def weight_plan(config: DeepseekV3Config, ranks: Ranks = ALONE) -> WeightPlan:
    """What a checkpoint of `config` must and may contain, and what of it the rank holds."""
    return WeightPlan(tuple(_parameters(config, ranks)), (), _unserved(config))


def _unserved(config: DeepseekV3Config) -> tuple[Unserved, ...]:
    first, count = config.num_hidden_layers, config.num_nextn_predict_layers
    prediction_layers = tuple(f"{ROOT}layers.{layer}." for layer in range(first, first + count))
    groups = [
        Unserved("multi-token prediction", lambda name: name.startswith(prediction_layers)),
        Unserved("rotary frequencies, which are computed", lambda name: name.endswith(".rotary_emb.inv_freq")),
    ]
    if config.tie_word_embeddings:
        groups.append(Unserved("output head, tied to the embedding", lambda name: name == "lm_head.weight"))
    return tuple(groups)


def _parameters(config: DeepseekV3Config, ranks: Ranks) -> Iterator[Parameter]:
    hidden = config.hidden_size
    yield _single("embed_tokens", config.vocab_size, hidden)
    yield _single("norm", hidden)
    if not config.tie_word_embeddings:
        head = (config.vocab_size, hidden)
        yield single("lm_head", "lm_head.weight", head, rows=[ranks.part(config.vocab_size)])
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        yield _single(f"{prefix}input_layernorm", hidden)
        yield _single(f"{prefix}post_attention_layernorm", hidden)
        yield from _attention(config, ranks, f"{prefix}self_attn.")
        if config.is_dense(layer):
            yield from _mlp(config, ranks, f"{prefix}mlp.", config.intermediate_size)
        else:
            yield from _moe(config, ranks, f"{prefix}mlp.")


def _attention(config: DeepseekV3Config, ranks: Ranks, prefix: str) -> Iterator[Parameter]:
    """Cut by head; the latents, and what is cached, are the same on all ranks."""
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    q_dim, kv_dim = config.qk_nope_head_dim + config.qk_rope_head_dim, config.qk_nope_head_dim + config.v_head_dim
    own = ranks.part(heads)
    q_rows = scaled(own, q_dim)
    if config.q_lora_rank is None:
        yield _linear(f"{prefix}q_proj", heads * q_dim, hidden, rows=q_rows)
    else:
        yield _linear(f"{prefix}q_a_proj", config.q_lora_rank, hidden)
        yield _single(f"{prefix}q_a_layernorm", config.q_lora_rank)
        yield _linear(f"{prefix}q_b_proj", heads * q_dim, config.q_lora_rank, rows=q_rows)
    yield _linear(f"{prefix}kv_a_proj_with_mqa", config.cache_width, hidden)
    yield _single(f"{prefix}kv_a_layernorm", latent)
    yield _linear(f"{prefix}kv_b_proj", heads * kv_dim, latent, rows=scaled(own, kv_dim))
    yield _linear(f"{prefix}o_proj", hidden, heads * config.v_head_dim, columns=scaled(own, config.v_head_dim))


def _moe(config: DeepseekV3Config, ranks: Ranks, prefix: str) -> Iterator[Parameter]:
    hidden, experts, width = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size
    # Routing is float32 whatever the model's dtype: rounded logits or biases would choose other experts.
    yield _single(f"{prefix}gate", experts, hidden, dtype="float32")
    yield _single(f"{prefix}gate.e_score_correction_bias", experts, suffix="", dtype="float32")
    stem, own = f"{ROOT}{prefix}experts.", ranks.part(experts)
    yield expert_matrices(f"{prefix}experts.gate_up_proj", stem, experts, ("gate", "up"), width, hidden, own)
    yield expert_matrices(f"{prefix}experts.down_proj", stem, experts, ("down",), hidden, width, own)
    yield from _mlp(config, ranks, f"{prefix}shared_experts.", config.n_shared_experts * width)


def _mlp(config: DeepseekV3Config, ranks: Ranks, prefix: str, width: int) -> Iterator[Parameter]:
    """Cut by inner width."""
    hidden, own = config.hidden_size, ranks.part(width)
    yield _linear(f"{prefix}gate_up_proj", width, hidden, f"{prefix}gate_proj", f"{prefix}up_proj", rows=own)
    yield _linear(f"{prefix}down_proj", hidden, width, columns=own)


def _linear(
    name: str,
    out_features: int,
    in_features: int,
    *parts: str,
    rows: range | None = None,
    columns: range | None = None,
) -> Parameter:
    """A projection, or several of one shape stacked: in the model's dtype or in block-scaled FP8."""
    names = [f"{ROOT}{part}" for part in parts or (name,)]
    return projection(name, names, out_features, in_features, rows=rows, columns=columns)


def _single(name: str, *shape: int, suffix: str = ".weight", dtype: TargetDtype = "model") -> Parameter:
    """A parameter that is one tensor on disk, the same on all ranks."""
    return single(name, f"{ROOT}{name}{suffix}", shape, dtype=dtype)
