"""Hashes of n-grams: a tile [tokens, heads] of table rows, one a thread."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import ngram
from tokenspeed_kernels.triton.declare import portable

_SEARCH = tl.constexpr(128)
"""Sequence ends that a step of the search for a token's sequence compares with."""


@triton.jit
def _sequence_of(o_t, cu_ptr, seqs, SEARCH: tl.constexpr):
    """The sequence of each token and its first token: a search of SEARCH + 1 branches, one step up to SEARCH ends."""
    sequence = tl.zeros_like(o_t)
    start = tl.zeros_like(o_t)
    if seqs > 1:
        stride = tl.full([], 1, tl.int64)
        while stride * SEARCH < seqs:
            stride *= SEARCH
        while stride > 0:
            i_end = sequence[:, None] + (tl.arange(0, SEARCH)[None, :] + 1) * stride  # [T, SEARCH]
            b_end = tl.load(cu_ptr + i_end, mask=i_end <= seqs, other=0x7FFFFFFF).to(tl.int64)
            before = b_end <= o_t[:, None]
            sequence += tl.sum(before.to(tl.int32), 1) * stride
            start = tl.maximum(start, tl.max(tl.where(before, b_end, 0), 1))
            stride //= SEARCH
    return sequence, start


@triton.jit
def hash_tile(
    o_t,  # [T] int64
    ids_ptr,  # [tokens]
    context_ptr,  # [seqs, ORDER - 1]
    cu_ptr,  # [seqs + 1]
    multipliers_ptr,  # [ORDER]
    moduli_ptr,  # [HEADS]
    offsets_ptr,  # [HEADS]
    tokens,
    seqs,
    eos,
    ORDER: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
):
    """The table rows [T, LANES] of tokens and heads, -1 for padding and past the ends."""
    o_h = tl.arange(0, LANES)
    m_t = o_t < tokens
    m_h = o_h < HEADS
    modulus = tl.load(moduli_ptr + o_h, mask=m_h, other=1)[None, :]
    offset = tl.load(offsets_ptr + o_h, mask=m_h, other=0)[None, :]
    token = tl.load(ids_ptr + o_t, mask=m_t, other=-1)
    value = token * tl.load(multipliers_ptr)
    sequence, start = _sequence_of(o_t, cu_ptr, seqs, _SEARCH)
    position = o_t - start
    eos = tl.zeros_like(o_t) + eos
    hashed = tl.zeros_like(modulus)
    ended = token != token
    for back in tl.static_range(1, ORDER):
        in_text = position >= back
        text = tl.load(ids_ptr + o_t - back, mask=m_t & (o_t >= back), other=-1)
        p_context = context_ptr + sequence * (ORDER - 1) + (ORDER - 1 - back) + position
        context = tl.load(p_context, mask=m_t & (position < back), other=-1)
        previous = tl.where(in_text, text, context)
        ended = ended | (previous == eos) | (previous == -1)
        value ^= tl.where(ended, eos, previous) * tl.load(multipliers_ptr + back)
        hashed = tl.where((o_h // (HEADS // (ORDER - 1)) == back - 1)[None, :], value[:, None], hashed)
    # Of -1 - h, which is not negative where h is, the remainder counts down from the last row.
    negative = hashed < 0
    remainder = (tl.where(negative, ~hashed, hashed).to(tl.uint64) % modulus.to(tl.uint64)).to(tl.int64)
    rows = tl.where(negative, modulus - 1 - remainder, remainder) + offset
    return tl.where((token != -1)[:, None] & m_h[None, :], rows, -1)


@triton.jit(do_not_specialize=["tokens", "seqs"])
def _ngram_hash(
    ids_ptr,
    context_ptr,
    cu_ptr,
    multipliers_ptr,
    moduli_ptr,
    offsets_ptr,
    o_ptr,  # [tokens, HEADS]
    tokens,
    seqs,
    eos,
    ORDER: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    o_t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    rows = hash_tile(
        o_t, ids_ptr, context_ptr, cu_ptr, multipliers_ptr, moduli_ptr, offsets_ptr, tokens, seqs, eos,
        ORDER, HEADS, LANES,
    )  # fmt: skip
    o_h = tl.arange(0, LANES)[None, :]
    tl.store(o_ptr + o_t[:, None] * HEADS + o_h, rows, mask=(o_t < tokens)[:, None] & (o_h < HEADS))


@portable(ngram.ngram_hash)
def ngram_hash(
    ids: Tensor,
    context: Tensor,
    cu_seqlens: Tensor,
    multipliers: Tensor,
    moduli: Tensor,
    offsets: Tensor,
    *,
    eos: int,
    out: Tensor | None = None,
) -> Tensor:
    tokens, heads = ids.shape[0], moduli.shape[0]
    out = torch.empty(tokens, heads, dtype=torch.int64, device=ids.device) if out is None else out
    if out.numel():
        lanes = triton.next_power_of_2(heads)
        block = max(32 // lanes, 1)
        _ngram_hash[(triton.cdiv(tokens, block),)](
            ids, context, cu_seqlens, multipliers, moduli, offsets, out, tokens, context.shape[0], eos,
            multipliers.shape[0], heads, lanes, block, num_warps=1,
        )  # fmt: skip
    return out
