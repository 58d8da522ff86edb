"""The causal convolution: some tokens of each sequence, or all of packed prompts."""

from typing import Literal

import torch
from torch import Tensor

from tokenspeed_kernels import conv
from tokenspeed_kernels.triton.conv_prefill import prefill
from tokenspeed_kernels.triton.conv_update import update
from tokenspeed_kernels.triton.declare import portable

Activation = Literal["none", "silu"]


@portable(conv.causal_conv_update)
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
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    update(x, weight, state, slots, dropped, out, dilation=dilation, silu=activation == "silu")
    return out


@portable(conv.causal_conv_prefill)
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
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    silu = activation == "silu"
    prefill(x, weight, state, slots, cu_seqlens, fresh, dropped, out, dilation=dilation, silu=silu)
    return out
