"""Gated residual of thousands of tokens: torch's matrix products, and elementwise passes between them."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from tokenspeed_kernels.triton.device import bucket
from tokenspeed_kernels.triton.overlap import overlapping
from tokenspeed_kernels.triton.residual_many import activate
from tokenspeed_kernels.triton.residual_parts import store_gates
from tokenspeed_kernels.triton.residual_prepare import prepare
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry.platform import Platform


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
    PDL: tl.constexpr,
):
    i_c = tl.program_id(1)
    o_t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    o_c = i_c * BLOCK + tl.arange(0, BLOCK)
    alive = (o_t < tokens)[:, None]
    inside = alive & (o_c < HIDDEN)[None, :]
    mixed = tl.zeros((TOKENS, BLOCK), tl.float32)
    if PDL:
        gdc_wait()
    for i_stream in tl.static_range(STREAMS):
        o_x = (o_t * STREAMS + i_stream)[:, None] * HIDDEN + o_c[None, :]
        gate = tl.load(gate_ptr + o_x, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if SCALED:
            gate *= tl.load(up_scale_ptr + i_stream * HIDDEN + o_c, mask=o_c < HIDDEN, other=0.0)[None, :]
        b_n = tl.load(normed_ptr + o_x, mask=inside, other=0.0, eviction_policy="evict_first")
        mixed += tl.sigmoid(gate) * b_n.to(tl.float32)
    p_m = mixed_ptr + o_t[:, None] * HIDDEN + o_c[None, :]
    tl.store(p_m, (mixed / STREAMS).to(mixed_ptr.dtype.element_ty), mask=inside)
    if GATES and i_c == 0:
        store_gates(products_ptr, gates_ptr, o_t, tokens, STREAMS, GATES, GATE_BLOCK, TOKENS)


def _config(tokens: int, block: int, warps: int) -> Config:
    return {"TOKENS": tokens, "BLOCK": block, "num_warps": warps}


def _space(dims: Dims) -> list[Config]:
    return [_config(*shape) for shape in ((2, 512, 4), (1, 512, 2), (4, 512, 8), (4, 512, 4), (4, 256, 4), (8, 256, 8))]


def _default(platform: Platform, dims: Dims) -> Config:
    block = min(triton.next_power_of_2(dims["hidden"]), 512)
    return _config(max(1024 // block, 1), block, 4)


GATE = Tunable("residual_library_gate", _space, _default)


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
    pdl = overlapping(x.device)
    normed, products = prepare(x, injection, norm_weight, w_inject, eps)
    flat = torch.mm(normed.view(tokens, streams * hidden), w_down.to(x.dtype).t())
    low = torch.empty_like(flat)
    activate(flat.unsqueeze(0), down_scale, low, flat.shape[1], streams, pdl)
    gate = torch.mm(low, w_up.to(x.dtype).t())
    config = GATE.pick(x.device, tokens=min(bucket(tokens), 4096), hidden=hidden, itemsize=x.element_size())
    _gate[(triton.cdiv(tokens, config["TOKENS"]), triton.cdiv(hidden, config["BLOCK"]))](
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
        **config,
        **pdl,
    )
