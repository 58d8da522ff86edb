"""The tokens that a search by mass needs to look at: those above a cut of their weights, gathered in a pool.

The programs of a row, each on a part of it, first weigh what lies above each of some cuts. They then gather what lies
above the first cut that suffices, if it fits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.triton.sampling_best import total_weight, weight_of

_PARTS = tl.constexpr(16)
"""Programs that weigh and gather a row."""
_CUTS = tl.constexpr(8)
_ROOM = 1 << 16
"""Tokens that a pool holds."""


@triton.jit
def _cuts(peak, temperature):
    """Logits at and above which a weight is at least exp(-3), exp(-5), ... exp(-17): [_CUTS]."""
    return peak - (3.0 + 2.0 * tl.arange(0, _CUTS)) * temperature


@triton.jit
def _part(vocab, i_part):
    """First and last token of a part."""
    span = tl.cdiv(tl.cdiv(vocab, _PARTS), 4096) * 4096
    return i_part * span, tl.minimum((i_part + 1) * span, vocab)


@triton.jit
def many_kept(top_k_ptr, temperature_ptr, i_row, vocab, FEW: tl.constexpr):
    """How many tokens the row keeps, and whether those are more than another kernel takes."""
    kept = tl.load(top_k_ptr + i_row)
    kept = tl.where((kept <= 0) | (kept > vocab), vocab, kept)
    return kept, (tl.load(temperature_ptr + i_row) > 0) & (kept > FEW)


@triton.jit
def _weigh(
    logit_ptr,  # [rows, vocab]
    peak_ptr,  # [rows, chunks]
    temperature_ptr,  # [rows]
    top_k_ptr,  # [rows]
    count_ptr,  # [rows, _PARTS, _CUTS]: how many tokens of a part lie above each cut
    mass_ptr,  # [rows, _PARTS, _CUTS]: what they weigh
    vocab,
    chunks,
    FEW: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64) // _PARTS
    i_part = tl.program_id(0) % _PARTS
    _, many = many_kept(top_k_ptr, temperature_ptr, i_row, vocab, FEW)
    if many:
        temperature = tl.load(temperature_ptr + i_row)
        o_chunk = tl.arange(0, CHUNKS)
        peak = tl.max(tl.load(peak_ptr + i_row * chunks + o_chunk, mask=o_chunk < chunks, other=float("-inf")), 0)
        cuts = _cuts(peak, temperature)
        counts = tl.zeros([_CUTS, TILE], tl.int32)
        masses = tl.zeros([_CUTS, TILE], tl.float32)
        first, end = _part(vocab, i_part)
        for i_token in range(first, end, TILE):
            o_token = i_token + tl.arange(0, TILE)
            logit = tl.load(logit_ptr + i_row * vocab + o_token, mask=o_token < end, other=float("-inf"))
            above = (logit[None, :] >= cuts[:, None]) & (logit > float("-inf"))[None, :]  # [_CUTS, TILE]
            counts += above.to(tl.int32)
            masses += tl.where(above, weight_of(logit, peak, temperature)[None, :], 0.0)
        o_cell = tl.program_id(0).to(tl.int64) * _CUTS + tl.arange(0, _CUTS)
        tl.store(count_ptr + o_cell, tl.sum(counts, 1))
        tl.store(mass_ptr + o_cell, tl.sum(masses, 1))


@triton.jit
def _gather(
    logit_ptr,  # [rows, vocab]
    peak_ptr,  # [rows, chunks]
    sum_ptr,  # [rows, chunks]
    count_ptr,  # [rows, _PARTS, _CUTS]
    mass_ptr,  # [rows, _PARTS, _CUTS]
    temperature_ptr,  # [rows], as the next three
    top_k_ptr,
    top_p_ptr,
    uniform_ptr,
    pool_ptr,  # [rows, ROOM]
    pool_token_ptr,  # [rows, ROOM]
    found_ptr,  # [rows]
    cut_ptr,  # [rows]
    vocab,
    chunks,
    FEW: tl.constexpr,
    ROOM: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64) // _PARTS
    i_part = tl.program_id(0) % _PARTS
    kept, many = many_kept(top_k_ptr, temperature_ptr, i_row, vocab, FEW)
    if not many:
        return
    temperature = tl.load(temperature_ptr + i_row)
    o_chunk = tl.arange(0, CHUNKS)
    peaks = tl.load(peak_ptr + i_row * chunks + o_chunk, mask=o_chunk < chunks, other=float("-inf"))
    sums = tl.load(sum_ptr + i_row * chunks + o_chunk, mask=o_chunk < chunks, other=0.0)
    peak, total = total_weight(peaks, sums, temperature)
    o_cut = tl.arange(0, _CUTS)
    o_part = tl.arange(0, _PARTS)
    p_cell = (i_row * _PARTS + o_part)[:, None] * _CUTS + o_cut[None, :]  # [_PARTS, _CUTS]
    counts = tl.load(count_ptr + p_cell)
    count = tl.sum(counts, 0)
    mass = tl.sum(tl.load(mass_ptr + p_cell), 0)
    top_p = tl.load(top_p_ptr + i_row)
    share = tl.where(top_p < 1, top_p, tl.load(uniform_ptr + i_row))  # of the mass, that what is searched for lies in
    enough = tl.where(kept < vocab, count >= kept, share * total < mass * (1.0 - 1e-5))
    chosen = tl.min(tl.where(enough & (count <= ROOM), o_cut, _CUTS), 0)
    found = tl.sum(tl.where(o_cut == chosen, count, 0), 0)
    cut = tl.sum(tl.where(o_cut == chosen, _cuts(peak, temperature), 0.0), 0)
    if i_part == 0:
        tl.store(found_ptr + i_row, found)
        tl.store(cut_ptr + i_row, cut)
    if found > 0:
        earlier = (o_part < i_part)[:, None] & (o_cut == chosen)[None, :]
        place = tl.sum(tl.sum(tl.where(earlier, counts, 0), 1), 0)
        first, end = _part(vocab, i_part)
        for i_token in range(first, end, TILE):
            o_token = i_token + tl.arange(0, TILE)
            logit = tl.load(logit_ptr + i_row * vocab + o_token, mask=o_token < end, other=float("-inf"))
            taken = (logit >= cut) & (logit > float("-inf"))
            o_pool = i_row * ROOM + place + tl.cumsum(taken.to(tl.int32), 0) - 1
            tl.store(pool_ptr + o_pool, logit, mask=taken)
            tl.store(pool_token_ptr + o_pool, o_token, mask=taken)
            place += tl.sum(taken.to(tl.int32), 0)


def gather_pools(
    logits: Tensor,
    peaks: Tensor,
    sums: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    uniform: Tensor,
    few: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of rows in which more than `few` tokens are kept: logits above a cut, their tokens, how many, and the cut.

    None are gathered, and how many says 0, where all tokens are needed, or too many to be kept: [rows, room] twice,
    [rows] twice.
    """
    rows, vocab = logits.shape
    chunks, room = peaks.shape[1], min(_ROOM, triton.next_power_of_2(vocab))
    pool = torch.empty(rows, room, device=logits.device)
    tokens = torch.empty(rows, room, dtype=torch.int32, device=logits.device)
    found = torch.empty(rows, dtype=torch.int32, device=logits.device)
    cut = torch.empty(rows, device=logits.device)
    counts = torch.empty(rows, _PARTS.value, _CUTS.value, dtype=torch.int32, device=logits.device)
    masses = torch.empty(rows, _PARTS.value, _CUTS.value, device=logits.device)
    grid, widest = (rows * _PARTS.value,), triton.next_power_of_2(chunks)
    _weigh[grid](logits, peaks, temperature, top_k, counts, masses, vocab, chunks, few, widest, 512, num_warps=4)
    _gather[grid](
        logits, peaks, sums, counts, masses, temperature, top_k, top_p, uniform, pool, tokens, found, cut,
        vocab, chunks, few, room, widest, 4096, num_warps=8,
    )  # fmt: skip
    return pool, tokens, found, cut
