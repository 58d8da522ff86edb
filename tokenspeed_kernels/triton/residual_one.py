"""Gated residual of one token: products of matrices and one vector, in two launches.

`residual_one_down` splits the columns in few ranges, so that each program of `_up` can add them up for itself. `_up`
takes some columns of all streams. It asks for its weights before it waits for the first half, where the device can
start it early, and stores its columns of the streams after the injection.
"""
# Tuples of tiles grow in kernels.
# mypy: disable-error-code="assignment, var-annotated"

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from tokenspeed_kernels.triton.overlap import overlapping
from tokenspeed_kernels.triton.residual_one_down import down
from tokenspeed_kernels.triton.residual_parts import dims_of, halves, injected
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry.platform import Platform


@triton.jit
def _inverse(partial_ptr, i_stream, eps, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """1 / root mean square of a stream."""
    square = 0.0
    for i_split in tl.static_range(SPLITS):
        square += tl.load(partial_ptr + (i_stream * SPLITS + i_split) * WIDTH + WIDTH - 1)
    return 1.0 / tl.sqrt(square / HIDDEN + eps)


@triton.jit
def _sum(
    partial_ptr,
    o_c,
    inside,
    eps,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Columns `o_c` of W n / streams."""
    parts = ()
    for i_split in tl.static_range(STREAMS * SPLITS):
        parts += (tl.load(partial_ptr + i_split * WIDTH + o_c, mask=inside, other=0.0),)
    total = 0.0
    for i_stream in tl.static_range(STREAMS):
        part = 0.0
        for i_split in tl.static_range(SPLITS):
            part += parts[i_stream * SPLITS + i_split]
        total += part * _inverse(partial_ptr, i_stream, eps, HIDDEN, WIDTH, SPLITS)
    return total / STREAMS


@triton.jit
def _low(
    partial_ptr,
    scale_ptr,
    o_r,
    eps,
    SCALED: tl.constexpr,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The low-rank activations `o_r`."""
    total = _sum(partial_ptr, o_r, o_r < RANK, eps, STREAMS, HIDDEN, WIDTH, SPLITS)
    if SCALED:
        total *= tl.load(scale_ptr + o_r, mask=o_r < RANK, other=0.0)
    return total * tl.sigmoid(total)


@triton.jit
def _up(
    x_ptr,  # [STREAMS, HIDDEN]
    y_ptr,  # [HIDDEN]
    inject_ptr,  # [STREAMS]
    norm_ptr,  # [STREAMS, HIDDEN]
    up_ptr,  # [STREAMS * HIDDEN, RANK]
    down_scale_ptr,  # [RANK]
    up_scale_ptr,  # [STREAMS * HIDDEN]
    partial_ptr,
    gates_ptr,  # [GATES]
    mixed_ptr,  # [HIDDEN]
    eps,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    RANK: tl.constexpr,
    GATES: tl.constexpr,
    INJECTED: tl.constexpr,
    DOWN_SCALED: tl.constexpr,
    UP_SCALED: tl.constexpr,
    WIDTH: tl.constexpr,
    STREAM_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    REST: tl.constexpr,
    GATE_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    i_c = tl.program_id(0)
    o_i = tl.arange(0, STREAM_BLOCK * COLUMNS)  # the columns in stream 0, then in stream 1, ...
    # Rows past the end read the last one; what comes of them is not stored.
    o_k = tl.minimum(o_i // COLUMNS * HIDDEN + i_c * COLUMNS + o_i % COLUMNS, STREAMS * HIDDEN - 1)
    o_r = tl.arange(0, RANKS)
    o_s = tl.arange(0, STREAM_BLOCK)
    o_c = i_c * COLUMNS + tl.arange(0, COLUMNS)
    exists = (o_s < STREAMS)[:, None] & (o_c < HIDDEN)[None, :]
    dtype = x_ptr.dtype.element_ty

    p_w = up_ptr + o_k[:, None] * RANK
    b_w = tl.load(p_w + o_r[None, :], mask=(o_r < RANK)[None, :], other=0.0)  # [streams * columns, RANKS]
    if REST:
        o_rest = RANKS + tl.arange(0, REST)
        b_rest = tl.load(p_w + o_rest[None, :], mask=(o_rest < RANK)[None, :], other=0.0)
    o_x = o_s[:, None] * HIDDEN + o_c[None, :]  # [streams, columns]
    b_x = tl.load(x_ptr + o_x, mask=exists, other=0.0)
    scale = 1.0 + tl.load(norm_ptr + o_x, mask=exists, other=0.0).to(tl.float32)
    if INJECTED:
        b_y = tl.load(y_ptr + o_c, mask=o_c < HIDDEN, other=0.0)
        share = tl.load(inject_ptr + o_s, mask=o_s < STREAMS, other=0.0)
        b_x = injected(b_x, b_y[None, :], share[:, None], True)
    else:
        b_x = b_x.to(tl.float32)
    if INJECTED:
        tl.debug_barrier()  # the compiler may load x once more, for other warps than those that store it below
    if PDL:
        gdc_wait()

    if INJECTED:  # not earlier: `_down` reads x
        tl.store(x_ptr + o_x, b_x.to(dtype), mask=exists)
    low = _low(partial_ptr, down_scale_ptr, o_r, eps, DOWN_SCALED, STREAMS, HIDDEN, RANK, WIDTH, SPLITS)
    gate = tl.sum(b_w.to(tl.float32) * low[None, :], 1)
    if REST:
        low = _low(partial_ptr, down_scale_ptr, o_rest, eps, DOWN_SCALED, STREAMS, HIDDEN, RANK, WIDTH, SPLITS)
        gate += tl.sum(b_rest.to(tl.float32) * low[None, :], 1)
    inverse = tl.zeros((STREAM_BLOCK,), tl.float32)
    for i_stream in tl.static_range(STREAMS):
        inverse = tl.where(o_s == i_stream, _inverse(partial_ptr, i_stream, eps, HIDDEN, WIDTH, SPLITS), inverse)
    if UP_SCALED:
        gate *= tl.load(up_scale_ptr + o_k)
    gate = tl.sigmoid(tl.reshape(gate, (STREAM_BLOCK, COLUMNS)))
    mixed = tl.sum(gate * (b_x * inverse[:, None] * scale), 0) / STREAMS  # nothing is added where nothing is
    tl.store(mixed_ptr + o_c, mixed.to(dtype), mask=o_c < HIDDEN)
    if GATES and i_c == 0:
        o_g = tl.arange(0, GATE_BLOCK)
        total = _sum(partial_ptr, RANK + o_g, o_g < GATES, eps, STREAMS, HIDDEN, WIDTH, SPLITS)
        tl.store(gates_ptr + o_g, 2.0 * tl.sigmoid(total), mask=o_g < GATES)


def _up_space(dims: Dims) -> list[Config]:
    return [{"COLUMNS": c, "num_warps": w} for c, w in ((8, 2), (8, 4), (16, 4))]


def _up_default(platform: Platform, dims: Dims) -> Config:
    return {"COLUMNS": 16, "num_warps": 4}


UP = Tunable("residual_one_up", _up_space, _up_default)


def mix_one(
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
    _, streams, hidden = x.shape
    rank, gate_count = w_down.shape[0], gates.shape[1]
    y, inject = injection or (x, x)
    down_scale, up_scale = scales
    pdl = overlapping(x.device)
    partial, splits = down(x, injection, norm_weight, w_down, w_inject)
    config = UP.pick(x.device, **dims_of(x, rank, w_up))
    ranks, rest = halves(rank)
    _up[(triton.cdiv(hidden, config["COLUMNS"]),)](
        x,
        y,
        inject,
        norm_weight,
        w_up,
        partial if down_scale is None else down_scale,
        partial if up_scale is None else up_scale,
        partial,
        gates,
        mixed,
        eps,
        streams,
        hidden,
        rank,
        gate_count,
        injection is not None,
        down_scale is not None,
        up_scale is not None,
        partial.shape[1],
        triton.next_power_of_2(streams),
        splits,
        ranks,
        rest,
        max(triton.next_power_of_2(gate_count), 1),
        **config,
        **pdl,
    )
