"""Sampling from rows of which many tokens are kept: searches by mass in the order of the logits, nothing is sorted.

The kept tokens are those whose key reaches a threshold, and of those that equal it the first few. Thresholds are found
one after another: that of rank `top_k` by counts, that of the nucleus by mass, the token's own by mass. A step of a
search reads the row once for three candidates between the bounds. Sums run in one order, so that the mass falls as the
threshold rises, whatever the rounding.
"""

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.triton.sampling_best import logit_of, token_key, weight_of


@triton.jit
def _reached(p_logit, vocab, peak, temperature, a, b, c, COUNT: tl.constexpr, TILE: tl.constexpr):
    """How much mass, or how many tokens, have keys of at least each of three."""
    of_a = tl.zeros([TILE], tl.float32)
    of_b = tl.zeros([TILE], tl.float32)
    of_c = tl.zeros([TILE], tl.float32)
    for i_token in range(0, vocab, TILE):
        o_token = i_token + tl.arange(0, TILE)
        inside = o_token < vocab
        logit = tl.load(p_logit + o_token, mask=inside, other=float("-inf"))
        key = token_key(logit, inside, True).to(tl.int64)
        if COUNT:
            weight = tl.full([TILE], 1.0, tl.float32)  # below 2^24 a lane exact
        else:
            weight = weight_of(logit, peak, temperature)
        of_a += tl.where(key >= a, weight, 0.0)
        of_b += tl.where(key >= b, weight, 0.0)
        of_c += tl.where(key >= c, weight, 0.0)
    return tl.sum(of_a, 0), tl.sum(of_b, 0), tl.sum(of_c, 0)


@triton.jit
def _search(
    p_logit, vocab, peak, temperature, low, high, target, STRICT: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The largest key in [low, high) that as much as `target` reaches, taken for granted of `low`."""
    while high - low > 1:
        step = (high - low + 3) // 4
        a = low + step
        b = tl.minimum(a + step, high)
        c = tl.minimum(b + step, high)
        of_a, of_b, of_c = _reached(p_logit, vocab, peak, temperature, a, b, c, COUNT, TILE)
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
def _sample_by_mass(
    logit_ptr,  # [rows, vocab]
    peak_ptr,  # [rows, chunks]
    temperature_ptr,  # [rows], as the next three
    top_k_ptr,
    top_p_ptr,
    uniform_ptr,
    o_ptr,  # [rows]
    vocab,
    chunks,
    FEW: tl.constexpr,  # where no more are kept, the row is another kernel's
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
    peak = tl.max(peaks, 0)
    if peak == float("-inf"):
        tl.store(o_ptr + i_row, tl.full([], 0, tl.int64))
        return
    p_logit = logit_ptr + i_row * vocab
    one = tl.full([], 1, tl.int64)
    top = token_key(peak, peak > float("-inf"), True).to(tl.int64) + 1

    # What temperature and top-k keep: keys above `edge`, and `edge_count` of those that equal it.
    edge = one
    edge_count = tl.full([], 0.0, tl.float32)
    if kept < vocab:
        edge = _search(p_logit, vocab, peak, temperature, one, top, kept.to(tl.float32), False, True, TILE)
        reached, above, _ = _reached(p_logit, vocab, peak, temperature, edge, edge + 1, edge + 1, True, TILE)
        edge_count = tl.minimum(kept - above, reached - above)
    _, mass_above, _ = _reached(p_logit, vocab, peak, temperature, edge, edge + 1, edge + 1, False, TILE)
    weight = weight_of(logit_of(edge.to(tl.uint32)), peak, temperature)
    mass = mass_above + tl.where(edge_count > 0, edge_count * weight, 0.0)  # the lowest key is no logit's

    # Of those, the fewest whose mass reaches top_p.
    top_p = tl.load(top_p_ptr + i_row)
    if top_p < 1:
        wanted = tl.maximum(top_p * mass, 0.5)  # the first token weighs 1
        core = _search(p_logit, vocab, peak, temperature, edge, top, wanted, False, False, TILE)
        weight = weight_of(logit_of(core.to(tl.uint32)), peak, temperature)
        at, above, _ = _reached(p_logit, vocab, peak, temperature, core, core + 1, core + 1, True, TILE)
        _, mass_above, _ = _reached(p_logit, vocab, peak, temperature, core, core + 1, core + 1, False, TILE)
        ties = tl.where((core == edge) & (kept < vocab), edge_count, at - above)
        needed = tl.ceil((wanted - mass_above) / tl.maximum(weight, 1e-37))
        edge_count = tl.minimum(tl.maximum(needed, tl.where(above > 0, 0.0, 1.0)), ties)
        edge = core
        mass = mass_above + edge_count * weight

    target = tl.minimum(tl.load(uniform_ptr + i_row) * mass, mass * (1.0 - 2.0**-23))
    key = _search(p_logit, vocab, peak, temperature, edge, top, target, True, False, TILE)
    weight = weight_of(logit_of(key.to(tl.uint32)), peak, temperature)
    _, mass_above, _ = _reached(p_logit, vocab, peak, temperature, key, key + 1, key + 1, False, TILE)
    index = tl.floor((target - mass_above) / tl.maximum(weight, 1e-37))
    index = tl.maximum(index, 0.0)

    # The token of that index among those with the key.
    before = 0
    chosen = 0
    limit = tl.where(key == edge, edge_count, vocab.to(tl.float32))
    index = tl.minimum(index, tl.maximum(limit - 1.0, 0.0)).to(tl.int32)
    for i_token in range(0, vocab, TILE):
        o_token = i_token + tl.arange(0, TILE)
        inside = o_token < vocab
        logit = tl.load(p_logit + o_token, mask=inside, other=float("-inf"))
        equal = (token_key(logit, inside, True).to(tl.int64) == key).to(tl.int32)
        rank = before + tl.cumsum(equal, 0) - 1
        before += tl.sum(equal, 0)
        # The last of equals stands in where rounding asks for more than there are.
        chosen = tl.maximum(chosen, tl.max(tl.where((equal > 0) & (rank <= index), o_token, 0), 0))
    tl.store(o_ptr + i_row, chosen.to(tl.int64))


def sample_by_mass(
    logits: Tensor,
    peaks: Tensor,
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
    _sample_by_mass[(rows,)](
        logits, peaks, temperature, top_k, top_p, uniform, ids,
        vocab, chunks, few, triton.next_power_of_2(chunks), 4096, num_warps=16,
    )  # fmt: skip
