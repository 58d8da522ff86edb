"""Gated residual of few tokens, first half: down to the low-rank activations and the injection gates.

A stream's norm is one factor r = rsqrt(mean(x²) + eps) on all its columns, so W n = Σ_streams r · W (x · (1 + w)): the
products need no pass before them that finds r.

`_down` takes a tile of ranks and a range of columns of one stream (a split), adds y to the streams in registers only,
and writes its share of the products beside its share of Σx². It asks for all it reads at once.
`_combine` adds these partial sums in fixed order and applies r. Nobody stores the sums of x and y: programs that share
columns would race, so the second half does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed_kernels.triton.device import platform_for
from tokenspeed_kernels.triton.overlap import overlapping
from tokenspeed_kernels.triton.residual_parts import dims_of, injected
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry.platform import Platform


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
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_LOAD: tl.constexpr,  # of the weights, of ranks or of gates: their pointers may be chosen between
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
    alive = (o_t < tokens)[:, None]
    # The last program of a split takes the gates in place of ranks: products of both in one program would share an
    # operand, which makes Triton let every warp do all.
    RANK_TILES: tl.constexpr = (RANK + RANKS - 1) // RANKS
    takes_gates = i_rank == RANK_TILES
    o_g = tl.arange(0, RANKS)
    has_gate = (o_g < tl.where(takes_gates, GATES, 0))[:, None]
    has_rank = (o_r < RANK)[:, None]
    WIDE: tl.constexpr = STREAMS * HIDDEN
    RAGGED: tl.constexpr = COLUMNS % BLOCK != 0 or HIDDEN % COLUMNS != 0
    # What is left of float16's range after the norm's weight: without the norm's factor, values may be large.
    HEADROOM: tl.constexpr = 0.25 if x_ptr.dtype.element_ty == tl.float16 else 1.0

    p_x = x_ptr + o_t[:, None] * WIDE + i_stream * HIDDEN + first + o_b[None, :]
    p_y = y_ptr + o_t[:, None] * HIDDEN + first + o_b[None, :]
    # As wide as x, or it would not be loaded ahead.
    p_norm = norm_ptr + i_stream * HIDDEN + first + o_b[None, :] + o_t[:, None] * 0
    p_w = down_ptr + o_r[:, None] * WIDE + i_stream * HIDDEN + first + o_b[None, :]
    p_g = w_inject_ptr + o_g[:, None] * WIDE + i_stream * HIDDEN + first + o_b[None, :]
    if ONE_LOAD:
        p_w, has_rank = tl.where(takes_gates, p_g, p_w), has_gate | has_rank
    share = 0.0
    if INJECTED:
        share = tl.load(inject_ptr + o_t * STREAMS + i_stream, mask=o_t < tokens, other=0.0)[:, None]
    squares = tl.zeros((TOKENS,), tl.float32)
    products = tl.zeros((RANKS, TOKENS), tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        inside = tl.full((1, BLOCK), True, tl.int1)
        if RAGGED:
            inside = ((start + o_b < COLUMNS) & (first + start + o_b < HIDDEN))[None, :]
        b_x = tl.load(p_x + start, mask=alive & inside, other=0.0)  # [TOKENS, BLOCK]
        if INJECTED:
            b_n = injected(b_x, tl.load(p_y + start, mask=alive & inside, other=0.0), share, True)
        else:
            b_n = b_x.to(tl.float32)
        scale = 1.0 + tl.load(p_norm + start, mask=alive & inside, other=0.0).to(tl.float32)
        squares += tl.sum(b_n * b_n, 1)
        b_a = (b_n * (scale * HEADROOM)).to(b_x.dtype)
        b_w = tl.load(p_w + start, mask=has_rank & inside, other=0.0)  # [RANKS, BLOCK]
        b_w = b_w.to(b_x.dtype)
        if not ONE_LOAD:
            b_w += tl.load(p_g + start, mask=has_gate & inside, other=0.0)
        products = tl.dot(b_w, tl.trans(b_a), products, input_precision="ieee")

    p_p = partial_ptr + (i_split * tokens + o_t) * WIDTH
    o_p = tl.where(takes_gates, RANK + o_g, o_r)[:, None]
    there = (o_p < tl.where(takes_gates, RANK + GATES, RANK)) & (o_t < tokens)[None, :]
    tl.store(p_p[None, :] + o_p, products / HEADROOM, mask=there)
    if i_rank == 0:
        tl.store(p_p + WIDTH - 1, squares, mask=o_t < tokens)


@triton.jit
def sums(
    partial_ptr,
    i_t,
    o_c,
    inside,
    tokens,
    eps,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    STREAM_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
):
    """Columns `o_c` of W n / streams for one token, and 1 / root mean square of each stream."""
    o_i = tl.arange(0, STREAM_BLOCK * SPLIT_BLOCK)
    o_s, o_j = o_i // SPLIT_BLOCK, o_i % SPLIT_BLOCK
    exists = (o_s < STREAMS) & (o_j < SPLITS)
    p_p = partial_ptr + ((o_s * SPLITS + o_j) * tokens + i_t) * WIDTH
    squares = tl.load(p_p + WIDTH - 1, mask=exists, other=0.0)
    b_p = tl.load(p_p[:, None] + o_c[None, :], mask=exists[:, None] & inside[None, :], other=0.0)
    rms = 1.0 / tl.sqrt(tl.sum(tl.reshape(squares, (STREAM_BLOCK, SPLIT_BLOCK)), 1) / HIDDEN + eps)
    factor = tl.reshape(tl.broadcast_to(rms[:, None], (STREAM_BLOCK, SPLIT_BLOCK)), (STREAM_BLOCK * SPLIT_BLOCK,))
    return tl.sum(tl.where(exists[:, None], b_p * factor[:, None], 0.0), 0) / STREAMS, rms


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
    if PDL:
        gdc_wait()
    total, rms = sums(
        partial_ptr, i_t, o_c, o_c < RANK + GATES, tokens, eps,
        STREAMS, HIDDEN, WIDTH, STREAM_BLOCK, SPLITS, SPLIT_BLOCK,
    )  # fmt: skip
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


def _config(tokens: int, ranks: int, splits: int, block: int, warps: int, stages: int) -> Config:
    shape = {"TOKENS": tokens, "RANKS": ranks, "SPLITS": splits, "BLOCK": block}
    return {**shape, "num_warps": warps, "num_stages": stages}


def _space(dims: Dims) -> list[Config]:
    rows = max(16, min(dims["tokens"], 32))
    tiles = [(64, 20, 128, 4, 1), (64, 10, 128, 4, 2), (64, 10, 128, 4, 3), (64, 10, 64, 4, 5)]
    return [_config(rows, *tile) for tile in tiles]


def _default(platform: Platform, dims: Dims) -> Config:
    ranks, hidden = triton.next_power_of_2(max(dims["rank"], 16)), dims["hidden"]
    if hidden < 512 or dims["itemsize"] == 4:
        return _config(16, min(ranks, 16), triton.cdiv(hidden, 256), 64, 4, 1)
    rows = max(16, min(dims["tokens"], 32))
    if rows == 32 and dims["weight"] == 2 and platform.vendor == "nvidia":
        return _config(rows, min(ranks, 64), triton.cdiv(hidden, 256), 64, 4, 5)
    return _config(rows, min(ranks, 64), triton.cdiv(hidden, 128), 128, 4, 1)


DOWN = Tunable("residual_few_down", _space, _default)


def down(
    x: Tensor,
    injection: tuple[Tensor, Tensor] | None,
    norm_weight: Tensor,
    w_down: Tensor,
    w_inject: Tensor,
    eps: float,
    down_scale: Tensor | None,
    gates: Tensor,
) -> tuple[Tensor, Tensor]:
    """The low-rank activations [tokens, rank and padding] and 1 / rms of every stream; fills `gates`."""
    tokens, streams, hidden = x.shape
    rank = w_down.shape[0]
    pdl = overlapping(x.device)
    y, inject = injection or (x, x)
    stream_block = triton.next_power_of_2(streams)
    width = triton.cdiv(rank + gates.shape[1] + 1, 4) * 4

    config = dict(DOWN.pick(x.device, **dims_of(x, rank, w_down)))
    columns = triton.cdiv(hidden, config["SPLITS"])
    config["SPLITS"] = splits = triton.cdiv(hidden, columns)
    partial = torch.empty(streams * splits, tokens, width, dtype=torch.float32, device=x.device)
    grid = (
        triton.cdiv(rank, config["RANKS"]) + (gates.shape[1] > 0),
        streams * splits,
        triton.cdiv(tokens, config["TOKENS"]),
    )
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
        gates.shape[1],
        injection is not None,
        width,
        COLUMNS=columns,
        # AMD's compiler of Triton 3.6 fails at a choice between pointers.
        ONE_LOAD=w_down.dtype == w_inject.dtype and platform_for(x.device).vendor != "amd",
        PDL=pdl["PDL"],
        **config,
    )

    low_width = triton.cdiv(rank, 16) * 16
    low = torch.empty(tokens, low_width, dtype=x.dtype, device=x.device)
    rms = torch.empty(tokens, streams, dtype=torch.float32, device=x.device)
    block = min(triton.next_power_of_2(rank + gates.shape[1]), 64)
    _combine[(tokens, triton.cdiv(rank + gates.shape[1], block))](
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
        gates.shape[1],
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
    return low, rms
