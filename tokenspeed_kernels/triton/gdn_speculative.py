"""Speculative verify of the gated delta rule, on the tiles of `gdn_recurrent`.

`gdn_verify` is decode with more tokens. `gdn_verify_replay` brings a tile up to date in registers and goes on from
there, so that it writes a state only where it folds. There the new keys and gates go to rows of the buffers that
programs of other tiles still read: a second launch brings them, once all have read. All else the first one writes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import gdn_speculative
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.gdn_recurrent import (
    change,
    changed,
    chunks_of,
    few_batches,
    load_key,
    load_tile,
    load_token,
    recurrent_steps,
    step,
    store_tile,
    tile,
    tile_space,
    wide_key,
)
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry.platform import Platform

_FEW = 4
"""Batches up to this leave registers to spare, with which to wait once for all tokens."""


def _with_ahead(dims: Dims, config: Config) -> Config:
    """A tile of more than 2048 elements a warp leaves no registers to ask ahead with: they would spill."""
    large = config["ROWS"] * triton.next_power_of_2(dims["d_k"]) > 2048 * config["num_warps"]
    return {**config, "AHEAD": 0 if large else 1}


def _space(dims: Dims) -> list[Config]:
    tiles = [_with_ahead(dims, each) for each in tile_space(dims)]
    if dims["batch"] > _FEW or dims["q_len"] == 1:
        return tiles
    small = [each for each in tiles if each["AHEAD"] and each["num_warps"] < 4]
    return small + [{**each, "AHEAD": min(dims["q_len"], 4)} for each in small]


def _default_replay(platform: Platform, dims: Dims) -> Config:
    """Small tiles fill a chip with one request; large ones do what every tile does, such as the norms, less often."""
    if dims["batch"] <= _FEW:
        return {**tile(dims, 1024, 1), "AHEAD": min(dims["q_len"], 4)}
    return _with_ahead(dims, tile(dims, 2048 if dims["batch"] < 32 else 4096, 1))


VERIFY = Tunable("gdn_verify", _space, lambda platform, dims: {**tile(dims, 2048, 1), "AHEAD": 1})
REPLAY = Tunable("gdn_verify_replay", _space, _default_replay)
FOLD = Tunable("gdn_fold", tile_space, lambda platform, dims: tile(dims, 2048, 1))


@portable(gdn_speculative.gdn_verify)
def gdn_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    initial_slots: Tensor,
    slots: Tensor,
    *,
    scale: float,
    normalise: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    batch, q_len, v_heads, d_v = v.shape
    k_heads, d_k = k.shape[2:]
    if out.numel() == 0:
        return out
    config = VERIFY.pick(v.device, batch=few_batches(batch), q_len=q_len, v_heads=v_heads, d_k=d_k, d_v=d_v)
    recurrent_steps[(batch * v_heads * triton.cdiv(d_v, config["ROWS"]),)](
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
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        q_len,
        v_heads,
        v_heads // k_heads,
        d_k,
        d_v,
        *chunks_of(d_k, state),
        normalise,
        **config,
    )
    return out


@triton.jit
def _replay(
    state,
    p_k,  # of the key head
    p_v,  # of the tile's rows of the value head
    p_g,
    p_beta,
    inside,
    count,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """The tile after `count` kept tokens, each asked for while the one before is worked on."""
    next_k = load_key(p_k, DK, CHUNKS, CHUNK)
    next_v = tl.load(p_v, mask=inside, other=0.0)
    next_g = tl.load(p_g)
    next_beta = tl.load(p_beta)
    for i in range(count):
        k, v, g, beta = next_k, next_v, next_g, next_beta
        i_next = tl.minimum(i + 1, count - 1)
        next_k = load_key(p_k + i_next * (K_HEADS * DK), DK, CHUNKS, CHUNK)
        next_v = tl.load(p_v + i_next * (V_HEADS * DV), mask=inside, other=0.0)
        next_g = tl.load(p_g + i_next * V_HEADS)
        next_beta = tl.load(p_beta + i_next * V_HEADS)
        k, factor = wide_key(k, CHUNKS, NORMALISE)
        decay = tl.exp(g)
        state = changed(state, k, change(state, k, factor, v, decay, beta, CHUNKS), decay, CHUNKS)
    return state


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "kept_ptr"])
def _verify_replay(
    q_ptr,  # [batch, Q_LEN, k_heads, DK]
    k_ptr,
    v_ptr,  # [batch, Q_LEN, V_HEADS, DV]
    g_ptr,  # [batch, Q_LEN, V_HEADS]
    beta_ptr,
    state_ptr,  # [pool, V_HEADS, DV, DK]
    kept_k_ptr,  # [pool, CAPACITY, k_heads, DK]
    kept_v_ptr,  # [pool, CAPACITY, V_HEADS, DV]
    kept_g_ptr,  # [pool, CAPACITY, V_HEADS]
    kept_beta_ptr,
    slots_ptr,  # [batch]
    kept_ptr,  # [batch]
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
    CAPACITY: tl.constexpr,
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
    K_HEADS: tl.constexpr = V_HEADS // GROUP
    i_program = tl.program_id(0)
    i_tile = i_program % TILES
    i_head = i_program // TILES % V_HEADS
    i_key = i_head // GROUP
    i_batch = (i_program // TILES // V_HEADS).to(tl.int64)
    o_v = i_tile * ROWS + tl.arange(0, ROWS)
    inside = o_v < DV
    slot = tl.load(slots_ptr + i_batch).to(tl.int64)
    count = tl.load(kept_ptr + i_batch)
    p_q = q_ptr + i_batch * q_batch + i_key * q_head
    p_k = k_ptr + i_batch * k_batch + i_key * k_head
    p_v = v_ptr + i_batch * v_batch + i_head * v_head + o_v
    i_gate = i_batch * (Q_LEN * V_HEADS) + i_head
    p_o = o_ptr + i_gate * DV + o_v
    # All that needs no slot is asked for before the slot has come.
    p_g, p_beta = g_ptr + i_gate, beta_ptr + i_gate
    first_tokens = tl.tuple(())
    for i in tl.static_range(min(AHEAD, Q_LEN)):
        p_keys = p_q + i * q_token, p_k + i * k_token
        p_gates = p_g + i * V_HEADS, p_beta + i * V_HEADS
        first_tokens += (load_token(*p_keys, p_v + i * v_token, *p_gates, inside, DK, CHUNKS, CHUNK),)
    if slot >= 0:
        p_state = state_ptr + slot * (V_HEADS * DV * DK) + (i_head * DV + o_v) * DK
        state = load_tile(p_state, inside, DK, CHUNKS, CHUNK)
        p_kept_k = kept_k_ptr + (slot * (CAPACITY * K_HEADS) + i_key) * DK
        p_kept_v = kept_v_ptr + (slot * (CAPACITY * V_HEADS) + i_head) * DV + o_v
        p_kept_g = kept_g_ptr + slot * (CAPACITY * V_HEADS) + i_head
        p_kept_beta = kept_beta_ptr + slot * (CAPACITY * V_HEADS) + i_head
        state = _replay(
            state,
            p_kept_k,
            p_kept_v,
            p_kept_g,
            p_kept_beta,
            inside,
            count,
            K_HEADS,
            V_HEADS,
            DK,
            DV,
            CHUNKS,
            CHUNK,
            NORMALISE,
        )
        first = count
        if count + Q_LEN > CAPACITY:
            store_tile(p_state, state, inside, DK, CHUNKS, CHUNK)
            first = 0
            tl.debug_barrier()  # the tile's values go to rows that its warps have just replayed
        tokens = first_tokens
        for i in tl.static_range(Q_LEN):
            if i + AHEAD < Q_LEN:
                p_keys = p_q + (i + AHEAD) * q_token, p_k + (i + AHEAD) * k_token
                p_gates = p_g + (i + AHEAD) * V_HEADS, p_beta + (i + AHEAD) * V_HEADS
                tokens += (load_token(*p_keys, p_v + (i + AHEAD) * v_token, *p_gates, inside, DK, CHUNKS, CHUNK),)
            q, k, v, g, beta = tokens[i]
            tl.store(p_kept_v + (first + i) * (V_HEADS * DV), v, mask=inside)
            if (count + Q_LEN <= CAPACITY) & (i_tile == 0):
                if i_head % GROUP == 0:
                    for c in tl.static_range(CHUNKS):
                        o_k = c * CHUNK + tl.arange(0, CHUNK)
                        tl.store(p_kept_k + (first + i) * (K_HEADS * DK) + o_k, k[c], mask=o_k < DK)
                tl.store(p_kept_g + (first + i) * V_HEADS, g)
                tl.store(p_kept_beta + (first + i) * V_HEADS, beta)
            o, state = step(state, q, k, v, g, beta, scale, CHUNKS, NORMALISE)
            tl.store(p_o + i * (V_HEADS * DV), o.to(o_ptr.dtype.element_ty), mask=inside)
    else:
        for i in tl.static_range(Q_LEN):
            tl.store(p_o + i * (V_HEADS * DV), tl.zeros([ROWS], o_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "kept_ptr"])
def _keep_after_fold(
    k_ptr,  # [batch, Q_LEN, K_HEADS, DK]
    g_ptr,  # [batch, Q_LEN, V_HEADS]
    beta_ptr,
    kept_k_ptr,  # [pool, CAPACITY, K_HEADS, DK]
    kept_g_ptr,  # [pool, CAPACITY, V_HEADS]
    kept_beta_ptr,
    slots_ptr,  # [batch]
    kept_ptr,  # [batch]
    k_batch,
    k_token,
    k_head,
    Q_LEN: tl.constexpr,
    CAPACITY: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
):
    """The keys and gates of a token whose sequence has folded, to the head of its buffers."""
    i_batch = (tl.program_id(0) // Q_LEN).to(tl.int64)
    i_token = tl.program_id(0) % Q_LEN
    slot = tl.load(slots_ptr + i_batch).to(tl.int64)
    count = tl.load(kept_ptr + i_batch)
    if (slot >= 0) & (count + Q_LEN > CAPACITY):
        o_k = tl.arange(0, K_BLOCK)
        p_k = k_ptr + i_batch * k_batch + i_token * k_token + o_k // DK * k_head + o_k % DK
        k = tl.load(p_k, mask=o_k < K_HEADS * DK, other=0.0)
        i_row = slot * CAPACITY + i_token
        tl.store(kept_k_ptr + i_row * (K_HEADS * DK) + o_k, k, mask=o_k < K_HEADS * DK)
        o_h = tl.arange(0, V_BLOCK)
        i_gate = (i_batch * Q_LEN + i_token) * V_HEADS + o_h
        in_heads = o_h < V_HEADS
        tl.store(kept_g_ptr + i_row * V_HEADS + o_h, tl.load(g_ptr + i_gate, mask=in_heads), mask=in_heads)
        tl.store(kept_beta_ptr + i_row * V_HEADS + o_h, tl.load(beta_ptr + i_gate, mask=in_heads), mask=in_heads)


@portable(gdn_speculative.gdn_verify_replay)
def gdn_verify_replay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    kept_k: Tensor,
    kept_v: Tensor,
    kept_g: Tensor,
    kept_beta: Tensor,
    slots: Tensor,
    kept: Tensor,
    *,
    scale: float,
    normalise: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    batch, q_len, v_heads, d_v = v.shape
    capacity, k_heads, d_k = kept_k.shape[1:]
    if out.numel() == 0:
        return out
    config = REPLAY.pick(v.device, batch=few_batches(batch), q_len=q_len, v_heads=v_heads, d_k=d_k, d_v=d_v)
    _verify_replay[(batch * v_heads * triton.cdiv(d_v, config["ROWS"]),)](
        q,
        k,
        v,
        g,
        beta,
        state,
        kept_k,
        kept_v,
        kept_g,
        kept_beta,
        slots,
        kept,
        out,
        scale,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        q_len,
        capacity,
        v_heads,
        v_heads // k_heads,
        d_k,
        d_v,
        *chunks_of(d_k, state, width=128),
        normalise,
        **config,
    )
    _keep_after_fold[(batch * q_len,)](
        k,
        g,
        beta,
        kept_k,
        kept_g,
        kept_beta,
        slots,
        kept,
        *k.stride()[:3],
        q_len,
        capacity,
        k_heads,
        v_heads,
        d_k,
        triton.next_power_of_2(k_heads * d_k),
        triton.next_power_of_2(v_heads),
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "kept_ptr"])
def _fold(
    state_ptr,  # [pool, V_HEADS, DV, DK]
    kept_k_ptr,  # [pool, CAPACITY, k_heads, DK]
    kept_v_ptr,  # [pool, CAPACITY, V_HEADS, DV]
    kept_g_ptr,  # [pool, CAPACITY, V_HEADS]
    kept_beta_ptr,
    slots_ptr,  # [batch]
    kept_ptr,  # [batch]
    CAPACITY: tl.constexpr,
    V_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # value heads a key head
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    NORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
):
    TILES: tl.constexpr = (DV + ROWS - 1) // ROWS
    K_HEADS: tl.constexpr = V_HEADS // GROUP
    i_program = tl.program_id(0)
    i_head = i_program // TILES % V_HEADS
    i_batch = i_program // TILES // V_HEADS
    o_v = i_program % TILES * ROWS + tl.arange(0, ROWS)
    inside = o_v < DV
    slot = tl.load(slots_ptr + i_batch).to(tl.int64)
    count = tl.load(kept_ptr + i_batch)
    if (slot >= 0) & (count > 0):
        p_state = state_ptr + slot * (V_HEADS * DV * DK) + (i_head * DV + o_v) * DK
        state = load_tile(p_state, inside, DK, CHUNKS, CHUNK)
        state = _replay(
            state,
            kept_k_ptr + (slot * (CAPACITY * K_HEADS) + i_head // GROUP) * DK,
            kept_v_ptr + (slot * (CAPACITY * V_HEADS) + i_head) * DV + o_v,
            kept_g_ptr + slot * (CAPACITY * V_HEADS) + i_head,
            kept_beta_ptr + slot * (CAPACITY * V_HEADS) + i_head,
            inside,
            count,
            K_HEADS,
            V_HEADS,
            DK,
            DV,
            CHUNKS,
            CHUNK,
            NORMALISE,
        )
        store_tile(p_state, state, inside, DK, CHUNKS, CHUNK)


@portable(gdn_speculative.gdn_fold)
def gdn_fold(
    state: Tensor,
    kept_k: Tensor,
    kept_v: Tensor,
    kept_g: Tensor,
    kept_beta: Tensor,
    slots: Tensor,
    kept: Tensor,
    *,
    normalise: bool = True,
) -> None:
    batch = slots.shape[0]
    capacity, k_heads, d_k = kept_k.shape[1:]
    v_heads, d_v = kept_v.shape[2:]
    if batch == 0 or kept_v.numel() == 0 or state.numel() == 0:
        return
    config = FOLD.pick(state.device, batch=few_batches(batch), v_heads=v_heads, d_k=d_k, d_v=d_v)
    _fold[(batch * v_heads * triton.cdiv(d_v, config["ROWS"]),)](
        state,
        kept_k,
        kept_v,
        kept_g,
        kept_beta,
        slots,
        kept,
        capacity,
        v_heads,
        v_heads // k_heads,
        d_k,
        d_v,
        *chunks_of(d_k, state),
        normalise,
        **config,
    )
