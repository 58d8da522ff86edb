"""The model's configuration: what transformers reads from it we read too, and what cannot be served is named."""

import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.engine.tiny_deepseek import BASE, PLAIN_ROPE, VARIANTS, YARN, hf_model, tiny_checkpoint
from tokenspeed_engine.checkpoint.errors import ConfigError
from tokenspeed_engine.models.deepseek_v3.config import DeepseekV3Config, RopeParameters, parse_config
from tokenspeed_engine.models.deepseek_v3.rotary import rotary_frequencies
from tokenspeed_engine.models.families import describe_model, read_model

MODEL = {"model_type": "deepseek_v3"}

DEEPSEEK_V3_ROPE: dict[str, Any] = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

KIMI_K2: dict[str, Any] = {
    "model_type": "kimi_k2",
    "vocab_size": 163_840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 262_144,
    "rope_theta": 50_000.0,
    "rope_scaling": DEEPSEEK_V3_ROPE | {"factor": 64.0, "beta_fast": 1.0},
}


def tiny(**fields: Any) -> dict[str, Any]:
    """A small valid configuration with `fields` changed."""
    return MODEL | dict(BASE) | fields


def yarn(**fields: Any) -> dict[str, Any]:
    return tiny(rope_parameters=dict(YARN) | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict(BASE),
        {"rope_theta": 5.0, "rope_scaling": dict(DEEPSEEK_V3_ROPE), "max_position_embeddings": 163_840},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": None, "mscale": 0.0}},
        {"rope_parameters": dict(YARN) | {"rope_theta": 7.0, "attention_factor": 1.25}, "rope_theta": 5.0},
        {"rope_parameters": dict(YARN), "original_max_position_embeddings": 128},
        {"rope_parameters": dict(YARN) | {"beta_fast": 1.0, "truncate": False}},  # a step, no ramp
        {"q_lora_rank": None, "tie_word_embeddings": True, "norm_topk_prob": False, "eos_token_id": [5, 6]},
        {key: value for key, value in KIMI_K2.items() if key != "model_type"},
    ],
)
def test_reads_what_transformers_reads(fields: dict[str, Any]) -> None:
    config = transformers.DeepseekV3Config(**json.loads(json.dumps(fields)))
    theirs, ours = config.to_dict(), parse_config(MODEL | fields)
    only_ours = {"rope_parameters", "num_key_value_heads", "moe_layer_freq", "scoring_func", "topk_method"}
    compared = set(DeepseekV3Config.model_fields) - only_ours
    assert {name: _plain(getattr(ours, name)) for name in compared} == {name: theirs[name] for name in compared}
    rope, parameters = ours.rope_parameters, theirs["rope_parameters"]
    assert (rope.rope_type, rope.rope_theta) == (parameters["rope_type"], parameters["rope_theta"])
    if rope.rope_type == "yarn":
        frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
        assert torch.equal(rotary_frequencies(rope, ours.qk_rope_head_dim), frequencies)
        assert rope.rotary_factor == factor


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("variant", VARIANTS)
def test_rotary_constants_of_saved_folders(variant: str) -> None:
    folder = tiny_checkpoint(variant)
    description, theirs = read_model(folder), hf_model(folder)
    assert description.family == "deepseek_v3"
    config = description.config
    assert isinstance(config, DeepseekV3Config)
    assert config.softmax_scale == pytest.approx(theirs.model.layers[0].self_attn.scaling, rel=1e-12)
    assert config.rope_parameters.rotary_factor == theirs.model.rotary_emb.attention_scaling
    frequencies = rotary_frequencies(config.rope_parameters, config.qk_rope_head_dim)
    assert torch.equal(frequencies, theirs.model.rotary_emb.inv_freq)


def test_constants_of_the_released_models() -> None:
    deepseek = parse_config(MODEL | {"rope_scaling": DEEPSEEK_V3_ROPE, "max_position_embeddings": 163_840})
    assert deepseek.rope_parameters.rotary_factor == 1.0
    assert deepseek.softmax_scale == pytest.approx(192**-0.5 * 1.8738542, rel=1e-6)
    assert (deepseek.cache_width, deepseek.is_dense(2), deepseek.is_dense(3)) == (576, True, False)
    frequencies = rotary_frequencies(deepseek.rope_parameters, 64)
    plain = 10_000.0 ** -(torch.arange(32) / 32)
    # 32 turns in 4096 tokens: pair 10; one turn: pair 23.
    assert torch.allclose(frequencies[:11], plain[:11], rtol=1e-6)
    assert torch.allclose(frequencies[23:], plain[23:] / 40, rtol=1e-6)
    assert torch.allclose(frequencies[15], plain[15] * (8 / 13 + 5 / 13 / 40), rtol=1e-6)
    kimi = describe_model(KIMI_K2)
    assert kimi.family == "deepseek_v3"
    assert isinstance(kimi.config, DeepseekV3Config)
    assert kimi.config.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(64) + 1) ** 2)


def test_factors_of_yarn() -> None:
    """Scale of a key of 40 numbers, and the two factors where both, one, or none of the mscales are given."""
    wide = tiny(qk_nope_head_dim=24, qk_rope_head_dim=16, rope_scaling=DEEPSEEK_V3_ROPE)
    assert parse_config(wide).softmax_scale == pytest.approx(0.29628, abs=5e-6)
    grown = 0.1 * math.log(8) + 1

    def factors(**fields: Any) -> tuple[float, float]:
        rope = parse_config(yarn(**fields)).rope_parameters
        return rope.rotary_factor, rope.softmax_factor

    assert factors() == pytest.approx((1.0, grown**2))
    assert factors(mscale=0.5) == pytest.approx(((0.05 * math.log(8) + 1) / grown, grown**2))
    assert factors(mscale=None) == pytest.approx((grown, grown**2))
    assert factors(mscale_all_dim=None) == factors(mscale_all_dim=0.0) == pytest.approx((grown, 1.0))
    assert factors(attention_factor=1.5) == pytest.approx((1.5, grown**2))
    assert factors(factor=1.0) == (1.0, 1.0)
    plain = RopeParameters.model_validate(dict(PLAIN_ROPE) | {"factor": 8.0, "mscale_all_dim": 1.0})
    assert (plain.rotary_factor, plain.softmax_factor) == (1.0, 1.0)


BAD: list[tuple[dict[str, Any], str]] = [
    (tiny(hidden_size=0), "hidden_size: Input should be greater than 0, got 0"),
    (tiny(hidden_size="32"), "hidden_size: Input should be a valid integer, got '32'"),
    (tiny(first_k_dense_replace=-1), "first_k_dense_replace: "),
    (tiny(norm_topk_prob=None), "norm_topk_prob: "),
    (tiny(rope_interleave="yes"), "rope_interleave: "),
    (tiny(hidden_act="gelu"), "hidden_act: must be silu, got 'gelu'"),
    (tiny(eos_token_id=97), r"eos_token_id: \[97\] not in a vocabulary of 97"),
    (tiny(attention_bias=True), "attention_bias: biases are not supported"),
    (tiny(num_key_value_heads=2), "num_key_value_heads: latent attention has as many .* 4, got 2"),
    (tiny(qk_rope_head_dim=7), "qk_rope_head_dim: must be even, got 7"),
    (tiny(rope_parameters=3), "rope_parameters: "),
    (tiny(rope_parameters={"rope_type": "llama3"}), "rope_parameters.rope_type: must be default or yarn, got 'llama3'"),
    (tiny(rope_parameters={"partial_rotary_factor": 0.5}), "rope_parameters.partial_rotary_factor: must be 1, got 0.5"),
    (yarn(factor=None), "rope_parameters.factor: missing, yarn needs it"),
    (yarn(factor=-1.0), "rope_parameters.factor: "),
    (yarn(rope_theta=1.0), "rope_parameters.rope_theta: yarn needs more than 1, got 1.0"),
    (tiny(moe_layer_freq=2), "moe_layer_freq: must be 1, got 2"),
    (tiny(scoring_func="softmax"), "scoring_func: must be sigmoid, got 'softmax'"),
    (tiny(topk_method="greedy"), "topk_method: must be noaux_tc, got 'greedy'"),
    (tiny(n_group=3), "n_routed_experts: 8 is not a multiple of n_group, 3"),
    (tiny(n_group=8, num_experts_per_tok=2), "n_group: 8 groups of 8 experts have fewer than 2 each"),
    (tiny(topk_group=5), "topk_group: 5 is more than n_group, 4"),
    (tiny(num_experts_per_tok=5), "num_experts_per_tok: 5 is more than topk_group groups have, 4"),
    (
        tiny(quantization_config={"quant_method": "fp8"}),
        r"quantization_config.weight_block_size: expected \[128, 128\], got None",
    ),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bad_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config.json: {message}"):
        parse_config(fields)


def test_all_bad_fields_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(tiny(attention_bias=True, n_group=3, scoring_func="softmax"))
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "attention_bias",
        "n_routed_experts",
        "scoring_func",
    ]


def test_describing_a_model_loads_no_torch() -> None:
    code = """
import sys
from tokenspeed_engine.models.families import describe_model
describe_model({"model_type": "deepseek_v3", "num_hidden_layers": 4}).weight_plan([])
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
