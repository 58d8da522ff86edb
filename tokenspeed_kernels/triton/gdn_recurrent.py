"""The gated delta rule token by token: decode, its gates, and the norm of its output.

A program owns a tile of some rows of one head's state, from the pool to registers and back: rows never meet, since
both products of a step run along them. So a head is spread over as many programs as it takes to keep a chip busy with
one request, and at any batch a state is moved once in each direction, which is all the time there is to spend.

A tile is held in chunks of some columns: lanes then take several rows at once, and the sum along a row meets fewer of
them. Where a state is moved for few tokens a chunk is 256 bytes wide: narrower ones scatter what a warp asks of memory,
which costs 5% of the rate. Where many tokens are worked on it is 128 bytes, one cache line.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import gdn
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.device import bucket
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable

NORM_EPS = tl.constexpr(1e-6)
_MOST_BATCH = 64
"""Batches above fill any chip alike."""


@triton.jit
def load_key(p_k, DIM: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """One head's query or key in its own dtype: CHUNKS tensors [CHUNK]."""
    k = tl.tuple(())
    for c in tl.static_range(CHUNKS):
        o_k = c * CHUNK + tl.arange(0, CHUNK)
        k += (tl.load(p_k + o_k, mask=o_k < DIM, other=0.0),)
    return k


@triton.jit
def load_token(p_q, p_k, p_v, p_g, p_beta, inside, DK: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """A token of one head, of the values those of a tile's rows."""
    q = load_key(p_q, DK, CHUNKS, CHUNK)
    k = load_key(p_k, DK, CHUNKS, CHUNK)
    v = tl.load(p_v, mask=inside, other=0.0)
    return q, k, v, tl.load(p_g), tl.load(p_beta)


@triton.jit
def wide_key(k, CHUNKS: tl.constexpr, NORMALISE: tl.constexpr):
    """A query or key in float32, and what makes it of unit length if that is asked for, else 1."""
    wide = tl.tuple(())
    for c in tl.static_range(CHUNKS):
        wide += (k[c].to(tl.float32),)
    factor = 1.0
    if NORMALISE:
        squares = wide[0] * wide[0]
        for c in tl.static_range(1, CHUNKS):
            squares += wide[c] * wide[c]
        factor = tl.rsqrt(tl.sum(squares, 0) + NORM_EPS)
    return wide, factor


@triton.jit
def load_tile(p_state, inside, DK: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """A tile in float32 from where its rows start, [ROWS]: CHUNKS tensors [ROWS, CHUNK]."""
    state = tl.tuple(())
    for c in tl.static_range(CHUNKS):
        o_k = c * CHUNK + tl.arange(0, CHUNK)
        mask = inside[:, None] & (o_k < DK)[None, :]
        part = tl.load(p_state[:, None] + o_k[None, :], mask=mask, other=0.0)
        state += (part.to(tl.float32),)
    return state


@triton.jit
def store_tile(p_state, state, inside, DK: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    for c in tl.static_range(CHUNKS):
        o_k = c * CHUNK + tl.arange(0, CHUNK)
        part = state[c].to(p_state.dtype.element_ty)
        mask = inside[:, None] & (o_k < DK)[None, :]
        tl.store(p_state[:, None] + o_k[None, :], part, mask=mask)


@triton.jit
def along_rows(state, k, CHUNKS: tl.constexpr):
    """Product of a tile with a query or key: [ROWS]."""
    total = state[0] * k[0][None, :]
    for c in tl.static_range(1, CHUNKS):
        total += state[c] * k[c][None, :]
    return tl.sum(total, 1)


@triton.jit
def change(state, k, factor, v, decay, beta, CHUNKS: tl.constexpr):
    """What a token adds to the decayed tile along its key as it came, [ROWS]; `factor` makes that of unit length."""
    return beta * (v.to(tl.float32) - along_rows(state, k, CHUNKS) * (decay * factor)) * factor


@triton.jit
def changed(state, k, delta, decay, CHUNKS: tl.constexpr):
    """The tile after a token."""
    new = tl.tuple(())
    for c in tl.static_range(CHUNKS):
        new += (state[c] * decay + delta[:, None] * k[c][None, :],)
    return new


@triton.jit
def step(state, q, k, v, g, beta, scale, CHUNKS: tl.constexpr, NORMALISE: tl.constexpr):
    """What a token's query reads, [ROWS], and the tile after the token.

    Both products are with the tile before it, so that neither waits for the other: S q is exp(g) S q + δ (k q).
    """
    k, k_factor = wide_key(k, CHUNKS, NORMALISE)
    q, q_factor = wide_key(q, CHUNKS, NORMALISE)
    overlap = k[0] * q[0]
    for c in tl.static_range(1, CHUNKS):
        overlap += k[c] * q[c]
    decay = tl.exp(g)
    delta = change(state, k, k_factor, v, decay, beta, CHUNKS)
    o = along_rows(state, q, CHUNKS) * decay + delta * tl.sum(overlap, 0)
    return o * (q_factor * scale), changed(state, k, delta, decay, CHUNKS)


@triton.jit(do_not_specialize_on_alignment=["initial_ptr", "slots_ptr"])
def recurrent_steps(
    q_ptr,  # [batch, Q_LEN, k_heads, DK]
    k_ptr,
    v_ptr,  # [batch, Q_LEN, V_HEADS, DV]
    g_ptr,  # [batch, Q_LEN, V_HEADS]
    beta_ptr,
    state_ptr,  # [pool, V_HEADS, DV, DK]
    initial_ptr,  # [batch]: slots to start from
    slots_ptr,  # [batch, Q_LEN]: where the state after each token goes; none for -1
    o_ptr,  # [batch, Q_LEN, V_HEADS, DV]
    scale,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
    Q_LEN: tl.constexpr,
    V_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # value heads a key head
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    NORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
    AHEAD: tl.constexpr,  # tokens asked for before they are worked on
):
    TILES: tl.constexpr = (DV + ROWS - 1) // ROWS
    i_program = tl.program_id(0)
    i_head = i_program // TILES % V_HEADS
    i_batch = (i_program // TILES // V_HEADS).to(tl.int64)
    o_v = i_program % TILES * ROWS + tl.arange(0, ROWS)
    inside = o_v < DV
    # What needs no slot is asked for before the slot has come.
    initial = tl.load(initial_ptr + i_batch)
    p_q = q_ptr + i_batch * q_batch + i_head // GROUP * q_head
    p_k = k_ptr + i_batch * k_batch + i_head // GROUP * k_head
    p_v = v_ptr + i_batch * v_batch + i_head * v_head + o_v
    i_gate = i_batch * (Q_LEN * V_HEADS) + i_head
    p_g, p_beta = g_ptr + i_gate, beta_ptr + i_gate
    first_tokens = tl.tuple(())
    for i in tl.static_range(min(AHEAD, Q_LEN)):
        p_keys = p_q + i * q_token, p_k + i * k_token
        p_gates = p_g + i * V_HEADS, p_beta + i * V_HEADS
        first_tokens += (load_token(*p_keys, p_v + i * v_token, *p_gates, inside, DK, CHUNKS, CHUNK),)
    p_o = o_ptr + i_gate * DV + o_v
    if initial >= 0:
        o_state = (i_head * DV + o_v) * DK
        p_state = state_ptr + initial.to(tl.int64) * (V_HEADS * DV * DK) + o_state
        state = load_tile(p_state, inside, DK, CHUNKS, CHUNK)
        tokens = first_tokens
        for i in tl.static_range(Q_LEN):
            slot = tl.load(slots_ptr + i_batch * Q_LEN + i)
            if i + AHEAD < Q_LEN:
                p_keys = p_q + (i + AHEAD) * q_token, p_k + (i + AHEAD) * k_token
                p_gates = p_g + (i + AHEAD) * V_HEADS, p_beta + (i + AHEAD) * V_HEADS
                tokens += (load_token(*p_keys, p_v + (i + AHEAD) * v_token, *p_gates, inside, DK, CHUNKS, CHUNK),)
            q, k, v, g, beta = tokens[i]
            o, state = step(state, q, k, v, g, beta, scale, CHUNKS, NORMALISE)
            if slot >= 0:
                p_state = state_ptr + slot.to(tl.int64) * (V_HEADS * DV * DK) + o_state
                store_tile(p_state, state, inside, DK, CHUNKS, CHUNK)
            tl.store(p_o + i * (V_HEADS * DV), o.to(o_ptr.dtype.element_ty), mask=inside)
    else:
        for i in tl.static_range(Q_LEN):
            tl.store(p_o + i * (V_HEADS * DV), tl.zeros([ROWS], o_ptr.dtype.element_ty), mask=inside)


def chunks_of(d_k: int, state: Tensor, width: int = 256) -> tuple[int, int]:
    """How many chunks, of `width` bytes or one whole row, a row of the state is cut into, and the columns of each."""
    columns = triton.next_power_of_2(d_k)
    chunk = min(columns, width // state.element_size())
    return columns // chunk, chunk


def tile_space(dims: Dims) -> list[Config]:
    """Tiles of 1024 to 4096 state elements a warp: of more than that a warp's registers hold no tile."""
    columns, most = triton.next_power_of_2(dims["d_k"]), triton.next_power_of_2(dims["d_v"])
    sizes = [(warps, warps * each // columns) for warps in (1, 2, 4) for each in (1024, 2048, 4096)]
    return [{"ROWS": rows, "num_warps": warps} for warps, rows in sizes if 1 <= rows <= most]


def tile(dims: Dims, elements: int, warps: int) -> Config:
    """So many state elements, or all rows of a head if those are fewer."""
    rows = max(elements // triton.next_power_of_2(dims["d_k"]), 1)
    return {"ROWS": min(rows, triton.next_power_of_2(dims["d_v"])), "num_warps": warps}


def few_batches(batch: int) -> int:
    """The bucket of a batch size that tiles are chosen by."""
    return min(bucket(batch), _MOST_BATCH)


DECODE = Tunable("gdn_decode", tile_space, lambda platform, dims: tile(dims, 2048, 1))


@portable(gdn.gdn_decode)
def gdn_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    *,
    scale: float,
    normalise: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    batch, v_heads, d_v = v.shape
    k_heads, d_k = k.shape[1:]
    if out.numel() == 0:
        return out
    config = DECODE.pick(v.device, batch=few_batches(batch), v_heads=v_heads, d_k=d_k, d_v=d_v)
    recurrent_steps[(batch * v_heads * triton.cdiv(d_v, config["ROWS"]),)](
        q,
        k,
        v,
        g,
        beta,
        state,
        slots,
        slots,
        out,
        scale,
        q.stride(0),
        0,
        q.stride(1),
        k.stride(0),
        0,
        k.stride(1),
        v.stride(0),
        0,
        v.stride(1),
        1,
        v_heads,
        v_heads // k_heads,
        d_k,
        d_v,
        *chunks_of(d_k, state),
        normalise,
        AHEAD=1,
        **config,
    )
    return out


@triton.jit(do_not_specialize=["tokens"])
def _gates(
    a_ptr,  # [tokens, HEADS]
    b_ptr,
    a_log_ptr,  # [HEADS]
    dt_bias_ptr,
    g_ptr,  # [tokens, HEADS]
    beta_ptr,
    tokens,
    a_stride,
    b_stride,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    o_t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    o_h = tl.arange(0, BLOCK)
    in_heads = o_h < HEADS
    inside = (o_t < tokens)[:, None] & in_heads[None, :]  # [TOKENS, BLOCK]
    a_log = tl.load(a_log_ptr + o_h, mask=in_heads, other=0.0)
    dt_bias = tl.load(dt_bias_ptr + o_h, mask=in_heads, other=0.0)
    a = tl.load(a_ptr + o_t[:, None] * a_stride + o_h[None, :], mask=inside, other=0.0)
    b = tl.load(b_ptr + o_t[:, None] * b_stride + o_h[None, :], mask=inside, other=0.0)
    g, beta = gates(a, b, a_log[None, :], dt_bias[None, :])
    o_g = o_t[:, None] * HEADS + o_h[None, :]
    tl.store(g_ptr + o_g, g, mask=inside)
    tl.store(beta_ptr + o_g, beta, mask=inside)


@triton.jit
def gates(a, b, a_log, dt_bias):
    """Log decay and write strength in float32."""
    x = a.to(tl.float32) + dt_bias
    # log(1 + small), to the last digits: what the sum rounded off is made up for.
    small = tl.exp(-tl.abs(x))
    one_more = 1.0 + small
    lost = tl.where(one_more == 1.0, small, tl.log(one_more) * (small / tl.where(one_more == 1.0, 1.0, one_more - 1.0)))
    return -tl.exp(a_log) * (tl.maximum(x, 0.0) + lost), 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))


@portable(gdn.gdn_gates)
def gdn_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    if out is None:
        g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    else:
        g, beta = out
    tokens, heads = a.shape
    if g.numel():
        block = triton.next_power_of_2(heads)
        rows = max(256 // block, 1)
        _gates[(triton.cdiv(tokens, rows),)](
            a, b, a_log, dt_bias, g, beta, tokens, a.stride(0), b.stride(0), heads, rows, block, num_warps=2
        )
    return g, beta


@triton.jit
def _gated_rms_norm(
    x_ptr,  # [tokens, HEADS, DIM]
    gate_ptr,
    w_ptr,  # [DIM]
    o_ptr,  # [tokens, HEADS, DIM]
    eps,
    x_token,
    x_head,
    gate_token,
    gate_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_h = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    o_d = tl.arange(0, BLOCK)[None, :]
    inside = (o_h < HEADS) & (o_d < DIM)  # [ROWS, BLOCK]
    x = tl.load(x_ptr + i_token * x_token + o_h * x_head + o_d, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + i_token * gate_token + o_h * gate_head + o_d, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + o_d, mask=o_d < DIM, other=0.0).to(tl.float32)
    y = x * (1.0 / tl.sqrt(tl.sum(x * x, 1) / DIM + eps))[:, None] * w
    activated = 1.0 / (1.0 + tl.exp(-gate))
    if SILU:
        activated *= gate
    y *= activated
    tl.store(o_ptr + (i_token * HEADS + o_h) * DIM + o_d, y.to(o_ptr.dtype.element_ty), mask=inside)


@portable(gdn.gated_rms_norm)
def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    *,
    eps: float,
    activation: Literal["sigmoid", "silu"],
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    tokens, heads, dim = x.shape
    if out.numel():
        block = triton.next_power_of_2(dim)
        rows = max(min(2048 // block, triton.next_power_of_2(heads)), 1)
        _gated_rms_norm[(tokens, triton.cdiv(heads, rows))](
            x,
            gate,
            weight,
            out,
            eps,
            x.stride(0),
            x.stride(1),
            gate.stride(0),
            gate.stride(1),
            heads,
            dim,
            activation == "silu",
            rows,
            block,
            num_warps=min(max(rows * block // 512, 1), 8),
        )
    return out
