"""Sampling from rows of which many tokens are kept: searches by mass in the order of the logits, nothing is sorted.

The kept tokens are those whose key reaches a threshold, and of those that equal it the first few. Thresholds are found
one after another: that of rank `top_k` by counts, that of the nucleus by mass, the token's own by mass. A step of a
search reads the tokens once for three candidates between the bounds. Sums run in one order, so that the mass falls as
the threshold rises, whatever the rounding.

A program a row searches. What it reads is mostly a pool, the tokens above a cut of their weights: the programs before
it, several a row, weigh what lies above each of some cuts, and gather what lies above the first that suffices.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.triton.sampling_best import logit_of, token_key, total_weight, weight_of

PARTS = tl.constexpr(16)
"""Programs that weigh and gather a row."""
CUTS = tl.constexpr(8)
_POOL = 1 << 16
"""Tokens that a pool holds."""


@triton.jit
def _cuts(peak, temperature):
    """Logits at and above which a weight is at least exp(-3), exp(-5), ... exp(-17): [CUTS]."""
    return peak - (3.0 + 2.0 * tl.arange(0, CUTS)) * temperature


@triton.jit
def _part(vocab, i_part, TILE: tl.constexpr):
    """First and last token of a part, in whole tiles."""
    span = tl.cdiv(tl.cdiv(vocab, PARTS), TILE) * TILE
    return i_part * span, tl.minimum((i_part + 1) * span, vocab)


@triton.jit
def weigh(p_logit, p_count, p_mass, vocab, i_part, peak, temperature, TILE: tl.constexpr):
    """How many tokens of a part lie above each cut, and what they weigh: to [CUTS] both."""
    cuts = _cuts(peak, temperature)
    counts = tl.zeros([CUTS], tl.int32)
    masses = tl.zeros([CUTS], tl.float32)
    first, end = _part(vocab, i_part, TILE)
    for i_token in range(first, end, TILE):
        o_token = i_token + tl.arange(0, TILE)
        logit = tl.load(p_logit + o_token, mask=o_token < end, other=float("-inf"))
        weight = weight_of(logit, peak, temperature)
        above = (logit[None, :] >= cuts[:, None]) & (logit > float("-inf"))[None, :]  # [CUTS, TILE]
        counts += tl.sum(above.to(tl.int32), 1)
        masses += tl.sum(tl.where(above, weight[None, :], 0.0), 1)
    tl.store(p_count + tl.arange(0, CUTS), counts)
    tl.store(p_mass + tl.arange(0, CUTS), masses)


@triton.jit
def _gather(
    logit_ptr,  # [rows, vocab]
    peak_ptr,  # [rows, chunks]
    sum_ptr,  # [rows, chunks]
    count_ptr,  # [rows, PARTS, CUTS]
    mass_ptr,  # [rows, PARTS, CUTS]
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
    i_row = tl.program_id(0).to(tl.int64) // PARTS
    i_part = tl.program_id(0) % PARTS
    temperature = tl.load(temperature_ptr + i_row)
    kept = tl.load(top_k_ptr + i_row)
    kept = tl.where((kept <= 0) | (kept > vocab), vocab, kept)
    if (temperature <= 0) | (kept <= FEW):
        return
    o_chunk = tl.arange(0, CHUNKS)
    peaks = tl.load(peak_ptr + i_row * chunks + o_chunk, mask=o_chunk < chunks, other=float("-inf"))
    sums = tl.load(sum_ptr + i_row * chunks + o_chunk, mask=o_chunk < chunks, other=0.0)
    peak, total = total_weight(peaks, sums, temperature)
    o_cut = tl.arange(0, CUTS)
    o_part = tl.arange(0, PARTS)
    p_cell = (i_row * PARTS + o_part)[:, None] * CUTS + o_cut[None, :]  # [PARTS, CUTS]
    counts = tl.load(count_ptr + p_cell)
    count = tl.sum(counts, 0)
    mass = tl.sum(tl.load(mass_ptr + p_cell), 0)
    top_p = tl.load(top_p_ptr + i_row)
    share = tl.where(top_p < 1, top_p, tl.load(uniform_ptr + i_row))  # of the mass, that what is searched for lies in
    enough = tl.where(kept < vocab, count >= kept, share * total < mass * (1.0 - 1e-5))
    chosen = tl.min(tl.where(enough & (count <= ROOM), o_cut, CUTS), 0)
    found = tl.sum(tl.where(o_cut == chosen, count, 0), 0)
    cut = tl.sum(tl.where(o_cut == chosen, _cuts(peak, temperature), 0.0), 0)
    if i_part == 0:
        tl.store(found_ptr + i_row, found)
        tl.store(cut_ptr + i_row, cut)
    if found > 0:
        earlier = (o_part < i_part)[:, None] & (o_cut == chosen)[None, :]
        place = tl.sum(tl.sum(tl.where(earlier, counts, 0), 1), 0)
        first, end = _part(vocab, i_part, TILE)
        for i_token in range(first, end, TILE):
            o_token = i_token + tl.arange(0, TILE)
            logit = tl.load(logit_ptr + i_row * vocab + o_token, mask=o_token < end, other=float("-inf"))
            taken = (logit >= cut) & (logit > float("-inf"))
            o_pool = i_row * ROOM + place + tl.cumsum(taken.to(tl.int32), 0) - 1
            tl.store(pool_ptr + o_pool, logit, mask=taken)
            tl.store(pool_token_ptr + o_pool, o_token, mask=taken)
            place += tl.sum(taken.to(tl.int32), 0)


@triton.jit
def _reached(p_logit, count, peak, temperature, a, b, c, TALLY: tl.constexpr, TILE: tl.constexpr):
    """How much mass, or how many tokens, have keys of at least each of three."""
    of_a = tl.zeros([TILE], tl.float32)
    of_b = tl.zeros([TILE], tl.float32)
    of_c = tl.zeros([TILE], tl.float32)
    for i_token in range(0, count, TILE):
        o_token = i_token + tl.arange(0, TILE)
        inside = o_token < count
        logit = tl.load(p_logit + o_token, mask=inside, other=float("-inf"))
        key = token_key(logit, inside, True)
        if TALLY:
            weight = tl.full([TILE], 1.0, tl.float32)  # below 2^24 a lane exact
        else:
            weight = weight_of(logit, peak, temperature)
        of_a += tl.where(key >= a.to(tl.uint32), weight, 0.0)
        of_b += tl.where(key >= b.to(tl.uint32), weight, 0.0)
        of_c += tl.where(key >= c.to(tl.uint32), weight, 0.0)
    return tl.sum(of_a, 0), tl.sum(of_b, 0), tl.sum(of_c, 0)


@triton.jit
def _search(
    p_logit, count, peak, temperature, low, high, target, STRICT: tl.constexpr, TALLY: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The largest key in [low, high) that as much as `target` reaches, taken for granted of `low`."""
    while high - low > 1:
        step = (high - low + 3) // 4
        a = low + step
        b = tl.minimum(a + step, high)
        c = tl.minimum(b + step, high)
        of_a, of_b, of_c = _reached(p_logit, count, peak, temperature, a, b, c, TALLY, TILE)
        if STRICT:
            on_a, on_b, on_c = of_a > target, of_b > target, of_c > target
        else:
            on_a, on_b, on_c = of_a >= target, of_b >= target, of_c >= target
        on_a &= a < high
        on_b &= b < high
        on_c &= c < high
        high = tl.where(on_c, high, tl.where(on_b, c, tl.where(on_a, b, a)))
        low = tl.where(on_c, c, tl.where(on_b, b, tl.where(on_a, a, low)))
    return low


@triton.jit
def _find(p_logit, count, edge, kept, vocab, mass, top_p, uniform, peak, temperature, TILE: tl.constexpr):
    """The place of the token drawn among `count` logits: all of a row, or all that matter.

    Their keys are above `edge`, which is 1 at least; the weights of the row sum to `mass`.
    """
    top = token_key(peak, peak > float("-inf"), True).to(tl.int64) + 1

    # What temperature and top-k keep: keys above `edge`, and `edge_count` of those that equal it.
    edge_count = tl.full([], 0.0, tl.float32)
    if kept < vocab:
        edge = _search(p_logit, count, peak, temperature, edge, top, kept * 1.0, False, True, TILE)
        reached, above, _ = _reached(p_logit, count, peak, temperature, edge, edge + 1, edge + 1, True, TILE)
        edge_count = tl.minimum(kept - above, reached - above)
        _, mass, _ = _reached(p_logit, count, peak, temperature, edge, edge + 1, edge + 1, False, TILE)
        weight = weight_of(logit_of(edge.to(tl.uint32)), peak, temperature)
        mass += tl.where(edge_count > 0, edge_count * weight, 0.0)  # the lowest key is no logit's

    # Of those, the fewest whose mass reaches top_p.
    if top_p < 1:
        wanted = tl.maximum(top_p * mass, 0.5)  # the first token weighs 1
        core = _search(p_logit, count, peak, temperature, edge, top, wanted, False, False, TILE)
        weight = weight_of(logit_of(core.to(tl.uint32)), peak, temperature)
        at, above, _ = _reached(p_logit, count, peak, temperature, core, core + 1, core + 1, True, TILE)
        _, mass_above, _ = _reached(p_logit, count, peak, temperature, core, core + 1, core + 1, False, TILE)
        ties = tl.where((core == edge) & (kept < vocab), edge_count, at - above)
        needed = tl.ceil((wanted - mass_above) / tl.maximum(weight, 1e-37))
        edge_count = tl.minimum(tl.maximum(needed, tl.where(above > 0, 0.0, 1.0)), ties)
        edge = core
        mass = mass_above + tl.where(edge_count > 0, edge_count * weight, 0.0)

    target = tl.minimum(uniform * mass, mass * (1.0 - 2.0**-23))
    key = _search(p_logit, count, peak, temperature, edge, top, target, True, False, TILE)
    weight = weight_of(logit_of(key.to(tl.uint32)), peak, temperature)
    _, mass_above, _ = _reached(p_logit, count, peak, temperature, key, key + 1, key + 1, False, TILE)
    index = tl.maximum(tl.floor((target - mass_above) / tl.maximum(weight, 1e-37)), 0.0)
    limit = tl.where(key == edge, edge_count, count * 1.0)
    index = tl.minimum(index, tl.maximum(limit - 1.0, 0.0)).to(tl.int32)

    # The token of that index among those with the key; the last of them where rounding asks for more.
    before = 0
    place = 0
    for i_token in range(0, count, TILE):
        o_token = i_token + tl.arange(0, TILE)
        inside = o_token < count
        logit = tl.load(p_logit + o_token, mask=inside, other=float("-inf"))
        equal = (token_key(logit, inside, True) == key.to(tl.uint32)).to(tl.int32)
        rank = before + tl.cumsum(equal, 0) - 1
        before += tl.sum(equal, 0)
        place = tl.maximum(place, tl.max(tl.where((equal > 0) & (rank <= index), o_token, 0), 0))
    return place


@triton.jit
def _sample_by_mass(
    logit_ptr,  # [rows, vocab]
    peak_ptr,  # [rows, chunks]
    sum_ptr,  # [rows, chunks]
    temperature_ptr,  # [rows], as the next three
    top_k_ptr,
    top_p_ptr,
    uniform_ptr,
    pool_ptr,  # [rows, ROOM]
    pool_token_ptr,  # [rows, ROOM]
    found_ptr,  # [rows]
    cut_ptr,  # [rows]
    o_ptr,  # [rows]
    vocab,
    chunks,
    FEW: tl.constexpr,  # where no more are kept, the row is another kernel's
    ROOM: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + i_row)
    kept = tl.load(top_k_ptr + i_row)
    kept = tl.where((kept <= 0) | (kept > vocab), vocab, kept)
    if (temperature <= 0) | (kept <= FEW):
        return
    o_chunk = tl.arange(0, CHUNKS)
    peaks = tl.load(peak_ptr + i_row * chunks + o_chunk, mask=o_chunk < chunks, other=float("-inf"))
    sums = tl.load(sum_ptr + i_row * chunks + o_chunk, mask=o_chunk < chunks, other=0.0)
    peak, total = total_weight(peaks, sums, temperature)
    if peak == float("-inf"):
        tl.store(o_ptr + i_row, tl.full([], 0, tl.int64))
        return
    top_p = tl.load(top_p_ptr + i_row)
    uniform = tl.load(uniform_ptr + i_row)
    found = tl.load(found_ptr + i_row)
    if found > 0:
        cut = tl.load(cut_ptr + i_row)
        edge = tl.maximum(token_key(cut, cut > float("-inf"), True).to(tl.int64) - 1, 1)
        p_pool = pool_ptr + i_row * ROOM
        place = _find(p_pool, found, edge, kept, vocab, total, top_p, uniform, peak, temperature, TILE)
        token = tl.load(pool_token_ptr + i_row * ROOM + place)
    else:
        edge = tl.full([], 1, tl.int64)
        p_logit = logit_ptr + i_row * vocab
        token = _find(p_logit, vocab, edge, kept, vocab, total, top_p, uniform, peak, temperature, TILE)
    tl.store(o_ptr + i_row, token)


def sample_by_mass(
    logits: Tensor,
    peaks: Tensor,
    sums: Tensor,
    counts: Tensor,
    masses: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    uniform: Tensor,
    ids: Tensor,
    few: int,
) -> None:
    """Ids of the rows in which more than `few` tokens are kept; other rows are left as they are."""
    rows, vocab = logits.shape
    chunks = peaks.shape[1]
    room = min(_POOL, triton.next_power_of_2(vocab))
    pool = torch.empty(rows, room, device=logits.device)
    tokens = torch.empty(rows, room, dtype=torch.int32, device=logits.device)
    found = torch.empty(rows, dtype=torch.int32, device=logits.device)
    cut = torch.empty(rows, device=logits.device)
    controls = temperature, top_k, top_p, uniform
    sizes = vocab, chunks, few, room, triton.next_power_of_2(chunks)
    _gather[(rows * PARTS.value,)](
        logits, peaks, sums, counts, masses, *controls, pool, tokens, found, cut, *sizes, 4096, num_warps=8
    )
    _sample_by_mass[(rows,)](logits, peaks, sums, *controls, pool, tokens, found, cut, ids, *sizes, 4096, num_warps=16)
