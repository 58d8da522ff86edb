"""Projections and experts with quantised weights equal the same ops on the dequantised ones, scale by scale."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernels.linear import linear
from tokenspeed_kernels.linear_quantised import linear_fp8_block, linear_nvfp4
from tokenspeed_kernels.moe import moe_experts
from tokenspeed_kernels.moe_quantised import moe_experts_fp8_block, moe_experts_nvfp4
from tokenspeed_kernels.quantise import from_fp8_block, from_nvfp4, to_fp8_block, to_nvfp4
from tokenspeed_registry import ArgumentError, DtypeError, ShapeError

FP8 = torch.float8_e4m3fn


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fp8_experts(experts: int, inter: int, hidden: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        *to_fp8_block(normal(experts, 2, inter, hidden) * hidden**-0.5),
        *to_fp8_block(normal(experts, hidden, inter) * inter**-0.5),
    )


def nvfp4_experts(experts: int, inter: int, hidden: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        *to_nvfp4(normal(experts, 2, inter, hidden) * hidden**-0.5),
        *to_nvfp4(normal(experts, hidden, inter) * inter**-0.5),
    )


def test_each_block_of_128_by_128_has_its_scale() -> None:
    weight = torch.ones(257, 130).to(FP8)
    scale = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
    x = torch.zeros(2, 130)
    x[0, 127], x[1, 128] = 1.0, 1.0
    y = linear_fp8_block(x, weight, scale, backend="torch")
    assert y.tolist() == [[1.0] * 128 + [2.0] * 128 + [4.0], [10.0] * 128 + [20.0] * 128 + [40.0]]


def test_each_16_inputs_of_a_row_have_their_scale() -> None:
    weight = torch.full((2, 16), 0x22, dtype=torch.uint8)  # ones
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0]]).to(FP8)
    x = torch.zeros(2, 32)
    x[0, 15], x[1, 16] = 1.0, 1.0
    y = linear_nvfp4(x, weight, scale, torch.tensor([0.5]), backend="torch")
    assert y.tolist() == [[0.5, 2.0], [1.0, 4.0]]


def test_all_codes_of_a_byte_through_a_projection() -> None:
    """Row b holds byte b in its first place: columns 0 and 1 of the identity read its two codes."""
    weight = torch.zeros(256, 8, dtype=torch.uint8)
    weight[:, 0] = torch.arange(256)
    x = torch.eye(2, 16)
    y = linear_nvfp4(x, weight, torch.ones(256, 1).to(FP8), torch.ones(1), backend="torch")
    codes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.cat([codes, -codes])
    assert torch.equal(y[0], codes.repeat(16))
    assert torch.equal(y[1], codes.repeat_interleave(16))


def test_edge_values_of_e4m3_as_weights_and_as_scales() -> None:
    edges = torch.tensor([448.0, -448.0, 2.0**-9, 7 * 2.0**-9, 2.0**-6, 0.0])
    y = linear_fp8_block(torch.eye(6), torch.diag(edges).to(FP8), torch.ones(1, 1), backend="torch")
    assert torch.equal(y, torch.diag(edges))
    y = linear_nvfp4(
        torch.eye(1, 16),
        torch.full((6, 8), 0x27, dtype=torch.uint8),
        edges.abs()[:, None].to(FP8),
        torch.tensor([2.0**-10]),
        backend="torch",
    )
    assert torch.equal(y[0], 6 * edges.abs() * 2**-10)
    nan = torch.full((1, 1), torch.nan).to(FP8)
    assert bool(linear_fp8_block(torch.ones(1, 1), nan, torch.ones(1, 1), backend="torch").isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_quantised_projection_equals_one_with_its_values(dtype: torch.dtype) -> None:
    x, weight = normal(5, 272, seed=1).to(dtype), normal(200, 272) / 16
    allowed: dict[str, Any] = {"rtol": 0, "atol": 0.05 if dtype == torch.bfloat16 else 2e-3}
    quantised = to_fp8_block(weight)
    wanted = linear(x, from_fp8_block(*quantised), dtype=torch.float32)
    torch.testing.assert_close(linear_fp8_block(x, *quantised, backend="torch").float(), wanted, **allowed)
    packed = to_nvfp4(weight)
    wanted = linear(x, from_nvfp4(*packed), dtype=torch.float32)
    torch.testing.assert_close(linear_nvfp4(x, *packed, backend="torch").float(), wanted, **allowed)


def test_weights_below_the_range_of_float16_are_not_lost() -> None:
    x = torch.full((1, 128), 1000.0, dtype=torch.float16)
    y = linear_fp8_block(x, torch.ones(3, 128).to(FP8), torch.full((1, 1), 2.0**-26), backend="torch")
    torch.testing.assert_close(y, torch.full((1, 3), 128 * 1000 * 2.0**-26, dtype=torch.float16), rtol=1e-2, atol=0)


@pytest.mark.parametrize(("inter", "hidden"), [(128, 256), (160, 130), (640, 64)])
def test_quantised_experts_equal_experts_with_their_values(inter: int, hidden: int) -> None:
    x, weights = normal(7, hidden, seed=1), normal(7, 2, seed=2).softmax(dim=-1)
    ids = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(i))[:2] for i in range(7)]).int()
    gate_up, gate_up_scale, down, down_scale = fp8_experts(4, inter, hidden)
    values = from_fp8_block(gate_up, gate_up_scale).flatten(1, 2), from_fp8_block(down, down_scale)
    got = moe_experts_fp8_block(x, gate_up, gate_up_scale, down, down_scale, weights, ids, backend="torch")
    torch.testing.assert_close(got, moe_experts(x, *values, weights, ids), rtol=1e-4, atol=1e-5)
    hidden -= hidden % 16
    packed = nvfp4_experts(4, inter, hidden)
    values = from_nvfp4(*packed[:3]).flatten(1, 2), from_nvfp4(*packed[3:])
    x = x[:, :hidden]
    got = moe_experts_nvfp4(x, *packed, weights, ids, backend="torch")
    torch.testing.assert_close(got, moe_experts(x, *values, weights, ids), rtol=1e-4, atol=1e-5)


def test_gate_up_and_down_of_each_expert_have_scales_of_their_own() -> None:
    """Weights of one: gate 2 · x, up 4 · x, down 8; the other expert's scales are NaN."""
    ones, nan = torch.ones(2, 1, 1), torch.full((1, 2, 1, 1), torch.nan)
    scale = torch.cat([nan, torch.tensor([2.0, 4.0]).view(1, 2, 1, 1)])
    down_scale = torch.tensor([torch.nan, 8.0]).view(2, 1, 1)
    ids, weights = torch.tensor([[1]], dtype=torch.int32), torch.tensor([[0.5]])
    wanted = 0.5 * 8 * 4 * torch.nn.functional.silu(torch.tensor([[2.0]]))
    y = moe_experts_fp8_block(
        torch.ones(1, 1), ones[:, None].expand(2, 2, 1, 1).contiguous().to(FP8), scale, ones.to(FP8), down_scale,
        weights, ids, backend="torch",
    )  # fmt: skip
    torch.testing.assert_close(y, wanted)
    first = torch.eye(1, 8, dtype=torch.uint8) * 2  # a one, then zeros
    y = moe_experts_nvfp4(
        torch.eye(1, 16),
        first.expand(2, 2, 16, 8).contiguous(),
        torch.ones(2, 2, 16, 1).to(FP8),
        torch.tensor([[torch.nan, torch.nan], [2.0, 4.0]]),
        first.expand(2, 16, 8).contiguous(),
        torch.ones(2, 16, 1).to(FP8),
        torch.tensor([torch.nan, 8.0]),
        weights,
        ids,
        backend="torch",
    )
    torch.testing.assert_close(y, wanted.expand(1, 16))


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_shares_of_the_experts_add_up(form: str) -> None:
    op: Any = moe_experts_fp8_block if form == "fp8" else moe_experts_nvfp4
    matrices: tuple[Tensor, ...] = fp8_experts(6, 32, 48) if form == "fp8" else nvfp4_experts(6, 32, 48)
    x, weights = normal(5, 48, seed=1), normal(5, 3, seed=2).softmax(dim=-1)
    ids = torch.tensor([[0, 1, 2], [3, 4, 5], [5, 0, -1], [2, 2, 3], [-1, -1, -1]], dtype=torch.int32)
    whole = op(x, *matrices, weights, ids, backend="torch")
    assert bool((whole[4] == 0).all())
    parts = torch.zeros_like(whole)
    for first, last in ((0, 1), (1, 4), (4, 6)):
        parts += op(x, *(m[first:last] for m in matrices), weights, ids, first_expert=first, backend="torch")
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_an_expert_that_was_not_hit_is_not_read(form: str) -> None:
    op: Any = moe_experts_fp8_block if form == "fp8" else moe_experts_nvfp4
    matrices: tuple[Tensor, ...] = fp8_experts(3, 16, 16) if form == "fp8" else nvfp4_experts(3, 16, 16)
    for matrix in matrices:
        if matrix.dtype != torch.uint8:
            matrix[1] = torch.full(matrix[1].shape, torch.nan).to(matrix.dtype)
    y = op(torch.ones(1, 16), *matrices, torch.ones(1, 2), torch.tensor([[0, 2]], dtype=torch.int32), backend="torch")
    assert bool(y.isfinite().all())


def test_scales_that_do_not_fit_are_refused_by_name() -> None:
    x, weight = torch.zeros(2, 130), torch.zeros(129, 130).to(FP8)
    linear_fp8_block(x, weight, torch.ones(2, 2))
    for blocks, relation in (((1, 2), "out_blocks"), ((2, 1), "in_blocks"), ((2, 3), "in_blocks")):
        with pytest.raises(ShapeError, match=relation):
            linear_fp8_block(x, weight, torch.ones(blocks))
    with pytest.raises(DtypeError, match="scale"):
        linear_fp8_block(x, weight, torch.ones(2, 2).half())
    with pytest.raises(DtypeError, match="weight"):
        linear_fp8_block(x, weight.view(torch.int8), torch.ones(2, 2))
    packed = torch.zeros(3, 16, dtype=torch.uint8), torch.ones(3, 2).to(FP8)
    with pytest.raises(ShapeError, match="global_scale"):
        linear_nvfp4(torch.zeros(2, 32), *packed, torch.ones(3))
    with pytest.raises(ShapeError, match="weight"):
        linear_nvfp4(torch.zeros(2, 48), *packed, torch.ones(1))
    with pytest.raises(ArgumentError, match="in_features % 16 == 0"):
        linear_nvfp4(torch.zeros(2, 33), *packed, torch.ones(1))
    matrices = fp8_experts(2, 130, 16)
    routed = torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ShapeError, match="inter_blocks"):
        moe_experts_fp8_block(
            torch.zeros(1, 16), matrices[0], torch.ones(2, 2, 1, 1), matrices[2], torch.ones(2, 1, 1), *routed
        )
