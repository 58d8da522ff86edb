"""Gated residual of many tokens: matrix products with nothing in their way.

`_prepare` injects, writes the normalised streams n in the model's dtype and takes the injection gates' products in
passing. `_down` is a plain product n W_downᵀ, split along its long sum where there are too few tiles to fill the
device; `_combine` then adds the splits. `_up` multiplies the low-rank activations with the rows of W_up of a range of
columns in all streams, gates n with the result while it is in registers, and writes the mean over streams: the gates
themselves, as large as all streams, go nowhere.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed_kernels.triton.device import bucket, compute_units
from tokenspeed_kernels.triton.residual_few import injected, overlapping
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry.platform import Platform

MANY = 512


@triton.jit(do_not_specialize=["tokens", "tiles"])
def _prepare(
    x_ptr,  # [tokens, STREAMS, HIDDEN]
    y_ptr,  # [tokens, HIDDEN]
    inject_ptr,  # [tokens, STREAMS]
    norm_ptr,  # [STREAMS, HIDDEN]
    w_inject_ptr,  # [GATES, STREAMS * HIDDEN]
    normed_ptr,  # [tokens, STREAMS, HIDDEN]
    products_ptr,  # [tokens, STREAMS, GATES]
    tokens,
    tiles,
    eps,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    GATES: tl.constexpr,
    INJECTED: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program one stream of `tiles` times `TOKENS` tokens: it keeps the weights of that stream."""
    i_stream = tl.program_id(0) % STREAMS  # programs of the same tokens, which share y, follow each other
    first = (tl.program_id(0) // STREAMS).to(tl.int64) * tiles * TOKENS
    o_c = tl.arange(0, BLOCK)
    inside = o_c < HIDDEN
    scale = 1.0 + tl.load(norm_ptr + i_stream * HIDDEN + o_c, mask=inside, other=0.0).to(tl.float32)
    b_g = ()
    for i_g in tl.static_range(GATES):
        b_g += (tl.load(w_inject_ptr + (i_g * STREAMS + i_stream) * HIDDEN + o_c, mask=inside, other=0.0),)  # type: ignore[assignment]
    for i_tile in tl.range(0, tiles, num_stages=STAGES):
        o_t = first + i_tile * TOKENS + tl.arange(0, TOKENS)
        alive = o_t < tokens
        mask = alive[:, None] & inside[None, :]
        o_x = (o_t * STREAMS + i_stream)[:, None] * HIDDEN + o_c[None, :]
        b_n = tl.load(x_ptr + o_x, mask=mask, other=0.0)  # [TOKENS, BLOCK]
        if INJECTED:
            b_y = tl.load(y_ptr + o_t[:, None] * HIDDEN + o_c[None, :], mask=mask, other=0.0)
            share = tl.load(inject_ptr + o_t * STREAMS + i_stream, mask=alive, other=0.0)
            b_n = injected(b_n, b_y, share[:, None], True)
            tl.store(x_ptr + o_x, b_n.to(x_ptr.dtype.element_ty), mask=mask)
        else:
            b_n = b_n.to(tl.float32)
        b_n = b_n * (1.0 / tl.sqrt(tl.sum(b_n * b_n, 1) / HIDDEN + eps))[:, None] * scale[None, :]
        tl.store(normed_ptr + o_x, b_n.to(normed_ptr.dtype.element_ty), mask=mask)
        for i_g in tl.static_range(GATES):
            products = tl.sum(b_g[i_g].to(tl.float32)[None, :] * b_n, 1)
            tl.store(products_ptr + (o_t * STREAMS + i_stream) * GATES + i_g, products, mask=alive)


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
    REST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of tokens and ranks; where `REST` is set, ranks up to RANKS and as many as `REST` after them."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    RANK_TILES: tl.constexpr = 1 if REST else (RANK + RANKS - 1) // RANKS
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
    if REST:
        o_rest = RANKS + tl.arange(0, REST)
        p_rest = down_ptr + tl.minimum(o_rest, RANK - 1)[:, None] * WIDE + o_b[None, :]
        products_rest = tl.zeros((TOKENS, REST), tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        inside = tl.full((1, BLOCK), True, tl.int1)
        if RAGGED:
            inside = (start + o_b < WIDE)[None, :]
        b_n = tl.load(p_n + start, mask=inside, other=0.0)  # [TOKENS, BLOCK]
        b_w = tl.load(p_w + start, mask=inside, other=0.0)  # [RANKS, BLOCK]
        products = tl.dot(b_n, tl.trans(b_w.to(b_n.dtype)), products, input_precision="ieee")
        if REST:
            b_w = tl.load(p_rest + start, mask=inside, other=0.0)
            products_rest = tl.dot(b_n, tl.trans(b_w.to(b_n.dtype)), products_rest, input_precision="ieee")
    alive = (o_t < tokens)[:, None]
    p_o = partial_ptr + (i_split * tokens + o_t[:, None]) * WIDTH
    tl.store(p_o + o_r[None, :], products, mask=alive & (o_r < RANK)[None, :])
    if REST:
        tl.store(p_o + o_rest[None, :], products_rest, mask=alive & (o_rest < RANK)[None, :])


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
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    COLUMN_TILES: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    # Tiles go through `GROUP` ranges of tokens for each range of columns: what runs at a time shares both.
    in_group = GROUP * COLUMN_TILES
    i_group, i_in = tl.program_id(0) // in_group, tl.program_id(0) % in_group
    size = tl.minimum(tl.cdiv(tokens, TOKENS) - i_group * GROUP, GROUP)
    i_t, i_c = i_group * GROUP + i_in % size, i_in // size
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
        o_g = tl.arange(0, GATE_BLOCK)
        has_gate = alive[:, None] & (o_g < GATES)[None, :]
        total = tl.zeros((TOKENS, GATE_BLOCK), tl.float32)
        for i_stream in tl.static_range(STREAMS):
            p_p = products_ptr + (o_t[:, None] * STREAMS + i_stream) * GATES + o_g[None, :]
            total += tl.load(p_p, mask=has_gate, other=0.0)
        tl.store(gates_ptr + o_t[:, None] * GATES + o_g[None, :], 2.0 * tl.sigmoid(total / STREAMS), mask=has_gate)


def _prepare_space(dims: Dims) -> list[Config]:
    tiles = [(1, 4, 1), (1, 4, 3), (1, 8, 1), (1, 8, 3), (2, 8, 1), (2, 8, 2), (2, 4, 1), (4, 8, 1)]
    return [{"TOKENS": tokens, "num_warps": warps, "STAGES": stages} for tokens, warps, stages in tiles]


def _prepare_default(platform: Platform, dims: Dims) -> Config:
    if dims["hidden"] < 512:
        return {"TOKENS": 1, "num_warps": 1, "STAGES": 1}
    return {"TOKENS": 1 if dims["tokens"] <= 512 else 2, "num_warps": 8, "STAGES": 1}


PREPARE = Tunable("residual_many_prepare", _prepare_space, _prepare_default)


def _down_config(
    tokens: int, ranks: int, rest: int, splits: int, warps: int, stages: int, block: int = 64
) -> dict[str, Any]:
    config = {"TOKENS": tokens, "RANKS": ranks, "REST": rest, "SPLITS": splits, "BLOCK": block}
    return {**config, "num_warps": warps, "num_stages": stages}


def _down_space(dims: Dims) -> list[Config]:
    tokens = dims["tokens"]
    if tokens <= 256:
        tiles = [(64, 64, 0, 10), (64, 64, 0, 20), (64, 128, 0, 20), (128, 64, 0, 20), (64, 64, 0, 32)]
        return [_down_config(*tile, 4, stages) for tile in tiles for stages in (3, 4)]
    splits = (1, 2) if tokens > 2048 else (4, 8)
    found = [_down_config(128, 256, 64, split, 8, stages) for split in splits for stages in (3, 4)]
    found += [_down_config(64, 256, 64, split, 4, 4) for split in splits]
    return found + [_down_config(128, 128, 0, split, 8, 4) for split in splits]


def _down_default(platform: Platform, dims: Dims) -> Config:
    tokens, rank = dims["tokens"], dims["rank"]
    ranks = min(max(triton.next_power_of_2(rank), 16), 64)
    if dims["itemsize"] == 4 or dims["hidden"] < 512:
        return _down_config(16, min(ranks, 32), 0, 1, 4, 1, 32)
    stages = 1 if platform.vendor == "amd" else 3
    if tokens <= 256:
        return _down_config(64, ranks, 0, 20, 4, stages)
    splits = 8 if tokens <= 512 else 4 if tokens <= 2048 else 2
    if platform.vendor == "amd" or rank != 320:
        return _down_config(128, ranks, 0, splits, 4, stages)
    return _down_config(128, 256, 64, splits, 8, 3)


DOWN = Tunable("residual_many_down", _down_space, _down_default)


def _up_config(tokens: int, columns: int, warps: int, stages: int, group: int = 8, block: int = 64) -> Config:
    shape = {"TOKENS": tokens, "COLUMNS": columns, "BLOCK": block, "GROUP": group}
    return {**shape, "num_warps": warps, "num_stages": stages}


def _up_space(dims: Dims) -> list[Config]:
    if dims["tokens"] <= 256:
        tiles = [(64, 16, 4), (64, 32, 4), (128, 16, 4), (128, 32, 8)]
        return [_up_config(*tile, stages) for tile in tiles for stages in (2, 4)]
    tiles = [(128, 64, 8), (128, 32, 8), (64, 64, 4), (128, 32, 4), (64, 32, 4)]
    return [_up_config(*tile, stages) for tile in tiles for stages in (2, 3)]


def _up_default(platform: Platform, dims: Dims) -> Config:
    if dims["itemsize"] == 4 or dims["hidden"] < 512:
        return _up_config(16, 16, 4, 1, 8, 32)
    if platform.vendor == "amd":
        return _up_config(64, 32, 4, 1)
    return _up_config(64, 16, 4, 4) if dims["tokens"] <= 256 else _up_config(128, 32, 8, 2)


UP = Tunable("residual_many_up", _up_space, _up_default)


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
    # About eight programs a compute unit, as long as each has few tokens.
    tiles = min(max(tokens * streams // (8 * compute_units(x.device) * config["TOKENS"]), 1), 16)
    _prepare[(streams * triton.cdiv(tokens, tiles * config["TOKENS"]),)](
        x,
        y,
        inject,
        norm_weight,
        w_inject,
        normed,
        products,
        tokens,
        tiles,
        eps,
        streams,
        hidden,
        gates,
        injection is not None,
        triton.next_power_of_2(hidden),
        **config,
    )
    return normed, products


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
    dims = {
        "tokens": bucket(tokens),
        "hidden": hidden,
        "rank": rank,
        "itemsize": x.element_size(),
        "weight": w_down.element_size(),
    }
    pdl = overlapping(x.device)
    down_scale, up_scale = scales
    normed, products = prepare(x, injection, norm_weight, w_inject, eps)

    config = DOWN.pick(x.device, **dims)
    splits, width = config["SPLITS"], triton.cdiv(rank, 16) * 16
    partial = torch.empty(splits, tokens, width, dtype=torch.float32, device=x.device)
    rank_tiles = 1 if config["REST"] else triton.cdiv(rank, config["RANKS"])
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
