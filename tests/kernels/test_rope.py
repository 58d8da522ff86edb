"""Rotary position embedding through the public API, on the plain-torch kernels."""

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from tokenspeed_kernels.rope import rope
from tokenspeed_registry import ArgumentTypeError, ShapeError

STYLES: list[Literal["neox", "interleaved"]] = ["neox", "interleaved"]


def frequencies(theta: float, half: int) -> Tensor:
    return theta ** (-torch.arange(half, dtype=torch.float32) / half)


def test_pairs_of_each_style() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0]]])
    quarter, position = torch.tensor([math.pi / 2, 0.0]), torch.tensor([1])
    neox = rope(x, position, quarter, style="neox", backend="torch")
    interleaved = rope(x, position, quarter, style="interleaved", backend="torch")
    torch.testing.assert_close(neox, torch.tensor([[[-3.0, 2.0, 1.0, 4.0, 5.0]]]))
    torch.testing.assert_close(interleaved, torch.tensor([[[-2.0, 1.0, 3.0, 4.0, 5.0]]]))


@pytest.mark.parametrize("style", STYLES)
def test_scores_depend_on_the_distance_of_positions_only(style: Literal["neox", "interleaved"]) -> None:
    torch.manual_seed(0)
    q, k, inv_freq = torch.randn(1, 1, 64), torch.randn(1, 1, 64), frequencies(1e4, 32)

    def score(q_position: int, k_position: int) -> Tensor:
        turned_q = rope(q, torch.tensor([q_position]), inv_freq, style=style, backend="torch")
        turned_k = rope(k, torch.tensor([k_position]), inv_freq, style=style, backend="torch")
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(score(107, 100), score(7, 0), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(score(8, 0), score(7, 0), atol=1e-2)


def test_interleaved_pairs_give_the_scores_of_pairs_sorted_apart() -> None:
    """Models that move even dims before odd ones and pair halves score alike; halves of the raw dims do not."""
    torch.manual_seed(0)
    q, k, inv_freq = torch.randn(4, 2, 64), torch.randn(4, 2, 64), frequencies(1e4, 32)
    positions = torch.tensor([0, 3, 50, 1000])
    order = torch.cat((torch.arange(0, 64, 2), torch.arange(1, 64, 2)))

    def scores(a: Tensor, b: Tensor, style: Literal["neox", "interleaved"]) -> Tensor:
        turned = [rope(x.contiguous(), positions, inv_freq, style=style, backend="torch") for x in (a, b)]
        return torch.einsum("qhd,khd->hqk", *turned)

    in_place = scores(q, k, "interleaved")
    torch.testing.assert_close(in_place, scores(q[..., order], k[..., order], "neox"), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(in_place, scores(q, k, "neox"), atol=1e-1)


@pytest.mark.parametrize("style", STYLES)
def test_position_0_and_dims_past_the_rotary_ones_are_copied(style: Literal["neox", "interleaved"]) -> None:
    torch.manual_seed(0)
    x, inv_freq = torch.randn(3, 2, 256).bfloat16(), frequencies(1e7, 32)
    turned = rope(x, torch.tensor([0, 5, 9]), inv_freq, style=style, backend="torch")
    assert torch.equal(turned[0], x[0])
    assert torch.equal(turned[..., 64:], x[..., 64:])
    assert not torch.equal(turned[1:, :, :64], x[1:, :, :64])


def test_far_positions_keep_float32_angles_and_round_cosines_to_the_model_dtype() -> None:
    position, inv_freq = 299_700, frequencies(1e7, 32)
    ones = torch.cat((torch.ones(32), torch.zeros(32))).bfloat16()[None, None]
    turned = rope(ones, torch.tensor([position]), inv_freq, backend="torch")
    angle = torch.tensor(float(position)) * inv_freq
    assert torch.equal(turned[0, 0], torch.cat((angle.cos(), angle.sin())).bfloat16())


def test_factor_scales_the_rotary_dims_alone() -> None:
    torch.manual_seed(0)
    x, position, inv_freq = torch.randn(2, 1, 10), torch.tensor([3, 4]), frequencies(1e4, 4)
    plain = rope(x, position, inv_freq, backend="torch")
    scaled = rope(x, position, inv_freq, factor=1.5, backend="torch")
    torch.testing.assert_close(scaled[..., :8], 1.5 * plain[..., :8])
    assert torch.equal(scaled[..., 8:], plain[..., 8:])


def test_more_frequencies_than_pairs_and_unknown_styles_are_rejected() -> None:
    x, positions = torch.zeros(1, 1, 6), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ShapeError, match="half"):
        rope(x, positions, torch.ones(4))
    with pytest.raises(ArgumentTypeError, match="style"):
        rope(x, positions, torch.ones(3), style="llama")  # type: ignore[arg-type]
