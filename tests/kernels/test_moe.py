"""Mixture of experts: routing as the model families define it, experts that are elsewhere, gated products."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed_kernels.moe import moe_experts, moe_route, moe_route_grouped, sigmoid_mul, silu_mul
from tokenspeed_registry import ArgumentError


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
        held = gate_up[first : first + 2], down[first : first + 2]
        parts += moe_experts(x, *held, weights, ids, first_expert=first, backend="torch")
    torch.testing.assert_close(parts, whole)


def test_ids_outside_the_share_contribute_nothing_on_either_side() -> None:
    gate_up, down = layer()
    x = torch.ones(4, 16)
    x[3] = torch.nan
    ids = int32([[2, 3], [1, 2], [3, 5], [1, 5]])
    weights = torch.tensor([[1.0, 2.0], [torch.nan, 1.0], [2.0, torch.nan], [torch.nan, torch.nan]])
    held = gate_up[2:4].contiguous(), down[2:4].contiguous()
    y = moe_experts(x, *held, weights, ids, first_expert=2, backend="torch")
    torch.testing.assert_close(y[0], y[1] + y[2])
    assert bool((y[:3] != 0).any(dim=-1).all())
    assert bool((y[3] == 0).all())
    padding = moe_experts(x, *held, weights, int32([[-1, -1]] * 4), first_expert=2, backend="torch")
    assert bool((padding == 0).all())
    with pytest.raises(ArgumentError, match="first_expert >= 0"):
        moe_experts(x, *held, weights, ids, first_expert=-1)


@pytest.mark.parametrize("width", [24, 37, 68, 272])
def test_a_token_of_nan_spoils_no_other(width: int) -> None:
    gate_up, down = torch.ones(1, 2 * width, width).bfloat16(), torch.ones(1, width, width).bfloat16()
    x = torch.zeros(17, width).bfloat16()
    x[8] = torch.nan
    y = moe_experts(x, gate_up, down, torch.ones(17, 1), int32([[0]] * 17), backend="torch")
    assert y.isnan().any(dim=-1).tolist() == [row == 8 for row in range(17)]


def test_grouped_routing_takes_the_groups_with_the_two_best() -> None:
    """Group 0 has the single best expert, group 1 the two best, group 2 the best three."""
    scores = torch.tensor([[0.9, 0.2, 0.1, 0.6, 0.7, 0.1, 0.5, 0.5, 0.5]])
    logits, bias = scores.logit(), torch.zeros(9)
    weights, experts = moe_route_grouped(logits, bias, top_k=3, groups=3, top_groups=1, scaling=2.5, backend="torch")
    assert experts.tolist() == [[4, 3, 5]]
    torch.testing.assert_close(weights, 2.5 * torch.tensor([[0.7, 0.6, 0.1]]) / 1.4)
    weights, experts = moe_route_grouped(
        logits, bias, top_k=4, groups=3, top_groups=2, renormalise=False, backend="torch"
    )
    assert experts.tolist() == [[0, 4, 3, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.9, 0.7, 0.6, 0.2]]))


def test_the_bias_decides_who_is_chosen_but_not_the_weight() -> None:
    logits = torch.tensor([[0.8, 0.6, 0.2, 0.1]]).logit()
    bias = torch.tensor([0.0, 0.0, 0.0, 1.0])
    weights, experts = moe_route_grouped(logits, bias, top_k=2, backend="torch")
    assert experts.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, torch.tensor([[1 / 9, 8 / 9]]))


def test_experts_of_dropped_groups_stay_out_where_all_choices_are_negative() -> None:
    logits = torch.tensor([[0.9, 0.8, 0.2, 0.1]]).logit()
    _, experts = moe_route_grouped(logits, torch.full((4,), -3.0), top_k=2, groups=2, top_groups=1, backend="torch")
    assert experts.tolist() == [[0, 1]]


def test_one_group_and_all_groups_are_no_group_step() -> None:
    make = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(17, 24, generator=make), torch.randn(24, generator=make)
    for groups in (1, 3, 12):
        _, experts = moe_route_grouped(logits, bias, top_k=6, groups=groups, top_groups=groups, backend="torch")
        assert torch.equal(experts.long(), (logits.sigmoid() + bias).topk(6, dim=-1).indices)


def test_scores_that_vanish_give_finite_weights() -> None:
    weights, _ = moe_route_grouped(torch.full((1, 4), -200.0), torch.zeros(4), top_k=2, backend="torch")
    assert weights.tolist() == [[0.0, 0.0]]


def test_deepseek_v3_shape_is_routed_as_its_formula_says() -> None:
    make = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(7, 256, generator=make), 0.2 * torch.randn(256, generator=make)
    weights, experts = moe_route_grouped(logits, bias, top_k=8, groups=8, top_groups=4, scaling=2.5, backend="torch")
    for row, chosen, given in zip(logits, experts.tolist(), weights, strict=True):
        choice = row.sigmoid() + bias
        worth = [float(choice[32 * g : 32 * g + 32].topk(2).values.sum()) for g in range(8)]
        kept = sorted(range(8), key=lambda g: -worth[g])[:4]
        allowed = sorted((e for g in kept for e in range(32 * g, 32 * g + 32)), key=lambda e: -float(choice[e]))
        assert chosen == allowed[:8]
        torch.testing.assert_close(given, 2.5 * row.sigmoid()[chosen] / row.sigmoid()[chosen].sum())


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
    with pytest.raises(ArgumentError, match="gate_up"):
        moe_experts(x, gate_up[:, :-1].contiguous(), down, weights, int32([[0, 1], [0, 1]]))
    with pytest.raises(ArgumentError, match="top_k <= experts"):
        moe_route(torch.zeros(2, 4), top_k=5)
    for wrong, (top_k, groups, top_groups) in {
        "experts % groups": (1, 3, 1),
        "experts >= 2 \\* groups": (1, 4, 1),
        "top_groups <= groups": (1, 2, 3),
        "top_k <= top_groups": (3, 2, 1),
    }.items():
        with pytest.raises(ArgumentError, match=wrong):
            moe_route_grouped(torch.zeros(2, 4), torch.zeros(4), top_k=top_k, groups=groups, top_groups=top_groups)
    with pytest.raises(ArgumentError, match="width % 2 == 0"):
        silu_mul(torch.zeros(2, 3))
    with pytest.raises(ArgumentError, match="gate_dim == dim"):
        sigmoid_mul(torch.zeros(2, 4), torch.zeros(2, 2))
