"""Programs that replay kept tokens on a tile of the gated delta rule, to fold them into the state or to verify more."""

import triton
import triton.language as tl

from tokenspeed_kernels.triton.gdn_tile import (
    along_rows,
    change,
    changed,
    dot,
    load_key,
    load_tile,
    load_tokens,
    store_tile,
    wide_key,
)
from tokenspeed_kernels.triton.overlap import wait_for_predecessor


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
def fold(
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
    i_row = i_program % TILES * ROWS
    o_v = i_row + tl.arange(0, ROWS)
    inside = o_v < DV
    slot = tl.load(slots_ptr + i_batch).to(tl.int64)
    count = tl.load(kept_ptr + i_batch)
    if (slot >= 0) & (count > 0):
        p_tile = state_ptr + (slot * (V_HEADS * DV) + (i_head * DV + i_row)) * DK
        state = load_tile(p_tile, inside, DK, CHUNKS, CHUNK, True)
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
        store_tile(p_tile, state, inside, DK, CHUNKS, CHUNK)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "kept_ptr"])
def verify_replay(
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
    PDL: tl.constexpr,
):
    wait_for_predecessor(PDL)
    TILES: tl.constexpr = (DV + ROWS - 1) // ROWS
    K_HEADS: tl.constexpr = V_HEADS // GROUP
    i_program = tl.program_id(0)
    i_row = i_program % TILES * ROWS
    i_head = i_program // TILES % V_HEADS
    i_key = i_head // GROUP
    i_batch = (i_program // TILES // V_HEADS).to(tl.int64)
    o_v = i_row + tl.arange(0, ROWS)
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
    new = p_q, p_k, p_v, p_g, p_beta, q_token, k_token, v_token, inside
    first_tokens = load_tokens(0, min(AHEAD, Q_LEN), *new, V_HEADS, DK, CHUNKS, CHUNK)
    if slot >= 0:
        p_tile = state_ptr + (slot * (V_HEADS * DV) + (i_head * DV + i_row)) * DK
        state = load_tile(p_tile, inside, DK, CHUNKS, CHUNK, False)
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
            store_tile(p_tile, state, inside, DK, CHUNKS, CHUNK)
            first = 0
            tl.debug_barrier()  # the tile's values go to rows that its warps have just replayed
        keys = tl.tuple(())
        deltas = tl.tuple(())
        decayed = 1.0
        tokens = first_tokens
        for i in tl.static_range(Q_LEN):
            tokens += load_tokens(i + AHEAD, min(i + AHEAD + 1, Q_LEN), *new, V_HEADS, DK, CHUNKS, CHUNK)
            q, k, v, g, beta = tokens[i]
            tl.store(p_kept_v + (first + i) * (V_HEADS * DV), v, mask=inside)
            if (count + Q_LEN <= CAPACITY) & (i_row == 0):
                if i_head % GROUP == 0:
                    for c in tl.static_range(CHUNKS):
                        o_k = c * CHUNK + tl.arange(0, CHUNK)
                        tl.store(p_kept_k + (first + i) * (K_HEADS * DK) + o_k, k[c], mask=o_k < DK)
                tl.store(p_kept_g + (first + i) * V_HEADS, g)
                tl.store(p_kept_beta + (first + i) * V_HEADS, beta)
            decay = tl.exp(g)
            decayed *= decay
            keys += (k,)
            wide_k, k_factor = wide_key(k, CHUNKS, NORMALISE)
            wide_q, q_factor = wide_key(q, CHUNKS, NORMALISE)
            read_k = along_rows(state, wide_k, CHUNKS) * decayed
            read_q = along_rows(state, wide_q, CHUNKS) * decayed
            earlier, deltas = deltas, tl.tuple(())
            for j in tl.static_range(i):
                deltas += (earlier[j] * decay,)
                read_k += deltas[j] * dot(keys[j], k, CHUNKS)
                read_q += deltas[j] * dot(keys[j], q, CHUNKS)
            delta = beta * (v.to(tl.float32) - read_k * k_factor) * k_factor
            deltas += (delta,)
            o = (read_q + delta * dot(k, q, CHUNKS)) * (q_factor * scale)
            tl.store(p_o + i * (V_HEADS * DV), o.to(o_ptr.dtype.element_ty), mask=inside)
    else:
        for i in tl.static_range(Q_LEN):
            tl.store(p_o + i * (V_HEADS * DV), tl.zeros([ROWS], o_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "kept_ptr"])
def keep_after_fold(
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
    PDL: tl.constexpr,
):
    """The keys and gates of a token whose sequence has folded, to the head of its buffers."""
    wait_for_predecessor(PDL)
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
