"""Gated residual of few tokens: as fast as the weights stream in.

After `residual_few_down`, `_up` takes columns of all streams, so that the mean over streams stays in the program; it
alone reads and writes these columns of x, so it is the one that stores the streams after the injection. It asks for its
weights before it waits for the first half, where the device can start it early.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from tokenspeed_kernels.triton.overlap import overlapping
from tokenspeed_kernels.triton.residual_few_down import down
from tokenspeed_kernels.triton.residual_parts import dims_of, halves, injected
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry.platform import Platform

FEW = 32


@triton.jit(do_not_specialize=["tokens"])
def _up(
    x_ptr,  # [tokens, STREAMS, HIDDEN]
    y_ptr,  # [tokens, HIDDEN]
    inject_ptr,  # [tokens, STREAMS]
    norm_ptr,  # [STREAMS, HIDDEN]
    up_ptr,  # [STREAMS * HIDDEN, RANK]
    up_scale_ptr,  # [STREAMS * HIDDEN]
    low_ptr,  # [tokens, LOW_WIDTH]
    rms_ptr,  # [tokens, STREAMS]
    mixed_ptr,  # [tokens, HIDDEN]
    tokens,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    RANK: tl.constexpr,
    INJECTED: tl.constexpr,
    SCALED: tl.constexpr,
    LOW_WIDTH: tl.constexpr,
    STREAM_BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    REST: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    i_c = tl.program_id(0)
    o_t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    o_i = tl.arange(0, STREAM_BLOCK * COLUMNS)  # the columns in stream 0, then in stream 1, ...
    o_k = o_i // COLUMNS * HIDDEN + i_c * COLUMNS + o_i % COLUMNS
    o_r = tl.arange(0, RANKS)
    o_s = tl.arange(0, STREAM_BLOCK)
    o_c = i_c * COLUMNS + tl.arange(0, COLUMNS)
    alive, exists = o_t < tokens, (o_s < STREAMS)[:, None] & (o_c < HIDDEN)[None, :]
    inside = alive[:, None, None] & exists[None, :, :]
    dtype = x_ptr.dtype.element_ty
    if STREAM_BLOCK != STREAMS or HIDDEN % COLUMNS != 0:  # rows past the end read the last one
        o_k = tl.minimum(o_k, STREAMS * HIDDEN - 1)

    p_w = up_ptr + o_k[:, None] * RANK
    b_w = tl.load(p_w + o_r[None, :], mask=(o_r < RANK)[None, :], other=0.0)  # [streams * columns, RANKS]
    if REST:
        o_rest = RANKS + tl.arange(0, REST)
        b_rest = tl.load(p_w + o_rest[None, :], mask=(o_rest < RANK)[None, :], other=0.0)
    o_x = o_s[:, None] * HIDDEN + o_c[None, :]  # [streams, columns]
    p_x = x_ptr + o_t[:, None, None] * (STREAMS * HIDDEN) + o_x[None, :, :]
    b_x = tl.load(p_x, mask=inside, other=0.0)  # [TOKENS, streams, columns]
    scale = 1.0 + tl.load(norm_ptr + o_x, mask=exists, other=0.0).to(tl.float32)
    p_s = o_t[:, None] * STREAMS + o_s[None, :]
    of_token = alive[:, None] & (o_c < HIDDEN)[None, :]
    of_stream = alive[:, None] & (o_s < STREAMS)[None, :]
    if INJECTED:
        b_y = tl.load(y_ptr + o_t[:, None] * HIDDEN + o_c[None, :], mask=of_token, other=0.0)
        share = tl.load(inject_ptr + p_s, mask=of_stream, other=0.0)
        b_x = injected(b_x, b_y[:, None, :], share[:, :, None], True)
    else:
        b_x = b_x.to(tl.float32)
    if INJECTED:
        tl.debug_barrier()  # the compiler may load x once more, for other warps than those that store it below
    if PDL:
        gdc_wait()

    if INJECTED:  # not earlier: `_down` reads x
        tl.store(p_x, b_x.to(dtype), mask=inside)
    p_low = low_ptr + o_t[:, None] * LOW_WIDTH
    b_low = tl.load(p_low + o_r[None, :], mask=alive[:, None] & (o_r < RANK)[None, :], other=0.0)
    rms = tl.load(rms_ptr + p_s, mask=of_stream, other=0.0)
    gate = tl.dot(b_low, tl.trans(b_w.to(dtype)), input_precision="ieee")  # [TOKENS, streams * columns]
    if REST:
        b_low = tl.load(p_low + o_rest[None, :], mask=alive[:, None] & (o_rest < RANK)[None, :], other=0.0)
        gate = tl.dot(b_low, tl.trans(b_rest.to(dtype)), gate, input_precision="ieee")
    if SCALED:
        gate *= tl.load(up_scale_ptr + o_k)[None, :]
    gate = tl.sigmoid(tl.reshape(gate, (TOKENS, STREAM_BLOCK, COLUMNS)))
    mixed = tl.sum(gate * (b_x * rms[:, :, None] * scale[None, :, :]), 1) / STREAMS  # nothing is added where nothing is
    tl.store(mixed_ptr + o_t[:, None] * HIDDEN + o_c[None, :], mixed.to(dtype), mask=of_token)


def _space(dims: Dims) -> list[Config]:
    rows = max(16, min(dims["tokens"], 32))
    return [{"TOKENS": rows, "COLUMNS": c, "num_warps": w} for c, w in ((16, 4), (32, 4), (32, 8))]


def _default(platform: Platform, dims: Dims) -> Config:
    if dims["itemsize"] == 4:
        return {"TOKENS": 16, "COLUMNS": 8, "num_warps": 4}
    rows = max(16, min(dims["tokens"], 32))
    return {"TOKENS": rows, "COLUMNS": 16, "num_warps": 4}


UP = Tunable("residual_few_up", _space, _default)


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
    rank = w_down.shape[0]
    y, inject = injection or (x, x)
    down_scale, up_scale = scales
    low, rms = down(x, injection, norm_weight, w_down, w_inject, eps, down_scale, gates)
    config = UP.pick(x.device, **dims_of(x, rank, w_up))
    ranks, rest = halves(rank)
    _up[(triton.cdiv(hidden, config["COLUMNS"]), triton.cdiv(tokens, config["TOKENS"]))](
        x,
        y,
        inject,
        norm_weight,
        w_up,
        rms if up_scale is None else up_scale,
        low,
        rms,
        mixed,
        tokens,
        streams,
        hidden,
        rank,
        injection is not None,
        up_scale is not None,
        low.shape[1],
        triton.next_power_of_2(streams),
        ranks,
        rest,
        **config,
        **overlapping(x.device),
    )
