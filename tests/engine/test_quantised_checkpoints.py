"""Checkpoints in FP8 and NVFP4 compute what their values say, and dummy weights come in the same formats."""

import pytest
import torch

from tests.engine.quantised import Format, quantised_twins
from tests.engine.test_llm import SMALL, greedy, prompts
from tokenspeed_engine import LLM
from tokenspeed_engine.checkpoint.dummy import DEVIATION, dummy_weights
from tokenspeed_engine.checkpoint.load import load_weights
from tokenspeed_engine.checkpoint.plan import Layout, Parameter, Piece, Target, WeightPlan
from tokenspeed_engine.checkpoint.reader import Checkpoint
from tokenspeed_engine.models.families import read_model
from tokenspeed_engine.models.layouts import expert_matrices, projection
from tokenspeed_kernels.quantise import from_fp8_block, from_nvfp4

CPU = torch.device("cpu")


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_a_quantised_checkpoint_generates_what_its_values_do(format: Format) -> None:
    quantised, plain = quantised_twins(format)
    found, wanted = (
        [generation.token_ids for generation in LLM(folder, SMALL).generate(prompts(), greedy(12))]
        for folder in (quantised, plain)
    )
    assert found == wanted


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_weights_stay_quantised_in_memory(format: Format) -> None:
    folder, _ = quantised_twins(format)
    with Checkpoint.open(folder) as checkpoint:
        weights = load_weights(checkpoint, read_model(folder).weight_plan(checkpoint.tensors), CPU, torch.float32)
    kinds = {name: tensor.dtype for name, tensor in weights.tensors.items()}
    experts = [kind for name, kind in kinds.items() if name.endswith("experts.down_proj")]
    assert set(experts) == {torch.float8_e4m3fn if format == "fp8" else torch.uint8}
    assert kinds["layers.1.ple.ple_embedding.ngram_embedding"] == torch.float8_e4m3fn


def plan() -> WeightPlan:
    whole = Layout("whole", (Target("norm", (300,), (Piece("norm", (300,)),), "float32"),))
    return WeightPlan(
        (
            expert_matrices("experts.down_proj", "experts.", 2, ("down",), 300, 160),
            projection("out_proj", ["out_proj"], 300, 200),
            Parameter("norm", (whole,)),
        ),
        (),
        (),
    )


@pytest.mark.parametrize(
    ("format", "layouts"),
    [
        ("model", ["fused", "whole", "whole"]),
        ("fp8", ["fp8 per expert", "fp8", "whole"]),
        ("nvfp4", ["nvfp4 per expert", "fp8", "whole"]),
    ],
)
def test_dummy_weights_come_in_the_format_that_is_asked_for(format: str, layouts: list[str]) -> None:
    weights = dummy_weights(plan(), CPU, torch.bfloat16, format)  # type: ignore[arg-type]
    assert list(weights.layouts.values()) == layouts
    again = dummy_weights(plan(), CPU, torch.bfloat16, format)  # type: ignore[arg-type]
    for name, tensor in weights.tensors.items():
        assert torch.equal(tensor.view(torch.uint8), again[name].view(torch.uint8))
    values = {
        "model": lambda: weights["experts.down_proj"].float(),
        "fp8": lambda: from_fp8_block(weights["experts.down_proj"], weights["experts.down_proj.scale"]),
        "nvfp4": lambda: from_nvfp4(*(weights[f"experts.down_proj{end}"] for end in ("", ".scale", ".global_scale"))),
    }[format]()
    assert values.shape == (2, 300, 160)
    assert abs(float(values.std()) / DEVIATION - 1) < 0.05
    assert abs(float(values.mean())) < 0.05 * DEVIATION


def test_an_unknown_dummy_format_is_named() -> None:
    with pytest.raises(ValueError, match="dummy_format: expected one of model, fp8, nvfp4, got 'int4'"):
        dummy_weights(plan(), CPU, torch.bfloat16, "int4")  # type: ignore[arg-type]
