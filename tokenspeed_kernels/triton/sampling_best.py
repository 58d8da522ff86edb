"""The best tokens of a row of logits, exactly, without looking at most of it twice.

`chunk_peaks` reads all logits once and keeps the largest of each chunk. If `wanted` chunks have a peak of at least t,
as many tokens reach t: so the peak of rank `wanted` bounds the wanted tokens from below, and they lie in the chunks
whose peak reaches it, of which there are `wanted` but for ties. `collect` looks through those alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.triton.selection import order_key, threshold_of

CHUNK = tl.constexpr(256)
MOST_TOKENS = CHUNK.value << 15
"""A vocabulary of more has more chunks than a threshold is found among."""


@triton.jit
def token_key(logit, inside, DROP: tl.constexpr):
    """Keys of logits, equal for zeros of both signs; NaN counts as −inf, which is 0, the key of none, under `DROP`."""
    logit = tl.where(logit == 0.0, 0.0, logit)
    logit = tl.where(logit == logit, logit, float("-inf"))
    key = order_key(logit)
    if DROP:
        inside &= logit > float("-inf")
    return tl.where(inside, key, 0)


@triton.jit
def logit_of(key):
    """The logit of a key."""
    return tl.where(key >> 31 != 0, key & 0x7FFFFFFF, ~key).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(logit, peak, temperature):
    """exp((logit − peak) / temperature), 1 at the peak even where that is +inf."""
    return tl.where(logit == peak, 1.0, tl.exp((logit - peak) / temperature))


@triton.jit
def positive(temperature):
    """1 in place of a temperature that is none."""
    return tl.where(temperature <= 0, 1.0, temperature)


@triton.jit
def total_weight(peaks, sums, temperature):
    """The largest logit of a row and the sum of its weights, 0 for a row of −inf, from those of the chunks."""
    peak = tl.max(peaks, 0)
    weights = sums * weight_of(peaks, peak, temperature)
    return peak, tl.sum(tl.where(peaks == float("-inf"), 0.0, weights), 0)


@triton.jit
def _chunk_peaks(
    logit_ptr,  # [rows, vocab]
    peak_ptr,  # [rows, chunks]
    sum_ptr,  # [rows, chunks]: of the weights, that of the peak being 1
    temperature_ptr,  # [rows], or none: 1
    vocab,
    chunks,
    groups,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64) // groups
    o_chunk = tl.program_id(0) % groups * BLOCK + tl.arange(0, BLOCK)
    o_token = o_chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]  # [BLOCK, CHUNK]
    logit = tl.load(logit_ptr + i_row * vocab + o_token, mask=o_token < vocab, other=float("-inf"))
    logit = tl.where(logit == logit, logit, float("-inf"))
    peak = tl.max(logit, 1)
    tl.store(peak_ptr + i_row * chunks + o_chunk, peak, mask=o_chunk < chunks)
    temperature = 1.0
    if temperature_ptr is not None:
        temperature = positive(tl.load(temperature_ptr + i_row))
    total = tl.sum(weight_of(logit, peak[:, None], temperature), 1)
    tl.store(sum_ptr + i_row * chunks + o_chunk, total, mask=o_chunk < chunks)


def chunk_peaks(logits: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
    """The peaks of the chunks, and their sums of exponentials over that of the peak: [rows, chunks]."""
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK.value)
    groups = triton.cdiv(chunks, 16)
    peaks = torch.empty(rows, chunks, device=logits.device)
    sums = torch.empty_like(peaks)
    _chunk_peaks[(rows * groups,)](logits, peaks, sums, temperature, vocab, chunks, groups, 16, CHUNK, num_warps=4)
    return peaks, sums


def scratch(rows: int, chunks: int, room: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What `collect` and `ranked` want: the listed chunks, the best tokens and their keys."""
    tokens = torch.empty(rows, room, dtype=torch.int32, device=device)
    keys = torch.empty(rows, room, dtype=torch.uint32, device=device)
    return torch.empty(rows, chunks, dtype=torch.int32, device=device), tokens, keys


@triton.jit
def _keys_of(p_logit, p_list, i_place, listed, vocab, TILE: tl.constexpr, DROP: tl.constexpr):
    """Tokens and keys of a tile of the listed chunks."""
    o_place = i_place + tl.arange(0, TILE)
    inside = o_place < listed * CHUNK
    token = tl.load(p_list + o_place // CHUNK, mask=inside, other=0) * CHUNK + o_place % CHUNK
    inside &= token < vocab
    return token, token_key(tl.load(p_logit + token, mask=inside, other=float("-inf")), inside, DROP)


@triton.jit
def collect(
    p_logit,  # [vocab], of this row
    p_peak,  # [chunks]
    p_list,  # [chunks], scratch
    p_best,  # [ROOM], scratch: tokens
    p_best_key,  # [ROOM], scratch: their keys
    vocab,
    chunks,
    wanted,
    ROOM: tl.constexpr,  # at least `wanted`
    CHUNKS: tl.constexpr,  # at least `chunks`
    TILE: tl.constexpr,
    DROP: tl.constexpr,
):
    """Leaves the `wanted` best tokens, or all if there are fewer, and possibly others, by token; returns how many."""
    o_chunk = tl.arange(0, CHUNKS)
    inside = o_chunk < chunks
    peak_key = token_key(tl.load(p_peak + o_chunk, mask=inside, other=float("-inf")), inside, DROP)
    threshold = tl.maximum(threshold_of(peak_key, wanted), 1)
    listed = peak_key >= threshold
    tl.store(p_list + tl.cumsum(listed.to(tl.int32), 0) - 1, o_chunk, mask=listed)
    count = tl.sum(listed.to(tl.int32), 0)
    tl.debug_barrier()

    found = 0
    for i_place in range(0, count * CHUNK, TILE):
        token, key = _keys_of(p_logit, p_list, i_place, count, vocab, TILE, DROP)
        taken = key >= threshold
        o_best = found + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(p_best + o_best, token, mask=taken & (o_best < ROOM))
        tl.store(p_best_key + o_best, key, mask=taken & (o_best < ROOM))
        found += tl.sum(taken.to(tl.int32), 0)
    if found > ROOM:
        # Many equal the bound, or crowd above it in few chunks: the key of rank `wanted` is searched for.
        low = threshold.to(tl.int64)
        high = tl.full([], 1 << 32, tl.int64)
        middle = low + 1
        above = 0
        while high - low > 1:
            reached = 0
            for i_place in range(0, count * CHUNK, TILE):
                token, key = _keys_of(p_logit, p_list, i_place, count, vocab, TILE, DROP)
                reached += tl.sum((key.to(tl.int64) >= middle).to(tl.int32), 0)
            if reached >= wanted:
                low = middle
            else:
                high = middle
                above = reached
            middle = (low + high) // 2
        threshold = low.to(tl.uint32)
        spare = wanted - above
        found = 0
        equal = 0
        for i_place in range(0, count * CHUNK, TILE):
            token, key = _keys_of(p_logit, p_list, i_place, count, vocab, TILE, DROP)
            ties = (key == threshold).to(tl.int32)
            taken = (key > threshold) | ((key == threshold) & (equal + tl.cumsum(ties, 0) <= spare))
            o_best = found + tl.cumsum(taken.to(tl.int32), 0) - 1
            tl.store(p_best + o_best, token, mask=taken)
            tl.store(p_best_key + o_best, key, mask=taken)
            equal += tl.sum(ties, 0)
            found += tl.sum(taken.to(tl.int32), 0)
    tl.debug_barrier()
    return found


@triton.jit
def ranked(p_best, p_best_key, found, temperature, ROOM: tl.constexpr):
    """Of the collected tokens [ROOM]: token, key, rank, and the weight of all tokens before each."""
    o_best = tl.arange(0, ROOM)
    token = tl.load(p_best + o_best, mask=o_best < found, other=0)
    key = tl.load(p_best_key + o_best, mask=o_best < found, other=0)
    peak = logit_of(tl.max(key.to(tl.int64), 0).to(tl.uint32))
    rank = tl.zeros([ROOM], tl.int32)
    before = tl.zeros([ROOM], tl.float32)
    for first in range(0, found, 16):
        o_other = first + tl.arange(0, 16)
        other_key = tl.load(p_best_key + o_other, mask=o_other < found, other=0)
        weight = weight_of(logit_of(other_key), peak, temperature)
        # They are stored by token, so the place tells the first of equals.
        earlier = (other_key[None, :] == key[:, None]) & (o_other[None, :] < o_best[:, None])
        earlier = (earlier | (other_key[None, :] > key[:, None])) & (o_other < found)[None, :]  # [ROOM, 16]
        rank += tl.sum(earlier.to(tl.int32), 1)
        before += tl.sum(tl.where(earlier, weight[None, :], 0.0), 1)
    return token, key, rank, before
