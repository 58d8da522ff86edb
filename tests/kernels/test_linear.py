"""Dense projections and embedding rows through the public API, on the plain-torch kernels."""

import pytest
import torch

from tokenspeed_kernels.linear import embedding, linear
from tokenspeed_registry import ArgumentError, ContentError, DtypeError, ShapeError


def test_weights_have_a_row_per_output() -> None:
    x, weight, bias = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 4.0]]), torch.ones(3)
    assert torch.equal(linear(x, weight, backend="torch"), torch.tensor([[1.0, 2.0, 11.0]]))
    assert torch.equal(linear(x, weight, bias, backend="torch"), torch.tensor([[2.0, 3.0, 12.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_features", [1, 3, 34, 37, 64, 68, 129, 272])
def test_a_token_of_nan_spoils_no_other(in_features: int, dtype: torch.dtype) -> None:
    x = torch.ones(17, in_features, dtype=dtype)
    x[5] = torch.nan
    projected = linear(x, torch.ones(256, in_features, dtype=dtype), backend="torch")
    assert projected[5].isnan().all()
    assert (projected[[row for row in range(17) if row != 5]] == in_features).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_slice_of_a_wider_tensor_is_read_alone(dtype: torch.dtype) -> None:
    wide = torch.full((17, 40), torch.nan, dtype=dtype)
    wide[:, 1:38] = 1
    assert (linear(wide[:, 1:38], torch.ones(48, 37, dtype=dtype), backend="torch") == 37).all()


def test_embedding_copies_rows_and_gives_zeros_for_padding() -> None:
    table = torch.tensor([[torch.nan, torch.nan], [1.0, 2.0], [3.0, 4.0]])
    rows = embedding(torch.tensor([2, -1, 1]), table, backend="torch")
    assert torch.equal(rows, torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 2.0]]))


def test_ids_outside_the_table_are_rejected_by_name() -> None:
    table = torch.zeros(3, 2)
    for bad in (3, -2):
        with pytest.raises(ContentError, match="ids"):
            embedding(torch.tensor([0, bad]), table)


def test_a_float32_router_sees_all_of_its_weights() -> None:
    """2^-12 vanishes beside 1 in bfloat16, as weight and as result."""
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    weight = torch.zeros(3, 64)
    weight[:, 0], weight[1, 1], weight[2, 0] = 1.0, 2**-12, 1 + 2**-12
    logits = linear(x, weight, dtype=torch.float32, backend="torch")
    assert logits.dtype == torch.float32
    assert logits.tolist() == [[1.0, 1 + 2**-12, 1 + 2**-12]] * 2
    rounded = linear(x, weight, backend="torch")
    assert rounded.dtype == torch.bfloat16
    assert rounded.tolist() == [[1.0, 1.0, 1.0]] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_logits_are_never_rounded_on_the_way(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 2**-5]]).expand(2, 2).contiguous().to(dtype)
    weight, bias = torch.tensor([[1.0, 2**-9]]).to(dtype), torch.tensor([2.0**-20]).to(dtype)
    out = torch.full((2, 1), torch.nan)
    logits = linear(x, weight, bias, dtype=torch.float32, out=out, backend="torch")
    assert logits is out
    assert logits.tolist() == [[1 + 2**-14 + 2**-20]] * 2


def test_the_result_may_be_narrower_than_its_inputs() -> None:
    x, weight = torch.full((1, 2), 1.0), torch.tensor([[1.0, 2**-10]])
    assert linear(x, weight, dtype=torch.bfloat16, backend="torch").tolist() == [[1.0]]
    with pytest.raises(DtypeError, match="out"):
        linear(x, weight, dtype=torch.bfloat16, out=torch.zeros(1, 1))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64, torch.bool])
def test_results_of_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    x, weight = torch.ones(1, 4), torch.ones(1, 4)
    linear(x, weight, dtype=torch.float16)
    with pytest.raises(ArgumentError, match="dtype"):
        linear(x, weight, dtype=dtype)


def test_mixed_dtypes_and_widths_are_rejected() -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(DtypeError, match="bias"):
        linear(x, torch.zeros(3, 4), torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(ShapeError, match="weight"):
        linear(x, torch.zeros(3, 5))
    with pytest.raises(ShapeError, match="bias"):
        linear(x, torch.zeros(3, 4), torch.zeros(4))
