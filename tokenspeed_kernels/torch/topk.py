"""The largest values of rows, with one answer for ties: torch.topk promises no order, and a row's width changes it."""

import torch
from torch import Tensor

_LOW_WORD = (1 << 32) - 1


def largest(values: Tensor, count: int) -> Tensor:
    """Places [rows, count] (int64) of the largest values of each row, in falling order, equal ones by place.

    `values`: Float32 [rows, width], without NaN. It sorts unique 64-bit keys: the value's bits, made to compare as
    integers do, above the inverted place.
    """
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0: −0 and 0 are equal
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (ordered << 32) | (_LOW_WORD - torch.arange(values.shape[1], device=values.device))
    return _LOW_WORD - (keys.topk(count, dim=1).values & _LOW_WORD)
