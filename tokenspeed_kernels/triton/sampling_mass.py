"""Sampling from rows of which many tokens are kept: searches by mass in the order of the logits, nothing is sorted.

The kept tokens are those whose key reaches a threshold, and of those that equal it the first few. Thresholds are found
one after another: that of rank `top_k` by counts, that of the nucleus by mass, the token's own by mass. A step of a
search reads the tokens once for three candidates between the bounds. Sums run in one order, so that the mass falls as
the threshold rises, whatever the rounding.

A program a row searches, mostly in the row's pool (see `sampling_pool`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.triton.sampling_best import logit_of, token_key, total_weight, weight_of
from tokenspeed_kernels.triton.sampling_pool import gather_pools, many_kept

_SEARCHED = 4096
"""Tokens that a program looks at together."""
_COARSE = tl.constexpr(3)
"""Steps of a search that look at all tokens."""


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
def _narrowed(low, high, a, b, c, of_a, of_b, of_c, target, STRICT: tl.constexpr):
    """The bounds that are left once it is known what reaches each of three keys."""
    if STRICT:
        on_a, on_b, on_c = of_a > target, of_b > target, of_c > target
    else:
        on_a, on_b, on_c = of_a >= target, of_b >= target, of_c >= target
    on_a &= a < high
    on_b &= b < high
    on_c &= c < high
    high = tl.where(on_c, high, tl.where(on_b, c, tl.where(on_a, b, a)))
    low = tl.where(on_c, c, tl.where(on_b, b, tl.where(on_a, a, low)))
    return low, high


@triton.jit
def _key_within(logit, low, high):
    key = token_key(logit, logit > float("-inf"), True).to(tl.int64)
    return tl.minimum(tl.maximum(key, low + 1), high)


@triton.jit
def _keep_between(p_logit, p_near, count, peak, temperature, low, high, TALLY: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr):  # fmt: skip  # noqa: E501
    """Leaves the logits whose keys are in [low, high), up to ROOM; how many there are, and what is above them."""
    near = 0
    above = tl.zeros([TILE], tl.float32)
    tl.debug_barrier()
    for i_token in range(0, count, TILE):
        o_token = i_token + tl.arange(0, TILE)
        inside = o_token < count
        logit = tl.load(p_logit + o_token, mask=inside, other=float("-inf"))
        key = token_key(logit, inside, True).to(tl.int64)
        between = ((key >= low) & (key < high)).to(tl.int32)
        place = near + tl.cumsum(between, 0) - 1
        tl.store(p_near + place, logit, mask=(between > 0) & (place < ROOM))
        near += tl.sum(between, 0)
        if TALLY:
            weight = tl.full([TILE], 1.0, tl.float32)
        else:
            weight = weight_of(logit, peak, temperature)
        above += tl.where(key >= high, weight, 0.0)
    tl.debug_barrier()
    return near, tl.sum(above, 0)


@triton.jit
def _search(
    p_logit, p_near, count, peak, temperature, low, high, target,
    STRICT: tl.constexpr, TALLY: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The largest key in [low, high) that as much as `target` reaches, taken for granted of `low`.

    Steps among all tokens, between equally spaced logits, leave a narrow range. Those within it are then set apart, and
    the steps that are left, between keys, look at them alone.
    """
    for _ in range(_COARSE):
        lowest = logit_of(low.to(tl.uint32))
        least = peak - 80.0 * temperature
        lowest = tl.where(lowest > least, lowest, least)
        gap = (tl.minimum(logit_of((high - 1).to(tl.uint32)), peak) - lowest) * 0.25
        a = _key_within(lowest + gap, low, high)
        b = _key_within(lowest + 2.0 * gap, low, high)
        c = _key_within(lowest + 3.0 * gap, low, high)
        of_a, of_b, of_c = _reached(p_logit, count, peak, temperature, a, b, c, TALLY, TILE)
        low, high = _narrowed(low, high, a, b, c, of_a, of_b, of_c, target, STRICT)
    near, above = _keep_between(p_logit, p_near, count, peak, temperature, low, high, TALLY, ROOM, TILE)
    fits = near <= ROOM
    looked_at = tl.where(fits, near, count)
    above = tl.where(fits, above, 0.0)
    # By a difference of addresses: a choice between two pointers breaks the AMD compiler of Triton 3.6.
    shift = tl.where(fits, (p_near.to(tl.int64) - p_logit.to(tl.int64)) // 4, 0)
    while high - low > 1:
        step = (high - low + 3) // 4
        a = low + step
        b = tl.minimum(a + step, high)
        c = tl.minimum(b + step, high)
        of_a, of_b, of_c = _reached(p_logit + shift, looked_at, peak, temperature, a, b, c, TALLY, TILE)
        low, high = _narrowed(low, high, a, b, c, above + of_a, above + of_b, above + of_c, target, STRICT)
    return low


@triton.jit
def _find(
    p_logit, p_near, count, edge, kept, vocab, mass, top_p, uniform, peak, temperature,
    ROOM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The place of the token drawn among `count` logits: all of a row, or all that matter.

    Their keys are above `edge`, which is 1 at least; the weights of the row sum to `mass`.
    """
    top = token_key(peak, peak > float("-inf"), True).to(tl.int64) + 1

    # What temperature and top-k keep: keys above `edge`, and `edge_count` of those that equal it.
    edge_count = tl.full([], 0.0, tl.float32)
    if kept < vocab:
        edge = _search(p_logit, p_near, count, peak, temperature, edge, top, kept * 1.0, False, True, ROOM, TILE)
        reached, above, _ = _reached(p_logit, count, peak, temperature, edge, edge + 1, edge + 1, True, TILE)
        edge_count = tl.minimum(kept - above, reached - above)
        _, mass, _ = _reached(p_logit, count, peak, temperature, edge, edge + 1, edge + 1, False, TILE)
        weight = weight_of(logit_of(edge.to(tl.uint32)), peak, temperature)
        mass += tl.where(edge_count > 0, edge_count * weight, 0.0)  # the lowest key is no logit's

    # Of those, the fewest whose mass reaches top_p.
    if top_p < 1:
        wanted = tl.maximum(top_p * mass, 0.5)  # the first token weighs 1
        core = _search(p_logit, p_near, count, peak, temperature, edge, top, wanted, False, False, ROOM, TILE)
        weight = weight_of(logit_of(core.to(tl.uint32)), peak, temperature)
        at, above, _ = _reached(p_logit, count, peak, temperature, core, core + 1, core + 1, True, TILE)
        _, mass_above, _ = _reached(p_logit, count, peak, temperature, core, core + 1, core + 1, False, TILE)
        ties = tl.where((core == edge) & (kept < vocab), edge_count, at - above)
        needed = tl.ceil((wanted - mass_above) / tl.maximum(weight, 1e-37))
        edge_count = tl.minimum(tl.maximum(needed, tl.where(above > 0, 0.0, 1.0)), ties)
        edge = core
        mass = mass_above + tl.where(edge_count > 0, edge_count * weight, 0.0)

    target = tl.minimum(uniform * mass, mass * (1.0 - 2.0**-23))
    key = _search(p_logit, p_near, count, peak, temperature, edge, top, target, True, False, ROOM, TILE)
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
    near_ptr,  # [rows, ROOM], scratch
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
    kept, many = many_kept(top_k_ptr, temperature_ptr, i_row, vocab, FEW)
    if not many:
        return
    temperature = tl.load(temperature_ptr + i_row)
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
    p_near = near_ptr + i_row * ROOM
    if found > 0:
        cut = tl.load(cut_ptr + i_row)
        edge = tl.maximum(token_key(cut, cut > float("-inf"), True).to(tl.int64) - 1, 1)
        p_pool = pool_ptr + i_row * ROOM
        place = _find(p_pool, p_near, found, edge, kept, vocab, total, top_p, uniform, peak, temperature, ROOM, TILE)
        token = tl.load(pool_token_ptr + i_row * ROOM + place)
    else:
        edge = tl.full([], 1, tl.int64)
        p_logit = logit_ptr + i_row * vocab
        token = _find(p_logit, p_near, vocab, edge, kept, vocab, total, top_p, uniform, peak, temperature, ROOM, TILE)
    tl.store(o_ptr + i_row, token)


def sample_by_mass(
    logits: Tensor,
    peaks: Tensor,
    sums: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    uniform: Tensor,
    ids: Tensor,
    few: int,
) -> None:
    """Ids of the rows in which more than `few` tokens are kept; other rows are left as they are."""
    rows, vocab = logits.shape
    controls = temperature, top_k, top_p, uniform
    pool, tokens, found, cut = gather_pools(logits, peaks, sums, *controls, few)
    _sample_by_mass[(rows,)](
        logits, peaks, sums, *controls, pool, tokens, torch.empty_like(pool), found, cut, ids,
        vocab, peaks.shape[1], few, pool.shape[1], triton.next_power_of_2(peaks.shape[1]), _SEARCHED, num_warps=16,
    )  # fmt: skip
