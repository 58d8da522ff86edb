"""Dense projections and embedding rows in plain torch."""

import torch
from torch import Tensor

from tokenspeed_kernels.linear import embedding as embedding_op
from tokenspeed_kernels.linear import linear as linear_op
from tokenspeed_kernels.torch.paged import gather_rows
from tokenspeed_registry import copy_into, kernel


@kernel(linear_op, backend="torch")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    if x.is_cpu and x.dtype == torch.bfloat16 and x.shape[1] % 4 != 0:
        # oneDNN's AMX product reads past the ends of such rows: a NaN in the next row, times zero, spoils this one.
        wide = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
        projected = wide.to(x.dtype)
    else:
        projected = torch.nn.functional.linear(x, weight, bias)
    return projected if out is None else copy_into(out, projected)


@kernel(embedding_op, backend="torch")
def embedding(ids: Tensor, table: Tensor, *, out: Tensor | None = None) -> Tensor:
    embedded = gather_rows(table, ids)
    return embedded if out is None else copy_into(out, embedded)
