"""Cases for dims, dtypes and flags that no axis lists: found, and as near as they get where they cannot be made."""

from typing import Any

import pytest
import torch
from jaxtyping import Float, Int32
from torch import Tensor

from tests.registry.toys import DOUBLE, double, double_cases, new_registry, toy
from tokenspeed_registry.cases import CaseSet, matching_cases
from tokenspeed_registry.signature import Signature
from tokenspeed_registry.steering import LARGEST, Fact, facts_of, reach


def attend(
    q: Float[Tensor, "tokens heads width"],
    cu: Int32[Tensor, "seqs+1"],
    bias: Float[Tensor, "heads"] | None,
    *,
    causal: bool,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "tokens heads width"]:
    """Dims that are no axis: a sum, a member of a pair, the sum and number of lengths."""
    return q.double()


def _build(p: Any, make: Any) -> dict[str, Any]:
    heads, groups = p["heads"]
    assert heads % groups == 0, "an odd group"
    return {
        "q": make.normal(sum(p["lengths"]), heads, p["latent"] + p["rope"], dtype=p["dtype"]),
        "cu": torch.tensor([0, *p["lengths"]], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        "bias": make.normal(heads, dtype=p["dtype"]) if p["bias"] else None,
        "causal": p["causal"],
    }


cases = CaseSet(
    axes={
        "lengths": [(3, 2), (1,)],
        "heads": [(4, 2), (1, 1)],
        "latent": [32, 16],
        "rope": [8, 0],
        "dtype": [torch.float32, torch.bfloat16],
        "bias": [False, True],
        "causal": [True, False],
    },
    build=_build,
    models={"large": {"lengths": (4096,), "heads": (24, 2), "latent": 512, "rope": 64, "dtype": torch.bfloat16}},
    shrink=[{"lengths": (2,)}],
)
FACTS: dict[str, Any] = {
    "cases": "tests.registry.test_steering:cases",
    "outputs": ("attended",),
    "output_dtypes": {"attended": "q"},
    "static": ("heads", "width"),
    "same_dtype": (("q", "bias"),),
}
CONTRACT: Any = toy(new_registry(), attend, **FACTS).contract


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("dim", "width", 576),
        ("dim", "width", 41),
        ("dim", "heads", 24),
        ("dim", "heads", 6),
        ("dim", "tokens", 100),
        ("dim", "seqs", 0),
        ("dim", "seqs", 9),
        ("dim", "seqs", 1),
        ("dtype", "q", torch.bfloat16),
        ("flag", "causal", False),
        ("given", "bias", True),
    ],
)
def test_reached(kind: str, name: str, value: Any) -> None:
    found = reach(CONTRACT, cases, cases.case({}), Fact(kind, name, value))
    assert found is not None
    assert Fact(kind, name, value).holds(cases.signature(CONTRACT, found))


def test_what_cannot_be_reached() -> None:
    start = cases.case({})
    for goal in (
        Fact("dim", "heads", 5),  # the builder needs whole groups
        Fact("dim", "width", -1),
        Fact("dim", "tokens", LARGEST),
        Fact("dtype", "q", torch.float16),
    ):
        assert reach(CONTRACT, cases, start, goal) is None, goal


def test_what_holds_already_is_kept() -> None:
    start = cases.case({"lengths": (5,)})
    goal, kept = Fact("dim", "tokens", 7), Fact("dim", "seqs", 1)
    found = reach(CONTRACT, cases, start, goal, [kept])
    assert found is not None
    assert found.params["lengths"] == (7,)
    assert reach(CONTRACT, cases, start, Fact("dim", "tokens", 10), [Fact("dim", "tokens", 5)]) is None


def matched(**changes: Any) -> tuple[Signature, list[Signature]]:
    """A call, and the signatures of its matching cases."""
    call = cases.signature(CONTRACT, cases.case(changes))
    return call, [cases.signature(CONTRACT, case) for case in matching_cases(CONTRACT, call)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lengths": (900, 30), "heads": (24, 2), "latent": 512, "rope": 64, "dtype": torch.bfloat16},
        {"heads": (12, 1), "latent": 100, "rope": 1, "dtype": torch.bfloat16, "bias": True, "causal": False},
    ],
)
def test_matching_cases_are_like_the_call_but_small(changes: dict[str, Any]) -> None:
    call, found = matched(**changes)
    assert 1 <= len(found) <= 4
    for signature in found:
        assert facts_of(CONTRACT, signature) == facts_of(CONTRACT, call)
        assert signature["tokens"] < 100


def test_the_nearest_where_none_match() -> None:
    call, found = matched(heads=(5, 5), dtype=torch.float16)
    assert found
    assert call.dtype("q") == torch.float16
    assert all(signature["width"] == 40 for signature in found)
    assert all(signature.dtype("q") == torch.float32 for signature in found[:1])


def test_limit_and_distinct() -> None:
    contract = toy(new_registry(), double, **DOUBLE).contract
    call = double_cases.signature(contract, double_cases.case({"tokens": 500}))
    for limit in (1, 2, 4):
        found = matching_cases(contract, call, limit)
        assert len(found) <= limit
        assert len({str(case) for case in found}) == len(found)
    assert {case.params["tokens"] for case in matching_cases(contract, call)} >= {3, 0, 1}
