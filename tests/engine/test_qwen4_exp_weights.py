"""From a checkpoint on disk to the engine's tensors: complete, exact, in every layout, and strict about the rest."""

import functools
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.test_ngram_hash import real_config
from tests.engine.tiny import UNSERVED_NAMES, VARIANTS, tiny_checkpoint
from tokenspeed_engine.checkpoint.errors import CheckpointError
from tokenspeed_engine.checkpoint.load import Weights, load_weights
from tokenspeed_engine.checkpoint.reader import Checkpoint
from tokenspeed_engine.models.families import describe_model, read_model
from tokenspeed_engine.models.qwen4_exp.weights import weight_plan

Tensors = dict[str, torch.Tensor]

PLE = "model.layers.1.ple."


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    description = read_model(folder)
    with Checkpoint.open(folder) as checkpoint:
        return load_weights(checkpoint, description.weight_plan(checkpoint.tensors), torch.device("cpu"), dtype)


def on_disk(folder: Path) -> Tensors:
    """Every tensor of a folder by its name there."""
    return functools.reduce(lambda tensors, file: tensors | load_file(file), folder.glob("*.safetensors"), Tensors())


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_element_on_disk_is_loaded_once(variant: str) -> None:
    folder = tiny_checkpoint(variant)
    stored = {
        name: tensor
        for name, tensor in on_disk(folder).items()
        if tensor.is_floating_point() and name not in UNSERVED_NAMES
    }
    weights = load(folder)
    assert sum(tensor.numel() for tensor in weights.tensors.values()) == sum(t.numel() for t in stored.values())
    loaded = torch.cat([tensor.reshape(-1) for tensor in weights.tensors.values()]).sort().values
    expected = torch.cat([tensor.reshape(-1) for tensor in stored.values()]).sort().values
    assert torch.equal(loaded, expected)


def test_places_of_composed_tensors() -> None:
    folder = tiny_checkpoint("default")
    stored, weights = on_disk(folder), load(folder)
    experts = weights["layers.0.mlp.experts.gate_up_proj"]
    assert experts.shape == (8, 32, 32)
    prefix = "model.layers.0.mlp."
    assert torch.equal(experts[5, :16], stored[f"{prefix}experts.5.gate_proj.weight"])
    assert torch.equal(experts[5, 16:], stored[f"{prefix}experts.5.up_proj.weight"])
    assert torch.equal(weights["layers.0.mlp.experts.down_proj"][7], stored[f"{prefix}experts.7.down_proj.weight"])
    shared = weights["layers.0.mlp.shared_expert.gate_up_proj"]
    assert torch.equal(shared[:24], stored[f"{prefix}shared_expert.gate_proj.weight"])
    assert torch.equal(shared[24:], stored[f"{prefix}shared_expert.up_proj.weight"])
    conv = weights["layers.0.linear_attn.conv1d"]
    assert torch.equal(conv, stored["model.layers.0.linear_attn.conv1d.weight"][:, 0])
    table = weights["layers.1.ple.ple_embedding.ngram_embedding"]
    assert table.shape == (240, 8)
    for shard in (2, 10):
        rows = table[22 * shard : 22 * (shard + 1)]
        assert torch.equal(rows, stored[f"{PLE}ple_embedding.ngram_embedding.shard_{shard}.weight"])


def test_both_layouts_load_the_same(tmp_path: Path) -> None:
    """The released layout, stored again as transformers' text class does, loads to the same tensors."""
    folder = tiny_checkpoint("multimodal")
    fused = load(folder)
    text: Tensors = {}
    for name, tensor in on_disk(folder).items():
        if name in UNSERVED_NAMES:
            continue
        name = name.replace("language_model.", "")
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(tensor.view(tensor.shape[0], 2, -1, tensor.shape[2])):
                text[name.replace("gate_up_proj", f"{expert}.gate_proj.weight")] = gate.clone()
                text[name.replace("gate_up_proj", f"{expert}.up_proj.weight")] = up.clone()
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                text[name.replace("down_proj", f"{expert}.down_proj.weight")] = down.clone()
        else:
            text[name] = tensor
    save_file(text, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    apart = load(tmp_path)
    assert fused.tensors.keys() == apart.tensors.keys()
    for name, tensor in fused.tensors.items():
        assert torch.equal(tensor, apart[name]), name
    name = "layers.3.mlp.experts.gate_up_proj"
    assert (fused.layouts[name], apart.layouts[name]) == ("fused", "per expert")


def test_bfloat16_keeps_the_decay_in_float32() -> None:
    folder = tiny_checkpoint("default")
    exact, weights = load(folder), load(folder, torch.bfloat16)
    kept = {name for name, tensor in weights.tensors.items() if tensor.dtype == torch.float32}
    assert kept == {f"layers.{layer}.linear_attn.{name}" for layer in (0, 1, 3) for name in ("A_log", "dt_bias")}
    for name, tensor in weights.tensors.items():
        assert torch.equal(tensor, exact[name] if name in kept else exact[name].bfloat16()), name


def test_unserved_parts_are_logged_by_group(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tokenspeed_engine.checkpoint"):
        load(tiny_checkpoint("multimodal"))
    assert sorted(record.getMessage() for record in caplog.records) == [
        "skipped inject weight of the final mixer, which has no block: 1 tensors, 24 bytes",
        "skipped multi-token prediction: 1 tensors, 24 bytes",
        "skipped n-gram hash statistics: 1 tensors, 24 bytes",
        "skipped n-gram token lookup: 1 tensors, 24 bytes",
        "skipped vision encoder: 2 tensors, 48 bytes",
    ]


def _drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def _put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_drop("lm_head.weight"), "lm_head.weight: missing, expected [97, 32]"),
        (_drop("model.layers.3.linear_attn.A_log"), "model.layers.3.linear_attn.A_log: missing, expected [4]"),
        (
            _drop("model.layers.0.mlp.experts.3.up_proj.weight"),
            "model.layers.0.mlp.experts.3.up_proj.weight: missing, expected [16, 32]",
        ),
        (
            _drop(f"{PLE}ple_embedding.ngram_embedding.shard_0.weight"),
            f"{PLE}ple_embedding.ngram_embedding.shard_0.weight: missing, expected [22, 8]",
        ),
        (
            _put(f"{PLE}ple_embedding.ngram_embedding.shard_11.weight", torch.ones(22, 8)),
            f"{PLE}ple_embedding.ngram_embedding.shard_11.weight: unknown tensor (F32 [22, 8])",
        ),
        (_put("model.norm.weight", torch.ones(32)), "model.norm.weight: unknown tensor (F32 [32])"),
        (
            _put("model.layers.2.self_attn.q_proj.weight", torch.ones(64, 32)),
            "model.layers.2.self_attn.q_proj.weight: shape [64, 32], expected [128, 32]",
        ),
        (
            _put("model.layers.0.linear_attn.norm.weight", torch.ones(16, dtype=torch.int8)),
            "model.layers.0.linear_attn.norm.weight: dtype I8, expected BF16 or F16 or F32",
        ),
        (
            _put(f"{PLE}ple_embedding.ngram_heads_offsets", torch.tensor([0, 53, 112, 174])),
            f"{PLE}ple_embedding.ngram_heads_offsets: [0, 53, 112, 174], expected [0, 53, 112, 173]",
        ),
    ],
)
def test_what_stops_start_up(tmp_path: Path, change: Callable[[Tensors], object], problem: str) -> None:
    folder = tiny_checkpoint("default")
    tensors = on_disk(folder)
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert caught.value.problems == (problem,)


def test_hash_constants_may_be_left_out(tmp_path: Path) -> None:
    folder = tiny_checkpoint("default")
    tensors = {name: tensor for name, tensor in on_disk(folder).items() if tensor.is_floating_point()}
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    assert load(tmp_path).tensors.keys() == load(folder).tensors.keys()


def test_tied_head_is_not_loaded() -> None:
    raw = {"model_type": "qwen4_exp_text", "num_hidden_layers": 4}
    names = {tied: _names(raw | {"tie_word_embeddings": tied}) for tied in (False, True)}
    assert names[False] - names[True] == {"lm_head.weight"}


def _names(raw: dict[str, object]) -> set[str]:
    plan = describe_model(raw).weight_plan([])
    return {piece.name for parameter in plan.parameters for piece, _ in parameter.layouts[0].pieces}


def test_released_checkpoint_is_counted_to_the_tensor() -> None:
    """The Hub counts 1658 tensors: 333 of the vision encoder, 31 of multi-token prediction, the rest ours."""
    fields = {
        "hidden_size": 2560,
        "num_attention_heads": 24,
        "linear_num_value_heads": 48,
        "moe_intermediate_size": 640,
        "shared_expert_intermediate_size": 640,
        "split_ngram_parts": 128,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "ple_embed_dim": 2560,
    }
    config = real_config().model_copy(update=fields)
    plan = weight_plan(config, ["model.language_model.embed_tokens.weight"])
    pieces = {
        piece.name: piece.shape
        for parameter in plan.parameters
        for target in parameter.layouts[0].targets
        for piece in target.pieces
    }
    assert len(pieces) + len(plan.constants) == 1658 - 333 - 31
    assert sum(len(constant.values) for constant in plan.constants) == 35
    root = "model.language_model."
    assert pieces["lm_head.weight"] == (248320, 2560)
    assert pieces[f"{root}layers.0.linear_attn.in_proj_qkv.weight"] == (10240, 2560)
    assert pieces[f"{root}layers.0.linear_attn.conv1d.weight"] == (10240, 1, 4)
    assert pieces[f"{root}layers.3.self_attn.q_proj.weight"] == (12288, 2560)
    assert pieces[f"{root}layers.47.self_attn.indexer.index_qk_proj.weight"] == (640, 2560)
    assert pieces[f"{root}layers.9.mlp.experts.gate_up_proj"] == (512, 1280, 2560)
    assert pieces[f"{root}layers.1.ple.ple_embedding.ngram_embedding.shard_127.weight"] == (2500012, 160)
    ours = sum(math.prod(shape) for shape in pieces.values())
    assert ours + _multi_token_prediction_size(pieces) + _vision_size() == 179_999_981_424


def _multi_token_prediction_size(pieces: dict[str, tuple[int, ...]]) -> int:
    """One layer like a full-attention layer of the model, a final mixer, two projections and two norms."""
    root = "model.language_model."
    alike = (f"{root}layers.3.", f"{root}hyper_connection_mixer.")
    layer_and_mixer = sum(math.prod(shape) for name, shape in pieces.items() if name.startswith(alike))
    return layer_and_mixer + 2 * 2560 * 2560 + 2560 + 10240


def _vision_size() -> int:
    """27 blocks of width 1152, between a patch and position embedding and a merger of 2x2 patches to width 2560."""
    width, inner, merged = 1152, 4304, 4 * 1152
    norms = 4 * width
    attention = 3 * width * width + 3 * width + width * width + width
    mlp = inner * width + inner + width * inner + width
    embeddings = width * 3 * 2 * 16 * 16 + width + 2304 * width
    merger = 2 * width + merged * merged + merged + 2560 * merged + 2560
    return 27 * (norms + attention + mlp) + embeddings + merger
