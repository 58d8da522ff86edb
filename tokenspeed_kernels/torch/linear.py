"""Dense projections and embedding rows in plain torch."""

import torch
from torch import Tensor

from tokenspeed_kernels.linear import embedding as embedding_op
from tokenspeed_kernels.linear import linear as linear_op
from tokenspeed_kernels.torch.paged import gather_rows
from tokenspeed_registry import copy_into, kernel


@kernel(linear_op, backend="torch")
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    projected = project(x, weight, bias, dtype or x.dtype)
    return projected if out is None else copy_into(out, projected)


@kernel(embedding_op, backend="torch")
def embedding(ids: Tensor, table: Tensor, *, out: Tensor | None = None) -> Tensor:
    embedded = gather_rows(table, ids)
    return embedded if out is None else copy_into(out, embedded)


def project(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x · weightᵀ + bias rounded to `dtype`; in float32 where the library has no such product, or a wrong one."""
    if x.dtype == weight.dtype == dtype and not reads_past_rows(x, x.shape[1]):
        return torch.nn.functional.linear(x, weight, bias)
    wide = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(dtype)


def reads_past_rows(x: Tensor, *widths: int) -> bool:
    """Whether products of rows of these widths, in the dtype of `x`, are not to be trusted on its device.

    oneDNN's AMX product may read past the end of a row that does not fill its tiles of 64 bytes: a NaN in the next
    row, times zero, then spoils this one.
    """
    return x.is_cpu and x.dtype == torch.bfloat16 and any(width % 32 != 0 for width in widths)
