"""Gated residual of one token, first half: the projection down to the low-rank activations and the injection gates.

A stream's norm is one factor on all its columns, so `_down` needs no pass before it that finds that factor: a program
takes some ranks and a range of columns of one stream, asks for all it reads at once, and writes its share of the
products; one more program a range takes the injection gates and the sum of squares.
"""
# Tuples of tiles grow in kernels.
# mypy: disable-error-code="assignment, var-annotated"

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from tokenspeed_kernels.triton.overlap import overlapping
from tokenspeed_kernels.triton.residual_parts import dims_of, injected
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry.platform import Platform


@triton.jit
def _products(
    w_ptr,  # the first of `rows` rows in WIDE columns
    x_ptr,
    y_ptr,
    norm_ptr,
    share,
    rows,
    columns,
    WIDE: tl.constexpr,
    INJECTED: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The products of some rows and `columns` columns, without the norm's factor, and the sum of squares."""
    # Each of LANES warps holds the vector for itself: it need not pass through shared memory.
    o_row = tl.arange(0, LANES)[:, None, None] + tl.arange(0, ROWS // LANES)[None, :, None] * LANES
    o_lane = tl.arange(0, LANES)[:, None] * 0
    o_b = tl.arange(0, BLOCK)
    weights, stream, added, norms = (), (), (), ()
    for i_b in tl.static_range(BLOCKS):
        o_c = i_b * BLOCK + o_b
        inside = (o_c < columns)[None, :]
        mask = (o_row < rows) & inside[None, :, :]
        weights += (tl.load(w_ptr + o_row * WIDE + o_c[None, None, :], mask=mask, other=0.0),)  # [LANES, rows, BLOCK]
        stream += (tl.load(x_ptr + o_lane + o_c[None, :], mask=inside, other=0.0),)  # [LANES, BLOCK]
        if INJECTED:
            added += (tl.load(y_ptr + o_lane + o_c[None, :], mask=inside, other=0.0),)
        norms += (tl.load(norm_ptr + o_lane + o_c[None, :], mask=inside, other=0.0),)
    products = tl.zeros((LANES, ROWS // LANES, BLOCK), tl.float32)
    squares = tl.zeros((LANES, BLOCK), tl.float32)
    for i_b in tl.static_range(BLOCKS):
        if INJECTED:
            b_x = injected(stream[i_b], added[i_b], share, True)
        else:
            b_x = stream[i_b].to(tl.float32)
        squares += b_x * b_x
        b_x *= 1.0 + norms[i_b].to(tl.float32)
        products += weights[i_b].to(tl.float32) * b_x[:, None, :]
    return tl.sum(products, 2), tl.sum(squares, 1)


@triton.jit
def _down(
    x_ptr,  # [STREAMS, HIDDEN]
    y_ptr,  # [HIDDEN]
    inject_ptr,  # [STREAMS]
    norm_ptr,  # [STREAMS, HIDDEN]
    down_ptr,  # [RANK, STREAMS * HIDDEN]
    w_inject_ptr,  # [GATES, STREAMS * HIDDEN]
    partial_ptr,  # [STREAMS * SPLITS, WIDTH]: ranks, gates, at last the sum of squares
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    RANK: tl.constexpr,
    GATES: tl.constexpr,
    INJECTED: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATE_ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    i_rank, i_split = tl.program_id(0), tl.program_id(1)
    i_stream, first = i_split // SPLITS, i_split % SPLITS * COLUMNS
    columns = tl.minimum(HIDDEN - first, COLUMNS)
    start = i_stream * HIDDEN + first
    WIDE: tl.constexpr = STREAMS * HIDDEN
    BLOCKS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    share = 0.0
    if INJECTED:
        share = tl.load(inject_ptr + i_stream)
    p_p = partial_ptr + i_split * WIDTH
    if i_rank * RANKS < RANK:
        o_r = i_rank * RANKS + tl.arange(0, LANES)[:, None] + tl.arange(0, RANKS // LANES)[None, :] * LANES
        total, _ = _products(
            down_ptr + i_rank * RANKS * WIDE + start, x_ptr + start, y_ptr + first, norm_ptr + start,
            share, RANK - i_rank * RANKS, columns, WIDE, INJECTED, RANKS, LANES, BLOCK, BLOCKS,
        )  # fmt: skip
        tl.store(p_p + o_r, total, mask=o_r < RANK)
    else:
        o_g = tl.arange(0, LANES)[:, None] + tl.arange(0, GATE_ROWS // LANES)[None, :] * LANES
        of_gates, squares = _products(
            w_inject_ptr + start, x_ptr + start, y_ptr + first, norm_ptr + start,
            share, GATES, columns, WIDE, INJECTED, GATE_ROWS, LANES, BLOCK, BLOCKS,
        )  # fmt: skip
        tl.store(p_p + RANK + o_g, of_gates, mask=o_g < GATES)
        tl.store(p_p + WIDTH - 1 + 0 * tl.arange(0, LANES), squares)


def _down_space(dims: Dims) -> list[Config]:
    tiles = [(8, 5, 256, 4), (4, 1, 512, 4), (4, 2, 256, 4), (8, 2, 256, 4), (8, 2, 256, 2), (16, 2, 256, 4)]
    return [{"RANKS": r, "SPLITS": s, "BLOCK": b, "num_warps": w} for r, s, b, w in tiles]


def _down_default(platform: Platform, dims: Dims) -> Config:
    if dims["hidden"] < 512:
        return {"RANKS": 8, "SPLITS": 1, "BLOCK": 32, "num_warps": 4}
    ranks, columns = (16, 1280) if dims["weight"] == 1 else (8, 512)
    return {"RANKS": ranks, "SPLITS": triton.cdiv(dims["hidden"], columns), "BLOCK": 256, "num_warps": 4}


DOWN = Tunable("residual_one_down", _down_space, _down_default)


def down(
    x: Tensor,
    injection: tuple[Tensor, Tensor] | None,
    norm_weight: Tensor,
    w_down: Tensor,
    w_inject: Tensor,
) -> tuple[Tensor, int]:
    """The products [streams * splits, ranks, gates, padding and the sum of squares], and how many splits."""
    _, streams, hidden = x.shape
    rank, gate_count = w_down.shape[0], w_inject.shape[0]
    y, inject = injection or (x, x)
    width = triton.cdiv(rank + gate_count + 1, 4) * 4
    config = dict(DOWN.pick(x.device, **dims_of(x, rank, w_down)))
    columns = triton.cdiv(hidden, config["SPLITS"])
    config["SPLITS"] = splits = triton.cdiv(hidden, columns)
    lanes = config["num_warps"]
    partial = torch.empty(streams * splits, width, dtype=torch.float32, device=x.device)
    _down[(triton.cdiv(rank, config["RANKS"]) + 1, streams * splits)](
        x,
        y,
        inject,
        norm_weight,
        w_down,
        w_inject,
        partial,
        streams,
        hidden,
        rank,
        gate_count,
        injection is not None,
        width,
        COLUMNS=columns,
        GATE_ROWS=max(triton.next_power_of_2(gate_count), lanes),
        LANES=lanes,
        PDL=overlapping(x.device)["PDL"],
        **config,
    )
    return partial, splits
