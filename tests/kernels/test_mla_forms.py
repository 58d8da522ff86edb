"""Both forms of multi-head latent attention, from the same weights and cache, through the public API."""

import pytest
import torch
from torch import Tensor

from tokenspeed_kernels.mla import merge_states, mla_cache_write, mla_decode, mla_prefill
from tokenspeed_kernels.mla_forms import mla_absorb_query, mla_cache_read, mla_value_up
from tokenspeed_registry import ArgumentError, ContentError, ShapeError

NOPE, ROPE, LATENT, V_DIM, HEADS = 128, 64, 512, 128, 3
SCALE = (NOPE + ROPE) ** -0.5


def offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Layer:
    """Weights and a cache of 60 tokens of one sequence, and the queries of the last 4."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        kv_b = torch.randn(HEADS * (NOPE + V_DIM), LATENT) * LATENT**-0.5
        self.w_k, self.w_v = kv_b.view(HEADS, NOPE + V_DIM, LATENT).split_with_sizes([NOPE, V_DIM], dim=1)
        self.q_nope, self.q_rope = torch.randn(4, HEADS, NOPE + ROPE).split_with_sizes([NOPE, ROPE], dim=-1)
        self.cache, self.table = torch.full((5, 16, LATENT + ROPE), torch.nan), ints(3, 0, 4, 1)[None]
        position = torch.arange(60)
        slots = self.table[0].long()[position // 16] * 16 + position % 16
        mla_cache_write(torch.randn(60, LATENT), torch.randn(60, ROPE), slots, self.cache, backend="torch")

    def expand(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of every head of cached rows."""
        latent, k_rope = rows.split_with_sizes([LATENT, ROPE], dim=-1)
        k_nope = torch.einsum("tr,hnr->thn", latent, self.w_k)
        k = torch.cat((k_nope, k_rope[:, None].expand(-1, HEADS, -1)), dim=-1)
        return k, torch.einsum("tr,hvr->thv", latent, self.w_v)

    def prefill(self, first: int, end: int, *, causal: bool) -> tuple[Tensor, Tensor]:
        """The expanded form over the cached tokens `first` to `end`."""
        rows = mla_cache_read(
            self.cache, self.table, offsets(end - first), ints(first), rows=end - first, dtype=torch.float32,
            backend="torch",
        )  # fmt: skip
        k, v = self.expand(rows)
        q = torch.cat((self.q_nope, self.q_rope), dim=-1)
        return mla_prefill(q, k, v, offsets(4), offsets(end - first), scale=SCALE, causal=causal, backend="torch")


def test_absorbed_decode_equals_expanded_prefill() -> None:
    layer = Layer()
    expanded, lse = layer.prefill(0, 60, causal=True)
    q = mla_absorb_query(layer.q_nope, layer.q_rope, layer.w_k, backend="torch")
    latents, absorbed_lse = mla_decode(
        q[None], layer.cache, layer.table, ints(60), latent=LATENT, scale=SCALE, backend="torch"
    )
    absorbed = mla_value_up(latents[0], layer.w_v, backend="torch")
    torch.testing.assert_close(absorbed, expanded, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(absorbed_lse[0], lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cuts", [[56], [16, 56], [1, 17, 40, 56]])
def test_a_prefix_expanded_in_parts_and_merged_equals_one_call(cuts: list[int]) -> None:
    layer = Layer()
    whole = layer.prefill(0, 60, causal=True)
    merged = layer.prefill(56, 60, causal=True)
    for first, end in zip([0, *cuts], cuts, strict=False):
        merged = merge_states(*merged, *layer.prefill(first, end, causal=False), backend="torch")
    torch.testing.assert_close(merged, whole, atol=1e-5, rtol=1e-5)


def test_absorbed_queries_are_the_transposed_keys_weight_beside_the_rotated_part() -> None:
    q_nope, q_rope = torch.tensor([[[1.0, 10.0], [2.0, 0.0]]]), torch.tensor([[[7.0], [8.0]]])
    w_k = torch.tensor([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[0.5, 0.0, 1.0], [9.0, 9.0, 9.0]]])
    q = mla_absorb_query(q_nope, q_rope, w_k, backend="torch")
    assert q.tolist() == [[[41.0, 52.0, 63.0, 7.0], [1.0, 0.0, 2.0, 8.0]]]
    assert q.is_contiguous()


def test_value_up_keeps_heads_apart() -> None:
    latents = torch.tensor([[[1.0, 10.0], [2.0, 3.0]]])
    w_v = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]])
    values = mla_value_up(latents, w_v, backend="torch")
    assert values.tolist() == [[[21.0, 43.0, 65.0], [2.0, 3.0, 5.0]]]
    assert values.is_contiguous()


def test_cached_rows_come_packed_from_any_position() -> None:
    cache = torch.arange(5 * 4, dtype=torch.float32).view(5, 4, 1)  # a row's number is its slot
    table = ints(3, 0, -1, 2, 4, 1).view(2, 3)
    rows = mla_cache_read(cache, table, ints(0, 5, 7), ints(2, 4), rows=7, dtype=torch.bfloat16, backend="torch")
    assert rows.flatten().tolist() == [14, 15, 0, 1, 2, 16, 17]
    assert rows.dtype == torch.bfloat16
    without = mla_cache_read(cache, table, ints(0, 1, 3), rows=3, dtype=torch.float32, backend="torch")
    assert without.flatten().tolist() == [12, 8, 9]
    missing = mla_cache_read(cache, table, ints(0, 2, 2), ints(7, 0), rows=2, dtype=torch.float32, backend="torch")
    assert missing.flatten().tolist() == [3, 0]


def test_reads_past_the_table_or_of_another_number_of_rows_are_rejected() -> None:
    cache, table = torch.zeros(2, 4, 8), ints(1, 0)[None]
    with pytest.raises(ContentError, match=r"cu_seqlens.*rows=8"):
        mla_cache_read(cache, table, ints(0, 7), rows=8, dtype=torch.float32)
    with pytest.raises(ContentError, match=r"cu_seqlens.*max_pages\*page=8"):
        mla_cache_read(cache, table, ints(0, 9), rows=9, dtype=torch.float32)
    with pytest.raises(ContentError, match="first"):
        mla_cache_read(cache, table, ints(0, 1), ints(9), rows=1, dtype=torch.float32)
    with pytest.raises(ArgumentError, match="page_table"):
        mla_cache_read(cache, table + 1, ints(0, 1), rows=1, dtype=torch.float32)


def test_weights_of_other_heads_or_widths_are_rejected() -> None:
    q_nope, q_rope = torch.zeros(1, 2, 4), torch.zeros(1, 2, 1)
    with pytest.raises(ShapeError, match="w_k"):
        mla_absorb_query(q_nope, q_rope, torch.zeros(3, 4, 8))
    with pytest.raises(ShapeError, match="q_rope"):
        mla_absorb_query(q_nope, q_rope[:, :1].contiguous(), torch.zeros(2, 4, 8))
    with pytest.raises(ShapeError, match="w_v"):
        mla_value_up(torch.zeros(1, 2, 8), torch.zeros(2, 3, 7))
