"""The causal convolution: rows of a history slide through registers, long prompts through tiles.

A history is advanced in place by one program a sequence and block of channels, which also makes all outputs that look
back into it; each of its threads reads all rows of its channels before it writes any. In a prefill those are a
sequence's first (width−1) · dilation tokens. All others look at inputs alone, and go by tiles of tokens and channels,
whatever sequences they belong to.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import conv
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry.platform import Platform

Activation = Literal["none", "silu"]
CHANNELS_OF_UPDATE = 128
"""Channels of a program that advances histories."""


def _tiles(dims: Dims) -> list[Config]:
    sizes = [(32, 128, 4, 1), (32, 128, 4, 4), (16, 128, 4, 8), (16, 256, 4, 1), (16, 256, 4, 4), (64, 64, 4, 2)]
    return [{"TOKENS": t, "BLOCK": b, "num_warps": warps, "TILES": tiles} for t, b, warps, tiles in sizes]


def _default_tile(platform: Platform, dims: Dims) -> Config:
    block = min(128, triton.next_power_of_2(dims["channels"]))
    return {"TOKENS": 32, "BLOCK": block, "num_warps": 4, "TILES": 1}


PREFILL = Tunable("causal_conv_prefill", _tiles, _default_tile)


@triton.jit
def channels_if(condition, o_c, CHANNELS: tl.constexpr):
    """Mask of a block's channels; none where the scalar condition is false."""
    return o_c < tl.where(condition, CHANNELS, 0)


@triton.jit
def tap_weights(w_ptr, o_c, inside, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """The taps of each channel: WIDTH tensors [BLOCK] in float32, loaded as whole rows."""
    o_w = tl.arange(0, COLUMNS)
    mask = inside[:, None] & (o_w < WIDTH)[None, :]
    w = tl.load(w_ptr + o_c[:, None] * WIDTH + o_w[None, :], mask=mask, other=0.0).to(tl.float32)
    taps = tl.tuple(())
    for j in tl.static_range(WIDTH):
        taps += (tl.sum(tl.where((o_w == j)[None, :], w, 0.0), 1),)
    return taps


@triton.jit
def activated(total, dtype: tl.constexpr, SILU: tl.constexpr):
    """The output of a float32 sum: rounded, then activated, then rounded."""
    y = total.to(dtype)
    if SILU:
        wide = y.to(tl.float32)
        y = (wide / (1.0 + tl.exp(-wide))).to(dtype)
    return y


@triton.jit
def update_sequence(
    p_x,  # of the sequence's first token
    w_ptr,  # [CHANNELS, WIDTH]
    state_ptr,  # [pool, HISTORY, CHANNELS]
    p_slot,
    p_dropped,
    p_y,  # of the sequence's first token
    x_token,
    o_c,
    Q_LEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    DILATION: tl.constexpr,
    HISTORY: tl.constexpr,
    SILU: tl.constexpr,
    DROPS: tl.constexpr,
):
    """All tokens of one sequence on a block of channels."""
    SPAN: tl.constexpr = (WIDTH - 1) * DILATION
    OLD: tl.constexpr = max(SPAN, HISTORY - Q_LEN)
    inside = o_c < CHANNELS
    slot = tl.load(p_slot).to(tl.int64)
    drop = 0
    if DROPS:
        drop = tl.load(p_dropped)
    taps = tap_weights(w_ptr, o_c, inside, WIDTH, COLUMNS)
    new = tl.tuple(())
    for i in tl.static_range(Q_LEN):
        new += (tl.load(p_x + i * x_token + o_c, mask=inside, other=0.0),)
    p_y += o_c
    if slot >= 0:
        p_state = state_ptr + slot * (HISTORY * CHANNELS) + o_c
        rows = tl.tuple(())  # inputs from OLD tokens before the call's first one on
        for i in tl.static_range(OLD):
            i_row = HISTORY - OLD + i - drop
            rows += (tl.load(p_state + i_row * CHANNELS, mask=channels_if(i_row >= 0, o_c, CHANNELS), other=0.0),)
        rows += new
        tl.debug_barrier()  # where threads do not divide all rows alike
        for i in tl.static_range(HISTORY):
            tl.store(p_state + i * CHANNELS, rows[OLD + Q_LEN - HISTORY + i], mask=inside)
        for i in tl.static_range(Q_LEN):
            total = taps[WIDTH - 1] * rows[OLD + i].to(tl.float32)
            for back in tl.static_range(1, WIDTH):
                total += taps[WIDTH - 1 - back] * rows[OLD + i - back * DILATION].to(tl.float32)
            tl.store(p_y + i * CHANNELS, activated(total, p_y.dtype.element_ty, SILU), mask=inside)
    else:
        for i in tl.static_range(Q_LEN):
            tl.store(p_y + i * CHANNELS, tl.zeros([o_c.shape[0]], p_y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "dropped_ptr"])
def _update(
    x_ptr,  # [batch, Q_LEN, CHANNELS]
    w_ptr,  # [CHANNELS, WIDTH]
    state_ptr,  # [pool, HISTORY, CHANNELS]
    slots_ptr,  # [batch]
    dropped_ptr,  # [batch]
    y_ptr,  # [batch, Q_LEN, CHANNELS]
    x_batch,
    x_token,
    Q_LEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    DILATION: tl.constexpr,
    HISTORY: tl.constexpr,
    SILU: tl.constexpr,
    DROPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    i_batch = (tl.program_id(0) // BLOCKS).to(tl.int64)
    update_sequence(
        x_ptr + i_batch * x_batch,
        w_ptr,
        state_ptr,
        slots_ptr + i_batch,
        dropped_ptr + i_batch,
        y_ptr + i_batch * (Q_LEN * CHANNELS),
        x_token,
        tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK),
        Q_LEN,
        CHANNELS,
        WIDTH,
        COLUMNS,
        DILATION,
        HISTORY,
        SILU,
        DROPS,
    )


@portable(conv.causal_conv_update)
def causal_conv_update(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    *,
    dropped: Tensor | None = None,
    dilation: int = 1,
    activation: Activation = "silu",
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    batch, q_len, channels = x.shape
    width = weight.shape[1]
    if batch and channels:  # without tokens too: what was dropped is taken out of the history
        block = min(CHANNELS_OF_UPDATE, triton.next_power_of_2(channels))
        _update[(batch * triton.cdiv(channels, block),)](
            x,
            weight,
            state,
            slots,
            slots if dropped is None else dropped,
            out,
            x.stride(0),
            x.stride(1),
            q_len,
            channels,
            width,
            triton.next_power_of_2(width),
            dilation,
            state.shape[1],
            activation == "silu",
            dropped is not None,
            block,
            num_warps=1,
        )
    return out


@triton.jit
def enter_sequence(
    x_ptr,
    state_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    fresh_ptr,
    dropped_ptr,
    y_ptr,
    x_stride,
    i_seq,
    o_c,
    taps,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    DILATION: tl.constexpr,
    HISTORY: tl.constexpr,
    SILU: tl.constexpr,
    DROPS: tl.constexpr,
):
    """The tokens of a sequence that look back into its history, and the history after all of its tokens."""
    SPAN: tl.constexpr = (WIDTH - 1) * DILATION
    inside = o_c < CHANNELS
    slot = tl.load(slots_ptr + i_seq).to(tl.int64)
    start = tl.load(cu_seqlens_ptr + i_seq).to(tl.int64)
    length = tl.load(cu_seqlens_ptr + i_seq + 1).to(tl.int64) - start
    # Rows of the history that count; the call's tokens come after them.
    known = tl.where(tl.load(fresh_ptr + i_seq) != 0, 0, HISTORY).to(tl.int64)
    shift = HISTORY
    if DROPS:
        shift = HISTORY - tl.load(dropped_ptr + i_seq)
    p_y = y_ptr + start * CHANNELS + o_c
    if slot >= 0:
        p_x = x_ptr + start * x_stride + o_c
        p_state = state_ptr + slot * (HISTORY * CHANNELS) + o_c
        rows = tl.tuple(())  # inputs from SPAN tokens before the call's first one to SPAN after
        for i in tl.static_range(SPAN):
            i_row = shift - SPAN + i
            old = channels_if((i_row >= 0) & (i_row < known), o_c, CHANNELS)
            rows += (tl.load(p_state + i_row * CHANNELS, mask=old, other=0.0),)
        for i in tl.static_range(SPAN):
            rows += (tl.load(p_x + i * x_stride, mask=channels_if(i < length, o_c, CHANNELS), other=0.0),)
        newest = tl.tuple(())
        for i in tl.static_range(HISTORY):
            i_token = length - HISTORY + i
            i_row = shift + i_token
            old = channels_if((i_token < 0) & (i_row >= 0) & (i_row < known), o_c, CHANNELS)
            row = tl.load(p_state + i_row * CHANNELS, mask=old, other=0.0)
            new = tl.load(p_x + i_token * x_stride, mask=channels_if(i_token >= 0, o_c, CHANNELS), other=0.0)
            newest += (tl.where(i_token >= 0, new, row),)
        tl.debug_barrier()  # where threads do not divide all rows alike
        for i in tl.static_range(HISTORY):
            tl.store(p_state + i * CHANNELS, newest[i], mask=inside)
        for i in tl.static_range(SPAN):
            total = taps[WIDTH - 1] * rows[SPAN + i].to(tl.float32)
            for back in tl.static_range(1, WIDTH):
                total += taps[WIDTH - 1 - back] * rows[SPAN + i - back * DILATION].to(tl.float32)
            y = activated(total, y_ptr.dtype.element_ty, SILU)
            tl.store(p_y + i * CHANNELS, y, mask=channels_if(i < length, o_c, CHANNELS))
    else:
        for i in tl.static_range(SPAN):
            y = tl.zeros([o_c.shape[0]], y_ptr.dtype.element_ty)
            tl.store(p_y + i * CHANNELS, y, mask=channels_if(i < length, o_c, CHANNELS))


@triton.jit
def sequences_of(cu_seqlens_ptr, o_t, seqs, halvings):
    """The sequence of each token: the last that starts at or before it, past empty ones."""
    low = tl.zeros(o_t.shape, tl.int32)
    high = low + seqs - 1
    for _ in range(halvings):
        middle = (low + high + 1) // 2
        reached = tl.load(cu_seqlens_ptr + middle).to(tl.int64) <= o_t
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low


@triton.jit
def convolve_tile(
    x_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    y_ptr,
    x_stride,
    seqs,
    tokens,
    halvings,
    o_t,  # [TOKENS]
    o_c,  # [BLOCK]
    taps,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    DILATION: tl.constexpr,
    SILU: tl.constexpr,
):
    """Tokens that look at inputs of their sequence alone."""
    i_seq = sequences_of(cu_seqlens_ptr, o_t, seqs, halvings)
    start = tl.load(cu_seqlens_ptr + i_seq).to(tl.int64)
    inside = o_c < CHANNELS
    own = (o_t < tokens) & (o_t - start >= (WIDTH - 1) * DILATION)
    mask = own[:, None] & inside[None, :]
    known = mask & (tl.load(slots_ptr + i_seq) >= 0)[:, None]
    p_x = x_ptr + o_t[:, None] * x_stride + o_c[None, :]
    total = taps[WIDTH - 1][None, :] * tl.load(p_x, mask=known, other=0.0).to(tl.float32)
    for back in tl.static_range(1, WIDTH):
        x = tl.load(p_x - back * DILATION * x_stride, mask=known, other=0.0).to(tl.float32)
        total += taps[WIDTH - 1 - back][None, :] * x
    p_y = y_ptr + o_t[:, None] * CHANNELS + o_c[None, :]
    tl.store(p_y, activated(total, y_ptr.dtype.element_ty, SILU), mask=mask)


@triton.jit(
    do_not_specialize=["seqs", "tokens", "halvings"],
    do_not_specialize_on_alignment=["slots_ptr", "cu_seqlens_ptr", "fresh_ptr", "dropped_ptr"],
)
def _prefill(
    x_ptr,  # [tokens, CHANNELS]
    w_ptr,  # [CHANNELS, WIDTH]
    state_ptr,  # [pool, HISTORY, CHANNELS]
    slots_ptr,  # [seqs]
    cu_seqlens_ptr,  # [seqs+1]
    fresh_ptr,  # [seqs]
    dropped_ptr,  # [seqs]
    y_ptr,  # [tokens, CHANNELS]
    x_stride,
    seqs,
    tokens,
    halvings,  # of the sequences, until one is left
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    DILATION: tl.constexpr,
    HISTORY: tl.constexpr,
    SILU: tl.constexpr,
    DROPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,  # of a program, one after the other: the taps come once
):
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    i_row = tl.program_id(0) // BLOCKS
    o_c = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
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
            DILATION,
            HISTORY,
            SILU,
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
                ((i_row - seqs).to(tl.int64) * TILES + i) * TOKENS + tl.arange(0, TOKENS),
                o_c,
                taps,
                CHANNELS,
                WIDTH,
                DILATION,
                SILU,
            )


@portable(conv.causal_conv_prefill)
def causal_conv_prefill(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    fresh: Tensor,
    *,
    dropped: Tensor | None = None,
    dilation: int = 1,
    activation: Activation = "silu",
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    (tokens, channels), seqs = x.shape, slots.shape[0]
    width = weight.shape[1]
    if seqs and channels:
        config = PREFILL.pick(x.device, channels=channels, width=width, dilation=dilation)
        rows = seqs + triton.cdiv(tokens, config["TOKENS"] * config["TILES"])
        _prefill[(rows * triton.cdiv(channels, config["BLOCK"]),)](
            x,
            weight,
            state,
            slots,
            cu_seqlens,
            fresh,
            slots if dropped is None else dropped,
            out,
            x.stride(0),
            seqs,
            tokens,
            (seqs - 1).bit_length(),
            channels,
            width,
            triton.next_power_of_2(width),
            dilation,
            state.shape[1],
            activation == "silu",
            dropped is not None,
            **config,
        )
    return out
