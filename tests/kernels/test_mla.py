"""Multi-head latent attention through the public API, on the plain-torch kernels."""

import math

import pytest
import torch
from torch import Tensor

from tokenspeed_kernels.mla import merge_states, mla_cache_write, mla_decode, mla_prefill
from tokenspeed_kernels.mla_forms import mla_cache_read
from tokenspeed_registry import ContentError, DtypeError, ShapeError

LATENT, ROPE = 512, 64
ROW = LATENT + ROPE


def decode(q: Tensor, cache: Tensor, table: Tensor, seq_lens: list[int], **kwargs: object) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    options: dict[str, object] = {"latent": cache.shape[-1] - ROPE, "scale": 192**-0.5, "backend": "torch"} | kwargs
    return mla_decode(q, cache, table, lengths, **options)  # type: ignore[arg-type]


def offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def test_merge_weighs_by_exponential_sums() -> None:
    a, b = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 1.0]]])
    merged, lse = merge_states(a, torch.tensor([[math.log(2.0)]]), b, torch.tensor([[math.log(8.0)]]), backend="torch")
    torch.testing.assert_close(merged, torch.tensor([[[0.2, 0.8]]]))
    torch.testing.assert_close(lse, torch.tensor([[math.log(10.0)]]))


@pytest.mark.parametrize("splits", [[24], [9, 15], [1, 15, 8]])
def test_merged_splits_of_the_keys_equal_no_split(splits: list[int]) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 24), torch.randn(24, 2, 24), torch.randn(24, 2, 16)
    whole = mla_prefill(q, k, v, offsets(3), offsets(24), scale=0.2, causal=False, backend="torch")
    merged: tuple[Tensor, Tensor] | None = None
    for keys, values in zip(torch.split(k, splits), torch.split(v, splits), strict=True):
        part = mla_prefill(
            q, keys, values, offsets(3), offsets(keys.shape[0]), scale=0.2, causal=False, backend="torch"
        )
        merged = part if merged is None else merge_states(*merged, *part, backend="torch")
    torch.testing.assert_close(merged, whole)


def test_rows_without_a_prefix_are_zero_and_merge_to_the_other_side() -> None:
    torch.manual_seed(0)
    prefixes, chunk = [0, 3, 17], 8
    q = torch.randn(3 * chunk, 2, 24)
    k, v = torch.randn(sum(prefixes), 2, 24), torch.randn(sum(prefixes), 2, 16)
    cu_q = offsets(chunk, chunk, chunk)
    prefix, prefix_lse = mla_prefill(q, k, v, cu_q, offsets(*prefixes), scale=0.2, causal=False, backend="torch")
    assert (prefix[:chunk] == 0).all()
    assert (prefix_lse[:chunk] == -torch.inf).all()
    assert prefix_lse[chunk:].isfinite().all()
    own, own_lse = mla_prefill(
        q, torch.randn(24, 2, 24), torch.randn(24, 2, 16), cu_q, cu_q, scale=0.2, backend="torch"
    )
    for sides in ((prefix, prefix_lse, own, own_lse), (own, own_lse, prefix, prefix_lse)):
        merged, merged_lse = merge_states(*sides, backend="torch")
        assert torch.equal(merged[:chunk], own[:chunk])
        assert torch.equal(merged_lse[:chunk], own_lse[:chunk])


def test_chunked_prefill_over_a_cached_prefix_equals_one_call() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(20, 2, 24), torch.randn(20, 2, 24), torch.randn(20, 2, 16)
    whole, whole_lse = mla_prefill(q, k, v, offsets(20), offsets(20), scale=0.2, backend="torch")
    last, last_lse = mla_prefill(q[13:], k, v, offsets(7), offsets(20), scale=0.2, backend="torch")
    torch.testing.assert_close(last, whole[13:])
    torch.testing.assert_close(last_lse, whole_lse[13:])


def test_padding_sequences_give_zeros_into_poisoned_outputs() -> None:
    torch.manual_seed(0)
    cache = torch.full((4, 64, ROW), torch.nan)
    cache[2, :5], cache[1] = torch.randn(5, ROW), torch.randn(64, ROW)
    table = torch.tensor([[-1], [2], [-1], [1]], dtype=torch.int32)
    q = torch.randn(4, 1, 16, ROW)
    out = torch.full((4, 1, 16, LATENT), torch.nan), torch.full((4, 1, 16), torch.nan)
    decode(q, cache, table, [0, 5, 0, 64], out=out)
    assert (out[0][[0, 2]] == 0).all()
    assert (out[1][[0, 2]] == -torch.inf).all()
    for row, length in ((1, 5), (3, 64)):
        alone, alone_lse = decode(q[row : row + 1], cache, table[row : row + 1], [length])
        torch.testing.assert_close(out[0][row], alone[0])
        torch.testing.assert_close(out[1][row], alone_lse[0])
        assert alone.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("q_len", [1, 2, 4, 8])
def test_each_verify_row_sees_the_tokens_up_to_its_own(q_len: int, dtype: torch.dtype) -> None:
    for length in (q_len, q_len + 1, 63, 64, 65, 200):
        # Scores are all zero, so that a row's output is the mean of what it sees; the last tokens are huge.
        cache = torch.ones(4, 64, 8 + ROPE, dtype=dtype)
        table = torch.tensor([[3, 1, 0, 2]], dtype=torch.int32)
        for position in range(length - q_len + 1, length):
            cache[int(table[0, position // 64]), position % 64, :8] = 1000.0
        q = torch.zeros(1, q_len, 2, 8 + ROPE, dtype=dtype)
        attended, lse = decode(q, cache, table, [length])
        for row in range(q_len):
            visible = length - q_len + row + 1
            mean = (visible - row + 1000.0 * row) / visible
            torch.testing.assert_close(attended[0, row], torch.full((2, 8), mean, dtype=dtype))
            torch.testing.assert_close(lse[0, row], torch.full((2,), math.log(visible)))


def test_a_verify_call_equals_single_steps() -> None:
    torch.manual_seed(0)
    cache, table = torch.randn(4, 64, ROW), torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    q = torch.randn(2, 4, 3, ROW)
    together = decode(q, cache, table, [70, 66])
    for row in range(4):
        single = decode(q[:, row : row + 1].contiguous(), cache, table, [70 - 3 + row, 66 - 3 + row])
        torch.testing.assert_close(single[0][:, 0], together[0][:, row])
        torch.testing.assert_close(single[1][:, 0], together[1][:, row])


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 12, 16, 24, 64, 128])
def test_any_number_of_heads_equals_heads_one_by_one(heads: int) -> None:
    torch.manual_seed(0)
    cache, table = torch.randn(2, 16, 32 + ROPE), torch.tensor([[1, 0]], dtype=torch.int32)
    q = torch.randn(1, 2, heads, 32 + ROPE)
    together, _ = decode(q, cache, table, [19])
    for head in range(heads):
        alone, _ = decode(q[:, :, head : head + 1].contiguous(), cache, table, [19])
        torch.testing.assert_close(alone[:, :, 0], together[:, :, head])


def test_absorbed_attention_equals_expanded() -> None:
    """The scale is that of the expanded width, 128 + 64, on both sides."""
    torch.manual_seed(0)
    heads, tokens, nope, v_dim = 3, 21, 128, 128
    w_k, w_v = torch.randn(heads, nope, LATENT) * LATENT**-0.5, torch.randn(heads, v_dim, LATENT) * LATENT**-0.5
    latent, k_rope = torch.randn(tokens, LATENT), torch.randn(tokens, ROPE)
    q_nope, q_rope = torch.randn(tokens, heads, nope), torch.randn(tokens, heads, ROPE)
    k = torch.cat((torch.einsum("tr,hnr->thn", latent, w_k), k_rope[:, None].expand(-1, heads, -1)), dim=-1)
    v = torch.einsum("tr,hvr->thv", latent, w_v)
    cu = offsets(tokens)
    expanded, lse = mla_prefill(torch.cat((q_nope, q_rope), dim=-1), k, v, cu, cu, scale=192**-0.5, backend="torch")

    cache = torch.zeros(2, 16, ROW)
    mla_cache_write(latent, k_rope, torch.arange(tokens), cache, backend="torch")
    absorbed = torch.cat((torch.einsum("thn,hnr->thr", q_nope, w_k), q_rope), dim=-1)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    latents, absorbed_lse = decode(absorbed[None, -4:].contiguous(), cache, table, [tokens])
    torch.testing.assert_close(torch.einsum("qhr,hvr->qhv", latents[0], w_v), expanded[-4:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(absorbed_lse[0], lse[-4:], atol=1e-5, rtol=1e-5)


def test_a_cache_past_4_gib_is_written_and_read_like_its_first_pages() -> None:
    torch.manual_seed(0)
    far = [58_257, 58_250, 58_259]
    # Untouched memory of the cache is never backed by the system.
    cache = torch.empty(58_260, 64, ROW, dtype=torch.bfloat16)
    near = torch.empty(3, 64, ROW, dtype=torch.bfloat16)
    latent, k_rope = torch.randn(130, LATENT).bfloat16(), torch.randn(130, ROPE).bfloat16()
    position = torch.arange(130)
    slots = torch.tensor(far)[position // 64] * 64 + position % 64
    mla_cache_write(latent, k_rope, slots, cache, backend="torch")
    mla_cache_write(latent, k_rope, position, near, backend="torch")
    assert torch.equal(cache[far[2], :2], near[2, :2])
    q = torch.randn(1, 2, 4, ROW).bfloat16()
    got = decode(q, cache, torch.tensor([far], dtype=torch.int32), [130])
    wanted = decode(q, near, torch.tensor([[0, 1, 2]], dtype=torch.int32), [130])
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])
    rows = mla_cache_read(
        cache, torch.tensor([far], dtype=torch.int32), offsets(130), rows=130, dtype=torch.bfloat16, backend="torch"
    )
    assert torch.equal(rows, torch.cat((latent, k_rope), dim=-1))


def test_fp8_cache_saturates_rounds_to_even_and_keeps_nan() -> None:
    inputs_and_stored = [
        *[(1.0, 2.0), (224.0, 448.0), (300.0, 448.0), (-1e6, -448.0), (math.inf, 448.0), (math.nan, math.nan)],
        # Halfway between neighbours, which are 2 apart from 16 to 32; and among the subnormal ones, 2^-9 apart.
        *[(17 / 2, 16.0), (19 / 2, 20.0), (21 / 2, 20.0), (2.0**-11, 0.0), (3 * 2.0**-11, 2.0**-8)],
    ]
    given, stored = (torch.tensor(side) for side in zip(*inputs_and_stored, strict=True))
    for dtype in (torch.float32, torch.bfloat16):
        cache = torch.zeros(1, 2, len(given) + 1, dtype=torch.float8_e4m3fn)
        mla_cache_write(
            given[None].to(dtype), torch.ones(1, 1, dtype=dtype), torch.tensor([1]), cache,
            kv_scale=torch.tensor([0.5]), backend="torch",
        )  # fmt: skip
        torch.testing.assert_close(cache[0, 1, :-1].float(), stored, rtol=0, atol=0, equal_nan=True)
        assert cache[0, 1, -1].item() == 2.0, "the rotated key has the scale of the latent"
        assert (cache[0, 0].float() == 0).all()


@pytest.mark.parametrize("scale", [None, 0.03, 2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_fp8_cache_stands_for_its_scaled_values(scale: float | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kv_scale = None if scale is None else torch.tensor([scale])
    stored = torch.randn(4, 16, 32 + ROPE).div(scale or 1.0).to(torch.float8_e4m3fn)
    wide = stored.float() * (scale or 1.0)
    table, q = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32), torch.randn(2, 4, 3, 32 + ROPE).to(dtype)
    got = decode(q, stored, table, [19, 32], latent=32, kv_scale=kv_scale)
    wanted = decode(q.float(), wide, table, [19, 32], latent=32)
    torch.testing.assert_close(got[0].float(), wanted[0], atol=torch.finfo(dtype).eps, rtol=torch.finfo(dtype).eps)
    torch.testing.assert_close(got[1], wanted[1])
    rows = mla_cache_read(
        stored, table, offsets(19, 32), rows=51, dtype=torch.float32, kv_scale=kv_scale, backend="torch"
    )
    torch.testing.assert_close(rows, torch.cat((wide[[2, 0]].flatten(0, 1)[:19], wide[[3, 1]].flatten(0, 1))))


def test_what_is_written_at_a_scale_is_read_at_it() -> None:
    torch.manual_seed(0)
    latent, k_rope, kv_scale = torch.randn(40, 32), torch.randn(40, ROPE), torch.tensor([4.0 / 448])
    fp8, wide = torch.zeros(3, 16, 32 + ROPE, dtype=torch.float8_e4m3fn), torch.zeros(3, 16, 32 + ROPE)
    mla_cache_write(latent, k_rope, torch.arange(40), fp8, kv_scale=kv_scale, backend="torch")
    mla_cache_write(latent, k_rope, torch.arange(40), wide, backend="torch")
    q, table = torch.randn(1, 2, 3, 32 + ROPE), torch.tensor([[0, 1, 2]], dtype=torch.int32)
    got, _ = decode(q, fp8, table, [40], latent=32, kv_scale=kv_scale)
    wanted, _ = decode(q, wide, table, [40], latent=32)
    # A stored number is off by 1/16 of itself at most, and the sums average over these errors.
    torch.testing.assert_close(got, wanted, atol=0.08, rtol=0.0)


def test_bad_scales_are_rejected_by_name() -> None:
    cache, q = torch.zeros(2, 4, 8, dtype=torch.float8_e4m3fn), torch.zeros(1, 1, 1, 8)
    table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([8], dtype=torch.int32)
    with pytest.raises(ShapeError, match="kv_scale"):
        mla_decode(q, cache, table, lengths, latent=4, scale=1.0, kv_scale=torch.ones(2))
    with pytest.raises(DtypeError, match="kv_scale"):
        mla_cache_write(torch.zeros(1, 6), torch.zeros(1, 2), torch.tensor([0]), cache, kv_scale=torch.ones(1).double())
    with pytest.raises(DtypeError, match="kv_cache"):
        mla_decode(q, cache.to(torch.float8_e5m2), table, lengths, latent=4, scale=1.0)


def test_cache_write_puts_the_latent_before_the_rotary_key_and_skips_padding() -> None:
    cache = torch.zeros(3, 2, 3)
    latent, k_rope = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([[10.0], [20.0], [30.0]])
    mla_cache_write(latent, k_rope, torch.tensor([3, -1, 4]), cache, backend="torch")
    wanted = torch.zeros(3, 2, 3)
    wanted[1, 1], wanted[2, 0] = torch.tensor([1.0, 2.0, 10.0]), torch.tensor([5.0, 6.0, 30.0])
    assert torch.equal(cache, wanted)


def test_a_write_of_padding_alone_changes_nothing() -> None:
    cache = torch.full((2, 2, 3), torch.nan)
    mla_cache_write(torch.ones(2, 2), torch.ones(2, 1), torch.tensor([-1, -1]), cache, backend="torch")
    assert cache.isnan().all()


@pytest.mark.parametrize("bad", [[1, 3], [0, 4, 2, 3], [0, 2]])
@pytest.mark.parametrize("argument", ["cu_seqlens_q", "cu_seqlens_k"])
def test_bad_offsets_are_rejected_by_name(argument: str, bad: list[int]) -> None:
    x = torch.zeros(3, 1, 8)
    good = [0, *[3] * (len(bad) - 1)]
    cu = {"cu_seqlens_q": good, "cu_seqlens_k": good} | {argument: bad}
    with pytest.raises(ContentError, match=argument):
        mla_prefill(x, x, x, *(torch.tensor(o, dtype=torch.int32) for o in cu.values()), scale=1.0)


def test_bad_pages_lengths_and_slots_are_rejected_by_name() -> None:
    cache, q = torch.zeros(2, 4, 8), torch.zeros(1, 1, 1, 8)
    table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([8], dtype=torch.int32)
    with pytest.raises(ContentError, match="page_table"):
        mla_decode(q, cache, table + 1, lengths, latent=4, scale=1.0)
    with pytest.raises(ContentError, match="seq_lens"):
        mla_decode(q, cache, table, lengths + 1, latent=4, scale=1.0)
    with pytest.raises(ContentError, match="slot_mapping"):
        mla_cache_write(torch.zeros(1, 6), torch.zeros(1, 2), torch.tensor([8]), cache)


def test_widths_that_do_not_fit_are_rejected() -> None:
    cache, q = torch.zeros(2, 4, 8), torch.zeros(1, 1, 1, 8)
    table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([8], dtype=torch.int32)
    with pytest.raises(ShapeError, match="latent <= qk"):
        mla_decode(q, cache, table, lengths, latent=9, scale=1.0)
    with pytest.raises(ShapeError, match="latent"):
        mla_cache_write(torch.zeros(1, 6), torch.zeros(1, 1), torch.tensor([0]), cache)
