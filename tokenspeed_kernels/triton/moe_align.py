"""Pairs of a token and an expert, brought in the order of experts and cut into blocks that share one.

A pair's place is the number of pairs before it: those of a smaller expert, and earlier ones of its own. It is counted
within a chunk by comparing each with each. Where there is more than one chunk, launches before count the chunks' pairs
by expert, and from that where each chunk's pairs of an expert begin. So no place depends on which program runs when.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.triton.device import bucket

_FEW = 8
"""Where there are so many times more experts than pairs, hardly two pairs share one: they are not brought together."""
_CHUNK = 512
_ROWS = 32


@triton.jit
def _experts_of(ids_ptr, o_pair, pairs, first_expert, EXPERTS: tl.constexpr):
    """Places of the pairs' experts here; EXPERTS where the expert is elsewhere or there is no such pair."""
    place = tl.load(ids_ptr + o_pair, mask=o_pair < pairs, other=-1) - first_expert
    return tl.where((o_pair < pairs) & (place >= 0) & (place < EXPERTS), place, EXPERTS)


@triton.jit(do_not_specialize=["pairs", "first_expert"])
def _count(
    ids_ptr,  # [pairs]
    counts_ptr,  # [chunks, BINS]
    pairs,
    first_expert,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_chunk = tl.program_id(0)
    b_expert = _experts_of(ids_ptr, i_chunk * CHUNK + tl.arange(0, CHUNK), pairs, first_expert, EXPERTS)
    tl.store(counts_ptr + i_chunk * BINS + tl.arange(0, BINS), tl.histogram(b_expert, BINS))


@triton.jit
def _write_table(table_ptr, b_total, o_bin, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """How many blocks there are, and of each its expert, its first place and that after its last."""
    b_total = tl.where(o_bin < EXPERTS, b_total, 0)
    b_blocks = tl.cdiv(b_total, BLOCK_M)
    b_end = tl.cumsum(b_total, 0)
    p_block = table_ptr + (1 + tl.cumsum(b_blocks, 0) - b_blocks) * 3
    for i in range(tl.max(b_blocks, 0)):
        b_start = b_end - b_total + i * BLOCK_M
        more = i < b_blocks
        tl.store(p_block + i * 3, o_bin, mask=more)
        tl.store(p_block + i * 3 + 1, b_start, mask=more)
        tl.store(p_block + i * 3 + 2, tl.minimum(b_start + BLOCK_M, b_end), mask=more)
    tl.store(table_ptr, tl.sum(b_blocks, 0))


@triton.jit(do_not_specialize=["chunks"])
def _begin(
    counts_ptr,  # [chunks, BINS]
    begins_ptr,  # [chunks, BINS]: the place of the expert's first pair in the chunk, less that within the chunk
    table_ptr,  # [1 + most blocks, 3]
    chunks,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    i_chunk = tl.program_id(0)
    o_bin = tl.arange(0, BINS)
    b_total, b_before = tl.zeros([BINS], tl.int32), tl.zeros([BINS], tl.int32)
    for i_first in range(0, chunks, 16):
        o_chunk = i_first + tl.arange(0, 16)
        p_counts = counts_ptr + o_chunk[:, None] * BINS + o_bin[None, :]
        b_counts = tl.load(p_counts, mask=(o_chunk < chunks)[:, None], other=0)  # [16, BINS]
        b_total += tl.sum(b_counts, axis=0)
        b_before += tl.sum(tl.where((o_chunk < i_chunk)[:, None], b_counts, 0), axis=0)
    b_own = tl.load(counts_ptr + i_chunk * BINS + o_bin)
    b_begin = tl.cumsum(b_total, 0) - b_total + b_before - (tl.cumsum(b_own, 0) - b_own)
    tl.store(begins_ptr + i_chunk * BINS + o_bin, b_begin)
    if i_chunk == 0:
        _write_table(table_ptr, b_total, o_bin, EXPERTS, BLOCK_M)


@triton.jit(do_not_specialize=["pairs", "first_expert"])
def _place(
    ids_ptr,  # [pairs]
    begins_ptr,  # [chunks, BINS]
    order_ptr,  # [pairs]: pairs in the order of experts, those without one here last
    table_ptr,
    pairs,
    first_expert,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
):
    """Places of ROWS pairs; of a lone chunk the last program writes the table."""
    i_rows = tl.program_id(0)
    i_chunk = 0 if ONE_CHUNK else i_rows * ROWS // CHUNK
    o_c = tl.arange(0, CHUNK)
    b_expert = _experts_of(ids_ptr, i_chunk * CHUNK + o_c, pairs, first_expert, EXPERTS)
    if ONE_CHUNK and i_rows == tl.num_programs(0) - 1:
        _write_table(table_ptr, tl.histogram(b_expert, BINS), tl.arange(0, BINS), EXPERTS, BLOCK_M)
    else:
        o_pair = i_rows * ROWS + tl.arange(0, ROWS)
        b_own = _experts_of(ids_ptr, o_pair, pairs, first_expert, EXPERTS)
        b_key = b_own * CHUNK + (o_pair - i_chunk * CHUNK)
        b_before = (b_expert * CHUNK + o_c)[None, :] < b_key[:, None]  # [ROWS, CHUNK]
        b_place = tl.sum(b_before.to(tl.int32), axis=1)
        if not ONE_CHUNK:
            b_place += tl.load(begins_ptr + i_chunk * BINS + b_own)
        tl.store(order_ptr + b_place, o_pair, mask=o_pair < pairs)


@triton.jit
def block_at(ids_ptr, table_ptr, i_block, first_expert, ALIGNED: tl.constexpr):
    """The block's expert, or one out of range where there is no block; its first slot and that after its last."""
    if ALIGNED:
        there = i_block < tl.load(table_ptr)
        expert = tl.where(there, tl.load(table_ptr + 3 + i_block * 3), -1)
        begin = tl.load(table_ptr + 4 + i_block * 3)
        end = tl.load(table_ptr + 5 + i_block * 3)
    else:
        expert = tl.load(ids_ptr + i_block) - first_expert
        begin, end = i_block, i_block + 1
    return expert, begin, end


@triton.jit
def slots(order_ptr, begin, end, ALIGNED: tl.constexpr, BM: tl.constexpr):
    """A block's slots, which of them are, and their pairs."""
    o_slot = begin + tl.arange(0, BM)
    valid = o_slot < end
    o_pair = o_slot
    if ALIGNED:
        o_pair = tl.load(order_ptr + o_slot, mask=valid, other=0)
    return o_slot, valid, o_pair


@dataclass(frozen=True)
class Aligned:
    """`order` and `table` as `_place` and `_write_table` write them, and the most blocks that there can be.

    Where not `aligned`, a block is a single pair at its own place, and `order` and `table` are any tensors.
    """

    ids: Tensor
    first_expert: int
    experts: int
    block_m: int
    aligned: bool
    order: Tensor
    table: Tensor
    most: int


def align(ids: Tensor, first_expert: int, experts: int, block_m: int) -> Aligned:
    """Blocks of at most `block_m` pairs of one expert; a token's pairs, or few, are left as they are."""
    pairs = ids.numel()
    if ids.shape[0] == 1 or pairs * _FEW <= experts:
        return Aligned(ids, first_expert, experts, block_m, False, ids, ids, pairs)
    most = min(pairs, experts + pairs // block_m)
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    table = torch.empty(1 + most, 3, dtype=torch.int32, device=ids.device)
    bins = max(bucket(experts + 1), 256)
    chunk = min(bucket(pairs), _CHUNK)
    chunks = triton.cdiv(pairs, chunk)
    counts = begins = order
    if chunks > 1:
        counts, begins = torch.empty(2, chunks, bins, dtype=torch.int32, device=ids.device)
        _count[(chunks,)](ids, counts, pairs, first_expert, experts, bins, chunk, num_warps=4)
        _begin[(chunks,)](counts, begins, table, chunks, experts, bins, block_m, num_warps=8)
    programs = triton.cdiv(pairs, _ROWS) + (chunks == 1)
    _place[(programs,)](
        ids, begins, order, table, pairs, first_expert, experts, bins, chunk, _ROWS, block_m, chunks == 1, num_warps=4
    )
    return Aligned(ids, first_expert, experts, block_m, True, order, table, most)
