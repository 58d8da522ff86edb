"""The indexer's cache: raw keys of new tokens into the ring, and the keys of the blocks that they complete.

A program a sequence closes the block that was open before the call and then renews the ring, which nobody else reads.
A program a token closes the block that ends with it and lies in the call as a whole.
"""

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import sparse
from tokenspeed_kernels.triton.attention_parts import sequence_of
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_registry import Dim


@triton.jit
def _pooled(raw_ptr, ring_ptr, o_raw, o_ring, fresh, old, raw_token, column, inside, RATIO: tl.constexpr):
    """The rounded mean, float32 [BD], of the raw keys of a block: `fresh` ones of this call, `old` ones of the ring."""
    p_raw = raw_ptr + o_raw[:, None] * raw_token + column[None, :]  # [BR, BD]
    p_ring = ring_ptr + o_ring[:, None] + column[None, :]
    keys = tl.load(p_raw, mask=fresh[:, None] & inside[None, :], other=0.0).to(tl.float32)
    keys += tl.load(p_ring, mask=old[:, None] & inside[None, :], other=0.0).to(tl.float32)
    return (tl.sum(keys, 0) / RATIO).to(raw_ptr.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["seqs", "tokens", "table_seq"])
def _index_cache_write(
    raw_ptr,  # [tokens, DIM]
    ring_ptr,  # [slots, RING, DIM]
    cache_ptr,  # [pages, BLOCKS, DIM]
    table_ptr,  # [seqs, max_pages]
    slot_ptr,  # [seqs]
    cu_ptr,  # [seqs+1]
    len_ptr,  # [seqs]
    w_ptr,  # [DIM]
    freq_ptr,  # [HALF]
    seqs,
    tokens,
    eps,
    raw_token,
    table_seq,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCKS: tl.constexpr,
    RING: tl.constexpr,
    RATIO: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,  # at least RATIO and RING
):
    i_program = tl.program_id(0)
    of_sequence = i_program < seqs
    i_token = i_program - seqs
    i_seq = i_program
    if not of_sequence:
        i_seq = sequence_of(cu_ptr, i_token, seqs, 0, tokens, 1, 1, False)
    slot = tl.load(slot_ptr + i_seq).to(tl.int64)
    if slot < 0:
        return
    start = tl.load(cu_ptr + i_seq)
    end = tl.load(cu_ptr + i_seq + 1)
    length = tl.load(len_ptr + i_seq)
    first = length - (end - start)  # position of the first new token
    raw = raw_ptr.dtype.element_ty
    o_r = tl.arange(0, BR)
    o_d = tl.arange(0, BD)
    inside = o_d < DIM

    if of_sequence:
        block = tl.maximum(first, 0) // RATIO
        closes = (first > block * RATIO) & ((block + 1) * RATIO <= length)
    else:
        position = first + i_token - start
        block = tl.maximum(position, 0) // RATIO
        closes = (position == (block + 1) * RATIO - 1) & (block * RATIO >= first)
    page = tl.load(table_ptr + i_seq.to(tl.int64) * table_seq + block // BLOCKS, mask=closes, other=-1).to(tl.int64)
    if page >= 0:
        o_position = block * RATIO + o_r
        fresh = (o_r < RATIO) & (o_position >= first)
        old = (o_r < RATIO) & (o_position < first)
        o_raw = start.to(tl.int64) + o_position - first
        o_ring = (slot * RING + o_position % RING) * DIM
        other = tl.where(o_d < HALF, o_d + HALF, o_d - HALF)  # the other dim of a rotating pair
        turns = o_d < 2 * HALF
        mean = _pooled(raw_ptr, ring_ptr, o_raw, o_ring, fresh, old, raw_token, o_d, inside, RATIO)
        mean_other = _pooled(raw_ptr, ring_ptr, o_raw, o_ring, fresh, old, raw_token, other, turns, RATIO)
        w = tl.load(w_ptr + o_d, mask=inside, other=0.0).to(tl.float32)
        w_other = tl.load(w_ptr + other, mask=turns, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt_rn(tl.sum(mean * mean, 0) / DIM + eps)
        key = (mean * scale * (1.0 + w)).to(raw).to(tl.float32)
        key_other = (mean_other * scale * (1.0 + w_other)).to(raw).to(tl.float32)
        freq = tl.load(freq_ptr + tl.where(o_d < HALF, o_d, o_d - HALF), mask=turns, other=0.0)
        angle = (block * RATIO).to(tl.float32) * freq
        # Sine and cosine of large angles keep words of 2/pi in local memory, which is counted with what spills.
        cos = tl.cos(angle).to(raw).to(tl.float32)
        sin = tl.sin(angle).to(raw).to(tl.float32)
        turned = key * cos + tl.where(o_d < HALF, -key_other, key_other) * sin
        key = tl.where(turns, turned, key).to(raw)
        if cache_ptr.dtype.element_ty == tl.float8e4nv:
            key = key.to(tl.float32)
            key = tl.where(key > 448.0, 448.0, tl.where(key < -448.0, -448.0, key))
        p_key = cache_ptr + (page * BLOCKS + block % BLOCKS) * DIM + o_d
        tl.store(p_key, key.to(cache_ptr.dtype.element_ty), mask=inside)

    if of_sequence:
        tl.debug_barrier()  # what the block was made of is read before its rows are overwritten
        o_position = length - 1 - o_r
        kept = (o_r < RING) & (o_position >= 0) & (o_position >= first)
        p_raw = raw_ptr + (end - 1 - o_r).to(tl.int64)[:, None] * raw_token + o_d[None, :]  # [BR, BD]
        p_ring = ring_ptr + (slot * RING + tl.maximum(o_position, 0) % RING)[:, None] * DIM + o_d[None, :]
        mask = kept[:, None] & inside[None, :]
        tl.store(p_ring, tl.load(p_raw, mask=mask), mask=mask)


@portable(sparse.index_cache_write, constraints=[Dim("blocks") >= 1])
def index_cache_write(
    raw_k: Tensor,
    ring: Tensor,
    block_cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    weight: Tensor,
    inv_freq: Tensor,
    *,
    ratio: int,
    eps: float,
) -> None:
    tokens, dim = raw_k.shape
    if raw_k.numel() == 0 or ring.shape[0] == 0:
        return
    seqs = slots.shape[0]
    _index_cache_write[(seqs + tokens,)](
        raw_k, ring, block_cache, page_table, slots, cu_seqlens, seq_lens, weight, inv_freq,
        seqs, tokens, eps, raw_k.stride(0), page_table.stride(0),
        dim, inv_freq.shape[0], block_cache.shape[1], ring.shape[1], ratio,
        triton.next_power_of_2(dim), triton.next_power_of_2(max(ratio, ring.shape[1])), num_warps=1,
    )  # fmt: skip
