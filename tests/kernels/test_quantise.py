"""Formats of quantised weights: every code, the edges of the scales, and how far values move."""

import itertools

import pytest
import torch

from tokenspeed_kernels.linear_quantised import fp8_block_values, nvfp4_values
from tokenspeed_kernels.quantise import E2M1, from_fp8_block, from_nvfp4, to_fp8_block, to_nvfp4

FP8 = torch.float8_e4m3fn
CODES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_all_sixteen_codes_in_both_halves_of_a_byte() -> None:
    packed = torch.arange(256, dtype=torch.uint8)[None]
    scale = torch.ones(1, 32).to(FP8)
    expected = torch.tensor([CODES[half] for byte in range(256) for half in (byte & 15, byte >> 4)])
    for values in (from_nvfp4(packed, scale, torch.ones(1)), nvfp4_values(packed, scale, torch.tensor(1.0)).float()):
        assert torch.equal(values[0], expected)
        assert torch.equal(values[0].signbit(), expected.signbit())


def test_the_even_column_is_in_the_low_half() -> None:
    row = torch.tensor([[1.0, -6.0] + [0.0] * 14])
    packed, scale, global_scale = to_nvfp4(row)
    assert scale.float().item() == 448
    assert packed[0, 0].item() == 0xF2  # 1.0 is code 2, -6.0 code 15
    assert packed.shape == (1, 8)
    torch.testing.assert_close(from_nvfp4(packed, scale, global_scale), row, rtol=1e-6, atol=0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_elements_go_to_the_nearest_code_and_halfway_to_the_even_one(sign: float) -> None:
    wanted = {0.24: 0.0, 0.25: 0.0, 0.26: 0.5, 0.74: 0.5, 0.75: 1.0, 1.25: 1.0, 1.26: 1.5, 1.74: 1.5, 1.75: 2.0}
    wanted |= {2.5: 2.0, 2.51: 3.0, 3.49: 3.0, 3.5: 4.0, 5.0: 4.0, 5.01: 6.0}
    row = sign * 448 * torch.tensor([[*wanted, 6.0]])  # 16 columns, the last of which makes both scales 1 and 448
    values = from_nvfp4(*to_nvfp4(row))
    assert (values / (sign * 448))[0].tolist() == [*wanted.values(), 6.0]


def test_values_of_the_format_survive_unchanged() -> None:
    """Each group of scale 2^k with the largest code in it, the matrix with the largest scale in it."""
    row = torch.tensor(CODES)
    matrix = torch.stack([row * 2.0**k for k in range(-6, 9)])
    matrix[0] *= 448 / 2.0**-6  # the group that sets the global scale to 1
    packed, scale, global_scale = to_nvfp4(matrix)
    assert global_scale.tolist() == [1.0]
    assert torch.equal(from_nvfp4(packed, scale, global_scale), matrix)
    assert torch.equal(from_nvfp4(packed, scale, global_scale).signbit(), matrix.signbit())


def test_nvfp4_scales_follow_the_group_and_the_matrix() -> None:
    stack = normal(3, 5, 32)
    stack[1] *= 1000
    stack[0, 2, 16:] *= 0.01
    packed, scale, global_scale = to_nvfp4(stack)
    assert (packed.shape, scale.shape, global_scale.shape) == ((3, 5, 16), (3, 5, 2), (3,))
    values = from_nvfp4(packed, scale, global_scale)
    largest = stack.view(3, 5, 2, 16).abs().amax(-1, keepdim=True)
    # At most half of the widest step, 4 to 6, and the rounding of the scale.
    assert bool(((values - stack).view(3, 5, 2, 16).abs() <= largest * (1 / 6 + 2**-4)).all())
    alone = to_nvfp4(stack[2])
    assert torch.equal(from_nvfp4(*alone), values[2])
    assert alone[2].shape == (1,)


def test_the_references_decode_as_the_helpers_do() -> None:
    packed, scale, global_scale = to_nvfp4(normal(7, 48))
    values = nvfp4_values(packed, scale, global_scale[0]).float()
    torch.testing.assert_close(from_nvfp4(packed, scale, global_scale), values, rtol=1e-6, atol=0)
    weight, block_scale = to_fp8_block(normal(130, 257))
    blocks = fp8_block_values(weight, block_scale).float()
    torch.testing.assert_close(from_fp8_block(weight, block_scale), blocks, rtol=1e-6, atol=0)


def test_every_fp8_code_is_multiplied_by_its_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    values = codes.float()
    assert [values[i].item() for i in (0x01, 0x07, 0x08, 0x7E, 0xFE)] == [2**-9, 7 * 2**-9, 2**-6, 448.0, -448.0]
    assert bool(values[[0x7F, 0xFF]].isnan().all())
    for scale in (torch.tensor([[0.5, 3.0]]), torch.tensor([[0.5, 3.0]], dtype=torch.bfloat16)):
        expected = torch.cat([values[:128] * 0.5, values[128:] * 3.0])[None]
        assert torch.equal(from_fp8_block(codes[None], scale).nan_to_num(), expected.nan_to_num())
        assert torch.equal(fp8_block_values(codes[None], scale).float().nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (129, 127), (1, 1), (256, 300), (640, 160)])
def test_each_block_has_the_scale_of_its_own_largest(rows: int, columns: int) -> None:
    weight = normal(rows, columns)
    quantised, scale = to_fp8_block(weight)
    assert quantised.dtype == FP8
    assert scale.shape == (-(-rows // 128), -(-columns // 128))
    for i, j in itertools.product(*map(range, scale.shape)):
        block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
        assert scale[i, j] == weight[block].abs().max() / 448
        assert quantised[block].float().abs().max() == 448
    # Three bits of mantissa, and below 2^-6 of a scale steps of 2^-9.
    error = (from_fp8_block(quantised, scale) - weight).abs()
    assert bool((error <= weight.abs() * 2**-4 + 2**-10 * float(scale.max())).all())


def test_a_stack_is_quantised_matrix_by_matrix() -> None:
    stack = normal(2, 3, 130, 20) * torch.tensor([1.0, 10.0, 100.0])[:, None, None]
    quantised, scale = to_fp8_block(stack)
    assert scale.shape == (2, 3, 2, 1)
    alone, its_scale = to_fp8_block(stack[1, 2])
    assert torch.equal(quantised[1, 2].view(torch.uint8), alone.view(torch.uint8))
    assert torch.equal(scale[1, 2], its_scale)
    assert torch.equal(from_fp8_block(quantised, scale)[1, 2], from_fp8_block(alone, its_scale))


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-30, 1e30])
def test_zeros_and_extreme_sizes_stay_finite(size: float) -> None:
    weight = torch.full((4, 32), size)
    weight[0, :16] = 0.0
    for values in (from_fp8_block(*to_fp8_block(weight)), from_nvfp4(*to_nvfp4(weight))):
        assert bool((values[0, :16] == 0).all())
        torch.testing.assert_close(values, weight, rtol=0.07, atol=1e-36)


def test_a_group_too_small_for_a_scale_becomes_zeros() -> None:
    row = torch.full((1, 32), 1e-9)
    row[0, 16:] = 1.0
    values = from_nvfp4(*to_nvfp4(row))
    assert values[0, :16].tolist() == [0.0] * 16
    torch.testing.assert_close(values[0, 16:], torch.ones(16))


def test_half_precision_weights_are_quantised_as_their_values() -> None:
    weight = normal(3, 32).bfloat16()
    for got, wanted in zip(to_nvfp4(weight), to_nvfp4(weight.float()), strict=True):
        assert torch.equal(got.float(), wanted.float())
    assert torch.equal(to_fp8_block(weight)[1], to_fp8_block(weight.float())[1])


def test_a_width_that_no_group_divides_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16 columns"):
        to_nvfp4(torch.ones(2, 24))


def test_magnitudes_are_those_of_two_exponent_bits_and_one_of_mantissa() -> None:
    assert list(E2M1) == sorted({m / 2 for m in (0, 1)} | {(1 + m / 2) * 2**e for e in (0, 1, 2) for m in (0, 1)})
