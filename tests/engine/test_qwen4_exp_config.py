"""The model's configuration: what transformers reads from it we read too, and what cannot be served is named."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.engine.tiny import BASE, tiny_checkpoint
from tokenspeed_engine.checkpoint.errors import ConfigError
from tokenspeed_engine.models.families import describe_model, read_model
from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig, parse_config

TEXT = {"model_type": "qwen4_exp_text"}


def with_layers(**fields: Any) -> dict[str, Any]:
    """A small valid configuration with `fields` changed."""
    return TEXT | dict(BASE) | fields


@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict(BASE),
        {"num_hidden_layers": 9, "full_attention_interval": 3},
        {"layer_types": ["full_attention", "indexed_attention", "linear_attention"], "num_hidden_layers": 3},
        {"ple_layer_ids": [6, 2, 2], "eos_token_id": [7, 8], "hidden_size": 160, "ple_embed_dim": None},
        {"rope_theta": 5.0, "partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_theta": 7.0}, "rope_theta": 5.0, "partial_rotary_factor": 0.25},
        {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 7.0}},
        {"rope_parameters": {"mrope_section": [11, 11, 10], "mrope_interleaved": True, "rope_type": "default"}},
        {"output_gate_type": "sigmoid", "norm_topk_prob": False, "tie_word_embeddings": True},
    ],
)
def test_reads_what_transformers_reads(fields: dict[str, Any]) -> None:
    theirs = transformers.Qwen4ExpTextConfig(**json.loads(json.dumps(fields))).to_dict()
    ours = parse_config(TEXT | fields)
    # transformers does not know of the draft head, and names kinds of layers its own way.
    other = {"layer_types", "rope_parameters", "mamba_ssm_dtype", "mtp_num_hidden_layers"}
    compared = set(Qwen4ExpConfig.model_fields) - other
    assert {name: _plain(getattr(ours, name)) for name in compared} == {name: theirs[name] for name in compared}
    kinds = [kind.replace("full_attention", "indexed_attention") for kind in ours.layer_types]
    assert kinds == theirs["layer_types"]
    rope = theirs["rope_parameters"]
    assert ours.rope_parameters.rope_theta == rope["rope_theta"]
    assert ours.rope_parameters.partial_rotary_factor == rope.get("partial_rotary_factor", 1.0)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("variant", ["default", "multimodal"])
def test_saved_folders(variant: str) -> None:
    description = read_model(tiny_checkpoint(variant))
    assert description.family == "qwen4_exp"
    config = description.config
    assert isinstance(config, Qwen4ExpConfig)
    assert config.layer_types == tuple(BASE["layer_types"])
    assert config.dtype == "float32"
    assert (config.rotary_dim, config.stream_width, config.ngram_heads) == (8, 128, 4)
    assert [config.ngram_index(layer) for layer in range(5)] == [None, 0, None, None, None]
    assert config.hash_eos_token_id == BASE["eos_token_id"]


def test_layer_type_synonyms() -> None:
    kinds = ["linear_attention", "full_attention", "indexed_attention", "qwen_sparse_attention", "linear_attention"]
    assert parse_config(with_layers(layer_types=kinds, ple_layer_ids=[1])).layer_types == (
        "linear_attention",
        "full_attention",
        "full_attention",
        "full_attention",
        "linear_attention",
    )


def test_ngram_layers_count_from_one_and_in_order() -> None:
    config = parse_config(with_layers(ple_layer_ids=[4, 1, 4]))
    assert config.ple_layer_ids == (1, 4)
    assert [config.ngram_index(layer) for layer in range(5)] == [0, None, None, 1, None]


def test_first_eos_cuts_ngrams() -> None:
    config = parse_config(with_layers(eos_token_id=[9, 3]))
    assert config.hash_eos_token_id == 9
    assert config.eos_token_ids == (9, 3)


@pytest.mark.parametrize(("gate", "expected"), [(None, "silu"), ("swish", "silu"), ("sigmoid", "sigmoid")])
def test_output_gate(gate: str | None, expected: str) -> None:
    assert parse_config(with_layers(output_gate_type=gate)).output_gate == expected


def test_without_an_indexer_attention_is_dense() -> None:
    fields = dict.fromkeys(name for name in BASE if name.startswith("indexer_"))
    assert not parse_config(with_layers(**fields)).has_indexer


BAD: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 0}, "hidden_size: Input should be greater than 0, got 0"),
    ({"hidden_size": "32"}, "hidden_size: Input should be a valid integer, got '32'"),
    ({"moe_intermediate_size": -1}, "moe_intermediate_size: "),
    ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size: "),
    ({"norm_topk_prob": None}, "norm_topk_prob: "),
    ({"layer_types": ["linear_attention"] * 4}, "layer_types: has 4 entries, num_hidden_layers is 5"),
    ({"layer_types": ["linear_attention"] * 4 + ["sliding_attention"]}, "layer_types.4: .*'sliding_attention'"),
    ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval: must be a positive integer"),
    ({"hc_count": 1}, "hc_count: must be greater than 1, got 1"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is more than num_experts, 8"),
    ({"num_experts_per_tok": 0}, "num_experts_per_tok: "),
    ({"num_key_value_heads": 3}, "num_attention_heads: 4 is not a multiple of num_key_value_heads, 3"),
    ({"linear_num_key_heads": 3}, "linear_num_value_heads: 4 is not a multiple of linear_num_key_heads, 3"),
    ({"attention_bias": True}, "attention_bias: biases are not supported"),
    ({"hidden_act": "gelu"}, "hidden_act: must be silu, got 'gelu'"),
    ({"output_gate_type": "tanh"}, "output_gate_type: the output gate must be sigmoid or silu, got 'tanh'"),
    ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype: recurrent states are float32"),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        "rope_parameters.rope_type: must be default, got 'yarn'",
    ),
    ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "rope_parameters.partial_rotary_factor: "),
    (
        {"rope_parameters": {"partial_rotary_factor": 0.2}},
        "rope_parameters.partial_rotary_factor: 0.2 of head_dim 16 is 3",
    ),
    ({"rope_parameters": 3}, "rope_parameters: "),
    ({"indexer_budget": None}, "indexer_budget: missing"),
    ({"indexer_n_heads": 0}, "indexer_n_heads: "),
    ({"indexer_kv_heads": 2}, "indexer_kv_heads: must be 1, got 2"),
    ({"indexer_budget": 18}, "indexer_budget: 18 is not a multiple of indexer_compress_ratio, 4"),
    ({"indexer_head_dim": 6}, "indexer_head_dim: 6 is less than the 8 rotary dimensions"),
    ({"ple_embed_dim": 30}, "ple_embed_dim: 30 is not a multiple of the 4 n-gram heads"),
    ({"ple_layer_ids": [0]}, r"ple_layer_ids: \[0\] not in 1 to 5"),
    ({"ple_layer_ids": [6]}, r"ple_layer_ids: \[6\] not in 1 to 5"),
    ({"ple_layer_ids": [2, 3]}, r"ple_layer_ids: \[3\] are not linear-attention layers"),
    ({"ple_layer_ids": ["2"]}, "ple_layer_ids.0: "),
    ({"ngram_size": 1}, "ngram_size: must be at least 2, got 1"),
    ({"eos_token_id": None}, "eos_token_id: missing"),
    ({"eos_token_id": []}, "eos_token_id: missing"),
    ({"eos_token_id": 97}, r"eos_token_id: \[97\] not in a vocabulary of 97"),
    (
        {"quantization_config": {"quant_method": "fp8"}},
        r"quantization_config.weight_block_size: expected \[128, 128\], got None",
    ),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bad_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config.json: {message}"):
        parse_config(with_layers(**fields))


def test_nested_fields_are_named_by_their_path() -> None:
    text = dict(BASE) | {"hc_count": 1, "head_dim": 0}
    with pytest.raises(ConfigError, match=r"^config.json: text_config.head_dim: "):
        parse_config({"model_type": "qwen4_exp", "text_config": text})
    with pytest.raises(ConfigError, match=r"^config.json: text_config.hc_count: "):
        parse_config({"model_type": "qwen4_exp", "text_config": text | {"head_dim": 16}})
    with pytest.raises(ConfigError, match=r"text_config: missing"):
        parse_config({"model_type": "qwen4_exp"})


def test_all_bad_fields_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(with_layers(hc_count=1, indexer_kv_heads=2, ple_layer_ids=[9]))
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "hc_count",
        "indexer_kv_heads",
        "ple_layer_ids",
    ]


@pytest.mark.parametrize("model_type", ["llama", None, 7])
def test_unknown_model_type(model_type: object) -> None:
    with pytest.raises(
        ConfigError, match=r"model_type: .* is not supported \(supported: .*qwen4_exp, qwen4_exp_text\)"
    ):
        describe_model({"model_type": model_type})


@pytest.mark.parametrize("content", [None, "", "[]", "{"])
def test_unreadable_config(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config.json: (cannot be read|not a JSON object)"):
        read_model(tmp_path)


def test_describing_a_model_loads_no_torch() -> None:
    code = """
import sys
from tokenspeed_engine.checkpoint import header, match
from tokenspeed_engine import tokenizer
from tokenspeed_engine.models.families import describe_model
describe_model({"model_type": "qwen4_exp_text", "num_hidden_layers": 4}).weight_plan([])
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
