"""Dense projections and embedding rows through the public API, on the plain-torch kernels."""

import pytest
import torch

from tokenspeed_kernels.linear import embedding, linear
from tokenspeed_registry import ContentError, DtypeError, ShapeError


def test_weights_have_a_row_per_output() -> None:
    x, weight, bias = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 4.0]]), torch.ones(3)
    assert torch.equal(linear(x, weight, backend="torch"), torch.tensor([[1.0, 2.0, 11.0]]))
    assert torch.equal(linear(x, weight, bias, backend="torch"), torch.tensor([[2.0, 3.0, 12.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_features", [1, 3, 34, 37, 64, 129])
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


def test_mixed_dtypes_and_widths_are_rejected() -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(DtypeError, match="weight"):
        linear(x, torch.zeros(3, 4, dtype=torch.bfloat16))
    with pytest.raises(ShapeError, match="weight"):
        linear(x, torch.zeros(3, 5))
    with pytest.raises(ShapeError, match="bias"):
        linear(x, torch.zeros(3, 4), torch.zeros(4))
