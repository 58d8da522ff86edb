"""Causal depthwise convolution in plain torch: each tap is one gather from histories and inputs laid end to end."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed_kernels import conv
from tokenspeed_kernels.torch.paged import gather_rows, scatter_rows, token_sequences
from tokenspeed_registry import copy_into, kernel

Activation = Literal["none", "silu"]


@kernel(conv.causal_conv_prefill, backend="torch")
def causal_conv_prefill(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    fresh: Tensor,
    *,
    dilation: int = 1,
    activation: Activation = "silu",
    out: Tensor | None = None,
) -> Tensor:
    seqs, history = slots.shape[0], state.shape[1]
    before = torch.where(fresh[:, None, None], 0, gather_rows(state, slots))
    rows = torch.cat([before.flatten(0, 1), x])

    def row_of(seq: Tensor, position: Tensor) -> Tensor:
        """Where the input at `position` of a sequence lies in `rows`; its history has positions −history to −1."""
        here = seqs * history + cu_seqlens[seq] + position
        return torch.where(position < 0, (seq + 1) * history + position, here)

    seq, position = token_sequences(cu_seqlens, x.shape[0])
    taps = [rows[row_of(seq, position - offset)] for offset in _offsets(weight, dilation)]
    y = _finish(taps, weight, activation, slots[seq] >= 0, out)

    every = torch.arange(seqs, device=x.device).unsqueeze(-1)
    newest = cu_seqlens.diff().unsqueeze(-1) - history + torch.arange(history, device=x.device)
    scatter_rows(state, (slots,), rows[row_of(every, newest)])
    return y


@kernel(conv.causal_conv_update, backend="torch")
def causal_conv_update(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    *,
    accepted: Tensor | None = None,
    dilation: int = 1,
    activation: Activation = "silu",
    out: Tensor | None = None,
) -> Tensor:
    batch, q_len, channels = x.shape
    history = state.shape[1]
    rows = torch.cat([gather_rows(state, slots), x], 1)
    counted = torch.full_like(slots, history) if accepted is None else history - q_len + accepted
    counted = counted.unsqueeze(-1)  # [batch 1] rows of history before x

    def at(position: Tensor) -> Tensor:
        """The inputs at positions [batch n], counted from the first new token."""
        row = torch.where(position < 0, counted + position, history + position)
        return rows.gather(1, row.long().unsqueeze(-1).expand(-1, -1, channels))

    token = torch.arange(q_len, device=x.device).expand(batch, -1)
    taps = [at(token - offset) for offset in _offsets(weight, dilation)]
    y = _finish(taps, weight, activation, slots >= 0, out)
    scatter_rows(state, (slots,), at((torch.arange(history, device=x.device) - history + q_len).expand(batch, -1)))
    return y


def _offsets(weight: Tensor, dilation: int) -> list[int]:
    """How many tokens back each tap lies, first tap first."""
    return [back * dilation for back in reversed(range(weight.shape[1]))]


def _finish(taps: list[Tensor], weight: Tensor, activation: Activation, valid: Tensor, out: Tensor | None) -> Tensor:
    """Weighted sum of the taps [... channels], with zeros where `valid` (of the first dim) is false."""
    total = torch.zeros(taps[0].shape, device=weight.device)
    for tap, tap_weight in zip(taps, weight.float().unbind(1), strict=True):
        total += tap.float() * tap_weight
    total = torch.where(valid.reshape(-1, *(1 for _ in total.shape[1:])), total, 0.0)
    y = total.to(weight.dtype)
    y = F.silu(y) if activation == "silu" else y
    return y if out is None else copy_into(out, y)
