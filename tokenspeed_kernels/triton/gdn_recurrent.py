"""The gated delta rule token by token: decode, the launch that verify shares, and the norm of its output."""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import gdn
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.gdn_tile import (
    chunks_of,
    few_batches,
    load_tile,
    load_tokens,
    step,
    store_tile,
    tile,
    tile_space,
)
from tokenspeed_kernels.triton.overlap import overlapping, wait_for_predecessor
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry import Dim
from tokenspeed_registry.platform import Platform


def _default_decode(platform: Platform, dims: Dims) -> Config:
    return tile(dims, 1024 if dims["batch"] < 32 else 2048, 1)


DECODE = Tunable("gdn_decode", tile_space, _default_decode)


@triton.jit(do_not_specialize_on_alignment=["initial_ptr", "slots_ptr"])
def _advance(
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
    IN_PLACE: tl.constexpr,  # the state after the one token goes to where it started from
    ROWS: tl.constexpr,
    AHEAD: tl.constexpr,  # tokens asked for before they are worked on
    PDL: tl.constexpr,
):
    wait_for_predecessor(PDL)
    TILES: tl.constexpr = (DV + ROWS - 1) // ROWS
    i_program = tl.program_id(0)
    i_head = i_program // TILES % V_HEADS
    i_batch = (i_program // TILES // V_HEADS).to(tl.int64)
    i_row = i_program % TILES * ROWS
    o_v = i_row + tl.arange(0, ROWS)
    inside = o_v < DV
    # What needs no slot is asked for before the slot has come.
    initial = tl.load(initial_ptr + i_batch).to(tl.int64)
    slots = (initial,)
    if not IN_PLACE:
        slots = tl.tuple(())
        for i in tl.static_range(Q_LEN):
            slots += (tl.load(slots_ptr + i_batch * Q_LEN + i).to(tl.int64),)
    p_q = q_ptr + i_batch * q_batch + i_head // GROUP * q_head
    p_k = k_ptr + i_batch * k_batch + i_head // GROUP * k_head
    p_v = v_ptr + i_batch * v_batch + i_head * v_head + o_v
    i_gate = i_batch * (Q_LEN * V_HEADS) + i_head
    p_g, p_beta = g_ptr + i_gate, beta_ptr + i_gate
    new = p_q, p_k, p_v, p_g, p_beta, q_token, k_token, v_token, inside
    first_tokens = load_tokens(0, min(AHEAD, Q_LEN), *new, V_HEADS, DK, CHUNKS, CHUNK)
    p_o = o_ptr + i_gate * DV + o_v
    if initial >= 0:
        p_tile = state_ptr + (i_head * DV + i_row).to(tl.int64) * DK  # of slot 0
        state = load_tile(p_tile + initial * (V_HEADS * DV * DK), inside, DK, CHUNKS, CHUNK, IN_PLACE)
        tokens = first_tokens
        for i in tl.static_range(Q_LEN):
            tokens += load_tokens(i + AHEAD, min(i + AHEAD + 1, Q_LEN), *new, V_HEADS, DK, CHUNKS, CHUNK)
            q, k, v, g, beta = tokens[i]
            o, state = step(state, q, k, v, g, beta, scale, CHUNKS, NORMALISE)
            if slots[i] >= 0:
                store_tile(p_tile + slots[i] * (V_HEADS * DV * DK), state, inside, DK, CHUNKS, CHUNK)
            tl.store(p_o + i * (V_HEADS * DV), o.to(o_ptr.dtype.element_ty), mask=inside)
    else:
        for i in tl.static_range(Q_LEN):
            tl.store(p_o + i * (V_HEADS * DV), tl.zeros([ROWS], o_ptr.dtype.element_ty), mask=inside)


def advance(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    initial_slots: Tensor,
    slots: Tensor,
    out: Tensor,
    *,
    scale: float,
    normalise: bool,
    config: Config,
) -> None:
    """Writes outputs and states: one token of each sequence, or, with one dim more, several."""
    batch, q_len, v_heads, d_v = v.shape if v.ndim == 4 else (v.shape[0], 1, *v.shape[1:])
    k_heads, d_k = k.shape[-2:]
    strides = [x.stride()[:3] if x.ndim == 4 else (x.stride(0), 0, x.stride(1)) for x in (q, k, v)]
    _advance[(batch * v_heads * triton.cdiv(d_v, config["ROWS"]),)](
        q,
        k,
        v,
        g,
        beta,
        state,
        initial_slots,
        slots,
        out,
        scale,
        *strides[0],
        *strides[1],
        *strides[2],
        q_len,
        v_heads,
        v_heads // k_heads,
        d_k,
        d_v,
        *chunks_of(d_k, state),
        normalise,
        slots is initial_slots,
        **config,
        **overlapping(v.device),
    )


@portable(gdn.gdn_decode, constraints=[Dim("d_k") >= 1])
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
    (batch, v_heads, d_v), d_k = v.shape, k.shape[2]
    if out.numel():
        config = DECODE.pick(v.device, batch=few_batches(batch), v_heads=v_heads, d_k=d_k, d_v=d_v)
        config = {**config, "AHEAD": 1}
        advance(q, k, v, g, beta, state, slots, slots, out, scale=scale, normalise=normalise, config=config)
    return out


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
