"""Gated residual of many tokens, first pass: injection, norms and the injection gates, at the speed of a copy.

A program takes one stream of several tokens, one after another, while the loads of the next ones are under way. The
weights of the norm and of the gates stay in registers for all of them: read for each token, they would be twice its own
bytes. The gates' products are taken before the norm's factor is known and get it at the end.
"""
# Tuples of tiles grow in kernels.
# mypy: disable-error-code="assignment, misc, var-annotated"

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.triton.device import bucket, compute_units, interpreted
from tokenspeed_kernels.triton.overlap import overlapping, wait_for_predecessor
from tokenspeed_kernels.triton.residual_parts import injected
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry.platform import Platform


@triton.jit
def _add(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit(do_not_specialize=["tokens", "count"])
def _prepare(
    x_ptr,  # [tokens, STREAMS, HIDDEN]
    y_ptr,  # [tokens, HIDDEN]
    inject_ptr,  # [tokens, STREAMS]
    norm_ptr,  # [STREAMS, HIDDEN]
    w_inject_ptr,  # [GATES, STREAMS, HIDDEN]
    normed_ptr,  # [tokens, STREAMS, HIDDEN]
    products_ptr,  # [tokens, STREAMS, GATES]
    tokens,
    count,  # of tokens a program
    eps,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    GATES: tl.constexpr,
    INJECTED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):
    i_stream = tl.program_id(0) % STREAMS  # programs of the same tokens, which share y, follow each other
    first = (tl.program_id(0) // STREAMS).to(tl.int64) * count
    o_c = tl.arange(0, BLOCK)
    BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    dtype = x_ptr.dtype.element_ty

    scales, gate_weights = (), ()
    for i_b in tl.static_range(BLOCKS):
        inside = i_b * BLOCK + o_c < HIDDEN
        o_w = i_stream * HIDDEN + i_b * BLOCK + o_c
        scale = 1.0 + tl.load(norm_ptr + o_w, mask=inside, other=0.0).to(tl.float32)
        scales += (scale,)  # each [BLOCK]
        for i_g in tl.static_range(GATES):
            b_g = tl.load(w_inject_ptr + i_g * STREAMS * HIDDEN + o_w, mask=inside, other=0.0)
            gate_weights += (scale * b_g.to(tl.float32),)

    wait_for_predecessor(PDL)  # not before the weights are asked for, which no kernel writes
    for i in tl.range(0, tl.minimum(tokens - first, count).to(tl.int32), num_stages=STAGES):
        i_t = first + i
        row = i_t * STREAMS + i_stream
        share = 0.0
        if INJECTED:
            share = tl.load(inject_ptr + row)
        squares = tl.zeros((BLOCK,), tl.float32)
        stream, sums = (), ()
        for _ in tl.static_range(GATES):
            sums += (tl.zeros((BLOCK,), tl.float32),)
        for i_b in tl.static_range(BLOCKS):
            inside = i_b * BLOCK + o_c < HIDDEN
            p_x = x_ptr + row * HIDDEN + i_b * BLOCK + o_c
            b_x = tl.load(p_x, mask=inside, other=0.0)
            if INJECTED:
                b_y = tl.load(y_ptr + i_t * HIDDEN + i_b * BLOCK + o_c, mask=inside, other=0.0)
                b_x = injected(b_x, b_y, share, True).to(dtype)
                # Of what is written, the norms are read next.
                tl.store(p_x, b_x, mask=inside, eviction_policy="evict_first")
            b_x = b_x.to(tl.float32)
            stream += (b_x,)
            squares += b_x * b_x
            longer = ()
            for i_g in tl.static_range(GATES):
                longer += (sums[i_g] + b_x * gate_weights[i_b * GATES + i_g],)
            sums = longer
        if TOGETHER:  # one exchange between the warps
            square, t_0, t_1, t_2, t_3 = tl.reduce((squares, sums[0], sums[1], sums[2], sums[3]), 0, _add)
            totals = (t_0, t_1, t_2, t_3)
        else:
            square, totals = tl.sum(squares, 0), ()
            for i_g in tl.static_range(GATES):
                totals += (tl.sum(sums[i_g], 0),)
        factor = 1.0 / tl.sqrt(square / HIDDEN + eps)
        for i_b in tl.static_range(BLOCKS):
            b_n = stream[i_b] * factor * scales[i_b]
            p_n = normed_ptr + row * HIDDEN + i_b * BLOCK + o_c
            tl.store(p_n, b_n.to(dtype), mask=i_b * BLOCK + o_c < HIDDEN)
        for i_g in tl.static_range(GATES):
            tl.store(products_ptr + row * GATES + i_g, totals[i_g] * factor)


def _config(programs: int, block: int, warps: int, stages: int) -> Config:
    """`PROGRAMS`: how many a compute unit holds at once."""
    return {"PROGRAMS": programs, "BLOCK": block, "STAGES": stages, "num_warps": warps}


def _space(dims: Dims) -> list[Config]:
    return [_config(programs, 512, 4, stages) for stages in (2, 3, 4) for programs in (3, 6)]


def _default(platform: Platform, dims: Dims) -> Config:
    block = min(triton.next_power_of_2(dims["hidden"]), 512)
    if platform.vendor == "amd":
        return _config(4, block, 2 if block == 512 else 1, 1)
    return _config(3, block, 4 if block == 512 else 1, 3)


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
    size = min(max(bucket(tokens), 128), 4096)
    config = dict(PREPARE.pick(x.device, tokens=size, hidden=hidden, itemsize=x.element_size()))
    count = triton.cdiv(tokens * streams, config.pop("PROGRAMS") * compute_units(x.device))
    _prepare[(streams * triton.cdiv(tokens, count),)](
        x,
        y,
        inject,
        norm_weight,
        w_inject,
        normed,
        products,
        tokens,
        count,
        eps,
        streams,
        hidden,
        gates,
        injection is not None,
        TOGETHER=gates == 4 and not interpreted(),  # the model's gates; the interpreter would take seconds
        **config,
        **overlapping(x.device),
    )
    return normed, products
