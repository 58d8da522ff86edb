"""Gated residual of some hundred tokens: matrix products with nothing in their way.

After `prepare`, `_down` is a plain product n W_downᵀ, split along its long sum so that its tiles fill the device;
`_activate` adds the splits. `_up` multiplies the low-rank activations with the rows of W_up of a range of columns in
all streams, gates n with the result while it is in registers, and writes the mean over streams.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed_kernels.triton.overlap import overlapping
from tokenspeed_kernels.triton.residual_parts import dims_of, store_gates
from tokenspeed_kernels.triton.residual_prepare import prepare
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry.platform import Platform

MANY = 256


@triton.jit(do_not_specialize=["tokens"])
def _down(
    normed_ptr,  # [tokens, WIDE]
    down_ptr,  # [RANK, WIDE]
    partial_ptr,  # [SPLITS, tokens, WIDTH]
    tokens,
    WIDE: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of tokens and ranks over one split of the columns."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    RANK_TILES: tl.constexpr = (RANK + RANKS - 1) // RANKS
    COLUMNS: tl.constexpr = ((WIDE + SPLITS - 1) // SPLITS + BLOCK - 1) // BLOCK * BLOCK
    RAGGED: tl.constexpr = WIDE % COLUMNS != 0
    i_rank, i_split = tl.program_id(0) % RANK_TILES, tl.program_id(1)
    o_t = (tl.program_id(0) // RANK_TILES).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    o_r = i_rank * RANKS + tl.arange(0, RANKS)
    o_b = i_split * COLUMNS + tl.arange(0, BLOCK)
    # Rows past the end read the last one; what comes of them is not stored.
    p_n = normed_ptr + tl.minimum(o_t, tokens - 1)[:, None] * WIDE + o_b[None, :]
    p_w = down_ptr + tl.minimum(o_r, RANK - 1)[:, None] * WIDE + o_b[None, :]
    products = tl.zeros((TOKENS, RANKS), tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        inside = tl.full((1, BLOCK), True, tl.int1)
        if RAGGED:
            inside = (start + o_b < WIDE)[None, :]
        b_n = tl.load(p_n + start, mask=inside, other=0.0)  # [TOKENS, BLOCK]
        b_w = tl.load(p_w + start, mask=inside, other=0.0)  # [RANKS, BLOCK]
        products = tl.dot(b_n, tl.trans(b_w.to(b_n.dtype)), products, input_precision="ieee")
    alive = (o_t < tokens)[:, None]
    p_o = partial_ptr + (i_split * tokens + o_t[:, None]) * WIDTH
    tl.store(p_o + o_r[None, :], products, mask=alive & (o_r < RANK)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _activate(
    products_ptr,  # [SPLITS, tokens, WIDTH]
    scale_ptr,  # [RANK]
    low_ptr,  # [tokens, LOW_WIDTH]
    tokens,
    STREAMS: tl.constexpr,
    RANK: tl.constexpr,
    SCALED: tl.constexpr,
    WIDTH: tl.constexpr,
    LOW_WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    o_t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    o_r = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (o_t < tokens)[:, None] & (o_r < RANK)[None, :]
    low = tl.zeros((TOKENS, BLOCK), tl.float32)
    for i_split in tl.static_range(SPLITS):
        p_p = products_ptr + (i_split * tokens + o_t[:, None]) * WIDTH + o_r[None, :]
        low += tl.load(p_p, mask=inside, other=0.0).to(tl.float32)
    low /= STREAMS
    if SCALED:
        low *= tl.load(scale_ptr + o_r, mask=o_r < RANK, other=0.0)[None, :]
    low *= tl.sigmoid(low)
    tl.store(low_ptr + o_t[:, None] * LOW_WIDTH + o_r[None, :], low.to(low_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _up(
    normed_ptr,  # [tokens, STREAMS, HIDDEN]
    low_ptr,  # [tokens, LOW_WIDTH]
    up_ptr,  # [STREAMS * HIDDEN, RANK]
    up_scale_ptr,  # [STREAMS * HIDDEN]
    products_ptr,  # [tokens, STREAMS, GATES]
    gates_ptr,  # [tokens, GATES]
    mixed_ptr,  # [tokens, HIDDEN]
    tokens,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    RANK: tl.constexpr,
    GATES: tl.constexpr,
    SCALED: tl.constexpr,
    LOW_WIDTH: tl.constexpr,
    STREAM_BLOCK: tl.constexpr,
    GATE_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    COLUMN_TILES: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    i_t, i_c = tl.program_id(0) // COLUMN_TILES, tl.program_id(0) % COLUMN_TILES
    o_t = i_t.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    o_i = tl.arange(0, STREAM_BLOCK * COLUMNS)  # the columns in stream 0, then in stream 1, ...
    o_k = o_i // COLUMNS * HIDDEN + i_c * COLUMNS + o_i % COLUMNS
    o_s = tl.arange(0, STREAM_BLOCK)[None, :, None]
    o_c = i_c * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    RAGGED: tl.constexpr = STREAM_BLOCK != STREAMS or HIDDEN % COLUMNS != 0
    if RAGGED:  # rows past the end read the last one
        o_k = tl.minimum(o_k, STREAMS * HIDDEN - 1)
    alive = o_t < tokens
    o_row = tl.minimum(o_t, tokens - 1)
    o_b = tl.arange(0, BLOCK)
    p_low = low_ptr + o_row[:, None] * LOW_WIDTH + o_b[None, :]
    p_w = up_ptr + o_k[:, None] * RANK + o_b[None, :]
    if PDL:
        gdc_wait()

    gate = tl.zeros((TOKENS, STREAM_BLOCK * COLUMNS), tl.float32)
    for start in range(0, RANK, BLOCK):
        inside = tl.full((1, BLOCK), True, tl.int1)
        if RANK % BLOCK != 0:
            inside = (start + o_b < RANK)[None, :]
        b_low = tl.load(p_low + start, mask=inside, other=0.0)  # [TOKENS, BLOCK]
        b_w = tl.load(p_w + start, mask=inside, other=0.0)  # [columns, BLOCK]
        gate = tl.dot(b_low, tl.trans(b_w.to(b_low.dtype)), gate, input_precision="ieee")
    if SCALED:
        gate *= tl.load(up_scale_ptr + o_k)[None, :]
    p_n = normed_ptr + o_row[:, None, None] * (STREAMS * HIDDEN) + o_s * HIDDEN + o_c
    if RAGGED:
        b_n = tl.load(p_n, mask=(o_s < STREAMS) & (o_c < HIDDEN), other=0.0)
    else:
        b_n = tl.load(p_n)  # [TOKENS, STREAMS, COLUMNS]
    gated = tl.sigmoid(tl.reshape(gate, (TOKENS, STREAM_BLOCK, COLUMNS))) * b_n.to(tl.float32)
    o_m = i_c * COLUMNS + tl.arange(0, COLUMNS)
    mask = alive[:, None] & (o_m < HIDDEN)[None, :]
    mixed = tl.sum(gated, 1) / STREAMS
    tl.store(mixed_ptr + o_t[:, None] * HIDDEN + o_m[None, :], mixed.to(mixed_ptr.dtype.element_ty), mask=mask)
    if GATES and i_c == 0:
        store_gates(products_ptr, gates_ptr, o_t, tokens, STREAMS, GATES, GATE_BLOCK, TOKENS)


def _down_config(tokens: int, ranks: int, splits: int, block: int, warps: int, stages: int) -> Config:
    shape = {"TOKENS": tokens, "RANKS": ranks, "SPLITS": splits, "BLOCK": block}
    return {**shape, "num_warps": warps, "num_stages": stages}


def _down_space(dims: Dims) -> list[Config]:
    tiles = [(64, 64, 10), (64, 64, 20), (64, 64, 32), (128, 64, 20), (64, 128, 20)]
    return [_down_config(*tile, 64, 4, stages) for tile in tiles for stages in (3, 4)]


def _down_default(platform: Platform, dims: Dims) -> Config:
    ranks = min(max(triton.next_power_of_2(dims["rank"]), 16), 64)
    if dims["itemsize"] == 4 or dims["hidden"] < 512:
        return _down_config(16, min(ranks, 32), 1, 32, 4, 1)
    return _down_config(64, ranks, 20, 64, 4, 1 if platform.vendor == "amd" else 4)


DOWN = Tunable("residual_many_down", _down_space, _down_default)


def _up_config(tokens: int, columns: int, block: int, warps: int, stages: int) -> Config:
    shape = {"TOKENS": tokens, "COLUMNS": columns, "BLOCK": block}
    return {**shape, "num_warps": warps, "num_stages": stages}


def _up_space(dims: Dims) -> list[Config]:
    tiles = [(64, 16, 64, 4), (64, 32, 64, 4), (128, 16, 64, 4), (128, 32, 64, 8)]
    return [_up_config(*tile, stages) for tile in tiles for stages in (3, 4)]


def _up_default(platform: Platform, dims: Dims) -> Config:
    if dims["itemsize"] == 4 or dims["hidden"] < 512:
        return _up_config(16, 16, 32, 4, 1)
    return _up_config(64, 32, 64, 4, 1) if platform.vendor == "amd" else _up_config(64, 16, 64, 4, 4)


UP = Tunable("residual_many_up", _up_space, _up_default)


def activate(
    products: Tensor, scale: Tensor | None, low: Tensor, rank: int, streams: int, options: Mapping[str, Any]
) -> None:
    """Fills `low` [tokens, width] from W n in parts [splits, tokens, width]; the last columns may be padding."""
    splits, tokens, _ = products.shape
    block = min(triton.next_power_of_2(rank), 64)
    rows = 2 if tokens <= 512 else 16
    _activate[(triton.cdiv(tokens, rows), triton.cdiv(rank, block))](
        products,
        products if scale is None else scale,
        low,
        tokens,
        streams,
        rank,
        scale is not None,
        products.shape[2],
        low.shape[1],
        splits,
        rows,
        block,
        num_warps=2,
        **options,
    )


def mix_many(
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
    rank, gate_count = w_down.shape[0], gates.shape[1]
    dims = dims_of(x, rank, w_down)
    pdl = overlapping(x.device)
    down_scale, up_scale = scales
    normed, products = prepare(x, injection, norm_weight, w_inject, eps)

    config = DOWN.pick(x.device, **dims)
    splits, width = config["SPLITS"], triton.cdiv(rank, 16) * 16
    partial = torch.empty(splits, tokens, width, dtype=torch.float32, device=x.device)
    rank_tiles = triton.cdiv(rank, config["RANKS"])
    _down[(triton.cdiv(tokens, config["TOKENS"]) * rank_tiles, splits)](
        normed, w_down, partial, tokens, streams * hidden, rank, width, **config, **pdl
    )
    low = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    activate(partial, down_scale, low, rank, streams, pdl)

    config = UP.pick(x.device, **dims)
    _up[(triton.cdiv(tokens, config["TOKENS"]) * triton.cdiv(hidden, config["COLUMNS"]),)](
        normed,
        low,
        w_up,
        partial if up_scale is None else up_scale,
        products,
        gates,
        mixed,
        tokens,
        streams,
        hidden,
        rank,
        gate_count,
        up_scale is not None,
        width,
        triton.next_power_of_2(streams),
        max(triton.next_power_of_2(gate_count), 1),
        **config,
        **pdl,
    )
