"""The causal convolution: rows of a history slide through registers. Long prompts are in `conv_prefill`.

A history is advanced in place by one program a sequence and block of channels, which also makes all outputs that look
back into it; each of its threads reads all rows of its channels before it writes any. Where the gates of the delta rule
are asked for as well (`gdn_inputs`), one more program beside those of the channels makes them.
"""

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.triton.gdn_gates import gates_of_tokens

Gates = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""a, b, a_log, dt_bias, and g and beta to be written."""
_CHANNELS = 128
"""Of a program that advances histories."""


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
    p_dropped,  # None: nothing is dropped
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
):
    """All tokens of one sequence on a block of channels."""
    SPAN: tl.constexpr = (WIDTH - 1) * DILATION
    OLD: tl.constexpr = max(SPAN, HISTORY - Q_LEN)
    inside = o_c < CHANNELS
    slot = tl.load(p_slot).to(tl.int64)
    drop = 0
    if p_dropped is not None:
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
    dropped_ptr,  # [batch]; None: nothing is dropped
    y_ptr,  # [batch, Q_LEN, CHANNELS]
    a_ptr,  # [batch, Q_LEN, HEADS]; None and so on where no gates are made
    b_ptr,
    a_log_ptr,  # [HEADS]
    dt_bias_ptr,
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
    COLUMNS: tl.constexpr,  # power of two at or above WIDTH
    DILATION: tl.constexpr,
    HISTORY: tl.constexpr,
    HEADS: tl.constexpr,  # 0: no gates
    HEAD_BLOCK: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    PROGRAMS: tl.constexpr = BLOCKS + (1 if HEADS > 0 else 0)
    i_batch = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    i_block = tl.program_id(0) % PROGRAMS
    if i_block < BLOCKS:
        update_sequence(
            x_ptr + i_batch * x_batch,
            w_ptr,
            state_ptr,
            slots_ptr + i_batch,
            None if dropped_ptr is None else dropped_ptr + i_batch,
            y_ptr + i_batch * (Q_LEN * CHANNELS),
            x_token,
            i_block * BLOCK + tl.arange(0, BLOCK),
            Q_LEN,
            CHANNELS,
            WIDTH,
            COLUMNS,
            DILATION,
            HISTORY,
            SILU,
        )
    elif HEADS > 0:
        o_t = tl.arange(0, Q_BLOCK)
        o_g = ((i_batch * Q_LEN + o_t) * HEADS)[:, None]
        gates_of_tokens(
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


def update(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    dropped: Tensor | None,
    y: Tensor,
    *,
    dilation: int,
    silu: bool,
    gates: Gates | None = None,
) -> None:
    """Writes to `y`, and the gates if there are any: some tokens of each sequence."""
    (batch, q_len, channels), width = x.shape, weight.shape[1]
    if batch == 0 or channels == 0:  # without tokens too: what was dropped is taken out of the history
        return
    a, b = gates[:2] if gates else (x, x)
    heads = a.shape[2] if gates else 0
    block = min(_CHANNELS, triton.next_power_of_2(channels))
    _update[(batch * (triton.cdiv(channels, block) + (1 if gates else 0)),)](
        x,
        weight,
        state,
        slots,
        dropped,
        y,
        *(gates or [None] * 6),
        *x.stride()[:2],
        *a.stride()[:2],
        *b.stride()[:2],
        q_len,
        channels,
        width,
        triton.next_power_of_2(width),
        dilation,
        state.shape[1],
        heads,
        triton.next_power_of_2(max(heads, 1)),
        triton.next_power_of_2(max(q_len, 1)),
        silu,
        block,
        num_warps=1,
    )
