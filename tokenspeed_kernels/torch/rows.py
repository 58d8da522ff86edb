"""Reading and writing rows of a pool through indices of which some are −1, without asking the device for them."""

import torch
from torch import Tensor


def read_rows(pool: Tensor, rows: Tensor) -> Tensor:
    """`pool[rows]`; for −1 the values of some other row, which the caller must not use."""
    return pool.index_select(0, rows.clamp_min(0).long())


def write_rows(pool: Tensor, rows: Tensor, values: Tensor) -> None:
    """`pool[rows[i]] = values[i]` for every i with rows[i] ≥ 0.

    Boolean indexing would sync the device. Instead an entry of −1 repeats the write of one that is not; if there is
    none, row 0 is given the bits that it has.
    """
    if rows.numel() == 0:
        return
    valid = rows >= 0
    entries = torch.arange(rows.numel(), device=rows.device)
    source = torch.where(valid, entries, valid.int().argmax())
    target = rows.index_select(0, source).clamp_min(0).long()
    new = values.index_select(0, source).to(pool.dtype)
    anything = valid.any()
    pool.index_copy_(0, target, torch.where(anything, new, pool.index_select(0, target)))
