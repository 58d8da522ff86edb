"""Gated residual of many tokens, first pass: injection, norms and the injection gates, at the speed of a copy.

A program takes one stream of some tokens, about two warps a token. A row stays in registers from its load to the store
of its norm. The gates' products are taken before the norm's factor is known and get it at the end; their weights are
read once for all tokens of the program.
"""
# Tuples of tiles grow in kernels.
# mypy: disable-error-code="assignment, var-annotated"

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.triton.device import bucket
from tokenspeed_kernels.triton.residual_few_down import injected
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry.platform import Platform


@triton.jit(do_not_specialize=["tokens"])
def _prepare(
    x_ptr,  # [tokens, STREAMS, HIDDEN]
    y_ptr,  # [tokens, HIDDEN]
    inject_ptr,  # [tokens, STREAMS]
    norm_ptr,  # [STREAMS, HIDDEN]
    w_inject_ptr,  # [GATES, STREAMS, HIDDEN]
    normed_ptr,  # [tokens, STREAMS, HIDDEN]
    products_ptr,  # [tokens, STREAMS, GATES]
    tokens,
    eps,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    GATES: tl.constexpr,
    INJECTED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_stream = tl.program_id(0) % STREAMS  # programs of the same tokens, which share y, follow each other
    o_t = (tl.program_id(0) // STREAMS).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    alive = o_t < tokens
    o_c = tl.arange(0, BLOCK)
    BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    dtype = x_ptr.dtype.element_ty
    p_x = x_ptr + (o_t * STREAMS + i_stream)[:, None] * HIDDEN + o_c[None, :]
    p_n = normed_ptr + (o_t * STREAMS + i_stream)[:, None] * HIDDEN + o_c[None, :]
    p_y = y_ptr + o_t[:, None] * HIDDEN + o_c[None, :]
    # Each warp loads the weights for itself: a vector for all would pass through shared memory.
    o_w = i_stream * HIDDEN + o_c[None, :] + tl.zeros((TOKENS, 1), tl.int32)

    row, added, sums = (), (), ()
    for i_b in tl.static_range(BLOCKS):
        mask = alive[:, None] & (i_b * BLOCK + o_c < HIDDEN)[None, :]
        row += (tl.load(p_x + i_b * BLOCK, mask=mask, other=0.0),)  # each [TOKENS, BLOCK]
        if INJECTED:
            added += (tl.load(p_y + i_b * BLOCK, mask=mask, other=0.0),)
    share = 0.0
    if INJECTED:
        share = tl.load(inject_ptr + o_t * STREAMS + i_stream, mask=alive, other=0.0)[:, None]
    squares = tl.zeros((TOKENS, BLOCK), tl.float32)
    for _ in tl.static_range(GATES):
        sums += (tl.zeros((TOKENS, BLOCK), tl.float32),)
    kept = ()
    for i_b in tl.static_range(BLOCKS):
        inside = alive[:, None] & (i_b * BLOCK + o_c < HIDDEN)[None, :]
        b_x = row[i_b]
        if INJECTED:
            b_x = injected(b_x, added[i_b], share, True).to(dtype)
            tl.store(p_x + i_b * BLOCK, b_x, mask=inside)
        kept += (b_x,)
        b_n = b_x.to(tl.float32)
        squares += b_n * b_n
        if GATES:
            b_n *= 1.0 + tl.load(norm_ptr + o_w + i_b * BLOCK, mask=inside, other=0.0).to(tl.float32)
            longer = ()
            for i_g in tl.static_range(GATES):
                p_g = w_inject_ptr + i_g * STREAMS * HIDDEN + o_w + i_b * BLOCK
                longer += (sums[i_g] + b_n * tl.load(p_g, mask=inside, other=0.0).to(tl.float32),)
            sums = longer
    factor = 1.0 / tl.sqrt(tl.sum(squares, 1) / HIDDEN + eps)
    for i_b in tl.static_range(BLOCKS):
        inside = alive[:, None] & (i_b * BLOCK + o_c < HIDDEN)[None, :]
        scale = 1.0 + tl.load(norm_ptr + o_w + i_b * BLOCK, mask=inside, other=0.0).to(tl.float32)
        b_n = kept[i_b].to(tl.float32) * factor[:, None] * scale
        tl.store(p_n + i_b * BLOCK, b_n.to(dtype), mask=inside)
    for i_g in tl.static_range(GATES):
        p_p = products_ptr + (o_t * STREAMS + i_stream) * GATES + i_g
        tl.store(p_p, tl.sum(sums[i_g], 1) * factor, mask=alive)


def _space(dims: Dims) -> list[Config]:
    return [{"TOKENS": tokens, "BLOCK": 512, "num_warps": 2 * tokens} for tokens in (1, 2, 4, 8)]


def _default(platform: Platform, dims: Dims) -> Config:
    block = min(triton.next_power_of_2(dims["hidden"]), 512)
    tokens = 2 if dims["tokens"] <= 2048 else 4
    warps = tokens if block < 512 or platform.vendor == "amd" else 2 * tokens
    return {"TOKENS": tokens, "BLOCK": block, "num_warps": warps}


PREPARE = Tunable("residual_prepare", _space, _default)


def prepare(
    x: Tensor, injection: tuple[Tensor, Tensor] | None, norm_weight: Tensor, w_inject: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Stores the injected streams; the normalised ones, and their products with `w_inject` for each stream."""
    tokens, streams, hidden = x.shape
    gates = w_inject.shape[0]
    y, inject = injection or (x, x)
    normed = torch.empty_like(x)
    products = torch.empty(tokens, streams, gates, dtype=torch.float32, device=x.device)
    config = PREPARE.pick(x.device, tokens=min(bucket(tokens), 4096), hidden=hidden, itemsize=x.element_size())
    _prepare[(streams * triton.cdiv(tokens, config["TOKENS"]),)](
        x,
        y,
        inject,
        norm_weight,
        w_inject,
        normed,
        products,
        tokens,
        eps,
        streams,
        hidden,
        gates,
        injection is not None,
        **config,
    )
    return normed, products
