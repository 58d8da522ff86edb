"""How conformance judges numbers: infinities, NaNs and integers exactly, the rest against the output's size."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jaxtyping import Float32, Int32
from torch import Tensor

from tests.registry.toys import new_registry, report_of, toy
from tokenspeed_registry import copy_into
from tokenspeed_registry.cases import CaseSet
from tokenspeed_registry.conformance import Outcome, error_of


def softmax_lse(
    x: Float32[Tensor, "tokens dim"],
    index: Int32[Tensor, ""],
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Float32[Tensor, "tokens dim"], Float32[Tensor, "tokens"], Int32[Tensor, "tokens"]]:
    """Softmax, its log-sum-exp (-inf for an empty row) and the largest index."""
    lse = x.double().logsumexp(-1)
    return (x.double() - lse[:, None]).exp().nan_to_num(0.0), lse, (x.argmax(-1) + index).int()


softmax_cases = CaseSet(
    axes={"tokens": [4, 0], "dim": [3]},
    build=lambda p, make: {
        "x": torch.cat([make.normal(p["tokens"], p["dim"]), torch.full((1, p["dim"]), -torch.inf)]),
        "index": torch.tensor(1, dtype=torch.int32),
    },
)

SOFTMAX_OP: Any = toy(
    new_registry(),
    softmax_lse,
    cases="tests.registry.test_conformance_numbers:softmax_cases",
    outputs=("weights", "lse", "largest"),
)


def softmax(**wrong: Any) -> Callable[..., Any]:
    def run(x: Tensor, index: Tensor, *, out: Any = None) -> Any:
        weights, lse, largest = (
            result.to(target.dtype) for result, target in zip(softmax_lse(x, index), out, strict=True)
        )
        empty = lse.isinf()
        if "lse" in wrong:
            lse = torch.where(empty, torch.tensor(wrong["lse"]), lse)
        if "weights" in wrong:
            weights[empty] = wrong["weights"]
        return copy_into(out, (weights, lse, largest + wrong.get("largest", 0)))

    return run


def test_infinities_nans_and_integers_are_exact() -> None:
    assert report_of(SOFTMAX_OP, softmax()).ok
    for wrong in ({"lse": torch.inf}, {"lse": -1e30}, {"lse": torch.nan}, {"weights": torch.nan}, {"largest": 1}):
        report = report_of(SOFTMAX_OP, softmax(**wrong))
        assert len(report.failures) == report.cases, wrong


@pytest.mark.parametrize(
    ("got", "wanted", "error"),
    [
        ([1.0, -torch.inf], [1.0, -torch.inf], 0.0),
        ([1.0, torch.inf], [1.0, -torch.inf], torch.inf),
        ([1.0, 0.0], [1.0, torch.nan], torch.inf),
        ([1.0, torch.nan], [1.0, torch.nan], 0.0),
        ([torch.nan, 1.0], [1.0, torch.nan], torch.inf),
        ([torch.inf], [torch.nan], torch.inf),
        ([torch.inf], [3e38], torch.inf),
        ([1.0, 1.1], [1.0, 1.0], 0.05),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 1e-30], [0.0, 0.0], torch.inf),
        ([], [], 0.0),
    ],
)
def test_error(got: list[float], wanted: list[float], error: float) -> None:
    found = error_of(torch.tensor(got), torch.tensor(wanted))
    if error == torch.inf:
        assert found > 1e100
    else:
        assert found == pytest.approx(error, rel=1e-6)


def test_error_of_exact_types() -> None:
    for dtype in (torch.int32, torch.int64, torch.bool, torch.uint8):
        ones = torch.ones(3, dtype=dtype)
        assert error_of(ones, ones) == 0.0
        assert error_of(torch.tensor([1, 1, 0], dtype=dtype), ones) == torch.inf


def test_severity_compares_outcomes_of_different_tolerance() -> None:
    loose, tight = Outcome(0.1, 0.2), Outcome(1e-6, 1e-7)
    assert tight.severity > 1 > loose.severity
    assert Outcome(0.0, 0.0).severity == 0.0
    assert Outcome(1e-9, 0.0).severity == torch.inf
    assert Outcome(0.0, 1.0, "fault").severity == torch.inf
    assert Outcome(float("nan"), 1.0).severity == torch.inf
