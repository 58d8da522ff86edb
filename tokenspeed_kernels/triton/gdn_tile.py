"""A tile of one head's state in the gated delta rule: some rows of it, in registers.

Rows never meet, since both products of a step run along them. So a head is spread over as many programs as it takes to
keep a chip busy with one request, and at any batch a state is moved once in each direction, which is all the time there
is to spend.

A tile is held in chunks of some columns: lanes then take several rows at once, and the sum along a row meets fewer of
them. Where a state is moved for few tokens a chunk is 256 bytes wide: narrower ones scatter what a warp asks of memory,
which costs 5% of the rate. Where many tokens are worked on it is 128 bytes, one cache line.
"""

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.triton.device import bucket
from tokenspeed_kernels.triton.tuning import Config, Dims

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
def load_tokens(
    first,
    last,
    p_q,  # of the first token, and so on
    p_k,
    p_v,  # of a tile's rows
    p_g,
    p_beta,
    q_token,
    k_token,
    v_token,
    inside,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Tokens `first` to `last` − 1 of one head in their own dtype."""
    tokens = tl.tuple(())
    for i in tl.static_range(first, last):
        q = load_key(p_q + i * q_token, DK, CHUNKS, CHUNK)
        k = load_key(p_k + i * k_token, DK, CHUNKS, CHUNK)
        v = tl.load(p_v + i * v_token, mask=inside, other=0.0)
        tokens += ((q, k, v, tl.load(p_g + i * V_HEADS), tl.load(p_beta + i * V_HEADS)),)
    return tokens


@triton.jit
def wide_key(k, CHUNKS: tl.constexpr, NORMALISE: tl.constexpr):
    """A query or key in float32, and what makes it of unit length if that is asked for, else 1."""
    wide = tl.tuple(())
    for c in tl.static_range(CHUNKS):
        wide += (k[c].to(tl.float32),)
    factor = 1.0
    if NORMALISE:
        factor = tl.rsqrt(dot(wide, wide, CHUNKS) + NORM_EPS)
    return wide, factor


@triton.jit
def dot(a, b, CHUNKS: tl.constexpr):
    """Product of two queries or keys of any dtype, in float32."""
    total = a[0].to(tl.float32) * b[0].to(tl.float32)
    for c in tl.static_range(1, CHUNKS):
        total += a[c].to(tl.float32) * b[c].to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def load_tile(p_tile, inside, DK: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, STAYS: tl.constexpr):
    """A tile in float32 from where its first row starts: CHUNKS tensors [ROWS, CHUNK].

    STAYS: it is soon stored to where it came from. If a cache holds it until then, that costs 2% less.
    """
    policy: tl.constexpr = "evict_last" if STAYS else ""
    o_row = tl.arange(0, inside.shape[0]).to(tl.int64)[:, None] * DK
    state = tl.tuple(())
    for c in tl.static_range(CHUNKS):
        o_k = c * CHUNK + tl.arange(0, CHUNK)
        mask = inside[:, None] & (o_k < DK)[None, :]
        part = tl.load(p_tile + (o_row + o_k[None, :]), mask=mask, other=0.0, eviction_policy=policy)
        state += (part.to(tl.float32),)
    return state


@triton.jit
def store_tile(p_tile, state, inside, DK: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    o_row = tl.arange(0, inside.shape[0]).to(tl.int64)[:, None] * DK
    for c in tl.static_range(CHUNKS):
        o_k = c * CHUNK + tl.arange(0, CHUNK)
        part = state[c].to(p_tile.dtype.element_ty)
        tl.store(p_tile + (o_row + o_k[None, :]), part, mask=inside[:, None] & (o_k < DK)[None, :])


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
    decay = tl.exp(g)
    delta = change(state, k, k_factor, v, decay, beta, CHUNKS)
    o = along_rows(state, q, CHUNKS) * decay + delta * dot(k, q, CHUNKS)
    return o * (q_factor * scale), changed(state, k, delta, decay, CHUNKS)


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
