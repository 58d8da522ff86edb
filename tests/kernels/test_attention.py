"""Dense paged attention through the public API, on the plain-torch kernels."""

import math

import pytest
import torch
from torch import Tensor

from tokenspeed_kernels.attention import kv_cache_write, paged_attention
from tokenspeed_registry import ContentError, DtypeError, ShapeError


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attend(
    q: Tensor, caches: tuple[Tensor, Tensor], table: Tensor, new: list[int], seq_lens: list[int], **kwargs: object
) -> tuple[Tensor, Tensor]:
    options: dict[str, object] = {"scale": 0.25, "max_q_len": max(new), "backend": "torch"} | kwargs
    cu = torch.tensor([0, *new]).cumsum(0, dtype=torch.int32)
    return paged_attention(q, *caches, table, cu, ints(*seq_lens), **options)  # type: ignore[arg-type]


def test_padding_sequences_give_zeros_into_poisoned_outputs() -> None:
    torch.manual_seed(0)
    caches = torch.full((4, 64, 2, 16), torch.nan), torch.full((4, 64, 2, 16), torch.nan)
    for cache in caches:
        cache[2, :5], cache[1] = torch.randn(5, 2, 16), torch.randn(64, 2, 16)
    table, q = ints(-1, 2, -1, 1)[:, None], torch.randn(4, 4, 16)
    out = torch.full((4, 4, 16), torch.nan), torch.full((4, 4), torch.nan)
    attend(q, caches, table.contiguous(), [1, 1, 1, 1], [0, 5, 0, 64], out=out)
    assert (out[0][[0, 2]] == 0).all()
    assert (out[1][[0, 2]] == -torch.inf).all()
    for row, length in ((1, 5), (3, 64)):
        alone, alone_lse = attend(q[row : row + 1], caches, table[row : row + 1].contiguous(), [1], [length])
        torch.testing.assert_close(out[0][row], alone[0])
        torch.testing.assert_close(out[1][row], alone_lse[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("q_len", [1, 2, 4, 8])
def test_each_verify_row_sees_the_tokens_up_to_its_own(q_len: int, dtype: torch.dtype) -> None:
    for length in (q_len, q_len + 1, 63, 64, 65, 200):
        # Scores are all zero, so that a row's output is the mean of what it sees; the last values are huge.
        keys, values = torch.ones(4, 64, 1, 8, dtype=dtype), torch.ones(4, 64, 1, 8, dtype=dtype)
        table = ints(3, 1, 0, 2)[None]
        for position in range(length - q_len + 1, length):
            values[int(table[0, position // 64]), position % 64] = 1000.0
        q = torch.zeros(q_len, 2, 8, dtype=dtype)
        attended, lse = attend(q, (keys, values), table, [q_len], [length])
        for row in range(q_len):
            visible = length - q_len + row + 1
            mean = (visible - row + 1000.0 * row) / visible
            torch.testing.assert_close(attended[row], torch.full((2, 8), mean, dtype=dtype))
            torch.testing.assert_close(lse[row], torch.full((2,), math.log(visible)))


def test_a_verify_call_equals_single_steps() -> None:
    torch.manual_seed(0)
    caches = torch.randn(4, 64, 2, 16), torch.randn(4, 64, 2, 16)
    table, q = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32), torch.randn(8, 4, 16)
    together, together_lse = attend(q, caches, table, [4, 4], [70, 66])
    for row in range(4):
        rows = [row, 4 + row]
        single, single_lse = attend(q[rows], caches, table, [1, 1], [70 - 3 + row, 66 - 3 + row])
        torch.testing.assert_close(single, together[rows])
        torch.testing.assert_close(single_lse, together_lse[rows])


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 2), (4, 2), (12, 1), (16, 2), (24, 2), (64, 8), (128, 2)])
def test_query_heads_share_key_heads_in_order(heads: int, kv_heads: int) -> None:
    # Every value is the number of its head.
    keys = torch.zeros(1, 16, kv_heads, 4)
    values = torch.arange(kv_heads, dtype=torch.float32)[:, None].expand(1, 16, kv_heads, 4).contiguous()
    attended, _ = attend(torch.zeros(3, heads, 4), (keys, values), ints(0)[None], [3], [9])
    wanted = torch.tensor([head // (heads // kv_heads) for head in range(heads)], dtype=torch.float32)
    torch.testing.assert_close(attended, wanted[:, None].expand(3, heads, 4))


def test_prefill_in_chunks_equals_one_call() -> None:
    torch.manual_seed(0)
    caches = torch.randn(12, 16, 2, 8), torch.randn(12, 16, 2, 8)
    table, q = torch.randperm(12).int()[None], torch.randn(150, 4, 8)
    whole, whole_lse = attend(q, caches, table, [150], [150])
    for start, end in ((0, 1), (1, 128), (128, 150)):
        part, part_lse = attend(q[start:end], caches, table, [end - start], [end])
        torch.testing.assert_close(part, whole[start:end])
        torch.testing.assert_close(part_lse, whole_lse[start:end])


def test_caches_past_4_gib_are_written_and_read_like_their_first_pages() -> None:
    torch.manual_seed(0)
    far = [65_539, 65_537]
    # Untouched memory of the caches is never backed by the system. A page is 64 KiB.
    far_k, far_v = (torch.empty(65_540, 64, 2, 256, dtype=torch.bfloat16) for _ in "kv")
    near_k, near_v = (torch.empty(2, 64, 2, 256, dtype=torch.bfloat16) for _ in "kv")
    k, v = torch.randn(70, 2, 256).bfloat16(), torch.randn(70, 2, 256).bfloat16()
    position = torch.arange(70)
    kv_cache_write(k, v, torch.tensor(far)[position // 64] * 64 + position % 64, far_k, far_v, backend="torch")
    kv_cache_write(k, v, position, near_k, near_v, backend="torch")
    assert torch.equal(far_v[far[1], :6], near_v[1, :6])
    q = torch.randn(3, 4, 256).bfloat16()
    got = attend(q, (far_k, far_v), ints(*far)[None], [3], [70])
    wanted = attend(q, (near_k, near_v), ints(0, 1)[None], [3], [70])
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])


def test_cache_write_stores_tokens_at_their_slots_and_skips_padding() -> None:
    caches = torch.zeros(3, 2, 1, 2), torch.zeros(3, 2, 1, 2)
    k = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]]])
    kv_cache_write(k, k * 10, torch.tensor([-1, 5, 2]), *caches, backend="torch")
    wanted = torch.zeros(3, 2, 1, 2)
    wanted[2, 1, 0], wanted[1, 0, 0] = torch.tensor([3.0, 4.0]), torch.tensor([5.0, 6.0])
    assert torch.equal(caches[0], wanted)
    assert torch.equal(caches[1], wanted * 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_caches_stand_for_their_scaled_values(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    k_scale, v_scale = torch.tensor([0.05]), torch.tensor([2.0])
    k, v = (torch.randn(4, 16, 2, 8).div(of).to(torch.float8_e4m3fn) for of in (k_scale, v_scale))
    table, q = ints(3, 1, 0, 2).view(2, 2), torch.randn(5, 4, 8).to(dtype)
    got = attend(q, (k, v), table, [2, 3], [20, 31], k_scale=k_scale, v_scale=v_scale)
    wanted = attend(q.float(), (k.float() * k_scale, v.float() * v_scale), table, [2, 3], [20, 31])
    torch.testing.assert_close(got[0].float(), wanted[0], atol=torch.finfo(dtype).eps, rtol=torch.finfo(dtype).eps)
    torch.testing.assert_close(got[1], wanted[1])
    plain = attend(q.float(), (k, v), table, [2, 3], [20, 31])
    torch.testing.assert_close(plain, attend(q.float(), (k.float(), v.float()), table, [2, 3], [20, 31]))


def test_fp8_cache_writes_divide_each_by_its_scale_saturate_and_keep_nan() -> None:
    caches = torch.zeros(2, 2, 1, 4, dtype=torch.float8_e4m3fn), torch.zeros(2, 2, 1, 4, dtype=torch.float8_e4m3fn)
    x = torch.tensor([[[1.0, 1000.0, -math.inf, math.nan]], [[9.0, 9.0, 9.0, 9.0]]])
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([4.0])}
    kv_cache_write(x, x, torch.tensor([2, -1]), *caches, **scales, backend="torch")
    wanted = [torch.tensor([2.0, 448.0, -448.0, math.nan]), torch.tensor([0.25, 256.0, -448.0, math.nan])]
    for cache, row in zip(caches, wanted, strict=True):
        torch.testing.assert_close(cache[1, 0, 0].float(), row, rtol=0, atol=0, equal_nan=True)
        assert (cache.float()[[0, 0, 1], [0, 1, 1]] == 0).all()


def test_caches_of_two_dtypes_and_bad_scales_are_rejected_by_name() -> None:
    q, k, v = torch.zeros(1, 1, 8), torch.zeros(2, 4, 1, 8, dtype=torch.float8_e4m3fn), torch.zeros(2, 4, 1, 8)
    with pytest.raises(DtypeError, match="v_cache"):
        attend(q, (k, v), ints(0)[None], [1], [1])
    with pytest.raises(ShapeError, match="v_scale"):
        attend(q, (v, v), ints(0)[None], [1], [1], v_scale=torch.ones(2))
    with pytest.raises(DtypeError, match="k_scale"):
        kv_cache_write(q, q, torch.tensor([0]), v, v.clone(), k_scale=torch.ones(1).half())


def test_bad_index_tensors_are_rejected_by_name() -> None:
    q, cache = torch.zeros(3, 1, 8), torch.zeros(2, 4, 1, 8)
    good = {"page_table": ints(1, 0)[None], "cu_seqlens_q": ints(0, 3), "seq_lens": ints(8)}
    bad = {
        "page_table": [ints(2, 0)[None], ints(0, -2)[None]],
        "cu_seqlens_q": [ints(1, 3), ints(0, 2)],
        "seq_lens": [ints(9), ints(-1)],
    }
    for argument, values in bad.items():
        for value in values:
            with pytest.raises(ContentError, match=argument):
                paged_attention(q, cache, cache, *(good | {argument: value}).values(), scale=1.0, max_q_len=3)
    with pytest.raises(ContentError, match="max_q_len=2"):
        paged_attention(q, cache, cache, *good.values(), scale=1.0, max_q_len=2)
    with pytest.raises(ContentError, match="slot_mapping"):
        kv_cache_write(q, q, torch.tensor([0, 1, 8]), cache, cache.clone())


def test_heads_that_no_group_divides_are_rejected() -> None:
    cache = torch.zeros(2, 4, 2, 8)
    with pytest.raises(ShapeError, match="heads % kv_heads == 0"):
        paged_attention(torch.zeros(1, 3, 8), cache, cache, ints(0)[None], ints(0, 1), ints(1), scale=1.0, max_q_len=1)
