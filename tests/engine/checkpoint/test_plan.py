"""Matching a plan with a checkpoint, and filling tensors from it, on hand-made plans."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tokenspeed_engine.checkpoint.errors import CheckpointError
from tokenspeed_engine.checkpoint.load import Weights, load_weights
from tokenspeed_engine.checkpoint.plan import (
    FP8_DTYPES,
    Constant,
    Layout,
    Parameter,
    Piece,
    Target,
    Unserved,
    WeightPlan,
    concatenated,
)
from tokenspeed_engine.checkpoint.reader import Checkpoint

WHOLE = Layout("whole", (Target("w", (4, 2), (Piece("w", (4, 2)),)),))
HALVES = Layout("halves", (Target("w", (4, 2), concatenated([("w.0", (2, 2)), ("w.1", (2, 2))])),))
SCALED = Layout(
    "scaled",
    (
        Target("w", (4, 2), (Piece("w", (4, 2)),), "float8_e4m3fn", FP8_DTYPES),
        Target("w.scale", (1,), (Piece("w.scale", ()),), "float32"),
    ),
)
PLAN = WeightPlan(
    parameters=(
        Parameter("w", (WHOLE, HALVES, SCALED)),
        Parameter("log", (Layout("whole", (Target("log", (3,), (Piece("log", (3, 1)),), "float32"),)),)),
    ),
    constants=(Constant("primes", (2, 3)),),
    unserved=(
        Unserved("vision", lambda name: name.startswith("visual.")),
        Unserved("drafts", lambda name: name.startswith("mtp.")),
    ),
)
VALUES = torch.arange(8.0).view(4, 2) + 0.125
LOG = torch.tensor([[0.1], [0.2], [0.3]])
GOOD = {"w": VALUES, "log": LOG}


def load(folder: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> Weights:
    save_file(
        {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    with Checkpoint.open(folder) as checkpoint:
        return load_weights(checkpoint, PLAN, torch.device("cpu"), dtype)


def problems_of(folder: Path, tensors: dict[str, torch.Tensor]) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        load(folder, tensors)
    assert caught.value.subject == str(folder)
    return caught.value.problems


def test_either_layout_gives_the_same_tensor(tmp_path: Path) -> None:
    whole = load(tmp_path, GOOD)
    halves = load(tmp_path, {"w.1": VALUES[2:], "w.0": VALUES[:2], "log": LOG})
    assert torch.equal(whole["w"], VALUES)
    assert torch.equal(halves["w"], VALUES)
    assert (whole.layouts["w"], halves.layouts["w"]) == ("whole", "halves")
    assert torch.equal(whole["log"], LOG.view(3))


def test_layouts_of_the_same_names_are_told_apart_by_dtype(tmp_path: Path) -> None:
    quantised = VALUES.to(torch.float8_e4m3fn)
    weights = load(tmp_path, {"w": quantised, "w.scale": torch.full((1,), 0.5).bfloat16(), "log": LOG})
    assert weights.layouts["w"] == "scaled"
    assert torch.equal(weights["w"].float(), quantised.float())
    assert weights["w.scale"].tolist() == [0.5]


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16])
def test_dtypes(tmp_path: Path, stored: torch.dtype, served: torch.dtype) -> None:
    weights = load(tmp_path, {"w": VALUES.to(stored), "log": LOG.to(stored)}, served)
    assert torch.equal(weights["w"], VALUES.to(stored).to(served))
    assert torch.equal(weights["log"], LOG.to(stored).float().view(3)), "stays float32 whatever the model's dtype"


def test_weights_outlive_the_file(tmp_path: Path) -> None:
    weights = load(tmp_path, GOOD)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert torch.equal(weights["w"], VALUES)


def test_unknown_tensor(tmp_path: Path) -> None:
    assert problems_of(tmp_path, GOOD | {"q.bias": torch.ones(2)}) == ("q.bias: unknown tensor (F32 [2])",)


def test_tensors_of_a_layout_not_chosen_are_unknown(tmp_path: Path) -> None:
    assert problems_of(tmp_path, GOOD | {"w.1": VALUES[2:]}) == ("w.1: unknown tensor (F32 [2, 2])",)


def test_missing_parameter_and_missing_piece(tmp_path: Path) -> None:
    assert problems_of(tmp_path, {"w.0": VALUES[:2]}) == (
        "log: missing, expected [3, 1]",
        "w.1: missing, expected [2, 2]",
    )


def test_wrong_shape(tmp_path: Path) -> None:
    assert problems_of(tmp_path, GOOD | {"w": VALUES.T}) == ("w: shape [2, 4], expected [4, 2]",)


def test_wrong_dtype(tmp_path: Path) -> None:
    assert problems_of(tmp_path, GOOD | {"w": VALUES.double()}) == ("w: dtype F64, expected BF16 or F16 or F32",)


def test_all_problems_come_at_once_and_twenty_are_listed(tmp_path: Path) -> None:
    extra = {f"extra.{index:02d}": torch.ones(1) for index in range(30)}
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, extra)
    assert len(caught.value.problems) == 32
    lines = str(caught.value).splitlines()
    assert lines[0].endswith(": 32 problems")
    assert [line.strip().split(":")[0] for line in lines[1:21]] == [f"extra.{index:02d}" for index in range(20)]
    assert lines[21].strip() == "... and 12 more"


def test_constants_may_be_absent_but_not_different(tmp_path: Path) -> None:
    load(tmp_path, GOOD | {"primes": torch.tensor([2, 3])})
    assert problems_of(tmp_path, GOOD | {"primes": torch.tensor([2, 5])}) == ("primes: [2, 5], expected [2, 3]",)
    as_ints = GOOD | {"primes": torch.tensor([2, 3], dtype=torch.int32)}
    assert problems_of(tmp_path, as_ints) == ("primes: dtype I32, expected I64",)


def test_each_unserved_group_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tokenspeed_engine.checkpoint"):
        load(tmp_path, GOOD | {"visual.a": torch.ones(2), "visual.b": torch.ones(3, dtype=torch.float16)})
    assert [record.getMessage() for record in caplog.records] == ["skipped vision: 2 tensors, 14 bytes"]


def test_pieces_must_tile_their_target() -> None:
    with pytest.raises(ValueError, match="hold 6 elements"):
        Target("w", (4, 2), concatenated([("a", (2, 2)), ("b", (1, 2))]))
    with pytest.raises(ValueError, match="b starts at element 2, expected 4"):
        Target("w", (4, 2), (Piece("a", (2, 2)), Piece("b", (3, 2), 2)))
