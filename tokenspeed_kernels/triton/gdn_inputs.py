"""Inputs of the gated delta rule: the programs of `conv`, and a few more for the gates of the same tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import gdn_inputs
from tokenspeed_kernels.triton.conv import (
    CHANNELS_OF_UPDATE,
    PREFILL,
    convolve_tile,
    enter_sequence,
    sequences_of,
    tap_weights,
    update_sequence,
)
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.gdn_recurrent import gates

Inputs = tuple[Tensor, Tensor, Tensor]


@triton.jit
def _gates_of(
    p_a,  # [TOKENS, 1], of the first head
    p_b,
    a_log_ptr,  # [HEADS]
    dt_bias_ptr,
    p_g,  # [TOKENS, 1], of the first head
    p_beta,
    inside,  # [TOKENS]
    known,  # [TOKENS]: no padding
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    """Gates of some tokens, zero for padding."""
    o_h = tl.arange(0, HEAD_BLOCK)
    in_heads = o_h < HEADS
    a_log = tl.load(a_log_ptr + o_h, mask=in_heads, other=0.0)
    dt_bias = tl.load(dt_bias_ptr + o_h, mask=in_heads, other=0.0)
    read = (inside & known)[:, None] & in_heads[None, :]  # [TOKENS, HEAD_BLOCK]
    a = tl.load(p_a + o_h[None, :], mask=read, other=0.0)
    b = tl.load(p_b + o_h[None, :], mask=read, other=0.0)
    g, beta = gates(a, b, a_log[None, :], dt_bias[None, :])
    written = inside[:, None] & in_heads[None, :]
    tl.store(p_g + o_h[None, :], tl.where(read, g, 0.0), mask=written)
    tl.store(p_beta + o_h[None, :], tl.where(read, beta, 0.0), mask=written)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "dropped_ptr"])
def _update(
    x_ptr,  # [batch, Q_LEN, CHANNELS]
    a_ptr,  # [batch, Q_LEN, HEADS]
    b_ptr,
    w_ptr,  # [CHANNELS, WIDTH]
    state_ptr,  # [pool, HISTORY, CHANNELS]
    slots_ptr,  # [batch]
    dropped_ptr,  # [batch]
    a_log_ptr,  # [HEADS]
    dt_bias_ptr,
    y_ptr,  # [batch, Q_LEN, CHANNELS]
    g_ptr,  # [batch, Q_LEN, HEADS]
    beta_ptr,
    x_batch,
    x_token,
    a_batch,
    a_token,
    b_batch,
    b_token,
    Q_LEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    HISTORY: tl.constexpr,
    DROPS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    i_batch = (tl.program_id(0) // (BLOCKS + 1)).to(tl.int64)
    i_block = tl.program_id(0) % (BLOCKS + 1)
    if i_block < BLOCKS:
        update_sequence(
            x_ptr + i_batch * x_batch,
            w_ptr,
            state_ptr,
            slots_ptr + i_batch,
            dropped_ptr + i_batch,
            y_ptr + i_batch * (Q_LEN * CHANNELS),
            x_token,
            i_block * BLOCK + tl.arange(0, BLOCK),
            Q_LEN,
            CHANNELS,
            WIDTH,
            COLUMNS,
            1,
            HISTORY,
            True,
            DROPS,
        )
    else:
        o_t = tl.arange(0, Q_BLOCK)
        o_g = ((i_batch * Q_LEN + o_t) * HEADS)[:, None]
        _gates_of(
            a_ptr + i_batch * a_batch + (o_t * a_token)[:, None],
            b_ptr + i_batch * b_batch + (o_t * b_token)[:, None],
            a_log_ptr,
            dt_bias_ptr,
            g_ptr + o_g,
            beta_ptr + o_g,
            o_t < Q_LEN,
            tl.load(slots_ptr + i_batch + 0 * o_t) >= 0,
            HEADS,
            HEAD_BLOCK,
        )


@portable(gdn_inputs.gdn_inputs_update)
def gdn_inputs_update(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    *,
    dropped: Tensor | None = None,
    out: Inputs | None = None,
) -> Inputs:
    y, g, beta = _outputs(x, a) if out is None else out
    (batch, q_len, channels), heads, width = x.shape, a.shape[2], weight.shape[1]
    if batch and channels:  # without tokens too: what was dropped is taken out of the history
        block = min(CHANNELS_OF_UPDATE, triton.next_power_of_2(channels))
        _update[(batch * (triton.cdiv(channels, block) + 1),)](
            x,
            a,
            b,
            weight,
            state,
            slots,
            slots if dropped is None else dropped,
            a_log,
            dt_bias,
            y,
            g,
            beta,
            *x.stride()[:2],
            *a.stride()[:2],
            *b.stride()[:2],
            q_len,
            channels,
            width,
            triton.next_power_of_2(width),
            state.shape[1],
            dropped is not None,
            block,
            heads,
            triton.next_power_of_2(max(q_len, 1)),
            triton.next_power_of_2(heads),
            num_warps=1,
        )
    return y, g, beta


@triton.jit(
    do_not_specialize=["seqs", "tokens", "halvings"],
    do_not_specialize_on_alignment=["slots_ptr", "cu_seqlens_ptr", "fresh_ptr", "dropped_ptr"],
)
def _prefill(
    x_ptr,  # [tokens, CHANNELS]
    a_ptr,  # [tokens, HEADS]
    b_ptr,
    w_ptr,  # [CHANNELS, WIDTH]
    state_ptr,  # [pool, HISTORY, CHANNELS]
    slots_ptr,  # [seqs]
    cu_seqlens_ptr,  # [seqs+1]
    fresh_ptr,  # [seqs]
    dropped_ptr,  # [seqs]
    a_log_ptr,  # [HEADS]
    dt_bias_ptr,
    y_ptr,  # [tokens, CHANNELS]
    g_ptr,  # [tokens, HEADS]
    beta_ptr,
    x_stride,
    a_stride,
    b_stride,
    seqs,
    tokens,
    halvings,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    HISTORY: tl.constexpr,
    DROPS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    i_row = tl.program_id(0) // (BLOCKS + 1)
    i_block = tl.program_id(0) % (BLOCKS + 1)
    i_tile = (i_row - seqs).to(tl.int64) * TILES
    o_t = tl.arange(0, TOKENS)
    if i_block < BLOCKS:
        o_c = i_block * BLOCK + tl.arange(0, BLOCK)
        taps = tap_weights(w_ptr, o_c, o_c < CHANNELS, WIDTH, COLUMNS)
        if i_row < seqs:
            enter_sequence(
                x_ptr,
                state_ptr,
                slots_ptr,
                cu_seqlens_ptr,
                fresh_ptr,
                dropped_ptr,
                y_ptr,
                x_stride,
                i_row,
                o_c,
                taps,
                CHANNELS,
                WIDTH,
                1,
                HISTORY,
                True,
                DROPS,
            )
        else:
            for i in range(TILES):
                convolve_tile(
                    x_ptr,
                    slots_ptr,
                    cu_seqlens_ptr,
                    y_ptr,
                    x_stride,
                    seqs,
                    tokens,
                    halvings,
                    (i_tile + i) * TOKENS + o_t,
                    o_c,
                    taps,
                    CHANNELS,
                    WIDTH,
                    1,
                    True,
                )
    elif i_row >= seqs:
        for i in range(TILES):
            o_token = (i_tile + i) * TOKENS + o_t
            i_seq = sequences_of(cu_seqlens_ptr, o_token, seqs, halvings)
            _gates_of(
                a_ptr + (o_token * a_stride)[:, None],
                b_ptr + (o_token * b_stride)[:, None],
                a_log_ptr,
                dt_bias_ptr,
                g_ptr + (o_token * HEADS)[:, None],
                beta_ptr + (o_token * HEADS)[:, None],
                o_token < tokens,
                tl.load(slots_ptr + i_seq) >= 0,
                HEADS,
                HEAD_BLOCK,
            )


@portable(gdn_inputs.gdn_inputs_prefill)
def gdn_inputs_prefill(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    fresh: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    *,
    dropped: Tensor | None = None,
    out: Inputs | None = None,
) -> Inputs:
    y, g, beta = _outputs(x, a) if out is None else out
    (tokens, channels), seqs, heads, width = x.shape, slots.shape[0], a.shape[1], weight.shape[1]
    if seqs:
        config = PREFILL.pick(x.device, channels=channels, width=width, dilation=1)
        rows = seqs + triton.cdiv(tokens, config["TOKENS"] * config["TILES"])
        _prefill[(rows * (triton.cdiv(channels, config["BLOCK"]) + 1),)](
            x,
            a,
            b,
            weight,
            state,
            slots,
            cu_seqlens,
            fresh,
            slots if dropped is None else dropped,
            a_log,
            dt_bias,
            y,
            g,
            beta,
            x.stride(0),
            a.stride(0),
            b.stride(0),
            seqs,
            tokens,
            (seqs - 1).bit_length(),
            channels,
            width,
            triton.next_power_of_2(width),
            state.shape[1],
            dropped is not None,
            heads,
            triton.next_power_of_2(heads),
            **config,
        )
    return y, g, beta


def _outputs(x: Tensor, a: Tensor) -> Inputs:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    return y, g, beta
