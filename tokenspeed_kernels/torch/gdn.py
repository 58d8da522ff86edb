"""The gated delta rule in plain torch: chunked prefill, recurrent decode, both forms of verify."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed_kernels import gdn, gdn_speculative
from tokenspeed_kernels.torch.gdn_chunk import prepare
from tokenspeed_kernels.torch.paged import gather_rows, scatter_rows, token_sequences
from tokenspeed_registry import copy_into, kernel

CHUNK = 64


@kernel(gdn.gdn_gates, backend="torch")
def gdn_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    gates = -a_log.exp() * F.softplus(a.float() + dt_bias), torch.sigmoid(b.float())
    return gates if out is None else copy_into(out, gates)


@kernel(gdn.gdn_decode, backend="torch")
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
    q, k = _queries_and_keys(q, k, v.shape[-2], scale, normalise)
    new, o = _step(gather_rows(state, slots).float(), q, k, v.float(), g, beta)
    scatter_rows(state, (slots,), new)
    return _finish(o, slots >= 0, v.dtype, out)


@kernel(gdn.gdn_prefill, backend="torch")
def gdn_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    fresh: Tensor,
    *,
    scale: float,
    normalise: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    tokens, seqs = v.shape[0], slots.shape[0]
    scatter_rows(state, (torch.where(fresh, slots, -1),), state.new_zeros(1).expand(seqs, *state.shape[1:]))
    # Sequences are cut into chunks laid end to end. How many there are, the device knows; the host knows a bound.
    size = min(CHUNK, max(tokens, 1))
    chunks = (tokens + (size - 1) * seqs) // size
    if chunks == 0:
        return v.new_empty(v.shape) if out is None else out
    starts = cu_seqlens[:-1]
    chunk_ends = ((cu_seqlens.diff() + size - 1) // size).cumsum(0)
    first_chunks = F.pad(chunk_ends, (1, 0))[:-1]
    chunk = torch.arange(chunks, device=v.device)
    seq = torch.searchsorted(chunk_ends, chunk, right=True).clamp_max(seqs - 1)
    token = starts[seq].unsqueeze(-1) + ((chunk - first_chunks[seq]) * size).unsqueeze(-1)
    token = token + torch.arange(size, device=v.device)  # [chunks size]
    # Beyond the sequence's end lie its last chunk's rest and the chunks that the bound has too many.
    inside = (token < cu_seqlens[seq + 1].unsqueeze(-1)) & (slots[seq] >= 0).unsqueeze(-1)
    token = torch.where(inside, token, 0)

    def chunked(x: Tensor) -> Tensor:  # [tokens heads ...] → [chunks heads size ...]
        mask = inside.reshape(chunks, size, *(1 for _ in x.shape[1:]))
        return torch.where(mask, x[token].float(), 0.0).transpose(1, 2)

    q, k = _queries_and_keys(q, k, v.shape[-2], scale, normalise)
    prepared = prepare(*(chunked(x) for x in (q, k, v, g, beta)))
    opens, closes = chunk == first_chunks[seq], (chunk == chunk_ends[seq] - 1) & (slots[seq] >= 0)
    o = torch.empty_like(prepared.written)
    current = torch.zeros(state.shape[1:], dtype=torch.float32, device=v.device)
    for i in range(chunks):
        row = slots[seq[i : i + 1]]
        stored = gather_rows(state, row)
        o[i], current = prepared.at(i).apply(torch.where(opens[i], stored[0].float(), current))
        scatter_rows(state, (torch.where(closes[i], row, -1),), current.unsqueeze(0))

    seq, position = token_sequences(cu_seqlens, tokens)
    o = o[first_chunks[seq] + position // size, :, position % size]
    return _finish(o, slots[seq] >= 0, v.dtype, out)


@kernel(gdn_speculative.gdn_verify, backend="torch")
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
    q, k = _queries_and_keys(q, k, v.shape[-2], scale, normalise)
    valid = initial_slots >= 0
    current = gather_rows(state, initial_slots).float()
    o = v.new_empty(v.shape, dtype=torch.float32)
    for i in range(v.shape[1]):
        current, o[:, i] = _step(current, q[:, i], k[:, i], v[:, i].float(), g[:, i], beta[:, i])
        scatter_rows(state, (torch.where(valid, slots[:, i], -1),), current)
    return _finish(o, valid, v.dtype, out)


@kernel(gdn_speculative.gdn_verify_replay, backend="torch")
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
    q_len, capacity = v.shape[1], kept_v.shape[1]
    if v.numel() == 0:
        return v.new_empty(v.shape) if out is None else out
    current = _replay(state, kept_k, kept_v, kept_g, kept_beta, slots, kept, normalise)
    folded = kept + q_len > capacity
    scatter_rows(state, (torch.where(folded, slots, -1),), current)

    first = torch.where(folded, 0, kept).unsqueeze(-1)
    rows = first + torch.arange(q_len, device=v.device)
    places = slots.unsqueeze(-1).expand_as(rows).flatten(), rows.flatten()
    for buffer, new in ((kept_k, k), (kept_v, v), (kept_g, g), (kept_beta, beta)):
        scatter_rows(buffer, places, new.flatten(0, 1))

    q, k = _queries_and_keys(q, k, v.shape[-2], scale, normalise)
    o, _ = prepare(*(_by_head(x) for x in (q, k, v, g, beta))).apply(current)
    return _finish(o.transpose(1, 2), slots >= 0, v.dtype, out)


@kernel(gdn_speculative.gdn_fold, backend="torch")
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
    if kept_v.numel() and state.numel():
        new = _replay(state, kept_k, kept_v, kept_g, kept_beta, slots, kept, normalise)
        scatter_rows(state, (torch.where(kept > 0, slots, -1),), new)


@kernel(gdn.gated_rms_norm, backend="torch")
def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    *,
    eps: float,
    activation: Literal["sigmoid", "silu"],
    out: Tensor | None = None,
) -> Tensor:
    wide = x.float()
    activate = torch.sigmoid if activation == "sigmoid" else F.silu
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    normed = (normed * activate(gate.float())).to(x.dtype)
    return normed if out is None else copy_into(out, normed)


def _queries_and_keys(q: Tensor, k: Tensor, v_heads: int, scale: float, normalise: bool) -> tuple[Tensor, Tensor]:
    """Scaled queries and keys [... v_heads d_k] in float32, one of each for every value head."""
    q, k = q.float(), k.float()
    if normalise:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    repeats = v_heads // k.shape[-2]
    return (q * scale).repeat_interleave(repeats, -2), k.repeat_interleave(repeats, -2)


def _replay(
    state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, slots: Tensor, kept: Tensor, normalise: bool
) -> Tensor:
    """States [batch v_heads d_v d_k] of slots in float32 after the first `kept` tokens of their buffers.

    The tokens are one chunk, whatever their number: few are kept, and the decays are exact over any length.
    """
    committed = torch.arange(v.shape[1], device=v.device) < kept.unsqueeze(-1)  # [batch capacity]

    def rows(buffer: Tensor) -> Tensor:
        own = gather_rows(buffer, slots)
        return torch.where(committed.reshape(*committed.shape, *(1 for _ in own.shape[2:])), own, 0)

    k, v, g, beta = (rows(buffer) for buffer in (k, v, g, beta))
    _, k = _queries_and_keys(k, k, v.shape[-2], 1.0, normalise)
    _, new = prepare(*(_by_head(x) for x in (k, k, v, g, beta))).apply(gather_rows(state, slots).float())
    return new


def _by_head(x: Tensor) -> Tensor:
    """[batch tokens heads ...] → [batch heads tokens ...] in float32."""
    return x.float().transpose(1, 2)


def _step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token of every sequence: state [batch heads d_v d_k], q and k [batch heads d_k], v [batch heads d_v]."""
    state = g.exp()[..., None, None] * state
    delta = beta.unsqueeze(-1) * (v - (state @ k.unsqueeze(-1)).squeeze(-1))
    state = state + delta.unsqueeze(-1) * k.unsqueeze(-2)
    return state, (state @ q.unsqueeze(-1)).squeeze(-1)


def _finish(o: Tensor, valid: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Rounds outputs whose first dim is that of `valid`, with zeros where that is false."""
    o = torch.where(valid.reshape(-1, *(1 for _ in o.shape[1:])), o, 0.0).to(dtype)
    return o.contiguous() if out is None else copy_into(out, o)
