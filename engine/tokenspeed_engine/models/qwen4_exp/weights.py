"""The checkpoint of `qwen4_exp` as data: every tensor's name, shape and place.

Engine names are the checkpoint's without prefix and `.weight`.
"""

from collections.abc import Collection, Iterator, Sequence

from tokenspeed_engine.checkpoint.plan import (
    FP8_DTYPES,
    Constant,
    Layout,
    Parameter,
    Piece,
    Target,
    TargetDtype,
    Unserved,
    WeightPlan,
)
from tokenspeed_engine.models.layouts import expert_matrices, row_shards, scaled, single, stacked
from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig
from tokenspeed_engine.models.qwen4_exp.ngram_hash import ngram_hash
from tokenspeed_engine.parallel.ranks import ALONE, Ranks

MULTIMODAL_ROOT = "model.language_model."  # the released checkpoint
TEXT_ROOT = "model."  # as the text-only class of transformers saves


def weight_plan(
    config: Qwen4ExpConfig, names: Collection[str], draft_head: bool = False, ranks: Ranks = ALONE
) -> WeightPlan:
    """What a checkpoint of `config` must and may contain, and what of it the rank holds.

    `names`, those on disk, tell which prefix it uses. `draft_head`: whether the layer for multi-token prediction is
    served.
    """
    root = MULTIMODAL_ROOT if any(name.startswith(MULTIMODAL_ROOT) for name in names) else TEXT_ROOT
    constants = [
        constant
        for index, layer_id in enumerate(config.ple_layer_ids)
        for constant in _hash_constants(config, root, layer_id - 1, index)
    ]
    parameters = [*_parameters(config, ranks, root), *(_draft_head(config, ranks) if draft_head else ())]
    return WeightPlan(tuple(parameters), tuple(constants), _unserved(config, root, draft_head))


def _unserved(config: Qwen4ExpConfig, root: str, draft_head: bool) -> tuple[Unserved, ...]:
    mixer_inject = f"{root}hyper_connection_mixer.block_inject_weight.weight"
    groups = [
        Unserved("vision encoder", lambda name: name.startswith("model.visual.")),
        Unserved("scales of activations, which stay as they are", lambda name: name.endswith(".input_scale")),
        Unserved("n-gram hash statistics", lambda name: ".ple." in name and ".hashstats_" in name),
        Unserved("n-gram token lookup", lambda name: ".ple." in name and ".token_lookup" in name),
        Unserved("inject weight of the final mixer, which has no block", lambda name: name == mixer_inject),
    ]
    if not draft_head:
        groups.append(Unserved("multi-token prediction", lambda name: name.startswith("mtp.")))
    if config.tie_word_embeddings:
        groups.append(Unserved("output head, tied to the embedding", lambda name: name == "lm_head.weight"))
    return tuple(groups)


def _parameters(config: Qwen4ExpConfig, ranks: Ranks, root: str) -> Iterator[Parameter]:
    yield _single("embed_tokens", (config.vocab_size, config.hidden_size), root)
    if not config.tie_word_embeddings:
        yield _single("lm_head", (config.vocab_size, config.hidden_size), "", rows=[ranks.part(config.vocab_size)])
    yield from _residual(config, root, "hyper_connection_mixer.", inject=False)
    for layer, kind in enumerate(config.layer_types):
        prefix = f"layers.{layer}."
        yield from _residual(config, root, f"{prefix}attn_hyper_connection.")
        yield from _residual(config, root, f"{prefix}mlp_hyper_connection.")
        mixer = _linear_attention if kind == "linear_attention" else _full_attention
        yield from mixer(config, ranks, root, prefix)
        yield from _moe(config, ranks, root, f"{prefix}mlp.")
        index = config.ngram_index(layer)
        if index is not None:
            yield from _ngram_block(config, ranks, root, f"{prefix}ple.", index)


def _draft_head(config: Qwen4ExpConfig, ranks: Ranks) -> Iterator[Parameter]:
    """One more layer of full attention, and how it takes in tokens and streams."""
    hidden, width, prefix = config.hidden_size, config.stream_width, "mtp.layers.0."
    yield _single("mtp.fc_embedding", (hidden, hidden), "")
    yield _single("mtp.fc_hidden", (hidden, hidden), "")
    yield _single("mtp.pre_fc_norm_embedding", (hidden,), "")
    yield _single("mtp.pre_fc_norm_hidden", (width,), "")
    yield from _residual(config, "", "mtp.hyper_connection_mixer.", inject=False)
    yield from _residual(config, "", f"{prefix}attn_hyper_connection.")
    yield from _residual(config, "", f"{prefix}mlp_hyper_connection.")
    yield from _full_attention(config, ranks, "", prefix)
    yield from _moe(config, ranks, "", f"{prefix}mlp.")


def _single(
    name: str,
    shape: tuple[int, ...],
    root: str,
    *,
    rows: Sequence[range] = (),
    columns: range | None = None,
    on_disk: tuple[int, ...] | None = None,
    suffix: str = ".weight",
    dtype: TargetDtype = "model",
) -> Parameter:
    """A parameter that is one tensor on disk; see `layouts.single`."""
    source = f"{root}{name}{suffix}"
    return single(name, source, shape, rows=rows, columns=columns, on_disk=on_disk, dtype=dtype)


def _residual(config: Qwen4ExpConfig, root: str, prefix: str, inject: bool = True) -> Iterator[Parameter]:
    width = config.stream_width
    yield _single(f"{prefix}hc_norm", (width,), root)
    yield _single(f"{prefix}input_mix_weight_down", (config.hc_lowrank, width), root)
    yield _single(f"{prefix}input_mix_weight_up", (width, config.hc_lowrank), root)
    if inject:
        yield _single(f"{prefix}block_inject_weight", (config.hc_count, width), root)


def _linear_attention(config: Qwen4ExpConfig, ranks: Ranks, root: str, layer: str) -> Iterator[Parameter]:
    """Cut by head, those of values with theirs of keys."""
    prefix = f"{layer}linear_attn."
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_dim, config.linear_value_dim
    channels, kernel = 2 * key_dim + value_dim, config.linear_conv_kernel_dim
    keys, values = ranks.part_or_copy(config.linear_num_key_heads), ranks.part(heads)
    own = scaled(values, config.linear_value_head_dim)
    # Queries, keys and values of all heads lie one after the other.
    qkv = [scaled(keys, config.linear_key_head_dim, start) for start in (0, key_dim)]
    qkv.append(scaled(values, config.linear_value_head_dim, 2 * key_dim))
    yield _single(f"{prefix}A_log", (heads,), root, rows=[values], suffix="", dtype="float32")
    yield _single(f"{prefix}dt_bias", (heads,), root, rows=[values], suffix="", dtype="float32")
    yield _single(f"{prefix}conv1d", (channels, kernel), root, rows=qkv, on_disk=(channels, 1, kernel))
    yield _single(f"{prefix}in_proj_qkv", (channels, hidden), root, rows=qkv)
    yield _single(f"{prefix}in_proj_z", (value_dim, hidden), root, rows=[own])
    yield _single(f"{prefix}in_proj_a", (heads, hidden), root, rows=[values])
    yield _single(f"{prefix}in_proj_b", (heads, hidden), root, rows=[values])
    yield _single(f"{prefix}norm", (config.linear_value_head_dim,), root)
    yield _single(f"{prefix}out_proj", (hidden, value_dim), root, columns=own)


def _full_attention(config: Qwen4ExpConfig, ranks: Ranks, root: str, layer: str) -> Iterator[Parameter]:
    """Cut by head; all ranks have the whole indexer, since all heads attend to the blocks that it selects."""
    prefix = f"{layer}self_attn."
    hidden, dim, heads, kv_heads = (
        config.hidden_size,
        config.head_dim,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    own, keys = ranks.part(heads), scaled(ranks.part_or_copy(kv_heads), dim)
    yield _single(f"{prefix}q_proj", (heads * 2 * dim, hidden), root, rows=[scaled(own, 2 * dim)])
    yield _single(f"{prefix}k_proj", (kv_heads * dim, hidden), root, rows=[keys])
    yield _single(f"{prefix}v_proj", (kv_heads * dim, hidden), root, rows=[keys])
    yield _single(f"{prefix}o_proj", (hidden, heads * dim), root, columns=scaled(own, dim))
    yield _single(f"{prefix}q_norm", (dim,), root)
    yield _single(f"{prefix}k_norm", (dim,), root)
    if config.indexer_n_heads is not None and config.indexer_head_dim is not None:
        index_dim = config.indexer_head_dim
        yield _single(f"{prefix}indexer.index_qk_proj", ((config.indexer_n_heads + 1) * index_dim, hidden), root)
        yield _single(f"{prefix}indexer.q_layernorm", (index_dim,), root)
        yield _single(f"{prefix}indexer.k_layernorm", (index_dim,), root)


def _moe(config: Qwen4ExpConfig, ranks: Ranks, root: str, prefix: str) -> Iterator[Parameter]:
    """Experts are dealt out; the shared one is cut by its inner width."""
    hidden, experts, width = config.hidden_size, config.num_experts, config.moe_intermediate_size
    yield _single(f"{prefix}gate", (experts, hidden), root)
    yield _single(f"{prefix}shared_expert_gate", (1, hidden), root)
    shared, shared_width = f"{prefix}shared_expert.", config.shared_expert_intermediate_size
    part = ranks.part(shared_width)
    halves = [f"{root}{shared}{half}_proj.weight" for half in ("gate", "up")]
    yield stacked(f"{shared}gate_up_proj", halves, (shared_width, hidden), part)
    yield _single(f"{shared}down_proj", (hidden, shared_width), root, columns=part)
    stem, own = f"{root}{prefix}experts.", ranks.part(experts)
    yield expert_matrices(f"{prefix}experts.gate_up_proj", stem, experts, ("gate", "up"), width, hidden, own)
    yield expert_matrices(f"{prefix}experts.down_proj", stem, experts, ("down",), hidden, width, own)


def _ngram_block(config: Qwen4ExpConfig, ranks: Ranks, root: str, prefix: str, index: int) -> Iterator[Parameter]:
    width, kernel = config.stream_width, config.ple_conv_kernel_size
    yield _single(f"{prefix}key_proj", (width, config.ple_embed_dim), root)
    yield _single(f"{prefix}value_proj", (config.hidden_size, config.ple_embed_dim), root)
    for norm in ("norm_key", "norm_query", "norm_conv"):
        yield _single(f"{prefix}{norm}", (width,), root)
    yield _single(f"{prefix}conv1d", (width, kernel), root, on_disk=(width, 1, kernel))
    yield _ngram_table(config, ranks, root, f"{prefix}ple_embedding.ngram_embedding", index)


def _ngram_table(config: Qwen4ExpConfig, ranks: Ranks, root: str, name: str, index: int) -> Parameter:
    """The table, on disk cut by rows into shards of equal size, the last one maybe smaller; in FP8 with one scale."""
    rows, columns = ngram_hash(config, index).rows, config.ple_embed_dim // config.ngram_heads
    per_shard = -(-rows // config.split_ngram_parts)
    shards = (
        (f"{root}{name}.shard_{shard}.weight", (min(per_shard, rows - start), columns))
        for shard, start in enumerate(range(0, rows, per_shard))
    )
    own = ranks.part(rows)
    shape, pieces = (len(own), columns), row_shards(shards, own)
    scale = Target(f"{name}.scale", (1,), (Piece(f"{root}{name}.weight_scale", (1,)),), "float32")
    fp8 = Target(name, shape, pieces, "float8_e4m3fn", FP8_DTYPES)
    return Parameter(
        name, (Layout("row shards", (Target(name, shape, pieces),)), Layout("fp8 row shards", (fp8, scale)))
    )


def _hash_constants(config: Qwen4ExpConfig, root: str, layer: int, index: int) -> Iterator[Constant]:
    constants = ngram_hash(config, index)
    prefix = f"{root}layers.{layer}.ple.ple_embedding."
    yield Constant(f"{prefix}layer_multipliers", constants.multipliers)
    yield Constant(f"{prefix}ngram_heads_vocab_sizes", constants.moduli)
    yield Constant(f"{prefix}ngram_heads_offsets", constants.offsets)
