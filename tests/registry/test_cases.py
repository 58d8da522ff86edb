"""Case sets: the same cases everywhere, every axis value and edge among them, arguments that the op accepts."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from tests.registry.toys import BLEND, DOUBLE, FILL, blend, double, double_cases, fill_rows, new_registry, toy
from tokenspeed_registry import UnknownNameError
from tokenspeed_registry.cases import Case, CaseSet, Make, case_set
from tokenspeed_registry.validation import signature_of

OPS: dict[str, Any] = {
    "double": toy(new_registry(), double, **DOUBLE),
    "fill_rows": toy(new_registry(), fill_rows, **FILL),
    "blend": toy(new_registry(), blend, **BLEND),
}
EDGED = CaseSet(
    axes={"n": [2, 1, 0], "kind": ["a", "b"]},
    build=lambda p, make: {},
    edges=[{"n": 99}, {"n": 7, "kind": "c"}],
)


def test_defaults_lead_and_every_value_and_edge_occurs() -> None:
    params = [dict(case.params) for case in EDGED.cases()]
    assert params[0] == {"n": 2, "kind": "a"}
    for expected in ({"n": 1, "kind": "a"}, {"n": 0, "kind": "a"}, {"n": 2, "kind": "b"}):
        assert expected in params
    assert {"n": 99, "kind": "a"} in params
    assert {"n": 7, "kind": "c"} in params


def test_no_case_twice() -> None:
    shown = [str(case) for case in EDGED.cases()]
    assert len(shown) == len(set(shown))
    assert str(EDGED.cases()[0]) == "n=2, kind=a"
    assert str(double_cases.cases()[0]) == "tokens=3, dim=4, dtype=float32"


def test_cases_are_the_same_in_every_process() -> None:
    """Seeds must not hang on Python's salted hash."""
    code = "from tests.registry.toys import double_cases as c; print([(str(x), x.seed) for x in c.cases()])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str([(str(case), case.seed) for case in double_cases.cases()])


def test_data_is_the_same_for_one_seed_and_differs_between_seeds() -> None:
    def data(seed: int) -> list[torch.Tensor]:
        make = Make(seed)
        return [
            make.normal(3, 4),
            make.uniform(2, 2, low=1.0, high=2.0),
            make.integers(5, low=0, high=1000),
            make.permutation(6),
            torch.tensor(make.lengths(4, low=0, high=1000)),
        ]

    assert all(torch.equal(a, b) for a, b in zip(data(7), data(7), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(data(7), data(8), strict=True))


def test_make_keeps_its_bounds() -> None:
    make = Make(0)
    uniform = make.uniform(1000, low=-1.0, high=3.0)
    assert -1.0 <= float(uniform.min()) < -0.9
    assert 2.9 < float(uniform.max()) <= 3.0
    integers = make.integers(1000, low=2, high=5)
    assert (integers.dtype, set(integers.tolist())) == (torch.int32, {2, 3, 4})
    assert sorted(make.permutation(50).tolist()) == list(range(50))
    assert set(make.lengths(500, low=0, high=3)) == {0, 1, 2, 3}
    assert make.normal(4, dtype=torch.bfloat16, scale=0.0).tolist() == [0.0] * 4


@pytest.mark.parametrize("name", OPS)
def test_arguments_of_all_cases_are_valid_and_in_order(name: str) -> None:
    contract = OPS[name].contract
    source = case_set(contract)
    for case in [*source.cases(), *(source.case(params) for params in source.models.values())]:
        arguments = source.arguments(contract, case)
        assert list(arguments) == [parameter.name for parameter in contract.parameters]
        signature_of(contract, arguments)


def test_what_a_case_leaves_out_takes_its_default() -> None:
    contract = OPS["blend"].contract
    source = case_set(contract)
    arguments = source.arguments(contract, source.case({"weight": False}))
    assert arguments["weight"] is None
    assert arguments["residual"] is None
    assert (arguments["scale"], arguments["dtype"], arguments["window"]) == (1.0, torch.float32, None)


def test_a_case_that_builds_what_the_op_has_not() -> None:
    contract = OPS["double"].contract
    wrong = CaseSet(axes={"n": [1]}, build=lambda p, make: {"x": make.normal(1, 4), "xs": 1})
    with pytest.raises(KeyError, match=r"double: .*unknown arguments \['xs'\]"):
        wrong.arguments(contract, wrong.cases()[0])
    missing = CaseSet(axes={"n": [1]}, build=lambda p, make: {})
    with pytest.raises(KeyError, match="x"):
        missing.arguments(contract, missing.cases()[0])


@given(double_cases.strategy())
@settings(max_examples=30, deadline=None)
def test_strategy_draws_from_the_axes(case: Case) -> None:
    assert set(case.params) == set(double_cases.axes)
    assert all(case.params[axis] in values for axis, values in double_cases.axes.items())
    signature_of(OPS["double"].contract, double_cases.arguments(OPS["double"].contract, case))


SHRUNK = CaseSet(
    axes={"tokens": [3, 17], "hidden": [8, 16], "dtype": [torch.float32, torch.bfloat16]},
    build=lambda p, make: {"x": make.normal(p["tokens"], p["hidden"], dtype=p["dtype"])},
    models={"prefill": {"tokens": 8192, "hidden": 2560}, "one": {"tokens": 1, "hidden": 7168, "dtype": torch.bfloat16}},
    shrink=[{"tokens": 2}, {"tokens": 5, "dtype": torch.float16}],
)


def test_models_shrink_but_for_their_static_dims() -> None:
    assert SHRUNK.statics == {
        "prefill": [{"tokens": 2, "hidden": 2560}, {"tokens": 5, "hidden": 2560, "dtype": torch.float16}],
        # Nothing grows.
        "one": [
            {"tokens": 1, "hidden": 7168, "dtype": torch.bfloat16},
            {"tokens": 1, "hidden": 7168, "dtype": torch.float16},
        ],
    }
    params = [dict(case.params) for case in SHRUNK.cases()]
    for small in (small for smalls in SHRUNK.statics.values() for small in smalls):
        assert SHRUNK.defaults | dict(small) in params
    assert not any(case.params["tokens"] == 8192 for case in SHRUNK.cases())


def test_models_by_name() -> None:
    assert SHRUNK.model("prefill").params == {"tokens": 8192, "hidden": 2560, "dtype": torch.float32}
    with pytest.raises(UnknownNameError, match="unknown model 'prefil'; known: 'prefill', 'one'"):
        SHRUNK.model("prefil")


@pytest.mark.parametrize("name", OPS)
def test_a_signature_needs_no_data(name: str) -> None:
    contract = OPS[name].contract
    source = case_set(contract)
    for case in source.cases():
        whole = signature_of(contract, source.arguments(contract, case))
        blank = source.signature(contract, case)
        assert (blank.dims, blank.dtypes, blank.flags, blank.shapes) == (
            whole.dims,
            whole.dtypes,
            whole.flags,
            whole.shapes,
        )


def test_what_a_blank_leaves_out_changes_nothing_else() -> None:
    def choices(make: Make) -> list[torch.Tensor]:
        make.normal(100)
        return [make.integers(20, low=0, high=1000), make.uniform(20, low=0, high=1), make.permutation(20)]

    assert all(torch.equal(a, b) for a, b in zip(choices(Make(3)), choices(Make(3, blank=True)), strict=True))


def test_counts_belong_to_the_signature() -> None:
    contract = OPS["double"].contract
    counted = CaseSet(
        axes={"tokens": [7]},
        build=lambda p, make: {"x": make.uniform(p["tokens"], 1, low=-1.0, high=1.0)},
        counts=lambda arguments: {"positive": int((arguments["x"] > 0).sum())},
    )
    case = counted.case({})
    arguments = counted.arguments(contract, case)
    assert counted.describe(contract, arguments).count("positive", 7) == int((arguments["x"] > 0).sum()) < 7
    assert counted.signature(contract, case).counts == counted.describe(contract, arguments).counts
    assert signature_of(contract, arguments).count("positive", 7) == 7


def test_data_is_made_on_the_device_asked_for() -> None:
    contract = OPS["blend"].contract
    source = case_set(contract)
    seen: list[str] = []

    def build(p: Any, make: Make) -> dict[str, Any]:
        seen.append(torch.zeros(1).device.type)
        return source.build(p, make)

    CaseSet(axes=source.axes, build=build).arguments(contract, source.case({}), torch.device("cpu"))
    with torch.device("meta"):  # whatever the caller's default is
        arguments = CaseSet(axes=source.axes, build=build).arguments(contract, source.case({}))
    assert seen == ["cpu", "cpu"]
    assert {value.device.type for value in arguments.values() if isinstance(value, torch.Tensor)} == {"cpu"}


def test_case_set_is_found_by_its_name() -> None:
    assert case_set(OPS["double"].contract) is not None
    assert case_set(OPS["double"].contract).axes == double_cases.axes
