"""The causal convolution of packed sequences: as `conv_update` where a token looks back into a history, else by tiles.

The tokens that look back are a sequence's first (width−1) · dilation; the program that makes them leaves the history.
All others look at inputs alone, and go by tiles of tokens and channels, whatever sequences they belong to.
"""

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.triton.conv_update import Gates, activated, channels_if, tap_weights
from tokenspeed_kernels.triton.gdn_gates import gates_of_tokens
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry.platform import Platform


def _tiles(dims: Dims) -> list[Config]:
    sizes = [(32, 128, 4, 1), (32, 128, 4, 4), (16, 128, 4, 8), (16, 256, 4, 1), (16, 256, 4, 4), (64, 64, 4, 2)]
    return [{"TOKENS": t, "BLOCK": b, "num_warps": warps, "TILES": tiles} for t, b, warps, tiles in sizes]


def _default_tile(platform: Platform, dims: Dims) -> Config:
    block = min(128, triton.next_power_of_2(dims["channels"]))
    return {"TOKENS": 32, "BLOCK": block, "num_warps": 4, "TILES": 1}


PREFILL = Tunable("causal_conv_prefill", _tiles, _default_tile)


@triton.jit
def enter_sequence(
    x_ptr,
    state_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    fresh_ptr,
    dropped_ptr,  # None: nothing is dropped
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
    if dropped_ptr is not None:
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
    dropped_ptr,  # [seqs]; None: nothing is dropped
    y_ptr,  # [tokens, CHANNELS]
    a_ptr,  # [tokens, HEADS]; None and so on where no gates are made
    b_ptr,
    a_log_ptr,  # [HEADS]
    dt_bias_ptr,
    g_ptr,  # [tokens, HEADS]
    beta_ptr,
    x_stride,
    a_stride,
    b_stride,
    seqs,
    tokens,
    halvings,  # of the sequences, until one is left
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,  # power of two at or above WIDTH
    DILATION: tl.constexpr,
    HISTORY: tl.constexpr,
    HEADS: tl.constexpr,  # 0: no gates
    HEAD_BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,  # of a program, one after the other: the taps come once
):
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    PROGRAMS: tl.constexpr = BLOCKS + (1 if HEADS > 0 else 0)
    i_row = tl.program_id(0) // PROGRAMS  # sequences, then tiles
    i_block = tl.program_id(0) % PROGRAMS
    i_token = (i_row - seqs).to(tl.int64) * (TILES * TOKENS)
    o_t = i_token + tl.arange(0, TOKENS)
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
                DILATION,
                HISTORY,
                SILU,
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
                    o_t + i * TOKENS,
                    o_c,
                    taps,
                    CHANNELS,
                    WIDTH,
                    DILATION,
                    SILU,
                )
    elif HEADS > 0 and i_row >= seqs:
        for i in range(TILES):
            o_token = o_t + i * TOKENS
            i_seq = sequences_of(cu_seqlens_ptr, o_token, seqs, halvings)
            gates_of_tokens(
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


def prefill(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    fresh: Tensor,
    dropped: Tensor | None,
    y: Tensor,
    *,
    dilation: int,
    silu: bool,
    gates: Gates | None = None,
) -> None:
    """Writes to `y`, and the gates if there are any: all tokens of packed sequences."""
    (tokens, channels), seqs, width = x.shape, slots.shape[0], weight.shape[1]
    if seqs == 0 or channels == 0:
        return
    a, b = gates[:2] if gates else (x, x)
    heads = a.shape[1] if gates else 0
    config = PREFILL.pick(x.device, channels=channels, width=width, dilation=dilation)
    rows = seqs + triton.cdiv(tokens, config["TOKENS"] * config["TILES"])
    _prefill[(rows * (triton.cdiv(channels, config["BLOCK"]) + (1 if gates else 0)),)](
        x,
        weight,
        state,
        slots,
        cu_seqlens,
        fresh,
        dropped,
        y,
        *(gates or [None] * 6),
        x.stride(0),
        a.stride(0),
        b.stride(0),
        seqs,
        tokens,
        (seqs - 1).bit_length(),
        channels,
        width,
        triton.next_power_of_2(width),
        dilation,
        state.shape[1],
        heads,
        triton.next_power_of_2(max(heads, 1)),
        silu,
        **config,
    )
