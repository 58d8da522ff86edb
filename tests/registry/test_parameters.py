"""Annotations are read as jaxtyping means them, and what no torch.library schema can say is refused by name."""

from collections.abc import Callable
from typing import Any, Literal, Optional

import pytest
import torch
from jaxtyping import Bool, Float, Float8e4m3fn, Float32, Int, Int32, Int64, Shaped, UInt8
from torch import Tensor

from tests.registry.toys import blend
from tokenspeed_registry import RegistrationError
from tokenspeed_registry.parameters import (
    FLOATS,
    Output,
    ScalarParameter,
    TensorParameter,
    binding_of,
    read_outputs,
    read_parameters,
)


def tensors(
    a: Float[Tensor, "tokens streams*hidden 4"],
    b: Int32[Tensor, "seqs+1"] | None,
    c: Optional[Bool[Tensor, "tokens"]],  # noqa: UP045 - the older spelling is to be read too
    d: Float8e4m3fn[Tensor, "tokens"] | Float32[Tensor, "tokens"],
    e: UInt8[Tensor, ""],
    *,
    f: Int64[Tensor, "tokens"] | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> None: ...


def scalars(
    n: int,
    eps: float = 1e-6,
    *,
    causal: bool,
    mode: Literal["a", "b"] = "a",
    window: int | None = None,
    bits: Literal[4, 8] | None = None,
    layout: str = "rows",
    dtype: torch.dtype,
) -> None: ...


def test_tensor_parameters() -> None:
    assert read_parameters(tensors) == (
        TensorParameter("a", ("tokens", "streams*hidden", "4"), FLOATS, False, False),
        TensorParameter("b", ("seqs+1",), (torch.int32,), True, False),
        TensorParameter("c", ("tokens",), (torch.bool,), True, False),
        TensorParameter("d", ("tokens",), (torch.float8_e4m3fn, torch.float32), False, False),
        TensorParameter("e", (), (torch.uint8,), False, False),
        TensorParameter("f", ("tokens",), (torch.int64,), True, True, omissible=True),
    )


def test_float_means_the_three_of_inference() -> None:
    assert (torch.bfloat16, torch.float16, torch.float32) == FLOATS
    x = next(p for p in read_parameters(blend) if p.name == "x")
    assert isinstance(x, TensorParameter)
    assert x.describe_dtypes() == "bfloat16 or float16 or float32"


def test_scalar_parameters() -> None:
    import inspect

    none = inspect.Parameter.empty
    assert read_parameters(scalars) == (
        ScalarParameter("n", int, (), False, none, False),
        ScalarParameter("eps", float, (), False, 1e-6, False),
        ScalarParameter("causal", bool, (), False, none, True),
        ScalarParameter("mode", str, ("a", "b"), False, "a", True),
        ScalarParameter("window", int, (), True, None, True),
        ScalarParameter("bits", int, (4, 8), True, None, True),
        ScalarParameter("layout", str, (), False, "rows", True),
        ScalarParameter("dtype", torch.dtype, (), False, none, True),
    )


@pytest.mark.parametrize(
    ("expr", "binding"),
    [
        ("seqs+1", ("seqs", 1)),
        ("a_b+12", ("a_b", 12)),
        ("seqs", ("seqs", 0)),
        ("seqs*2", None),
        ("1+seqs", None),
        ("seqs+n", None),
        ("a+1+b", None),
        ("4", None),
    ],
)
def test_names_and_offsets_bind(expr: str, binding: tuple[str, int] | None) -> None:
    assert binding_of(expr) == binding


def plain_tensor(x: Tensor) -> None: ...
def any_integer(x: Int[Tensor, "n"]) -> None: ...
def any_dtype(x: Shaped[Tensor, "n"]) -> None: ...
def list_of(x: list[int]) -> None: ...
def int_or_str(x: int | str) -> None: ...
def mixed_choices(x: Literal["a", 1]) -> None: ...
def choice_of_none(x: Literal["a", None]) -> None: ...
def two_shapes(x: Float32[Tensor, "n"] | Int32[Tensor, "n m"]) -> None: ...
def tensor_or_number(x: Float32[Tensor, "n"] | int) -> None: ...
def unannotated(x) -> None: ...  # type: ignore[no-untyped-def]
def variadic(*x: int) -> None: ...
def keywords(**x: int) -> None: ...
def private(_x: int) -> None: ...


@pytest.mark.parametrize(
    "function",
    [
        plain_tensor,
        any_integer,
        any_dtype,
        list_of,
        int_or_str,
        mixed_choices,
        choice_of_none,
        two_shapes,
        tensor_or_number,
        unannotated,
        variadic,
        keywords,
        private,
    ],
)
def test_what_no_schema_has_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(RegistrationError):
        read_parameters(function)


def one(x: int) -> Float32[Tensor, "n"]: ...  # type: ignore[empty-body]
def two(x: int) -> tuple[Float[Tensor, "n m"], Int32[Tensor, "n"]]: ...  # type: ignore[empty-body]
def none(x: int) -> None: ...
def bare(x: int) -> Tensor: ...  # type: ignore[empty-body]
def number(x: int) -> int: ...  # type: ignore[empty-body]
def ambiguous(x: int) -> Float[Tensor, "n"]: ...  # type: ignore[empty-body]


def test_outputs() -> None:
    assert read_outputs(one, ("y",), {}) == (Output("y", ("n",), torch.float32),)
    assert read_outputs(two, ("y", "z"), {"y": "x"}) == (
        Output("y", ("n", "m"), "x"),
        Output("z", ("n",), torch.int32),
    )
    assert read_outputs(none, (), {}) == ()


@pytest.mark.parametrize("function", [bare, number, ambiguous])
def test_results_need_dtype_and_shape(function: Callable[..., Any]) -> None:
    with pytest.raises(RegistrationError, match=function.__name__):
        read_outputs(function, ("y",), {})
