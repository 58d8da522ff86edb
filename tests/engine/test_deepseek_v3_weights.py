"""From a checkpoint on disk to the engine's tensors and caches: complete, exact, and strict about the rest."""

import json
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.forward import CPU, weights_of
from tests.engine.test_deepseek_v3_config import KIMI_K2
from tests.engine.tiny_deepseek import VARIANTS, hf_logits, tiny_checkpoint
from tokenspeed_engine.checkpoint.errors import CheckpointError
from tokenspeed_engine.models.families import CacheSizes, describe_model, read_model

Tensors = dict[str, torch.Tensor]

LAYER, NEXT_LAYER = "model.layers.1.", "model.layers.3."


def on_disk(folder: Path) -> Tensors:
    return dict(load_file(folder / "model.safetensors"))


def altered(folder: Path, target: Path, change: Callable[[Tensors], object]) -> Path:
    """A copy of a checkpoint in `target`, its tensors changed."""
    tensors = on_disk(folder)
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    shutil.copy(folder / "config.json", target)
    return target


def _drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def _put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_element_on_disk_is_loaded_once(variant: str) -> None:
    folder = tiny_checkpoint(variant)
    stored, loaded = on_disk(folder), weights_of(folder).tensors
    ours, theirs = (
        torch.cat([tensor.reshape(-1) for tensor in tensors.values()]).sort().values for tensors in (loaded, stored)
    )
    assert torch.equal(ours, theirs)


def test_places_of_composed_tensors() -> None:
    folder = tiny_checkpoint()
    stored, weights = on_disk(folder), weights_of(folder)
    experts = weights["layers.1.mlp.experts.gate_up_proj"]
    assert experts.shape == (8, 32, 32)
    assert torch.equal(experts[5, :16], stored[f"{LAYER}mlp.experts.5.gate_proj.weight"])
    assert torch.equal(experts[5, 16:], stored[f"{LAYER}mlp.experts.5.up_proj.weight"])
    assert torch.equal(weights["layers.1.mlp.experts.down_proj"][7], stored[f"{LAYER}mlp.experts.7.down_proj.weight"])
    for name, half, rows in (
        ("layers.0.mlp.", "up", slice(40, 80)),
        ("layers.1.mlp.shared_experts.", "gate", slice(0, 32)),
    ):
        assert torch.equal(weights[f"{name}gate_up_proj"][rows], stored[f"model.{name}{half}_proj.weight"])


def test_bfloat16_keeps_routing_in_float32() -> None:
    folder = tiny_checkpoint()
    exact, weights = weights_of(folder), weights_of(folder, torch.bfloat16)
    kept = {name for name, tensor in weights.tensors.items() if tensor.dtype == torch.float32}
    assert kept == {
        f"layers.{layer}.mlp.{name}" for layer in (1, 2) for name in ("gate", "gate.e_score_correction_bias")
    }
    for name, tensor in weights.tensors.items():
        assert torch.equal(tensor, exact[name] if name in kept else exact[name].bfloat16()), name


def test_unserved_parts_are_logged_by_group(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The layer after the last predicts further tokens; what else a checkpoint has there is not ours to judge."""
    extra = {
        f"{NEXT_LAYER}eh_proj.weight": torch.ones(32, 64),
        f"{NEXT_LAYER}self_attn.o_proj.weight": torch.ones(3),
        f"{LAYER}self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    folder = altered(tiny_checkpoint(), tmp_path, lambda tensors: tensors.update(extra))
    with caplog.at_level(logging.INFO, "tokenspeed_engine.checkpoint"):
        loaded = weights_of(folder)
    assert loaded.tensors.keys() == weights_of(tiny_checkpoint()).tensors.keys()
    assert sorted(record.getMessage() for record in caplog.records) == [
        "skipped multi-token prediction: 2 tensors, 8204 bytes",
        "skipped rotary frequencies, which are computed: 1 tensors, 16 bytes",
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_drop("lm_head.weight"), "lm_head.weight: missing, expected [97, 32]"),
        (
            _drop(f"{LAYER}mlp.gate.e_score_correction_bias"),
            f"{LAYER}mlp.gate.e_score_correction_bias: missing, expected [8]",
        ),
        (
            _drop(f"{LAYER}mlp.experts.3.up_proj.weight"),
            f"{LAYER}mlp.experts.3.up_proj.weight: missing, expected [16, 32]",
        ),
        (
            _put(f"{LAYER}self_attn.kv_b_proj.weight", torch.ones(88, 32)),
            f"{LAYER}self_attn.kv_b_proj.weight: shape [88, 32], expected [88, 16]",
        ),
        (
            _put(f"{LAYER}self_attn.o_proj.weight", torch.ones(32, 40).to(torch.float8_e4m3fn)),
            f"{LAYER}self_attn.o_proj.weight_scale_inv: missing, expected [1, 1]",
        ),
        (
            _put(f"{LAYER}self_attn.o_proj.weight_scale_inv", torch.ones(1, 1)),
            f"{LAYER}self_attn.o_proj.weight_scale_inv: unknown tensor (F32 [1, 1])",
        ),
        (
            _put("model.layers.4.eh_proj.weight", torch.ones(1)),
            "model.layers.4.eh_proj.weight: unknown tensor (F32 [1])",
        ),
    ],
)
def test_what_stops_start_up(tmp_path: Path, change: Callable[[Tensors], object], problem: str) -> None:
    folder = altered(tiny_checkpoint(), tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        weights_of(folder)
    assert caught.value.problems == (problem,)


@pytest.mark.parametrize(
    "part",
    [
        "layers.0.mlp.up_proj",
        "input_layernorm",
        "post_attention_layernorm",
        "q_a_layernorm",
        "kv_a_layernorm",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "e_score_correction_bias",
        "mlp.gate.weight",
        "mlp.shared_experts.down_proj",
        "mlp.experts.3.up_proj",
    ],
)
def test_each_weight_matters_to_the_oracle(tmp_path: Path, part: str) -> None:
    """The tiny checkpoints leave no part of the model idle: one that is disturbed changes the logits."""
    noise = torch.Generator().manual_seed(0)

    def disturb(tensors: Tensors) -> None:
        for name in tensors:
            if part in name:
                tensors[name] += torch.randn(tensors[name].shape, generator=noise)

    ids = [(7 * index * index + 3 * index + 5) % 97 for index in range(40)]
    folder = altered(tiny_checkpoint(), tmp_path, disturb)
    assert (hf_logits(folder, ids) - hf_logits(tiny_checkpoint(), ids)).abs().max() > 1e-2


def test_released_checkpoints_are_counted() -> None:
    """DeepSeek-V3 is published as 671 B parameters, Kimi-K2 as 1 T, both without the layer of further prediction."""
    assert _count({"model_type": "deepseek_v3"}) == 671_026_419_200
    assert round(_count(KIMI_K2) / 1e9) == 1026
    names = _pieces({"model_type": "deepseek_v3"})
    assert names["model.layers.2.mlp.gate_proj.weight"] == (18_432, 7168)
    assert names["model.layers.60.mlp.experts.255.down_proj.weight"] == (7168, 2048)
    assert names["model.layers.60.self_attn.kv_b_proj.weight"] == (128 * 256, 512)
    tied = _pieces({"model_type": "deepseek_v3", "tie_word_embeddings": True})
    assert names.keys() - tied.keys() == {"lm_head.weight"}


def _pieces(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors in the model's dtype, each expert by itself."""
    layouts = [
        next((layout for layout in parameter.layouts if layout.name == "per expert"), parameter.layouts[0])
        for parameter in describe_model(raw).weight_plan([]).parameters
    ]
    return {piece.name: piece.shape for layout in layouts for piece, _ in layout.pieces}


def _count(raw: dict[str, Any]) -> int:
    return sum(math.prod(shape) for shape in _pieces(raw).values())


def test_bytes_of_caches() -> None:
    """576 numbers a token and layer, whatever the number of heads; no sequence has a state outside its pages."""
    released = describe_model({"model_type": "deepseek_v3"}).cache_bytes(CacheSizes(64, 0, 0, 0), torch.bfloat16)
    assert released == (64 * 61 * 576 * 2, 0, 0, 0)
    description = read_model(tiny_checkpoint())
    for dtype in (torch.float32, torch.bfloat16):
        sizes = CacheSizes(page_size=8, num_pages=5, num_slots=3, num_rows=2, num_drafts=3)
        caches = description.allocate_caches(sizes, dtype, CPU)
        assert [tuple(pool.shape) for pool in caches.tensors()] == [(3, 5, 8, 24)]
        assert sum(tensor.nbytes for tensor in caches.tensors()) == 5 * description.cache_bytes(sizes, dtype).per_page


def test_old_names_of_fields_serve_the_same_model(tmp_path: Path) -> None:
    """A config.json as older releases of transformers wrote it describes the same model."""
    folder = tiny_checkpoint()
    fields = json.loads((folder / "config.json").read_text())
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    older = fields | {"rope_scaling": rope, "torch_dtype": fields.pop("dtype")}
    (tmp_path / "config.json").write_text(json.dumps(older))
    assert read_model(tmp_path) == read_model(folder)
