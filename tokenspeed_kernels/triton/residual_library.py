"""Gated residual of thousands of tokens: torch's matrix products, and elementwise passes between them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.triton.residual_many import activate
from tokenspeed_kernels.triton.residual_prepare import prepare


@triton.jit(do_not_specialize=["tokens"])
def _gate(
    normed_ptr,  # [tokens, STREAMS, HIDDEN]
    gate_ptr,  # [tokens, STREAMS, HIDDEN]
    up_scale_ptr,  # [STREAMS, HIDDEN]
    products_ptr,  # [tokens, STREAMS, GATES]
    gates_ptr,  # [tokens, GATES]
    mixed_ptr,  # [tokens, HIDDEN]
    tokens,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    GATES: tl.constexpr,
    SCALED: tl.constexpr,
    GATE_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_c = tl.program_id(1)
    o_t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    o_c = i_c * BLOCK + tl.arange(0, BLOCK)
    alive = (o_t < tokens)[:, None]
    inside = alive & (o_c < HIDDEN)[None, :]
    mixed = tl.zeros((TOKENS, BLOCK), tl.float32)
    for i_stream in tl.static_range(STREAMS):
        o_x = (o_t * STREAMS + i_stream)[:, None] * HIDDEN + o_c[None, :]
        gate = tl.load(gate_ptr + o_x, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            gate *= tl.load(up_scale_ptr + i_stream * HIDDEN + o_c, mask=o_c < HIDDEN, other=0.0)[None, :]
        mixed += tl.sigmoid(gate) * tl.load(normed_ptr + o_x, mask=inside, other=0.0).to(tl.float32)
    p_m = mixed_ptr + o_t[:, None] * HIDDEN + o_c[None, :]
    tl.store(p_m, (mixed / STREAMS).to(mixed_ptr.dtype.element_ty), mask=inside)
    if GATES and i_c == 0:
        o_g = tl.arange(0, GATE_BLOCK)
        has_gate = alive & (o_g < GATES)[None, :]
        total = tl.zeros((TOKENS, GATE_BLOCK), tl.float32)
        for i_stream in tl.static_range(STREAMS):
            p_p = products_ptr + (o_t[:, None] * STREAMS + i_stream) * GATES + o_g[None, :]
            total += tl.load(p_p, mask=has_gate, other=0.0)
        tl.store(gates_ptr + o_t[:, None] * GATES + o_g[None, :], 2.0 * tl.sigmoid(total / STREAMS), mask=has_gate)


def mix_library(
    x: Tensor,
    injection: tuple[Tensor, Tensor] | None,
    norm_weight: Tensor,
    w_down: Tensor,
    w_up: Tensor,
    w_inject: Tensor,
    eps: float,
    scales: tuple[Tensor | None, Tensor | None],
    mixed: Tensor,
    gates: Tensor,
) -> None:
    """Fills `mixed` and `gates`, and stores the injected streams; `scales` are those of both projections."""
    tokens, streams, hidden = x.shape
    down_scale, up_scale = scales
    normed, products = prepare(x, injection, norm_weight, w_inject, eps)
    flat = torch.mm(normed.view(tokens, streams * hidden), w_down.to(x.dtype).t())
    low = torch.empty_like(flat)
    activate(flat.unsqueeze(0), down_scale, low, flat.shape[1], streams, {"PDL": False})
    gate = torch.mm(low, w_up.to(x.dtype).t())
    block = min(triton.next_power_of_2(hidden), 512)
    rows = max(1024 // block, 1)
    _gate[(triton.cdiv(tokens, rows), triton.cdiv(hidden, block))](
        normed,
        gate,
        gate if up_scale is None else up_scale,
        products,
        gates,
        mixed,
        tokens,
        streams,
        hidden,
        gates.shape[1],
        up_scale is not None,
        max(triton.next_power_of_2(gates.shape[1]), 1),
        rows,
        block,
        num_warps=4,
    )
