"""Inputs of the gated delta rule in plain torch: the convolution's kernels and the gates'."""

import torch
from torch import Tensor

from tokenspeed_kernels import gdn_inputs
from tokenspeed_kernels.torch.conv import causal_conv_prefill, causal_conv_update
from tokenspeed_kernels.torch.gdn import gdn_gates
from tokenspeed_kernels.torch.paged import token_sequences
from tokenspeed_registry import copy_into, kernel

Inputs = tuple[Tensor, Tensor, Tensor]


@kernel(gdn_inputs.gdn_inputs_update, backend="torch")
def gdn_inputs_update(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    *,
    dropped: Tensor | None = None,
    out: Inputs | None = None,
) -> Inputs:
    y = causal_conv_update.function(x, weight, state, slots, dropped=dropped)
    return _with_gates(y, gdn_gates.function(a, b, a_log, dt_bias), (slots >= 0)[:, None, None], out)


@kernel(gdn_inputs.gdn_inputs_prefill, backend="torch")
def gdn_inputs_prefill(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    fresh: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    *,
    dropped: Tensor | None = None,
    out: Inputs | None = None,
) -> Inputs:
    y = causal_conv_prefill.function(x, weight, state, slots, cu_seqlens, fresh, dropped=dropped)
    seq, _ = token_sequences(cu_seqlens, x.shape[0])
    return _with_gates(y, gdn_gates.function(a, b, a_log, dt_bias), (slots[seq] >= 0)[:, None], out)


def _with_gates(y: Tensor, gates: tuple[Tensor, Tensor], valid: Tensor, out: Inputs | None) -> Inputs:
    g, beta = (torch.where(valid, x, 0.0) for x in gates)
    return (y, g, beta) if out is None else copy_into(out, (y, g, beta))
