"""Inputs of the gated delta rule: its gates, alone or by the launch that also convolves queries, keys and values."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import gdn, gdn_inputs
from tokenspeed_kernels.triton.conv_prefill import prefill
from tokenspeed_kernels.triton.conv_update import update
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.gdn_gates import gates_of_tokens
from tokenspeed_registry import Dim

Inputs = tuple[Tensor, Tensor, Tensor]


@triton.jit(do_not_specialize=["tokens"])
def _gates(
    a_ptr,  # [tokens, HEADS]
    b_ptr,
    a_log_ptr,  # [HEADS]
    dt_bias_ptr,
    g_ptr,  # [tokens, HEADS]
    beta_ptr,
    tokens,
    a_stride,
    b_stride,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    o_t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = o_t < tokens
    gates_of_tokens(
        a_ptr + (o_t * a_stride)[:, None],
        b_ptr + (o_t * b_stride)[:, None],
        a_log_ptr,
        dt_bias_ptr,
        g_ptr + (o_t * HEADS)[:, None],
        beta_ptr + (o_t * HEADS)[:, None],
        inside,
        inside,
        HEADS,
        HEAD_BLOCK,
    )


@portable(gdn.gdn_gates)
def gdn_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    if out is None:
        g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    else:
        g, beta = out
    tokens, heads = a.shape
    if g.numel():
        block = triton.next_power_of_2(heads)
        rows = max(256 // block, 1)
        _gates[(triton.cdiv(tokens, rows),)](
            a, b, a_log, dt_bias, g, beta, tokens, a.stride(0), b.stride(0), heads, rows, block, num_warps=2
        )
    return g, beta


@portable(gdn_inputs.gdn_inputs_update, constraints=[Dim("channels") >= 1, Dim("heads") >= 1])
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
    y, g, beta = out = _outputs(x, a) if out is None else out
    gates = a, b, a_log, dt_bias, g, beta
    update(x, weight, state, slots, dropped, y, dilation=1, silu=True, gates=gates)
    return out


@portable(gdn_inputs.gdn_inputs_prefill, constraints=[Dim("channels") >= 1, Dim("heads") >= 1])
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
    y, g, beta = out = _outputs(x, a) if out is None else out
    gates = a, b, a_log, dt_bias, g, beta
    prefill(x, weight, state, slots, cu_seqlens, fresh, dropped, y, dilation=1, silu=True, gates=gates)
    return out


def _outputs(x: Tensor, a: Tensor) -> Inputs:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    return y, g, beta
