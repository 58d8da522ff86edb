"""What a rank holds of a model's weights, and which models cannot be cut."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine import tiny, tiny_deepseek
from tests.engine.tiny_draft import draft_checkpoint
from tokenspeed_engine import LLM, EngineOptions
from tokenspeed_engine.checkpoint.dummy import dummy_weights
from tokenspeed_engine.checkpoint.errors import CheckpointError
from tokenspeed_engine.checkpoint.load import Weights, load_weights
from tokenspeed_engine.checkpoint.plan import WeightPlan
from tokenspeed_engine.checkpoint.reader import Checkpoint
from tokenspeed_engine.models.families import ModelDescription, describe_model, read_model
from tokenspeed_engine.models.layouts import projection
from tokenspeed_engine.parallel.ranks import Ranks

CPU = torch.device("cpu")
RELEASED: Mapping[str, Mapping[str, Any]] = {
    "qwen4_exp_text": {
        "hidden_size": 2560,
        "num_hidden_layers": 4,
        "num_attention_heads": 24,
        "linear_num_value_heads": 48,
        "moe_intermediate_size": 640,
        "shared_expert_intermediate_size": 640,
        "ple_layer_ids": [2],
        "split_ngram_parts": 128,
        "eos_token_id": 248_044,
    },
    "deepseek_v3": {"num_hidden_layers": 4},
}
"""Sizes of released models, with as many layers as have one of each kind."""


def sizes_of(description: ModelDescription) -> dict[str, int]:
    """Elements of each parameter."""
    layouts = [parameter.layouts[0] for parameter in description.weight_plan([]).parameters]
    return {target.name: math.prod(target.shape) for layout in layouts for target in layout.targets}


def load(folder: Path, ranks: Ranks, draft_head: bool = False) -> tuple[Weights, int]:
    """A rank's weights, and the bytes that were read for them."""
    seen: list[int] = []
    with Checkpoint.open(folder) as checkpoint:
        plan = read_model(folder).on(ranks).weight_plan(checkpoint.tensors, draft_head)
        weights = load_weights(checkpoint, plan, CPU, torch.float32, progress=lambda done, total: seen.append(total))
    return weights, seen[-1]


@pytest.mark.parametrize(("model_type", "size"), [("qwen4_exp_text", 8), ("deepseek_v3", 4)])
def test_a_rank_of_a_released_model_holds_its_part(model_type: str, size: int) -> None:
    description = describe_model({"model_type": model_type, **RELEASED[model_type]})
    whole = sizes_of(description)
    shares = [sizes_of(description.on(Ranks(rank, size))) for rank in range(size)]
    on_all = 0
    for name, elements in whole.items():
        copies = sum(share[name] for share in shares) / elements
        few_heads = name.endswith(("k_proj", "v_proj"))
        assert copies in (1, size) or (few_heads and copies == size / 2)
        assert copies == 1 or "experts." not in name
        on_all += elements if copies > 1 else 0
    total = sum(whole.values())
    assert on_all / total < 0.08
    assert sum(shares[0].values()) / ((total - on_all) / size + on_all) < 1.001


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_loaded_and_read_shrinks_with_it(size: int) -> None:
    folder = draft_checkpoint()
    (whole, bytes_read), *shares = (
        load(folder, ranks, draft_head=True) for ranks in (Ranks(), *(Ranks(rank, size) for rank in range(size)))
    )
    once = 0
    for name, tensor in whole.tensors.items():
        held = [share[name].nbytes for share, _ in shares]
        if held[0] == tensor.nbytes:
            assert all(torch.equal(share[name], tensor) for share, _ in shares)
            once += tensor.nbytes
        assert sum(held) >= tensor.nbytes
    assert once < 0.5 * bytes_read
    for share, read in shares:
        cut = sum(tensor.nbytes for tensor in share.tensors.values()) - once
        assert cut / (bytes_read - once) < 1.2 / size
        assert read < 0.85 * bytes_read


@pytest.mark.parametrize("rank", [0, 1])
def test_what_other_ranks_hold_is_checked_too(rank: int, tmp_path: Path) -> None:
    source = tiny.tiny_checkpoint()
    tensors = load_file(source / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    experts = "model.layers.0.mlp.experts"
    del tensors[f"{experts}.1.up_proj.weight"]
    tensors[f"{experts}.6.down_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, Ranks(rank, 2))
    assert caught.value.problems == (
        f"{experts}.1.up_proj.weight: missing, expected [16, 32]",
        f"{experts}.6.down_proj.weight: shape [3, 3], expected [32, 16]",
    )


@pytest.mark.parametrize("format", ["model", "fp8"])
def test_dummy_weights_that_all_ranks_hold_are_the_same(format: str) -> None:
    description = read_model(tiny.tiny_checkpoint())
    whole, *shares = (
        dummy_weights(each.weight_plan([]), CPU, torch.float32, format, seed=3)  # type: ignore[arg-type]
        for each in (description, *(description.on(Ranks(rank, 2)) for rank in range(2)))
    )
    common = [name for name, tensor in whole.tensors.items() if tensor.shape == shares[1][name].shape]
    assert any(name.endswith("mlp.gate") for name in common)
    for name in common:
        assert all(torch.equal(share[name].view(torch.uint8), whole[name].view(torch.uint8)) for share in shares)


def fp8_plan(**cut: range) -> WeightPlan:
    return WeightPlan((projection("up", ["a", "b"], 256, 300, **cut),), (), ())


@pytest.mark.parametrize(
    ("cut", "rows", "columns"),
    [
        ({}, range(256), range(300)),
        ({"rows": range(128, 256)}, range(128, 256), range(300)),
        ({"columns": range(256, 300)}, range(256), range(256, 300)),
        ({"rows": range(128), "columns": range(128, 256)}, range(128), range(128, 256)),
    ],
)
def test_fp8_is_cut_between_blocks(cut: dict[str, range], rows: range, columns: range, tmp_path: Path) -> None:
    elements = {part: torch.randn(256, 300).to(torch.float8_e4m3fn) for part in "ab"}
    scales = {part: torch.rand(2, 3) for part in "ab"}
    stored = {f"{part}.weight": elements[part] for part in "ab"}
    save_file(stored | {f"{part}.weight_scale_inv": scales[part] for part in "ab"}, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        weights = load_weights(checkpoint, fp8_plan(**cut), CPU, torch.float32)
    inner = (slice(rows.start, rows.stop), slice(columns.start, columns.stop))
    blocks = (slice(rows.start // 128, rows.stop // 128), slice(columns.start // 128, -(-columns.stop // 128)))
    wanted = torch.cat([elements[part][inner].view(torch.uint8) for part in "ab"])
    assert torch.equal(weights["up"].view(torch.uint8), wanted)
    assert torch.equal(weights["up.scale"], torch.cat([scales[part][blocks] for part in "ab"]))


def test_fp8_blocks_are_not_cut(tmp_path: Path) -> None:
    plan = fp8_plan(rows=range(64, 192), columns=range(100, 200))
    problem = "up: ranks: a rank's share, rows 64 to 192 of 256 and columns 100 to 200 of 300, cuts FP8 blocks of 128"
    stored = {f"{part}.weight": torch.randn(256, 300) for part in "ab"}
    save_file(stored, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        weights = load_weights(checkpoint, plan, CPU, torch.float32)
    assert torch.equal(weights["up"], torch.cat([stored[f"{part}.weight"][64:192, 100:200] for part in "ab"]))

    quantised = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in stored.items()}
    scales = {f"{part}.weight_scale_inv": torch.rand(2, 3) for part in "ab"}
    save_file(quantised | scales, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(CheckpointError) as caught:
        load_weights(checkpoint, plan, CPU, torch.float32)
    assert caught.value.problems == (problem,)
    with pytest.raises(ValueError, match="cuts FP8 blocks"):
        dummy_weights(plan, CPU, torch.float32, "fp8")


@pytest.mark.parametrize(
    ("checkpoint", "size", "problems"),
    [
        (
            tiny.tiny_checkpoint,
            3,
            [
                "num_attention_heads is 4, which 3 ranks cannot share evenly",
                "num_experts is 8, which 3 ranks",
                "linear_num_value_heads is 4, which 3 ranks",
                "num_key_value_heads is 2, neither a multiple nor a divisor of 3 ranks",
                "linear_num_key_heads is 2, neither",
            ],
        ),
        (
            tiny_deepseek.tiny_checkpoint,
            5,
            [
                "num_attention_heads is 4, which 5 ranks",
                "n_routed_experts is 8, which 5 ranks",
                "n_shared_experts · moe_intermediate_size is 32, which 5 ranks",
            ],
        ),
        (tiny.tiny_checkpoint, 0, ["expected at least 1, got 0"]),
    ],
)
def test_models_that_cannot_be_cut_are_refused(checkpoint: Callable[[], Path], size: int, problems: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^ranks: ") as caught:
        LLM(checkpoint(), EngineOptions(device="cpu", ranks=size))
    assert str(caught.value).count("ranks: ") == len(problems)
    for problem in problems:
        assert f"ranks: {problem}" in str(caught.value)
