"""Limits that kernels declare: they decide call by call, through the table too, and must be on what the op has."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.registry.toys import BLEND, blend, blend_arguments, doubling, new_registry, setting, toy, with_kernels
from tokenspeed_registry import Dim, Dtype, Flag, Given, RegistrationError, kernel


def test_limits_on_dynamic_dims_hold_call_by_call() -> None:
    registry, op, ran = setting("rest")
    few = doubling(op, "few", ran, priority=300, constraints=[Dim("tokens") <= 8])
    many = doubling(op, "many", ran, priority=200, constraints=[Dim("tokens") >= 64, Dim("tokens").multiple_of(2)])
    with_kernels(registry, [few, many])
    expected = {1: "few", 8: "few", 9: "rest", 64: "many", 65: "rest", 0: "few"}
    for _ in range(3):  # the later rounds hit the table
        ran.clear()
        for tokens in expected:
            op(torch.ones(tokens, 4))
        assert ran == list(expected.values())
    table = registry.dispatcher("double").table
    op(torch.ones(5, 4))
    assert registry.dispatcher("double").table is table
    assert len(table) == 5, "one entry for each answer to the limits, not for each size"


def test_limits_on_dims_that_only_an_optional_tensor_has() -> None:
    registry = new_registry()
    op: Any = toy(registry, blend, **BLEND)
    ran: list[int] = []

    def run(x: Any, weight: Any, cu: Any, *, residual: Any, projection: Any, scale: Any, width: Any, window: Any,
            mode: Any, causal: Any, bits: Any, dtype: Any, out: Any = None) -> Any:  # fmt: skip
        ran.append(-1 if residual is None else residual.shape[1])
        return x, x

    registry.add_kernel(kernel(op, backend="mine", constraints=[Dim("inner") <= 2])(run))
    x, weight, cu = (blend_arguments()[name] for name in ("x", "weight", "cu"))
    for _ in range(2):
        for inner in (2, 3, 1):
            op(x, weight, cu, residual=torch.ones(3, inner))
        op(x, weight, cu)  # absent, and so within every limit
    assert ran == [2, 1, -1] * 2


def test_limits_on_dtypes_flags_and_presence() -> None:
    registry = new_registry()
    op: Any = toy(registry, blend, **BLEND)
    ran: list[str] = []

    def add(name: str, *limits: Any) -> None:
        def run(x: Any, weight: Any, cu: Any, *, residual: Any, projection: Any, scale: Any, width: Any, window: Any,
                mode: Any, causal: Any, bits: Any, dtype: Any, out: Any = None) -> Any:  # fmt: skip
            ran.append(name)
            return x, x

        registry.add_kernel(kernel(op, backend=name, constraints=limits)(run))

    add("a_bits", Flag("bits").in_(4))
    add("b_multiply", Flag("mode").in_("multiply"), Flag("causal").in_(True))
    add("c_no_weight", Given("weight").in_(False))
    add("d_half", Dtype("x").in_(torch.float16, torch.bfloat16))
    add("e_rest")
    x, weight, cu = (blend_arguments()[name] for name in ("x", "weight", "cu"))
    for _ in range(2):
        ran.clear()
        op(x, weight, cu)
        op(x, weight, cu, bits=4)
        op(x, weight, cu, mode="multiply")
        op(x, weight, cu, mode="multiply", causal=False)
        op(x, None, cu)
        op(x.half(), weight.half(), cu)
        assert ran == ["e_rest", "a_bits", "b_multiply", "e_rest", "c_no_weight", "d_half"]


def renamed(y: Tensor, *, out: Any = None) -> Any: ...
def positional_out(x: Tensor, out: Any = None) -> Any: ...
def no_out(x: Tensor) -> Any: ...
def extra(x: Tensor, n: int = 1, *, out: Any = None) -> Any: ...
def keyword(*, x: Tensor, out: Any = None) -> Any: ...
def variadic(*args: Any, **kwargs: Any) -> Any: ...


@pytest.mark.parametrize("function", [renamed, positional_out, no_out, extra, keyword, variadic])
def test_kernel_with_other_parameters_than_the_op(function: Any) -> None:
    _, op, _ = setting()
    with pytest.raises(RegistrationError, match=r"kernel mine.double: parameters .* are not the op's .*'x'.*'out'"):
        kernel(op, backend="mine")(function)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (Dim("heads") <= 8, "no dim 'heads'"),
        (Flag("causal").in_(True), "no flag 'causal'"),
        (Given("x").in_(True), "no given 'x'"),
        (Dtype("q").in_(torch.float32), "no dtype 'q'"),
    ],
)
def test_limits_on_what_the_op_does_not_have(limit: Any, message: str) -> None:
    _, op, _ = setting()
    with pytest.raises(RegistrationError, match=f"kernel mine: double has {message}"):
        doubling(op, "mine", constraints=[limit])
