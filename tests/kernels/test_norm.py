"""Root-mean-square normalisation through the public API, on the plain-torch kernels."""

import pytest
import torch

from tokenspeed_kernels.norm import add_rms_norm, grouped_rms_norm, rms_norm
from tokenspeed_registry import ShapeError
from tokenspeed_registry.conformance import error_of
from tokenspeed_registry.validation import signature_of


def test_a_zero_centred_weight_counts_from_one() -> None:
    x, weight = torch.tensor([[1.0, 7.0]]), torch.tensor([0.0, 1.0])  # mean square 25
    plain = rms_norm(x, weight, eps=0.0, zero_centred=False, backend="torch")
    centred = rms_norm(x, weight, eps=0.0, zero_centred=True, backend="torch")
    torch.testing.assert_close(plain, torch.tensor([[0.0, 1.4]]))
    torch.testing.assert_close(centred, torch.tensor([[0.2, 2.8]]))


def test_eps_is_added_to_the_mean_square() -> None:
    normed = rms_norm(torch.full((1, 4), 3e-3), torch.ones(4), eps=1.6e-5, zero_centred=False, backend="torch")
    torch.testing.assert_close(normed, torch.full((1, 4), 0.6))


def test_half_precision_rounds_once_at_the_end() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(64, 256).bfloat16(), torch.randn(256).bfloat16()
    normed = rms_norm(x, weight, eps=1e-6, zero_centred=True, backend="torch")
    wide = rms_norm(x.double().float(), weight.float(), eps=1e-6, zero_centred=True, backend="torch")
    assert torch.equal(normed, wide.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_before_the_weight_is_within_the_tolerance(dtype: torch.dtype) -> None:
    """What DeepSeek-V3 computes: w · cast(x · rsqrt(mean + eps)). A kernel may do either."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 512).to(dtype), torch.randn(512).to(dtype)
    arguments = {"x": x, "weight": weight, "eps": 1e-6, "zero_centred": False}
    wide = x.float()
    twice = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(dtype)
    wanted = rms_norm.contract.reference(**arguments)
    assert isinstance(wanted, torch.Tensor)
    allowed = rms_norm.contract.tolerance(signature_of(rms_norm.contract, arguments), "normed")
    assert 0.3 * allowed < error_of(twice, wanted) <= allowed
    assert not torch.equal(rms_norm(**arguments, backend="torch"), twice)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero_centred", [False, True])
def test_a_residual_gains_the_output_and_is_normed_as_it_is_stored(dtype: torch.dtype, zero_centred: bool) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(9, 64).to(dtype), (torch.randn(9, 64) * 30).to(dtype), torch.randn(64).to(dtype)
    total = (x.float() + residual.float()).to(dtype)
    normed = add_rms_norm(x, residual, weight, eps=1e-6, zero_centred=zero_centred, backend="torch")
    assert torch.equal(residual, total)
    assert torch.equal(normed, rms_norm(total, weight, eps=1e-6, zero_centred=zero_centred, backend="torch"))


def test_a_residual_between_other_columns_is_changed_alone() -> None:
    pool = torch.full((3, 10), 5.0)
    add_rms_norm(torch.ones(3, 4), pool[:, 3:7], torch.ones(4), eps=0.0, zero_centred=False, backend="torch")
    assert (pool[:, 3:7] == 6.0).all()
    assert (pool[:, [0, 1, 2, 7, 8, 9]] == 5.0).all()


def test_large_float16_values_do_not_overflow() -> None:
    x = torch.full((1, 8), 60_000.0, dtype=torch.float16)
    normed = rms_norm(x, torch.ones(8, dtype=torch.float16), eps=1e-6, zero_centred=False, backend="torch")
    torch.testing.assert_close(normed, torch.ones(1, 8, dtype=torch.float16))


def test_groups_have_their_own_mean_and_weights() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 4, 16) * torch.tensor([1.0, 10.0, 0.1, 3.0])[:, None], torch.randn(4, 16)
    grouped = grouped_rms_norm(x, weight, eps=1e-6, zero_centred=True, backend="torch")
    for group in range(4):
        alone = rms_norm(x[:, group], weight[group], eps=1e-6, zero_centred=True, backend="torch")
        torch.testing.assert_close(grouped[:, group], alone)
    whole = rms_norm(x.reshape(5, 64), weight.reshape(64), eps=1e-6, zero_centred=True, backend="torch")
    assert not torch.allclose(grouped.reshape(5, 64), whole, atol=0.1)


def test_head_slices_of_a_fused_projection_need_no_copy() -> None:
    """Per head, 256 query values and then 256 gate values."""
    torch.manual_seed(0)
    fused, weight = torch.randn(3, 2, 512), torch.randn(2, 256)
    sliced = grouped_rms_norm(fused[..., :256], weight, eps=1e-6, zero_centred=True, backend="torch")
    copied = grouped_rms_norm(fused[..., :256].contiguous(), weight, eps=1e-6, zero_centred=True, backend="torch")
    assert torch.equal(sliced, copied)


def test_a_weight_of_another_width_is_rejected() -> None:
    with pytest.raises(ShapeError, match="weight"):
        rms_norm(torch.zeros(2, 8), torch.zeros(7), eps=1e-6, zero_centred=True)
