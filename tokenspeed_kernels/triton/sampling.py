"""Sampling and log-probabilities.

All logits are read once, for the peaks of chunks. Where few tokens are kept, as top-k mostly has it, a program a row
collects those (see `sampling_best`), ranks them by comparing all pairs, and inverts their cumulative distribution.
Other rows are searched by mass (see `sampling_mass`); what lies on the device decides, so all kernels are launched.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import sampling
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.device import bucket
from tokenspeed_kernels.triton.sampling_best import (
    MOST_TOKENS,
    chunk_peaks,
    collect,
    logit_of,
    positive,
    ranked,
    scratch,
    total_weight,
    weight_of,
)
from tokenspeed_kernels.triton.sampling_mass import sample_by_mass
from tokenspeed_kernels.triton.tuning import Tunable
from tokenspeed_registry.constraints import Dim

ROOM = 256
"""The most tokens that are kept for ranking all pairs."""
BEST = Tunable(
    "sampling_best",
    space=lambda dims: [{"TILE": t, "num_warps": warps} for t, warps in ((4096, 4), (4096, 8), (4096, 16), (8192, 16))],
    # On Blackwell eight warps would spill.
    default=lambda platform, dims: {"TILE": 4096, "num_warps": 16 if platform.arch.startswith("sm_10") else 8},
)


@triton.jit
def _sample_few(
    logit_ptr,  # [rows, vocab]
    peak_ptr,  # [rows, chunks]
    temperature_ptr,  # [rows], as the next three
    top_k_ptr,
    top_p_ptr,
    uniform_ptr,
    list_ptr,  # [rows, chunks]
    best_ptr,  # [rows, ROOM]
    best_key_ptr,  # [rows, ROOM]
    o_ptr,  # [rows]
    vocab,
    chunks,
    ROOM: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + i_row)
    kept = tl.load(top_k_ptr + i_row)
    kept = tl.where((kept <= 0) | (kept > vocab), vocab, kept)
    kept = tl.where(temperature <= 0, 1, kept)
    if kept > ROOM:
        return
    temperature = positive(temperature)
    p_best = best_ptr + i_row * ROOM
    p_best_key = best_key_ptr + i_row * ROOM
    found = collect(
        logit_ptr + i_row * vocab, peak_ptr + i_row * chunks, list_ptr + i_row * chunks, p_best, p_best_key,
        vocab, chunks, kept, ROOM, CHUNKS, TILE, True,
    )  # fmt: skip
    token, key, rank, before = ranked(p_best, p_best_key, found, temperature, ROOM)
    peak = logit_of(tl.max(key.to(tl.int64), 0).to(tl.uint32))
    valid = (rank < kept) & (tl.arange(0, ROOM) < found)
    cumulative = before + weight_of(logit_of(key), peak, temperature)
    top_p = tl.load(top_p_ptr + i_row)
    total = tl.max(tl.where(valid, cumulative, 0.0), 0)
    # The first token at which the mass reaches top_p is still in.
    wanted = tl.where(top_p >= 1, float("inf"), top_p * total)
    nucleus = valid & ((before < wanted) | (rank == 0))
    mass = tl.max(tl.where(nucleus, cumulative, 0.0), 0)
    # Below the mass even where rounding lifts the product to it.
    target = tl.minimum(tl.load(uniform_ptr + i_row) * mass, mass * (1.0 - 2.0**-23))
    chosen = tl.min(tl.where(nucleus & (cumulative > target), rank, ROOM), 0)
    token = tl.sum(tl.where(nucleus & (rank == chosen), token, 0), 0)  # 0 where no token is left
    tl.store(o_ptr + i_row, token.to(tl.int64))


@portable(sampling.sample, constraints=[Dim("vocab") <= MOST_TOKENS])
def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor, *, out: Tensor | None = None
) -> Tensor:
    rows, vocab = logits.shape
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    if rows == 0:
        return ids
    peaks, sums = chunk_peaks(logits, temperature)
    chunks = peaks.shape[1]
    lists, tokens, keys = scratch(rows, chunks, ROOM, logits.device)
    _sample_few[(rows,)](
        logits, peaks, temperature, top_k, top_p, uniform, lists, tokens, keys, ids,
        vocab, chunks, ROOM, bucket(chunks), **BEST.pick(logits.device, chunks=bucket(chunks), room=ROOM),
    )  # fmt: skip
    if vocab > ROOM:
        sample_by_mass(logits, peaks, sums, temperature, top_k, top_p, uniform, ids, ROOM)
    return ids


@triton.jit
def _logprobs(
    logit_ptr,  # [rows, vocab]
    id_ptr,  # [rows]
    peak_ptr,  # [rows, chunks]
    sum_ptr,  # [rows, chunks]
    list_ptr,  # [rows, chunks]
    best_ptr,  # [rows, ROOM]
    best_key_ptr,  # [rows, ROOM]
    o_ptr,  # [rows]
    o_top_ptr,  # [rows, top]
    o_id_ptr,  # [rows, top]
    vocab,
    chunks,
    top,
    ROOM: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_best = tl.arange(0, ROOM)
    token = tl.load(id_ptr + i_row)
    if token < 0:
        tl.store(o_ptr + i_row, 0.0)
        tl.store(o_top_ptr + i_row * top + o_best, tl.zeros([ROOM], tl.float32), mask=o_best < top)
        tl.store(o_id_ptr + i_row * top + o_best, tl.zeros([ROOM], tl.int64), mask=o_best < top)
    else:
        o_chunk = tl.arange(0, CHUNKS)
        peaks = tl.load(peak_ptr + i_row * chunks + o_chunk, mask=o_chunk < chunks, other=float("-inf"))
        sums = tl.load(sum_ptr + i_row * chunks + o_chunk, mask=o_chunk < chunks, other=0.0)
        peak, total = total_weight(peaks, sums, 1.0)
        shift = tl.log(tl.where(total > 0, total, 1.0))
        logit = tl.load(logit_ptr + i_row * vocab + token)
        tl.store(o_ptr + i_row, tl.where(logit > float("-inf"), logit - peak - shift, float("-inf")))
        if top > 0:
            p_best = best_ptr + i_row * ROOM
            p_best_key = best_key_ptr + i_row * ROOM
            found = collect(
                logit_ptr + i_row * vocab, peak_ptr + i_row * chunks, list_ptr + i_row * chunks, p_best, p_best_key,
                vocab, chunks, top, ROOM, CHUNKS, TILE, False,
            )  # fmt: skip
            best, key, rank, _ = ranked(p_best, p_best_key, found, 1.0, ROOM)
            best_logit = logit_of(key)
            place = i_row * top + rank
            mask = (rank < top) & (o_best < found)
            value = tl.where(best_logit > float("-inf"), best_logit - peak - shift, float("-inf"))
            tl.store(o_top_ptr + place, value, mask=mask)
            tl.store(o_id_ptr + place, best.to(tl.int64), mask=mask)


@portable(sampling.logprobs, constraints=[Dim("vocab") <= MOST_TOKENS, Dim("top") <= 1024])
def logprobs(
    logits: Tensor, ids: Tensor, *, top: int, out: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocab = logits.shape
    device = logits.device
    if out is None:
        out = (
            torch.empty(rows, device=device),
            torch.empty(rows, top, device=device),
            torch.empty(rows, top, dtype=torch.int64, device=device),
        )
    if rows == 0:
        return out
    peaks, sums = chunk_peaks(logits, None)
    chunks = peaks.shape[1]
    room = max(ROOM, triton.next_power_of_2(top))
    lists, tokens, keys = scratch(rows, chunks, room, device)
    _logprobs[(rows,)](
        logits, ids, peaks, sums, lists, tokens, keys, *out,
        vocab, chunks, top, room, bucket(chunks), **BEST.pick(device, chunks=bucket(chunks), room=room),
    )  # fmt: skip
    return out
