"""Gated residual of few tokens: as fast as the weights stream in.

A stream's norm is one factor r = rsqrt(mean(x²) + eps) on all its columns, so W n = Σ_streams r · W (x · (1 + w)): the
products need no pass before them that finds r.

`_down` takes a tile of ranks and a range of columns of one stream (a split), adds y to the streams in registers only,
and writes its share of the products beside its share of Σx². It has stages enough to ask for all it reads at once.
`_up` takes columns of all streams, so that the mean over streams stays in the program; it alone reads and writes
these columns of x, so it is the one that stores the streams after the injection. It asks for its weights before it
waits for `_down`, where the device can start it early. The partial sums, added in fixed order, become the low-rank
activations in `_up` itself for up to `FUSED` tokens, in `_combine` for more.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed_kernels.triton.device import bucket, platform_for
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry.platform import Platform

FEW = 64
FUSED = 4


@triton.jit
def injected(x, y, gate, INJECTED: tl.constexpr):
    """The streams after the injection, rounded to their dtype, in float32."""
    if INJECTED:
        x = (x.to(tl.float32) + gate * y.to(tl.float32)).to(x.dtype)
    return x.to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _down(
    x_ptr,  # [tokens, STREAMS, HIDDEN]
    y_ptr,  # [tokens, HIDDEN]
    inject_ptr,  # [tokens, STREAMS]
    norm_ptr,  # [STREAMS, HIDDEN]
    down_ptr,  # [RANK, STREAMS * HIDDEN]
    w_inject_ptr,  # [GATES, STREAMS * HIDDEN]
    partial_ptr,  # [STREAMS * SPLITS, tokens, WIDTH]: ranks, gates, at last the sum of squares
    tokens,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    RANK: tl.constexpr,
    GATES: tl.constexpr,
    INJECTED: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATE_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    i_rank, i_split = tl.program_id(0), tl.program_id(1)
    i_stream = i_split // SPLITS
    first = (i_split % SPLITS) * COLUMNS
    o_t = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    o_b = tl.arange(0, BLOCK)
    o_r = i_rank * RANKS + tl.arange(0, RANKS)
    o_g = tl.arange(0, GATE_BLOCK)
    alive = (o_t < tokens)[:, None]
    # One program of a split does the gates; for all others these loads and products are of nothing.
    has_gate = (o_g + i_rank * GATE_BLOCK < GATES)[:, None]
    WIDE: tl.constexpr = STREAMS * HIDDEN
    RAGGED: tl.constexpr = COLUMNS % BLOCK != 0 or HIDDEN % COLUMNS != 0
    # What is left of float16's range after the norm's weight: without the norm's factor, values may be large.
    HEADROOM: tl.constexpr = 0.25 if x_ptr.dtype.element_ty == tl.float16 else 1.0

    share = 0.0
    if INJECTED:
        share = tl.load(inject_ptr + o_t * STREAMS + i_stream, mask=o_t < tokens, other=0.0)[:, None]
    squares = tl.zeros((TOKENS,), tl.float32)
    products = tl.zeros((TOKENS, RANKS), tl.float32)
    of_gates = tl.zeros((TOKENS, GATE_BLOCK), tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        o_c = first + start + o_b
        o_k = i_stream * HIDDEN + o_c
        inside = tl.full((1, BLOCK), True, tl.int1)
        if RAGGED:
            inside = ((start + o_b < COLUMNS) & (o_c < HIDDEN))[None, :]
        b_w = tl.load(
            down_ptr + o_r[:, None] * WIDE + o_k[None, :], mask=(o_r < RANK)[:, None] & inside, other=0.0
        )  # [RANKS, BLOCK]
        b_x = tl.load(x_ptr + o_t[:, None] * WIDE + o_k[None, :], mask=alive & inside, other=0.0)
        if INJECTED:
            b_y = tl.load(y_ptr + o_t[:, None] * HIDDEN + o_c[None, :], mask=alive & inside, other=0.0)
            b_n = injected(b_x, b_y, share, True)  # [TOKENS, BLOCK]
        else:
            b_n = b_x.to(tl.float32)
        scale = 1.0 + tl.load(norm_ptr + o_k[None, :], mask=inside, other=0.0).to(tl.float32)
        squares += tl.sum(b_n * b_n, 1)
        b_a = (b_n * (scale * HEADROOM)).to(b_x.dtype)
        products = tl.dot(b_a, tl.trans(b_w.to(b_x.dtype)), products, input_precision="ieee")
        if GATES:
            b_g = tl.load(w_inject_ptr + o_g[:, None] * WIDE + o_k[None, :], mask=has_gate & inside, other=0.0)
            of_gates = tl.dot(b_a, tl.trans(b_g), of_gates, input_precision="ieee")

    p_p = partial_ptr + (i_split * tokens + o_t[:, None]) * WIDTH
    tl.store(p_p + o_r[None, :], products / HEADROOM, mask=alive & (o_r < RANK)[None, :])
    if i_rank == 0:
        tl.store(p_p + WIDTH - 1, squares[:, None], mask=alive)
        if GATES:
            tl.store(p_p + RANK + o_g[None, :], of_gates / HEADROOM, mask=alive & (o_g < GATES)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _combine(
    partial_ptr,
    down_scale_ptr,  # [RANK]
    low_ptr,  # [tokens, LOW_WIDTH]
    rms_ptr,  # [tokens, STREAMS]
    gates_ptr,  # [tokens, GATES]
    tokens,
    eps,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    RANK: tl.constexpr,
    GATES: tl.constexpr,
    SCALED: tl.constexpr,
    WIDTH: tl.constexpr,
    LOW_WIDTH: tl.constexpr,
    STREAM_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program a token and a range of columns: ranks, then gates."""
    if PDL:
        gdc_launch_dependents()
    i_t, i_c = tl.program_id(0), tl.program_id(1)
    o_c = i_c * BLOCK + tl.arange(0, BLOCK)
    o_i = tl.arange(0, STREAM_BLOCK * SPLIT_BLOCK)
    o_s, o_j = o_i // SPLIT_BLOCK, o_i % SPLIT_BLOCK
    exists = (o_s < STREAMS) & (o_j < SPLITS)
    p_p = partial_ptr + ((o_s * SPLITS + o_j) * tokens + i_t) * WIDTH
    if PDL:
        gdc_wait()
    squares = tl.load(p_p + WIDTH - 1, mask=exists, other=0.0)
    b_p = tl.load(p_p[:, None] + o_c[None, :], mask=exists[:, None] & (o_c < RANK + GATES)[None, :], other=0.0)
    rms = 1.0 / tl.sqrt(tl.sum(tl.reshape(squares, (STREAM_BLOCK, SPLIT_BLOCK)), 1) / HIDDEN + eps)  # [STREAM_BLOCK]
    factor = tl.reshape(tl.broadcast_to(rms[:, None], (STREAM_BLOCK, SPLIT_BLOCK)), (STREAM_BLOCK * SPLIT_BLOCK,))
    total = tl.sum(tl.where(exists[:, None], b_p * factor[:, None], 0.0), 0) / STREAMS
    if GATES:
        o_g = o_c - RANK
        tl.store(gates_ptr + i_t * GATES + o_g, 2.0 * tl.sigmoid(total), mask=(o_g >= 0) & (o_g < GATES))
    if SCALED:
        total *= tl.load(down_scale_ptr + o_c, mask=o_c < RANK, other=0.0)
    low = total * tl.sigmoid(total)
    tl.store(low_ptr + i_t * LOW_WIDTH + o_c, low.to(low_ptr.dtype.element_ty), mask=o_c < RANK)
    if i_c == 0:
        o_stream = tl.arange(0, STREAM_BLOCK)
        tl.store(rms_ptr + i_t * STREAMS + o_stream, rms, mask=o_stream < STREAMS)


@triton.jit
def _inverse_rms(partial_ptr, i_stream, o_t, alive, tokens, eps, SPLITS, HIDDEN, WIDTH):
    """1 / root mean square of a stream of each token."""
    squares = tl.zeros(o_t.shape, tl.float32)
    for i_split in tl.static_range(SPLITS):
        i_row = (i_stream * SPLITS + i_split) * tokens
        squares += tl.load(partial_ptr + (i_row + o_t) * WIDTH + WIDTH - 1, mask=alive, other=0.0)
    return 1.0 / tl.sqrt(squares / HIDDEN + eps)


@triton.jit
def _sums(partial_ptr, o_t, alive, o_c, inside, tokens, eps, STREAMS, HIDDEN, SPLITS, WIDTH):
    """W n / streams, [tokens, columns]."""
    total = tl.zeros((o_t.shape[0], o_c.shape[0]), tl.float32)
    for i_stream in tl.static_range(STREAMS):
        part = tl.zeros((o_t.shape[0], o_c.shape[0]), tl.float32)
        for i_split in tl.static_range(SPLITS):
            p_p = partial_ptr + ((i_stream * SPLITS + i_split) * tokens + o_t[:, None]) * WIDTH
            part += tl.load(p_p + o_c[None, :], mask=alive[:, None] & inside[None, :], other=0.0)
        part *= _inverse_rms(partial_ptr, i_stream, o_t, alive, tokens, eps, SPLITS, HIDDEN, WIDTH)[:, None]
        total += part
    return total / STREAMS


@triton.jit(do_not_specialize=["tokens"])
def _up(
    x_ptr,  # [tokens, STREAMS, HIDDEN]
    y_ptr,  # [tokens, HIDDEN]
    inject_ptr,  # [tokens, STREAMS]
    norm_ptr,  # [STREAMS, HIDDEN]
    up_ptr,  # [STREAMS * HIDDEN, RANK]
    up_scale_ptr,  # [STREAMS * HIDDEN]
    down_scale_ptr,  # [RANK]
    partial_ptr,  # [STREAMS * SPLITS, tokens, WIDTH]
    low_ptr,  # [tokens, LOW_WIDTH]
    rms_ptr,  # [tokens, STREAMS]
    gates_ptr,  # [tokens, GATES]
    mixed_ptr,  # [tokens, HIDDEN]
    tokens,
    eps,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    RANK: tl.constexpr,
    GATES: tl.constexpr,
    INJECTED: tl.constexpr,
    DOWN_SCALED: tl.constexpr,
    UP_SCALED: tl.constexpr,
    WIDTH: tl.constexpr,
    LOW_WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    STREAM_BLOCK: tl.constexpr,
    GATE_BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    REST: tl.constexpr,
    FROM_PARTIAL: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    i_c = tl.program_id(0)
    o_t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    o_i = tl.arange(0, STREAM_BLOCK * COLUMNS)  # the columns in stream 0, then in stream 1, ...
    o_s, o_c = o_i // COLUMNS, i_c * COLUMNS + o_i % COLUMNS
    exists = (o_s < STREAMS) & (o_c < HIDDEN)
    o_k = o_s * HIDDEN + o_c
    o_r = tl.arange(0, RANKS)
    alive = o_t < tokens
    inside = alive[:, None] & exists[None, :]
    dtype = x_ptr.dtype.element_ty

    p_w = up_ptr + o_k[:, None] * RANK
    b_w = tl.load(p_w + o_r[None, :], mask=exists[:, None] & (o_r < RANK)[None, :], other=0.0)  # [columns, RANKS]
    if REST:
        o_rest = RANKS + tl.arange(0, REST)
        b_rest = tl.load(p_w + o_rest[None, :], mask=exists[:, None] & (o_rest < RANK)[None, :], other=0.0)
    p_x = x_ptr + o_t[:, None] * (STREAMS * HIDDEN) + o_k[None, :]
    b_n = tl.load(p_x, mask=inside, other=0.0)  # [TOKENS, columns]
    scale = 1.0 + tl.load(norm_ptr + o_k, mask=exists, other=0.0).to(tl.float32)
    if INJECTED:
        b_y = tl.load(y_ptr + o_t[:, None] * HIDDEN + o_c[None, :], mask=inside, other=0.0)
        share = tl.load(inject_ptr + o_t[:, None] * STREAMS + o_s[None, :], mask=inside, other=0.0)
        b_n = injected(b_n, b_y, share, True)
    else:
        b_n = b_n.to(tl.float32)
    if PDL:
        gdc_wait()

    if INJECTED:  # not earlier: `_down` reads x
        tl.store(p_x, b_n.to(dtype), mask=inside)
    if FROM_PARTIAL:
        b_low = _low(
            partial_ptr, down_scale_ptr, o_t, alive, o_r, tokens, eps,
            STREAMS, HIDDEN, RANK, DOWN_SCALED, SPLITS, WIDTH,
        )  # fmt: skip
    else:
        b_low = tl.load(
            low_ptr + o_t[:, None] * LOW_WIDTH + o_r[None, :], mask=alive[:, None] & (o_r < RANK)[None, :], other=0.0
        )
    gate = tl.dot(b_low.to(dtype), tl.trans(b_w.to(dtype)), input_precision="ieee")  # [TOKENS, columns]
    if REST:
        if FROM_PARTIAL:
            b_low = _low(
                partial_ptr, down_scale_ptr, o_t, alive, o_rest, tokens, eps,
                STREAMS, HIDDEN, RANK, DOWN_SCALED, SPLITS, WIDTH,
            )  # fmt: skip
        else:
            has_rest = alive[:, None] & (o_rest < RANK)[None, :]
            b_low = tl.load(low_ptr + o_t[:, None] * LOW_WIDTH + o_rest[None, :], mask=has_rest, other=0.0)
        gate = tl.dot(b_low.to(dtype), tl.trans(b_rest.to(dtype)), gate, input_precision="ieee")
    if UP_SCALED:
        gate *= tl.load(up_scale_ptr + o_k, mask=exists, other=0.0)[None, :]
    if FROM_PARTIAL:
        rms = tl.zeros((TOKENS, STREAM_BLOCK * COLUMNS), tl.float32)
        for i_stream in tl.static_range(STREAMS):
            of_stream = _inverse_rms(partial_ptr, i_stream, o_t, alive, tokens, eps, SPLITS, HIDDEN, WIDTH)
            rms = tl.where((o_s == i_stream)[None, :], of_stream[:, None], rms)
    else:
        rms = tl.load(rms_ptr + o_t[:, None] * STREAMS + o_s[None, :], mask=inside, other=0.0)
    gated = tl.where(inside, tl.sigmoid(gate) * (b_n * rms * scale[None, :]), 0.0)
    mixed = tl.sum(tl.reshape(gated, (TOKENS, STREAM_BLOCK, COLUMNS)), 1) / STREAMS
    o_m = i_c * COLUMNS + tl.arange(0, COLUMNS)
    mask = alive[:, None] & (o_m < HIDDEN)[None, :]
    tl.store(mixed_ptr + o_t[:, None] * HIDDEN + o_m[None, :], mixed.to(dtype), mask=mask)
    if FROM_PARTIAL and GATES and i_c == 0:
        o_g = tl.arange(0, GATE_BLOCK)
        total = _sums(partial_ptr, o_t, alive, RANK + o_g, o_g < GATES, tokens, eps, STREAMS, HIDDEN, SPLITS, WIDTH)
        has_gate = alive[:, None] & (o_g < GATES)[None, :]
        tl.store(gates_ptr + o_t[:, None] * GATES + o_g[None, :], 2.0 * tl.sigmoid(total), mask=has_gate)


@triton.jit
def _low(
    partial_ptr,
    down_scale_ptr,
    o_t,
    alive,
    o_r,
    tokens,
    eps,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    RANK: tl.constexpr,
    DOWN_SCALED: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The low-rank activations, [tokens, ranks]."""
    total = _sums(partial_ptr, o_t, alive, o_r, o_r < RANK, tokens, eps, STREAMS, HIDDEN, SPLITS, WIDTH)
    if DOWN_SCALED:
        total *= tl.load(down_scale_ptr + o_r, mask=o_r < RANK, other=0.0)[None, :]
    return total * tl.sigmoid(total)


def _down_config(tokens: int, ranks: int, splits: int, block: int, warps: int, stages: int) -> Config:
    shape = {"TOKENS": tokens, "RANKS": ranks, "SPLITS": splits, "BLOCK": block}
    return {**shape, "num_warps": warps, "num_stages": stages}


def _down_space(dims: Dims) -> list[Config]:
    tiles = [(32, 5, 128, 4, 5), (32, 10, 128, 4, 3), (64, 10, 128, 4, 3), (64, 5, 128, 4, 5), (16, 5, 128, 4, 5)]
    tiles += [(32, 10, 256, 4, 1), (64, 10, 128, 8, 3), (64, 20, 128, 4, 1)]
    rows = [max(16, min(dims["tokens"], 32))]
    rows += [64] if dims["tokens"] > 32 else []
    return [_down_config(row, *tile) for row in rows for tile in tiles]


def _down_default(platform: Platform, dims: Dims) -> Config:
    ranks = triton.next_power_of_2(max(dims["rank"], 16))
    if dims["hidden"] < 512 or dims["itemsize"] == 4:
        return _down_config(16, min(ranks, 16), triton.cdiv(dims["hidden"], 256), 64, 4, 1)
    splits, stages = triton.cdiv(dims["hidden"], 256), 1 if platform.vendor == "amd" else 3
    return _down_config(max(16, min(dims["tokens"], 32)), min(ranks, 64), splits, 128, 4, stages)


DOWN = Tunable("residual_few_down", _down_space, _down_default)


def _up_space(dims: Dims) -> list[Config]:
    rows = [max(16, min(dims["tokens"], 32))]
    rows += [64] if dims["tokens"] > 32 else []
    return [{"TOKENS": t, "COLUMNS": c, "num_warps": w} for t in rows for c in (8, 16, 32) for w in (4, 8)]


def _up_default(platform: Platform, dims: Dims) -> Config:
    wide = dims["itemsize"] == 2
    return {"TOKENS": max(16, min(dims["tokens"], 32 if wide else 16)), "COLUMNS": 16 if wide else 8, "num_warps": 4}


UP = Tunable("residual_few_up", _up_space, _up_default)


def overlapping(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that starts while its predecessor still runs and waits for it (`gdc_wait`).

    NVIDIA's programmatic dependent launch; elsewhere kernels follow one another.
    """
    if platform_for(device).vendor == "nvidia" and device.type != "cpu":
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def mix_few(
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
    y, inject = injection or (x, x)
    down_scale, up_scale = scales
    stream_block = triton.next_power_of_2(streams)
    width = triton.cdiv(rank + gate_count + 1, 4) * 4
    fused = tokens <= FUSED

    config = dict(DOWN.pick(x.device, **dims))
    columns = triton.cdiv(hidden, config["SPLITS"])
    config["SPLITS"] = splits = triton.cdiv(hidden, columns)
    partial = torch.empty(streams * splits, tokens, width, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rank, config["RANKS"]), streams * splits, triton.cdiv(tokens, config["TOKENS"]))
    _down[grid](
        x,
        y,
        inject,
        norm_weight,
        w_down,
        w_inject,
        partial,
        tokens,
        streams,
        hidden,
        rank,
        gate_count,
        injection is not None,
        width,
        COLUMNS=columns,
        GATE_BLOCK=max(triton.next_power_of_2(gate_count), 16),
        PDL=pdl["PDL"],
        **config,
    )

    low_width = triton.cdiv(rank, 16) * 16
    low, rms = mixed, partial  # stand-ins
    if not fused:
        low = torch.empty(tokens, low_width, dtype=x.dtype, device=x.device)
        rms = torch.empty(tokens, streams, dtype=torch.float32, device=x.device)
        block = min(triton.next_power_of_2(rank + gate_count), 64)
        _combine[(tokens, triton.cdiv(rank + gate_count, block))](
            partial,
            partial if down_scale is None else down_scale,
            low,
            rms,
            gates,
            tokens,
            eps,
            streams,
            hidden,
            rank,
            gate_count,
            down_scale is not None,
            width,
            low_width,
            stream_block,
            splits,
            triton.next_power_of_2(splits),
            block,
            num_warps=2,
            **pdl,
        )

    config = dict(UP.pick(x.device, **dims))
    ranks, rest = halves(rank)
    _up[(triton.cdiv(hidden, config["COLUMNS"]), triton.cdiv(tokens, config["TOKENS"]))](
        x,
        y,
        inject,
        norm_weight,
        w_up,
        partial if up_scale is None else up_scale,
        partial if down_scale is None else down_scale,
        partial,
        low,
        rms,
        gates,
        mixed,
        tokens,
        eps,
        streams,
        hidden,
        rank,
        gate_count,
        injection is not None,
        down_scale is not None,
        up_scale is not None,
        width,
        low_width,
        splits,
        stream_block,
        max(triton.next_power_of_2(gate_count), 1),
        ranks,
        rest,
        fused,
        **config,
        **pdl,
    )


def halves(rank: int) -> tuple[int, int]:
    """`rank` as two powers of two that matrix products take, the second one 0 where the first is enough."""
    first = max(bucket(rank + 1) // 2, 16)
    rest = 0 if rank <= first else max(bucket(rank - first), 16)
    return first, rest
