"""Calls that are valid: dims from every source, optional tensors, defaults, caller's outputs, content of indices."""

from typing import Any

import pytest
import torch
from jaxtyping import Float32, Int32
from torch import Tensor

from tests.registry.toys import BLEND, DOUBLE, blend, blend_arguments, double, fill_rows, new_registry, toy
from tokenspeed_registry import (
    ArgumentError,
    ArgumentTypeError,
    ContentError,
    DtypeError,
    Indices,
    Lengths,
    Offsets,
    ShapeError,
    StrideError,
)


def pair(
    x: Float32[Tensor, "tokens dim"],
    a: Float32[Tensor, "pages"] | None,
    b: Float32[Tensor, "pages"] | None,
    cu: Int32[Tensor, "pages+1"] | None,
    last: Float32[Tensor, "tokens"],
    *,
    pages_per_row: int | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float32[Tensor, "tokens"]:
    """Dims that only optional arguments bind."""
    return x.sum(-1) + sum(t.sum() for t in (a, b, cu) if t is not None) + last


def late(
    x: Float32[Tensor, "n"],
    extra: Float32[Tensor, "m"] | None,
    y: Float32[Tensor, "m"],
    *,
    backend: str | None = None,
    out: Tensor | None = None,
) -> Float32[Tensor, "m"]:
    """A dim that a required tensor binds after an optional one."""
    return y if extra is None else y + extra


def scalar_dims(
    x: Float32[Tensor, "rows*width"],
    *,
    rows: int,
    width: int,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float32[Tensor, "rows width"]:
    """Integer scalars as dims."""
    return x.reshape(rows, width)


def grouped(
    q: Float32[Tensor, "heads"], k: Float32[Tensor, "groups"], *, out: Tensor | None = None, backend: str | None = None
) -> Float32[Tensor, "heads"]:
    """A relation that divides by a dim."""
    return q * k.repeat_interleave(len(q) // len(k))


def bias_last(
    x: Float32[Tensor, "n"],
    bias: Float32[Tensor, "n"] | None = None,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float32[Tensor, "n"]:
    """A positional tensor that may be left out."""
    return x if bias is None else x + bias


def test_dims_of_optional_tensors_bind_from_whichever_is_given() -> None:
    op = toy(new_registry(), pair, outputs=("y",))
    x, last, three = torch.zeros(2, 4), torch.zeros(2), torch.ones(3)
    cu = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    for a, b, c, total in [(None, three, None, 3), (three, None, cu, 9), (None, three, cu, 9), (None, None, cu, 6)]:
        assert op(x, a, b, c, last).tolist() == [total, total]
    assert op(x, None, None, None, last).tolist() == [0, 0]
    for a, b, c, named in [
        (three, torch.ones(4), None, "b"),
        (None, three, cu[:3], "cu"),
        (None, None, cu[:0], "cu"),
    ]:
        with pytest.raises(ShapeError) as caught:
            op(x, a, b, c, last)
        assert caught.value.argument == named


def test_required_tensor_after_optional_one_binds_their_common_dim() -> None:
    op = toy(new_registry(), late, outputs=("z",))
    assert op(torch.zeros(2), None, torch.ones(3)).tolist() == [1, 1, 1]
    assert op(torch.zeros(2), torch.ones(3), torch.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(ShapeError):
        op(torch.zeros(2), torch.ones(2), torch.ones(3))


def test_integer_scalars_are_dims() -> None:
    op = toy(new_registry(), scalar_dims, outputs=("y",), where=("rows % width == 0",))
    assert op(torch.arange(8.0), rows=4, width=2).shape == (4, 2)
    assert op(torch.arange(4.0), rows=2, width=2).tolist() == [[0, 1], [2, 3]]
    with pytest.raises(ShapeError) as caught:
        op(torch.zeros(7), rows=4, width=2)
    assert "(8,)" in caught.value.expected
    with pytest.raises(ShapeError):  # not a ZeroDivisionError from the relation
        op(torch.zeros(0), rows=4, width=0)


def test_relation_that_divides_by_an_empty_dim_refuses() -> None:
    op = toy(new_registry(), grouped, outputs=("y",), where=("heads % groups == 0",))
    assert op(torch.ones(4), torch.tensor([1.0, 2.0])).tolist() == [1, 1, 2, 2]
    with pytest.raises(ShapeError, match="heads % groups"):
        op(torch.ones(4), torch.ones(0))
    with pytest.raises(ShapeError, match="heads=4, groups=3"):
        op(torch.ones(4), torch.ones(3))


def test_offset_dims() -> None:
    op = toy(new_registry(), blend, **BLEND)
    for seqs in (0, 1, 3):
        op(torch.zeros(3, 4), None, torch.zeros(seqs + 1, dtype=torch.int32))
    with pytest.raises(ShapeError, match=r"at least 1 elements \(seqs\+1\), got 0"):
        op(torch.zeros(3, 4), None, torch.zeros(0, dtype=torch.int32))


def test_defaults_and_keyword_use_of_positional_arguments() -> None:
    op = toy(new_registry(), blend, **BLEND)
    x, cu = torch.randn(3, 4), torch.zeros(2, dtype=torch.int32)
    explicit = blend_arguments() | {"x": x, "weight": None, "cu": cu, "residual": None, "projection": None}
    explicit |= {"scale": 1.0, "window": None}
    short, long = op(x, None, cu), op(**explicit)
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))
    assert torch.equal(op(cu=cu, weight=None, x=x)[0], short[0])
    loose: Any = op
    with pytest.raises(TypeError):
        loose(x, None)
    with pytest.raises(TypeError):
        loose(x, None, cu, None)
    with pytest.raises(TypeError):
        loose(x, None, cu, nothing=1)


def test_positional_optional_tensor_may_be_left_out() -> None:
    op = toy(new_registry(), bias_last, outputs=("y",))
    assert op(torch.ones(2)).tolist() == [1, 1]
    assert op(torch.ones(2), torch.ones(2)).tolist() == [2, 2]


def test_integers_do_for_floats() -> None:
    op = toy(new_registry(), blend, **BLEND)
    x, cu = torch.randn(3, 4), torch.zeros(2, dtype=torch.int32)
    assert torch.equal(op(x, None, cu, scale=2)[0], op(x, None, cu, scale=2.0)[0])


@pytest.mark.parametrize("shape", [(0, 4), (3, 4), (0, 0)])
def test_empty_tensors(shape: tuple[int, int]) -> None:
    op = toy(new_registry(), double, **DOUBLE)
    for _ in range(2):
        result = op(torch.ones(shape))
        assert result.shape == shape
        assert result.dtype == torch.float32


def test_strided_is_allowed_where_declared_alone() -> None:
    registry = new_registry()
    op = toy(registry, double, **DOUBLE, strided=("x",))
    base = torch.randn(6, 8)
    for view in (base[::2], base[:, :4], base[:, 4:], base[0].expand(5, 8), base[:, :1], base.T[:1].T):
        assert torch.equal(op(view), 2 * view)
    for refused in (base[:, ::2], base.T):
        with pytest.raises(StrideError, match="unit stride in the last dim"):
            op(refused)
    dense = toy(new_registry(), double, **DOUBLE)
    with pytest.raises(StrideError, match="a contiguous tensor"):
        dense(base[:, :4])


def test_out_is_used_and_returned() -> None:
    op = toy(new_registry(), blend, **BLEND)
    x, cu = torch.randn(3, 4), torch.zeros(2, dtype=torch.int32)
    expected = op(x, None, cu, dtype=torch.bfloat16)
    given = torch.full((3, 4), torch.nan, dtype=torch.bfloat16), torch.full((3, 2), torch.nan)
    returned = op(x, None, cu, dtype=torch.bfloat16, out=given)
    assert all(mine is theirs for mine, theirs in zip(returned, given, strict=True))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(given, expected, strict=True))


@pytest.mark.parametrize(
    ("out", "error"),
    [
        (torch.empty(3, 4), ArgumentTypeError),
        ((torch.empty(3, 4),), ArgumentTypeError),
        ((torch.empty(3, 4), None), ArgumentTypeError),
        ([torch.empty(3, 4), torch.empty(3, 2)], ArgumentTypeError),
        ((torch.empty(3, 4, dtype=torch.float16), torch.empty(3, 2)), DtypeError),
        ((torch.empty(3, 4), torch.empty(3, 3)), ShapeError),
        ((torch.empty(4, 4), torch.empty(3, 2)), ShapeError),
        ((torch.empty(3, 8)[:, ::2], torch.empty(3, 2)), StrideError),
        ((torch.empty(3, 4, device="meta"), torch.empty(3, 2)), ArgumentError),
        ((torch.empty(3, 4, requires_grad=True), torch.empty(3, 2)), ArgumentError),
    ],
)
def test_out_is_validated(out: Any, error: type[ArgumentError]) -> None:
    op = toy(new_registry(), blend, **BLEND)
    x, cu = torch.randn(3, 4), torch.zeros(2, dtype=torch.int32)
    for _ in range(2):
        with pytest.raises(error) as caught:
            op(x, None, cu, out=out)
        assert caught.value.argument == "out"
        op(x, None, cu)


def test_out_of_a_single_output_is_no_tuple() -> None:
    op = toy(new_registry(), double, **DOUBLE)
    loose: Any = op
    with pytest.raises(ArgumentTypeError):
        loose(torch.ones(1, 4), out=(torch.empty(1, 4),))


def test_mutation_returns_nothing() -> None:
    op = toy(new_registry(), fill_rows, mutates=("pool",), checks=(Indices("rows", "slots"),))
    pool = torch.zeros(3, 2)
    assert op(pool, torch.tensor([2], dtype=torch.int32), torch.ones(1, 2)) is None
    assert pool.tolist() == [[0, 0], [0, 0], [1, 1]]
    loose: Any = op
    with pytest.raises(TypeError):
        loose(pool, torch.tensor([2], dtype=torch.int32), torch.ones(1, 2), out=pool)


def counted(
    x: Float32[Tensor, "tokens"],
    cu: Int32[Tensor, "seqs+1"],
    lengths: Int32[Tensor, "seqs"],
    table: Int32[Tensor, "seqs pages"],
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float32[Tensor, "tokens"]:
    """Index tensors of every kind."""
    return x


CHECKS = (Offsets("cu", "tokens"), Lengths("lengths", ("pages", "seqs")), Indices("table", "tokens"))


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("cu", [0, 3, 2]),
        ("cu", [1, 2, 4]),
        ("cu", [0, 2, 3]),
        ("cu", [0, 2, 5]),
        ("cu", [0, -1, 4]),
        ("lengths", [0, 7]),
        ("lengths", [-1, 2]),
        ("table", [[0, 1, 2], [3, 4, -1]]),
        ("table", [[0, 1, -2], [3, 3, -1]]),
    ],
)
def test_content_of_short_host_tensors(argument: str, values: list[Any]) -> None:
    op: Any = toy(new_registry(), counted, outputs=("y",), checks=CHECKS)
    good = {"cu": [0, 0, 4], "lengths": [0, 6], "table": [[0, 1, 3], [-1, -1, 3]]}
    valid = {name: torch.tensor(numbers, dtype=torch.int32) for name, numbers in good.items()}
    for _ in range(2):
        op(torch.zeros(4), **valid)
        with pytest.raises(ContentError) as caught:
            op(torch.zeros(4), **(valid | {argument: torch.tensor(values, dtype=torch.int32)}))
        assert caught.value.argument == argument


def test_long_tensors_are_read_under_debug_only() -> None:
    offsets = torch.zeros(100, dtype=torch.int32)  # does not end at the number of tokens
    rest = torch.zeros(99, dtype=torch.int32), torch.zeros(99, 1, dtype=torch.int32)
    assert toy(new_registry(), counted, outputs=("y",), checks=CHECKS)(torch.zeros(4), offsets, *rest).shape == (4,)
    with pytest.raises(ContentError):
        toy(new_registry(debug=True), counted, outputs=("y",), checks=CHECKS)(torch.zeros(4), offsets, *rest)
