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
    dropped: Tensor | None = None,
    dilation: int = 1,
    activation: Activation = "silu",
    out: Tensor | None = None,
) -> Tensor:
    seqs, history = slots.shape[0], state.shape[1]
    before = torch.where(fresh[:, None, None], 0, gather_rows(state, slots))
    rows = torch.cat([x.new_zeros(1, x.shape[1]), before.flatten(0, 1), x])
    counted = torch.full_like(slots, history) if dropped is None else history - dropped  # [seqs] rows of each history

    def at(seq: Tensor, position: Tensor) -> Tensor:
        """Inputs at positions counted from a sequence's first new token; zero before the rows of its history."""
        old = counted[seq] + position
        old = torch.where(old < 0, 0, 1 + seq * history + old)
        return rows[torch.where(position < 0, old, 1 + seqs * history + cu_seqlens[seq] + position)]

    seq, position = token_sequences(cu_seqlens, x.shape[0])
    taps = [at(seq, position - offset) for offset in _offsets(weight, dilation)]
    y = _finish(taps, weight, activation, slots[seq] >= 0, out)

    every = torch.arange(seqs, device=x.device).unsqueeze(-1)
    newest = cu_seqlens.diff().unsqueeze(-1) - history + torch.arange(history, device=x.device)
    scatter_rows(state, (slots,), at(every, newest))
    return y


@kernel(conv.causal_conv_update, backend="torch")
def causal_conv_update(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    *,
    dropped: Tensor | None = None,
    dilation: int = 1,
    activation: Activation = "silu",
    out: Tensor | None = None,
) -> Tensor:
    batch, q_len, channels = x.shape
    history = state.shape[1]
    rows = torch.cat([x.new_zeros(batch, 1, channels), gather_rows(state, slots), x], 1)
    counted = torch.full_like(slots, history) if dropped is None else history - dropped  # [batch] rows of each history

    def at(position: Tensor) -> Tensor:
        """Inputs at positions [batch n] counted from the first new token; zero before the rows of the history."""
        row = torch.where(position < 0, (1 + counted.unsqueeze(-1) + position).clamp_min(0), 1 + history + position)
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
    total = torch.zeros(taps[0].shape, dtype=torch.float32, device=weight.device)
    for tap, tap_weight in zip(taps, weight.float().unbind(1), strict=True):
        total += tap.float() * tap_weight
    total = torch.where(valid.reshape(-1, *(1 for _ in total.shape[1:])), total, 0.0)
    y = total.to(weight.dtype)
    y = F.silu(y) if activation == "silu" else y
    return y if out is None else copy_into(out, y)
