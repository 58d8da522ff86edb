"""Rotary position embedding through the public API, on the plain-torch kernels."""

import math
from typing import Literal

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3RotaryEmbedding,
    apply_rotary_pos_emb_interleave,
)

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


def yarn_frequencies(theta: float, dim: int, factor: float, original: int) -> Tensor:
    """Frequencies that turn often within `original` positions stay, those that turn less than once are divided."""
    inv_freq = frequencies(theta, dim // 2)
    turns = [dim * math.log(original / (turned * 2 * math.pi)) / (2 * math.log(theta)) for turned in (32.0, 1.0)]
    low, high = max(math.floor(turns[0]), 0), min(math.ceil(turns[1]), dim - 1)
    ramp = ((torch.arange(dim // 2) - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq * (1 - ramp) + inv_freq / factor * ramp


@pytest.mark.parametrize("mscale_all_dim", [1.0, 0.5])
def test_scores_of_deepseek_v3_with_yarn(mscale_all_dim: float) -> None:
    """transformers sorts the parts of pairs apart; scores are the same. Cosines carry m(40, 1) / m(40, all)."""
    torch.manual_seed(0)
    scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096}
    scaling |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": mscale_all_dim}
    config = DeepseekV3Config(
        qk_rope_head_dim=64, max_position_embeddings=163840, rope_parameters=scaling, rope_interleave=True
    )
    q, k, positions = torch.randn(6, 2, 64), torch.randn(6, 1, 64), torch.tensor([0, 1, 77, 4095, 4096, 100_000])
    rotary = DeepseekV3RotaryEmbedding(config)
    inv_freq = rotary.inv_freq
    torch.testing.assert_close(inv_freq, yarn_frequencies(1e4, 64, 40.0, 4096))
    cos, sin = rotary(q, positions[None])
    oracle_q, oracle_k = apply_rotary_pos_emb_interleave(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    wanted = torch.einsum("hqd,kd->hqk", oracle_q[0], oracle_k[0, 0])
    factor = (0.1 * math.log(40.0) + 1) / (0.1 * mscale_all_dim * math.log(40.0) + 1)
    turned = [rope(x, positions, inv_freq, style="interleaved", factor=factor, backend="torch") for x in (q, k)]
    torch.testing.assert_close(torch.einsum("qhd,kd->hqk", turned[0], turned[1][:, 0]), wanted, atol=1e-3, rtol=1e-3)
    plain = [rope(x, positions, frequencies(1e4, 32), style="interleaved", backend="torch") for x in (q, k)]
    assert not torch.allclose(torch.einsum("qhd,kd->hqk", plain[0], plain[1][:, 0]), wanted, atol=0.1)


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
