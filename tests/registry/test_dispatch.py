"""The generated checks and the interpreted validation agree on every call, before and after a table hit."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.registry.toys import BLEND, blend, blend_arguments, new_registry, toy, with_kernels
from tokenspeed_registry import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    Dim,
    DtypeError,
    GradError,
    Kernel,
    Op,
    Registry,
    ShapeError,
    StrideError,
    copy_into,
    kernel,
)
from tokenspeed_registry.validation import signature_of

TENSORS = ["x", "weight", "cu", "residual", "projection"]
NOT_TENSORS = [None, 3, "x", [1.0, 2.0], (), np.zeros((3, 4), np.float32), torch.float32, object()]
NOT_FLAGS: list[object] = [
    None,
    0,
    1,
    1.0,
    0.0,
    4,
    8.0,
    True,
    False,
    "add",
    "other",
    [True],
    {},
    torch.float16,
    torch.zeros(2),
]
SCALARS = ["scale", "width", "window", "mode", "causal", "bits", "dtype"]


def guarded(target: Op[..., Any]) -> list[Kernel]:
    """Kernels with limits on dynamic dims of every kind, so that the dispatch key holds answers about them."""

    def run(x: Any, weight: Any, cu: Any, *, residual: Any, projection: Any, scale: Any, width: Any, window: Any,
            mode: Any, causal: Any, bits: Any, dtype: Any, out: Any = None) -> Any:  # fmt: skip
        y, sums = blend(
            x, weight, cu, residual=residual, projection=projection, scale=scale, width=width, window=window,
            mode=mode, causal=causal, bits=bits, dtype=dtype,
        )  # fmt: skip
        results = cast(Any, y).to(dtype), cast(Any, sums).float()
        return results if out is None else copy_into(out, results)

    limits = [Dim("tokens") <= 4, Dim("seqs") <= 2, Dim("inner") <= 2, Dim("window") <= 8, Dim("width").in_(2, 3)]
    return [kernel(target, backend=f"limit{i}", constraints=limits[i:], priority=300 - i)(run) for i in range(3)]


def blend_registry(guards: bool = True) -> tuple[Registry, Any]:
    registry = new_registry()
    op = toy(registry, blend, **BLEND)
    if guards:
        with_kernels(registry, guarded(op))
    return registry, op


def call(op: Any, arguments: dict[str, Any]) -> Any:
    positional = [arguments[name] for name in ("x", "weight", "cu")]
    return op(*positional, **{name: value for name, value in arguments.items() if name not in ("x", "weight", "cu")})


def corrupt(draw: st.DrawFn, tensor: torch.Tensor) -> object:
    """A tensor that differs from a valid one in one respect, which may or may not matter."""
    kind = draw(st.sampled_from(["dtype", "rank", "size", "strided", "device", "grad", "not a tensor", "empty"]))
    match kind:
        case "dtype":
            return tensor.to(
                draw(st.sampled_from([torch.float64, torch.int32, torch.int64, torch.float16, torch.bool]))
            )
        case "rank":
            return draw(st.sampled_from([tensor[None], tensor[0], tensor.flatten()]))
        case "size":
            dim = draw(st.integers(0, tensor.dim() - 1))
            shape = [size + draw(st.sampled_from([-1, 1])) * (i == dim) for i, size in enumerate(tensor.shape)]
            return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
        case "strided":
            step = draw(st.integers(0, tensor.dim() - 1))
            wide = torch.zeros([2 * n if i == step else n for i, n in enumerate(tensor.shape)], dtype=tensor.dtype)
            view = wide[tuple(slice(None, None, 2) if i == step else slice(None) for i in range(tensor.dim()))]
            return draw(st.sampled_from([view, wide.narrow(-1, 0, tensor.shape[-1]), tensor.expand_as(tensor)]))
        case "device":
            return torch.zeros_like(tensor, device="meta" if tensor.device.type == "cpu" else "cpu")
        case "grad":
            return tensor.float().clone().requires_grad_()
        case "empty":
            return tensor[:0]
        case _:
            return draw(st.sampled_from(NOT_TENSORS))


@st.composite
def calls(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """A valid call with some optional arguments absent, and the same with up to two arguments corrupted."""
    valid = blend_arguments(draw(st.sampled_from(["cpu", "cpu", "meta"])))
    for name in ("weight", "residual", "projection", "window"):
        if draw(st.booleans()):
            valid[name] = None
    corrupted = dict(valid)
    for name in draw(st.lists(st.sampled_from(TENSORS + SCALARS), max_size=2, unique=True)):
        value = valid[name]
        if isinstance(value, torch.Tensor):
            corrupted[name] = corrupt(draw, value)
        elif name in TENSORS:
            corrupted[name] = draw(st.sampled_from(NOT_TENSORS))
        else:
            corrupted[name] = draw(st.sampled_from([*NOT_FLAGS, -1, 3, 0.5, float("nan"), 200]))
    return valid, corrupted


def verdict(check: Any, *args: Any) -> tuple[str, str] | None:
    """The error and the argument it names; None where the call is accepted."""
    refusals: list[ArgumentError] = []
    try:
        check(*args)
    except ArgumentError as error:
        refusals.append(error)
    for refusal in refusals:
        assert refusal.op == "blend"
        assert refusal.argument in TENSORS + SCALARS
        assert refusal.expected
        assert isinstance(refusal.got, str)
        assert f"{refusal.argument!r}: expected {refusal.expected}, got {refusal.got}" in str(refusal)
    return next(((type(refusal).__name__, refusal.argument) for refusal in refusals), None)


WARM = blend_registry()
PLAIN = blend_registry(guards=False)


@pytest.mark.filterwarnings("ignore:blend falls back:RuntimeWarning")
@given(calls(), st.sampled_from([WARM, PLAIN]))
@settings(max_examples=150, deadline=None)
def test_fast_and_slow_checks_agree(pair: tuple[dict[str, Any], dict[str, Any]], setting: tuple[Registry, Any]) -> None:
    registry, op = setting
    valid, corrupted = pair
    dispatcher = registry.dispatcher("blend")
    expected = verdict(signature_of, dispatcher.contract, corrupted)
    dispatcher.forget()
    assert verdict(call, op, corrupted) == expected, "with an empty table"
    result = call(op, valid)
    assert dispatcher.table, "a valid call fills the table"
    assert verdict(call, op, corrupted) == expected, "after a valid call"
    again = call(op, valid)
    if valid["x"].device.type == "cpu":
        assert all(torch.equal(a, b) for a, b in zip(result, again, strict=True))


SINGLE: list[tuple[str, Any, type[ArgumentError]]] = [
    ("x", torch.zeros(3, 4, dtype=torch.float64), DtypeError),
    ("x", torch.zeros(3, 4, 1), ShapeError),
    ("x", torch.zeros(3, 8)[:, ::2], StrideError),
    ("x", torch.zeros(3, 4, requires_grad=True), GradError),
    ("x", None, ArgumentTypeError),
    ("weight", torch.zeros(5), ShapeError),
    ("weight", torch.zeros(4, dtype=torch.bfloat16), DtypeError),
    ("weight", torch.zeros(4, device="meta"), DeviceError),
    ("weight", "weight", ArgumentTypeError),
    ("cu", torch.zeros(3, dtype=torch.int64), DtypeError),
    ("cu", torch.zeros(0, dtype=torch.int32), ShapeError),
    ("cu", torch.zeros(3, dtype=torch.int32, device="meta"), DeviceError),
    ("cu", torch.zeros(6, dtype=torch.int32)[::2], StrideError),
    ("residual", torch.zeros(4, 2), ShapeError),
    ("projection", torch.zeros(2, 4), ShapeError),
    ("projection", torch.zeros(3, 8), ShapeError),
    ("scale", "1", ArgumentTypeError),
    ("scale", True, ArgumentTypeError),
    ("width", 2.0, ArgumentTypeError),
    ("width", True, ArgumentTypeError),
    ("width", None, ArgumentTypeError),
    ("window", 7.0, ArgumentTypeError),
    ("mode", "divide", ArgumentTypeError),
    ("causal", 1, ArgumentTypeError),
    ("causal", [True], ArgumentTypeError),
    ("bits", 16, ArgumentTypeError),
    ("bits", 8.0, ArgumentTypeError),
    ("dtype", "float32", ArgumentTypeError),
    ("dtype", [], ArgumentTypeError),
]


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("guards", [False, True], ids=["plain", "guarded"])
def test_every_refusal_names_its_argument_and_does_no_harm(warm: bool, guards: bool) -> None:
    _, op = blend_registry(guards)
    if warm:
        call(op, blend_arguments())
    for argument, value, error in SINGLE:
        with pytest.raises(error) as caught:
            call(op, blend_arguments() | {argument: value})
        assert (caught.value.op, caught.value.argument) == ("blend", argument)
    call(op, blend_arguments())


@pytest.mark.parametrize(
    ("argument", "value"), [("width", 0), ("cu", torch.zeros(9, dtype=torch.int32)), ("window", 100)]
)
def test_broken_relation_is_a_shape_error_that_says_the_relation(argument: str, value: Any) -> None:
    _, op = blend_registry()
    for _ in range(2):
        with pytest.raises(ShapeError, match="dims with") as caught:
            call(op, blend_arguments() | {argument: value})
        assert caught.value.expected.removeprefix("dims with ") in BLEND["where"]
        assert call(op, blend_arguments())[1].shape == (3, 2)


def test_a_meta_call_does_not_open_the_table_to_host_tensors() -> None:
    """The device index of a meta tensor is -1, like that of a CPU tensor."""
    _, op = blend_registry()
    arguments = blend_arguments("meta")
    call(op, arguments)
    with pytest.raises(DeviceError) as caught:
        call(op, arguments | {"weight": torch.zeros(4)})
    assert caught.value.argument == "weight"


def test_argument_errors_are_the_builtin_errors_that_callers_expect() -> None:
    _, op = blend_registry()
    for value, builtin in [(torch.zeros(3, 4, dtype=torch.int8), TypeError), (torch.zeros(3), ValueError)]:
        with pytest.raises(builtin):
            call(op, blend_arguments() | {"x": value})
