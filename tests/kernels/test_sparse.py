"""Block-sparse attention: speculation, chunking, equality with dense attention, budgets, padding."""

import pytest
import torch
from torch import Tensor

from tokenspeed_kernels.sparse import index_cache_write, index_scores, sparse_attention, topk_blocks
from tokenspeed_kernels.sparse_select import select_blocks
from tokenspeed_registry import ArgumentError, ContentError

RATIO, BLOCKS, DIM = 4, 2, 16
PAGE = RATIO * BLOCKS
WEIGHT = torch.linspace(-0.5, 0.5, DIM)
INV_FREQ = 1e4 ** (-torch.arange(4) / 4)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Indexer:
    """One sequence's raw keys going through the ring into block keys, call by call."""

    def __init__(self, ring_rows: int, tokens: int = 64) -> None:
        pages = tokens // PAGE
        self.ring = torch.full((3, ring_rows, DIM), torch.nan)
        self.cache = torch.full((pages, BLOCKS, DIM), torch.nan)
        self.table = torch.arange(pages, dtype=torch.int32).flip(0)[None].contiguous()
        self.slots = int32(1)

    def write(self, keys: Tensor, length: int) -> None:
        """Appends `keys`, the last of which is at position `length` − 1."""
        index_cache_write(
            keys, self.ring, self.cache, self.table, self.slots, int32(0, len(keys)), int32(length), WEIGHT, INV_FREQ,
            ratio=RATIO, eps=1e-6, backend="torch",
        )  # fmt: skip

    def block_keys(self, length: int) -> Tensor:
        """Keys of the complete blocks of a sequence of `length` tokens."""
        return self.cache[self.table[0].long()].flatten(0, 1)[: length // RATIO]


def raw_keys(tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, DIM, generator=torch.Generator().manual_seed(seed))


def after_one_verify(ring_rows: int, start: int, drafts: int, accepted: int) -> tuple[Tensor, Tensor]:
    """Block keys of 40 tokens, appended one by one after a verify at `start` that accepted some; and without it."""
    keys = raw_keys(40)
    indexer, plain = Indexer(ring_rows), Indexer(ring_rows)
    indexer.write(keys[:start], start)
    rejected = torch.full((1 + drafts - accepted, DIM), 1e3)
    indexer.write(torch.cat([keys[start : start + accepted], rejected]), start + 1 + drafts)
    for position in range(start + accepted, 40):
        indexer.write(keys[position : position + 1], position + 1)
    plain.write(keys, 40)
    return indexer.block_keys(40), plain.block_keys(40)


@pytest.mark.parametrize("ring_rows", [8, RATIO + 4 - 2])
@pytest.mark.parametrize("start", [8, 9, 10, 11])
@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_block_keys_are_rebuilt_after_rejected_drafts(ring_rows: int, start: int, accepted: int) -> None:
    rolled_back, plain = after_one_verify(ring_rows, start, drafts=3, accepted=accepted)
    assert torch.equal(rolled_back, plain)


@pytest.mark.parametrize("start", [8, 9, 10, 11])
def test_a_verify_that_accepts_nothing_needs_one_row_more(start: int) -> None:
    rolled_back, plain = after_one_verify(RATIO + 4 - 1, start, drafts=3, accepted=0)
    assert torch.equal(rolled_back, plain)


@pytest.mark.parametrize(("ring_rows", "accepted"), [(RATIO + 4 - 3, 1), (RATIO + 4 - 2, 0)])
def test_a_smaller_ring_loses_a_key_at_some_position(ring_rows: int, accepted: int) -> None:
    """The bounds of the docstring are sharp; nothing less would show that the tests above can fail."""
    pairs = [after_one_verify(ring_rows, start, drafts=3, accepted=accepted) for start in (8, 9, 10, 11)]
    assert not all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("ring_rows", [6, 8])
def test_verify_after_verify_with_one_accepted_each_time(ring_rows: int) -> None:
    keys = raw_keys(48)
    indexer, plain = Indexer(ring_rows), Indexer(ring_rows)
    indexer.write(keys[:5], 5)
    for length in range(5, 40):
        window = keys[length : length + 4].clone()
        window[1:] = -1e3
        indexer.write(window, length + 4)
        plain.write(keys[: length + 1], length + 1)
        assert torch.equal(indexer.block_keys(length + 1), plain.block_keys(length + 1))


def test_block_key_is_pooled_then_normed_then_rotated_at_the_first_token() -> None:
    indexer = Indexer(4)
    keys = raw_keys(8)
    indexer.write(keys, 8)
    mean = keys[4:8].mean(dim=0)
    normed = mean * (mean.square().mean() + 1e-6).rsqrt() * (1 + WEIGHT)
    angle = 4 * INV_FREQ
    a, b = normed[:4], normed[4:8]
    rotated = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), normed[8:]])
    torch.testing.assert_close(indexer.block_keys(8)[1], rotated, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cut", range(1, 27))
def test_a_chunk_boundary_anywhere_changes_nothing(cut: int) -> None:
    keys = raw_keys(27)
    whole, parts = Indexer(8), Indexer(8)
    whole.write(keys, 27)
    parts.write(keys[:cut], cut)
    parts.write(keys[cut:], 27)
    assert torch.equal(parts.block_keys(27), whole.block_keys(27))
    assert torch.equal(parts.ring[1], whole.ring[1])
    assert torch.equal(whole.ring[1, [19 % 8, 26 % 8]], keys[[19, 26]])


def test_padding_slots_touch_neither_ring_nor_block_cache() -> None:
    """Five slots, indices [0, 3, −1, −1]; also in the middle and everywhere."""
    keys = raw_keys(16)
    for slots in ([0, 3, -1, -1], [-1, 0, -1, 3], [-1, -1, -1, -1]):
        ring, cache = torch.full((5, 4, DIM), 7.0), torch.full((4, BLOCKS, DIM), 7.0)
        index_cache_write(
            keys, ring, cache, torch.arange(4, dtype=torch.int32)[:, None], int32(*slots),
            int32(0, 4, 8, 12, 16), int32(4, 4, 4, 4), WEIGHT, INV_FREQ, ratio=RATIO, eps=1e-6, backend="torch",
        )  # fmt: skip
        for slot in range(5):
            written = keys[4 * slots.index(slot) :][:4] if slot in slots else torch.full((4, DIM), 7.0)
            assert torch.equal(ring[slot], written)
        for page, slot in enumerate(slots):
            assert bool((cache[page, 0] == 7.0).all()) == (slot == -1)
            assert bool((cache[page, 1] == 7.0).all())


def score(length: int, q: Tensor, cache: Tensor) -> Tensor:
    """Scores of the last tokens of one sequence, whose block keys lie in `cache` in order."""
    pages = torch.arange(len(cache), dtype=torch.int32)[None]
    return index_scores(
        q, cache, pages, int32(0, len(q)), int32(length), ratio=RATIO, max_blocks=len(cache) * BLOCKS, backend="torch"
    )


def test_scores_are_rectified_head_by_head_and_cover_complete_blocks() -> None:
    cache = torch.zeros(2, BLOCKS, 4)
    cache[0, 0], cache[0, 1], cache[1, 0] = torch.tensor([2.0, 0, 0, 0]), torch.tensor([-2.0, 0, 0, 0]), 1e9
    q = torch.tensor([[1.0, 0, 0, 0], [-3.0, 0, 0, 0], [5.0, 0, 0, 0]])[None]
    # (2 + 0 + 10) / √4 and (0 + 6 + 0) / √4; the third block lacks its last token.
    assert score(11, q, cache).tolist() == [[6.0, 3.0, -torch.inf, -torch.inf]]
    # The token that completes a block sees it, the one before does not.
    both = score(8, q.repeat(2, 1, 1), cache)
    assert both.isfinite().tolist() == [[True, False, False, False], [True, True, False, False]]


def test_topk_never_takes_a_hidden_block_and_fills_with_minus_one() -> None:
    hidden = -torch.inf
    scores = torch.tensor([[0.5, hidden, 2.0, 0.0], [hidden] * 4, [hidden, 0.0, 0.0, 0.0]])
    blocks = topk_blocks(scores, top_k=6, backend="torch").tolist()
    assert [sorted(row[:3]) for row in blocks] == [[0, 2, 3], [-1, -1, -1], [1, 2, 3]]
    assert all(row[3:] == [-1, -1, -1] for row in blocks)
    assert sorted(topk_blocks(scores, top_k=2, backend="torch").tolist()[0]) == [0, 2]


@pytest.mark.parametrize("width", [6, 7, 16, 64, 1000])
def test_topk_of_ties_does_not_depend_on_the_width_of_the_batch(width: int) -> None:
    scores = torch.full((1, width), -torch.inf)
    scores[0, :6] = torch.tensor([0.0, 1.6, 0.0, 2.6, -0.0, 0.5])
    alone = scores[:, :6].topk(4).indices.tolist()  # the choice of transformers
    assert topk_blocks(scores, top_k=4, backend="torch").tolist() == alone


def select(length: int, q: Tensor, cache: Tensor, top_k: int) -> Tensor:
    """Choices of the last tokens of one sequence, whose block keys lie in `cache` in order."""
    pages = torch.arange(len(cache), dtype=torch.int32)[None]
    return select_blocks(
        q, cache, pages, int32(0, len(q)), int32(length), ratio=RATIO, top_k=top_k, max_blocks=len(cache) * BLOCKS,
        backend="torch",
    )  # fmt: skip


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("top_k", [1, 5, 16, 40])
def test_selection_in_one_step_is_that_in_two(top_k: int, cache_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, cache = torch.randn(50, 4, DIM), torch.randn(8, BLOCKS, DIM).to(cache_dtype)
    cu_seqlens, seq_lens = int32(0, 20, 20, 50), int32(33, 9, 41)
    table = torch.tensor([[0, 5, 2, 7, 1, -1], [3, -1, -1, -1, -1, -1], [6, 4, 3, -1, 2, 0]], dtype=torch.int32)
    scores = index_scores(q, cache, table, cu_seqlens, seq_lens, ratio=RATIO, max_blocks=10, backend="torch")
    wanted = topk_blocks(scores, top_k=top_k, backend="torch")
    got = select_blocks(q, cache, table, cu_seqlens, seq_lens, ratio=RATIO, top_k=top_k, max_blocks=10, backend="torch")
    assert torch.equal(got, wanted)
    # Alone, with room for more blocks, a sequence chooses the same.
    alone = select_blocks(
        q[20:], cache, table[2:], int32(0, 30), int32(41), ratio=RATIO, top_k=top_k, max_blocks=99, backend="torch"
    )
    assert torch.equal(alone, got[20:])


def test_selection_keeps_complete_blocks_alone_and_fills_with_minus_one() -> None:
    cache = torch.tensor([[[1.0], [3.0]], [[2.0], [1e9]]])
    q = torch.ones(14, 1, 1)
    blocks = select(14, q, cache, top_k=2).tolist()
    # Positions 0 to 13: no block until position 3, then one, then the two best of two and of three.
    assert blocks == [[-1, -1]] * 3 + [[0, -1]] * 4 + [[1, 0]] * 4 + [[1, 2]] * 3


def test_scores_read_float8_block_keys_as_they_are() -> None:
    torch.manual_seed(0)
    q, cache = torch.randn(9, 4, DIM), torch.randn(4, BLOCKS, DIM).to(torch.float8_e4m3fn)
    torch.testing.assert_close(score(31, q, cache), score(31, q, cache.float()))
    torch.testing.assert_close(score(31, q.bfloat16(), cache), score(31, q.bfloat16().float(), cache.float()))


def test_block_keys_in_float8_are_the_rounded_ones() -> None:
    keys = raw_keys(27)
    plain, narrow = Indexer(8), Indexer(8)
    narrow.cache = narrow.cache.to(torch.float8_e4m3fn)
    for indexer in (plain, narrow):
        indexer.write(keys[:11], 11)
        indexer.write(keys[11:], 27)
    rounded = plain.block_keys(27).to(torch.float8_e4m3fn)
    assert torch.equal(narrow.block_keys(27).float(), rounded.float())
    assert torch.equal(narrow.ring[1], plain.ring[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_attention_over_float8_caches_multiplies_by_their_scales(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, table = torch.randn(3, 4, 8).to(dtype), int32(2, 0, 1)[None]
    k_scale, v_scale = torch.tensor([0.05]), torch.tensor([2.0])
    k, v = (torch.randn(3, PAGE, 2, 8).div(of).to(torch.float8_e4m3fn) for of in (k_scale, v_scale))
    blocks, more = int32(0, 2, 4, -1).repeat(3, 1), {"ratio": RATIO, "scale": 0.3, "backend": "torch"}
    got = sparse_attention(
        q,
        k,
        v,
        table,
        blocks,
        int32(0, 3),
        int32(22),
        k_scale=k_scale,
        v_scale=v_scale,
        **more,  # type: ignore[arg-type]
    )
    wide = k.float() * k_scale, v.float() * v_scale
    wanted = sparse_attention(q.float(), *wide, table, blocks, int32(0, 3), int32(22), **more)  # type: ignore[arg-type]
    torch.testing.assert_close(got[0].float(), wanted[0], atol=torch.finfo(dtype).eps, rtol=torch.finfo(dtype).eps)
    torch.testing.assert_close(got[1], wanted[1])


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of the last len(q) tokens over all keys [length, kv_heads, dim], in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    logits = scale * torch.einsum("qhd,khd->hqk", q.double(), k)
    seen = torch.ones(len(q), len(k)).tril(len(k) - len(q)).bool()
    logits = logits.masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1), v), logits.logsumexp(-1).T


def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The last len(q) tokens of one sequence, keys and values in pages of reversed order."""
    length = len(k)
    count = -(-length // PAGE)
    k_cache, v_cache = (torch.full((count, PAGE, *x.shape[1:]), torch.nan, dtype=x.dtype) for x in (k, v))
    for cache, x in ((k_cache, k), (v_cache, v)):
        cache.view(-1, *x.shape[1:])[:length] = x
        cache.copy_(cache.flip(0))
    table = torch.arange(count, dtype=torch.int32).flip(0)[None].contiguous()
    return sparse_attention(
        q, k_cache, v_cache, table, blocks, int32(0, len(q)), int32(length), ratio=RATIO, scale=scale, backend="torch"
    )


def all_blocks(tokens: int, length: int) -> Tensor:
    return torch.arange(max(length // RATIO, 1), dtype=torch.int32).flip(0).repeat(tokens, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 55, 56, 57, 192])
def test_all_blocks_chosen_is_dense_attention(dtype: torch.dtype, tokens: int, more: int) -> None:
    """Row i sees exactly kv − q + i + 1 keys: one key too many among the last ones would dominate."""
    length = tokens + more
    make = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(n, h, 8, generator=make).to(dtype) for n, h in ((tokens, 6), (length, 2), (length, 2)))
    k[-1] *= 30
    v[-1] = 1e4
    got, lse = attend(q, k, v, all_blocks(tokens, length), scale=0.3)
    wanted, wanted_lse = dense(q, k, v, 0.3)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), wanted, rtol=max(4 * unit, 1e-5), atol=max(2 * unit, 1e-5))
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [4, 5, 63, 64, 65, 200])
def test_four_tokens_at_once_equal_four_steps(length: int) -> None:
    make = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(n, h, 8, generator=make) for n, h in ((4, 4), (length, 2), (length, 2)))
    chosen = all_blocks(4, length)[:, ::2].contiguous()
    together, _ = attend(q, k, v, chosen, scale=0.3)
    for i in range(4):
        past = length - 3 + i
        alone, _ = attend(q[i : i + 1], k[:past], v[:past], chosen[i : i + 1], scale=0.3)
        torch.testing.assert_close(together[i], alone[0], rtol=1e-6, atol=1e-6)


def first_sparse_position(budget: int, length: int) -> int:
    """The first position whose attention to the `budget // RATIO` best blocks is not dense attention."""
    make = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(length, h, DIM, generator=make) for h in (2, 1, 1))
    cache = torch.randn(-(-length // PAGE), BLOCKS, DIM, generator=make)
    blocks = select(length, q, cache, budget // RATIO)
    got, _ = attend(q, k, v, blocks, scale=0.25)
    off = (got - dense(q, k, v, 0.25)[0]).abs().amax(dim=(1, 2)) > 1e-4
    return int(off.int().argmax())


def test_the_first_sparse_query_is_at_budget_plus_ratio_minus_one() -> None:
    assert first_sparse_position(budget=16, length=32) == 19
    assert first_sparse_position(budget=2048, length=2056) == 2051


def test_the_own_block_of_a_query_may_be_dropped_the_tail_never() -> None:
    q, k, v = torch.ones(2, 1, 8), torch.zeros(9, 1, 8), torch.arange(9.0)[:, None, None].expand(9, 1, 8).contiguous()
    got, lse = attend(q, k, v, torch.zeros(2, 1, dtype=torch.int32), scale=1.0)
    # Position 7 completes block 1, which was not chosen; position 8 is a tail of one.
    torch.testing.assert_close(got[:, 0, 0], torch.tensor([1.5, (0 + 1 + 2 + 3 + 8) / 5]))
    torch.testing.assert_close(lse[:, 0], torch.tensor([4.0, 5.0]).log())


def test_sequences_without_tokens_give_zeros_and_leave_their_neighbours_alone() -> None:
    """Decode with lengths [0, 5, 0, 64] into outputs full of NaN, caches full of NaN where nothing was written."""
    lengths = [0, 5, 0, 64]
    k, v = (torch.full((9, PAGE, 1, 8), torch.nan) for _ in "kv")
    table = torch.full((4, 8), -1, dtype=torch.int32)
    table[1, 0] = 8
    table[3] = torch.arange(8)
    for cache in (k, v):
        cache[8, :5] = torch.randn(5, 1, 8)
        cache[:8] = torch.randn(8, PAGE, 1, 8)
    q = torch.randn(4, 2, 8)
    blocks = all_blocks(4, 64)
    poisoned = torch.full((4, 2, 8), torch.nan), torch.full((4, 2), torch.nan)
    got, lse = sparse_attention(
        q, k, v, table, blocks, int32(0, 1, 2, 3, 4), int32(*lengths), ratio=RATIO, scale=0.5, out=poisoned,
        backend="torch",
    )  # fmt: skip
    assert bool((got[[0, 2]] == 0).all())
    assert bool((lse[[0, 2]] == -torch.inf).all())
    short, _ = dense(q[1:2], k[8, :5], v[8, :5], 0.5)
    long, _ = dense(q[3:4], k[:8].flatten(0, 1), v[:8].flatten(0, 1), 0.5)
    torch.testing.assert_close(got[[1, 3]].double(), torch.cat([short, long]), rtol=1e-5, atol=1e-5)
    scores = index_scores(
        q, torch.full((9, BLOCKS, 8), torch.nan), table, int32(0, 1, 2, 3, 4), int32(0, 3, 0, 2),
        ratio=RATIO, max_blocks=3, backend="torch",
    )  # fmt: skip
    assert bool((scores == -torch.inf).all())


@pytest.mark.parametrize("offsets", [(1, 2, 4), (0, 3, 2), (0, 2, 3)])
def test_bad_offsets_are_refused_by_name(offsets: tuple[int, ...]) -> None:
    with pytest.raises(ContentError, match="cu_seqlens"):
        index_scores(
            torch.zeros(4, 1, 8), torch.zeros(2, 2, 8), torch.zeros(2, 1, dtype=torch.int32), int32(*offsets),
            int32(4, 4), ratio=4, max_blocks=2,
        )  # fmt: skip


def test_out_of_range_pages_slots_and_lengths_are_refused_by_name() -> None:
    indexer = Indexer(8)
    with pytest.raises(ContentError, match="seq_lens"):
        indexer.write(raw_keys(4), 65)
    indexer.slots = int32(3)
    with pytest.raises(ContentError, match="slots"):
        indexer.write(raw_keys(4), 4)
    indexer.table[0, 0] = 8
    with pytest.raises(ContentError, match="page_table"):
        indexer.write(raw_keys(4), 4)


def test_a_ring_shorter_than_a_block_and_pages_that_cut_blocks_are_refused() -> None:
    with pytest.raises(ArgumentError, match="ring_rows >= ratio"):
        Indexer(3).write(raw_keys(4), 4)
    with pytest.raises(ArgumentError, match="page % ratio == 0"):
        sparse_attention(
            torch.zeros(1, 1, 8), torch.zeros(1, 6, 1, 8), torch.zeros(1, 6, 1, 8), int32(0)[None], int32(0)[None],
            int32(0, 1), int32(1), ratio=4, scale=1.0,
        )  # fmt: skip
    with pytest.raises(ArgumentError, match="top_k >= 1"):
        topk_blocks(torch.zeros(1, 4), top_k=0)
    with pytest.raises(ArgumentError, match="top_k >= 1"):
        select(4, torch.zeros(1, 1, 4), torch.zeros(1, BLOCKS, 4), top_k=0)
    with pytest.raises(ContentError, match="seq_lens"):
        select(9, torch.zeros(1, 1, 4), torch.zeros(1, BLOCKS, 4), top_k=1)
