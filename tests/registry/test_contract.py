"""Declarations that are incomplete or contradict themselves are refused, and the message says what is wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from tests.registry.toys import BLEND, DOUBLE, FACTS, blend, double, fill_rows, new_registry, toy
from tokenspeed_registry import Indices, RegistrationError, UnknownNameError
from tokenspeed_registry.contract import declare


def undocumented(x: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
    return x


def wide(x: Float[Tensor, "tokens dim"], y: Float32[Tensor, "streams*dim"]) -> Float32[Tensor, "tokens"]:
    """Nothing binds streams."""
    return x


def lost(x: Float[Tensor, "tokens dim"]) -> Float32[Tensor, "tokens columns"]:
    """Nothing binds columns."""
    return x


def ellipsis(x: Float[Tensor, "... dim"]) -> Float32[Tensor, "dim"]:
    """Any rank, which no kernel is declared for."""
    return x


def capital(x: Float[Tensor, "T dim"]) -> Float32[Tensor, "dim"]:
    """Upper case is no dim name."""
    return x


def optional_first(x: Float[Tensor, "dim"] | None) -> Float32[Tensor, "dim"]:
    """No tensor is sure to be there."""
    raise NotImplementedError


def no_tensor(n: int) -> None:
    """No tensor at all."""


def forbidden(pool: Float32[Tensor, "slots"], *, mode: bool = True) -> None:
    """Mutates, and has a parameter whose name torch.compile needs for its own."""


ONE: dict[str, Any] = {"outputs": ("y",)}


@pytest.mark.parametrize("fact", ["family", "cases", "cost", "tolerance"])
def test_missing_fact_is_named(fact: str) -> None:
    facts: dict[str, Any] = {name: value for name, value in {**FACTS, **DOUBLE}.items() if name != fact}
    with pytest.raises(RegistrationError, match=f"double: an op needs {fact}"):
        declare(double, **facts)


def test_all_missing_facts_are_named_at_once() -> None:
    facts: dict[str, Any] = DOUBLE
    with pytest.raises(RegistrationError, match="family, cases, cost, tolerance"):
        declare(double, **facts)


@pytest.mark.parametrize(
    ("function", "facts", "message"),
    [
        (double, {**DOUBLE, "static": ("width",)}, "no dim .*width"),
        (double, {**DOUBLE, "strided": ("z",)}, "no tensor parameter .*z"),
        (double, {**DOUBLE, "mutates": ("doubled",)}, "no tensor parameter .*doubled"),
        (double, {**DOUBLE, "host": ("x",)}, "first tensor .* required"),
        (double, {**DOUBLE, "host": ("q",)}, "no tensor parameter .*q"),
        (double, {**DOUBLE, "same_dtype": (("x", "q"),)}, "no tensor parameter .*q"),
        (double, {**DOUBLE, "checks": (Indices("rows", "dim"),)}, "no tensor parameter .*rows"),
        (double, {**DOUBLE, "outputs": ()}, "1 outputs annotated, 0 named"),
        (double, {**DOUBLE, "outputs": ("a", "b")}, "1 outputs annotated, 2 named"),
        (double, {**DOUBLE, "output_dtypes": {}}, "output doubled needs a dtype"),
        (double, {**DOUBLE, "output_dtypes": {"doubled": "q"}}, "doubled takes its dtype from 'q'"),
        (double, {**DOUBLE, "output_dtypes": {"doubled": "x", "other": "x"}}, "no output .*other"),
        (double, {**DOUBLE, "where": ("tokens > heads",)}, "heads"),
        (fill_rows, {"outputs": ("filled",)}, "0 outputs annotated, 1 named"),
        (undocumented, {**ONE, "output_dtypes": {"y": "x"}}, "no docstring"),
        (wide, ONE, "no shape binds .*streams.* of y"),
        (lost, ONE, "no shape binds .*columns.* of y"),
        (ellipsis, ONE, r"x has dims that are no expressions: .*\.\.\."),
        (capital, ONE, "no shape binds .*T.* of x"),
        (optional_first, ONE, "first tensor .* required"),
        (no_tensor, {}, "first tensor .* required"),
        (forbidden, {"mutates": ("pool",)}, "torch.compile forbids the parameter name 'mode'"),
    ],
)
def test_contradiction_is_refused(function: Callable[..., Any], facts: dict[str, Any], message: str) -> None:
    with pytest.raises(RegistrationError, match=message) as caught:
        declare(function, **{**FACTS, **facts})
    assert function.__name__ in str(caught.value)


def test_a_relation_may_use_attributes_of_arguments() -> None:
    where = ("x is not None and dim in (4, 8)",)
    assert declare(double, **{**FACTS, **DOUBLE, "where": where}).where == where


def test_facts_derived_from_the_declaration() -> None:
    contract = declare(blend, **{**FACTS, **BLEND})
    assert contract.name == "blend"
    assert [tensor.name for tensor in contract.tensors] == ["x", "weight", "cu", "residual", "projection"]
    assert contract.dims == {"tokens", "dim", "seqs", "inner", "width", "window", "bits"}
    # A choice among numbers decides about kernels as a flag does; free numbers do not.
    assert [flag.name for flag in contract.flags] == ["mode", "causal", "bits", "dtype"]
    assert contract.reference is blend


def test_public_op_keeps_name_docstring_and_contract() -> None:
    op = toy(new_registry(), double, **DOUBLE)
    assert op.__name__ == "double"
    assert double.__doc__
    assert (op.__doc__ or "").startswith(double.__doc__)
    assert op.__module__ == double.__module__
    assert op.contract.reference is double


def test_an_op_is_registered_once() -> None:
    registry = new_registry()
    toy(registry, double, **DOUBLE)
    with pytest.raises(RegistrationError, match="op 'double' is already registered"):
        toy(registry, double, **DOUBLE)
    assert list(registry.contracts) == ["double"]


def test_unknown_op_suggests_near_names() -> None:
    registry = new_registry()
    toy(registry, double, **DOUBLE)
    with pytest.raises(UnknownNameError, match=r"unknown op 'duoble'; did you mean double\?"):
        registry.contract("duoble")
    with pytest.raises(UnknownNameError):
        registry.explain("nothing_like_it")


def named_like_locals(
    key: Float[Tensor, "n valid"],
    index: Int32[Tensor, "n"],
    valid: Float32[Tensor, "n"],
    kernel: Float32[Tensor, "valid"],
    *,
    guard: int = 1,
    scope: bool = False,
    settings: str = "s",
    dispatcher: float = 0.0,
    library_op: int = 3,
    result: int = 4,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float32[Tensor, "n"]:
    """Parameters that are named like what a dispatching function is likely to use itself."""
    return key.double().sum(-1) + index + valid + kernel.sum() + guard + dispatcher + library_op + result


def test_parameters_may_have_any_name() -> None:
    op = toy(new_registry(), named_like_locals, outputs=("y",), static=("valid",))
    arguments = torch.ones(2, 3), torch.ones(2, dtype=torch.int32), torch.ones(2), torch.ones(3)
    for _ in range(2):
        assert op(*arguments).tolist() == [16.0, 16.0]
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    assert compiled(*arguments, guard=2).tolist() == [17.0, 17.0]
