"""Mixture of experts: routing as the model families define it, experts that are elsewhere, gated products."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed_kernels.moe import moe_experts, moe_route, sigmoid_mul, silu_mul
from tokenspeed_registry import ArgumentError, ContentError


def layer(experts: int = 6, hidden: int = 16, inter: int = 8) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    return (
        torch.randn(experts, 2 * inter, hidden, generator=make) / 4,
        torch.randn(experts, hidden, inter, generator=make) / 4,
    )


def int32(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_routing_is_a_softmax_over_all_experts_renormalised_over_the_chosen() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    weights, experts = moe_route(logits, top_k=2, backend="torch")
    assert experts.tolist() == [[3, 2]]
    torch.testing.assert_close(weights, torch.tensor([[4 / 7, 3 / 7]]))
    weights, _ = moe_route(logits, top_k=2, renormalise=False, backend="torch")
    torch.testing.assert_close(weights, torch.tensor([[0.4, 0.3]]))


def test_ten_of_512_experts_on_bfloat16_logits_have_float32_weights_of_sum_one() -> None:
    logits = torch.randn(7, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights, experts = moe_route(logits, top_k=10, backend="torch")
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(7))
    probabilities = logits.float().softmax(dim=-1).gather(1, experts.long())
    torch.testing.assert_close(weights, probabilities / probabilities.sum(dim=-1, keepdim=True))
    assert [len(set(row)) for row in experts.tolist()] == [10] * 7


def test_large_logits_do_not_overflow() -> None:
    weights, experts = moe_route(torch.tensor([[3e4, 0.0, 3e4 - 1]]).bfloat16().float(), top_k=3, backend="torch")
    assert bool(weights.isfinite().all())
    assert sorted(experts[0].tolist()) == [0, 1, 2]


def test_the_gate_comes_first_and_the_weight_last() -> None:
    """One expert, one hidden value: gate row 2, up row 3, down 5, weight 0.5."""
    gate_up, down = torch.tensor([[[2.0], [3.0]]]), torch.tensor([[[5.0]]])
    y = moe_experts(torch.tensor([[1.0]]), gate_up, down, torch.tensor([[0.5]]), int32([[0]]), backend="torch")
    torch.testing.assert_close(y, 0.5 * 5 * 3 * F.silu(torch.tensor([[2.0]])))


def test_experts_of_several_ranks_add_up_to_all_of_them() -> None:
    gate_up, down = layer()
    x = torch.randn(9, 16, generator=torch.Generator().manual_seed(1))
    weights, ids = moe_route(torch.randn(9, 6, generator=torch.Generator().manual_seed(2)), top_k=3)
    whole = moe_experts(x, gate_up, down, weights, ids, backend="torch")
    parts = torch.zeros_like(whole)
    for first in (0, 2, 4):
        mine = (ids >= first) & (ids < first + 2)
        local = torch.where(mine, ids - first, -1).int()
        held = gate_up[first : first + 2], down[first : first + 2]
        parts += moe_experts(x, *held, weights, local, backend="torch")
    torch.testing.assert_close(parts, whole)


def test_a_token_alone_equals_the_token_in_a_batch() -> None:
    gate_up, down = layer(experts=40)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    weights, ids = moe_route(torch.randn(64, 40, generator=torch.Generator().manual_seed(2)), top_k=4)
    together = moe_experts(x, gate_up, down, weights, ids, backend="torch")
    for i in (0, 13, 63):
        alone = moe_experts(x[i : i + 1], gate_up, down, weights[i : i + 1], ids[i : i + 1], backend="torch")
        torch.testing.assert_close(together[i], alone[0])


def test_padding_is_not_read_and_gives_zeros() -> None:
    gate_up, down = layer()
    x = torch.ones(3, 16)
    x[1] = torch.nan
    weights = torch.tensor([[1.0, torch.nan], [torch.nan, torch.nan], [torch.nan, 1.0]])
    poisoned = torch.full((3, 16), torch.nan)
    y = moe_experts(x, gate_up, down, weights, int32([[2, -1], [-1, -1], [-1, 2]]), out=poisoned, backend="torch")
    assert y is poisoned
    assert bool((y[1] == 0).all())
    assert torch.equal(y[0], y[2])
    assert bool(y[0].isfinite().all() and (y[0] != 0).any())


def test_an_expert_that_was_not_hit_is_not_read() -> None:
    gate_up, down = layer()
    gate_up[3], down[3] = torch.nan, torch.nan
    y = moe_experts(torch.ones(2, 16), gate_up, down, torch.ones(2, 2), int32([[0, 5], [1, 2]]), backend="torch")
    assert bool(y.isfinite().all())


def test_a_gate_per_element_and_a_gate_per_row() -> None:
    x = torch.tensor([[2.0, 4.0]])
    torch.testing.assert_close(sigmoid_mul(x, torch.zeros(1, 1), backend="torch"), torch.tensor([[1.0, 2.0]]))
    large = torch.tensor([[100.0, -100.0]])
    torch.testing.assert_close(sigmoid_mul(x, large, backend="torch"), torch.tensor([[2.0, 0.0]]))
    interleaved = torch.tensor([[2.0, 4.0, 0.0, 0.0], [6.0, 8.0, 0.0, 0.0]])
    y = sigmoid_mul(interleaved[:, :2], interleaved[:, 2:], backend="torch")
    assert y.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_silu_mul_halves_the_width() -> None:
    y = silu_mul(torch.tensor([[0.0, 100.0, -100.0, 7.0, 2.0, 3.0]]), backend="torch")
    torch.testing.assert_close(y, torch.tensor([[0.0, 200.0, 0.0]]))


def test_what_does_not_fit_is_refused_by_name() -> None:
    gate_up, down = layer()
    x, weights = torch.zeros(2, 16), torch.zeros(2, 2)
    with pytest.raises(ContentError, match="ids"):
        moe_experts(x, gate_up, down, weights, int32([[0, 6], [0, 1]]))
    with pytest.raises(ArgumentError, match="gate_up"):
        moe_experts(x, gate_up[:, :-1].contiguous(), down, weights, int32([[0, 1], [0, 1]]))
    with pytest.raises(ArgumentError, match="top_k <= experts"):
        moe_route(torch.zeros(2, 4), top_k=5)
    with pytest.raises(ArgumentError, match="width % 2 == 0"):
        silu_mul(torch.zeros(2, 3))
    with pytest.raises(ArgumentError, match="gate_dim == dim"):
        sigmoid_mul(torch.zeros(2, 4), torch.zeros(2, 2))
