"""Gated residual: literal values, and what its parts must and must not see."""

from typing import Any

import pytest
import torch

from tokenspeed_kernels.residual import residual_inject, residual_inject_mix, residual_mix
from tokenspeed_registry import DtypeError, ShapeError

EPS = 1e-6


def _weights(streams: int, hidden: int, rank: int = 3, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    make = torch.Generator().manual_seed(7)
    width = streams * hidden
    shapes = {
        "norm_weight": (streams, hidden),
        "w_down": (rank, width),
        "w_up": (width, rank),
        "w_inject": (streams, width),
    }
    return {name: (torch.randn(shape, generator=make) * 0.5).to(dtype) for name, shape in shapes.items()}


def _zeros(streams: int, hidden: int, rank: int = 1) -> dict[str, Any]:
    return {name: torch.zeros_like(weight) for name, weight in _weights(streams, hidden, rank).items()}


def test_zero_projections_halve_the_mean_of_the_normalised_streams() -> None:
    x = torch.tensor([[[3.0, 4.0], [0.0, 2.0]]])
    mixed, inject = residual_mix(x, **_zeros(2, 2), eps=0.0, backend="torch")
    # [3, 4] / sqrt(12.5) and [0, 2] / sqrt(2), their mean, times sigmoid(0).
    torch.testing.assert_close(mixed, torch.tensor([[0.25 * 0.8485281, 0.25 * (1.1313708 + 1.4142136)]]))
    assert inject.tolist() == [[1.0, 1.0]]


def test_the_division_by_streams_comes_before_silu_and_sigmoid() -> None:
    weights = _zeros(4, 1)
    weights["w_down"][0] = 1.0  # n is all ones: the sum is 4, over 4 streams 1
    weights["w_up"][:] = 2.0
    weights["w_inject"][1] = 1.0
    mixed, inject = residual_mix(torch.ones(1, 4, 1), **weights, eps=0.0, backend="torch")
    torch.testing.assert_close(mixed, torch.tensor([[0.8118562]]))  # sigmoid(2 · silu(1)), silu(1) = 0.7310586
    torch.testing.assert_close(inject, torch.tensor([[1.0, 1.4621172, 1.0, 1.0]]))  # 2 sigmoid(1) for gate 1


def test_norm_weight_is_centred_at_zero() -> None:
    weights = _zeros(1, 2)
    weights["norm_weight"][:] = torch.tensor([[1.0, -1.0]])
    mixed, _ = residual_mix(torch.ones(1, 1, 2), **weights, eps=0.0, backend="torch")
    assert mixed.tolist() == [[1.0, 0.0]]  # sigmoid(0) · (1 + w)


def test_each_stream_is_normalised_by_itself() -> None:
    x = torch.randn(5, 4, 16, generator=torch.Generator().manual_seed(1))
    louder = x * torch.tensor([1000.0, 1.0, 0.5, 30.0]).view(1, 4, 1)
    for a, b in zip(
        residual_mix(x, **_weights(4, 16), eps=0.0, backend="torch"),
        residual_mix(louder, **_weights(4, 16), eps=0.0, backend="torch"),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_a_final_mixer_injects_nothing() -> None:
    x, weights = torch.randn(3, 4, 16), _weights(4, 16)
    with_gates, _ = residual_mix(x, **weights, eps=EPS, backend="torch")
    mixed, inject = residual_mix(x, **weights | {"w_inject": torch.zeros(0, 64)}, eps=EPS, backend="torch")
    assert inject.shape == (3, 0)
    assert torch.equal(mixed, with_gates)


def test_injection_rounds_once() -> None:
    # The product 1.0314331 rounds to 1.03125 in bfloat16; the sum with −1 must come from the unrounded one.
    x = torch.full((1, 1, 1), -1.0, dtype=torch.bfloat16)
    y = torch.full((1, 1), 1 + 3 * 2**-7, dtype=torch.bfloat16)
    residual_inject(x, y, torch.full((1, 1), 1 + 2**-7), backend="torch")
    assert x.item() == 0.031494140625


def test_each_stream_takes_its_own_share() -> None:
    x = torch.arange(6.0).view(1, 3, 2)
    residual_inject(x, torch.tensor([[10.0, 100.0]]), torch.tensor([[0.0, 1.0, 2.0]]), backend="torch")
    assert x.tolist() == [[[0.0, 1.0], [12.0, 103.0], [24.0, 205.0]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_op_equals_the_two(dtype: torch.dtype) -> None:
    x, y, inject = torch.randn(5, 4, 16).to(dtype), torch.randn(5, 16).to(dtype), torch.rand(5, 4) * 2
    weights, apart = _weights(4, 16, dtype=dtype), x.clone()
    mixed, gates = residual_inject_mix(x, y, inject, **weights, eps=EPS, backend="torch")
    residual_inject(apart, y, inject, backend="torch")
    wanted_mixed, wanted_gates = residual_mix(apart, **weights, eps=EPS, backend="torch")
    assert torch.equal(x, apart)
    assert torch.equal(mixed, wanted_mixed)
    assert torch.equal(gates, wanted_gates)


def test_gates_are_streams_or_none() -> None:
    weights = _weights(4, 16) | {"w_inject": torch.zeros(1, 64)}
    with pytest.raises(ShapeError, match=r"gates in \(0, streams\)"):
        residual_mix(torch.zeros(1, 4, 16), **weights, eps=EPS)


def test_weights_have_the_dtype_of_the_streams() -> None:
    weights = _weights(4, 16)
    weights["w_up"] = weights["w_up"].half()
    with pytest.raises(DtypeError, match="w_up"):
        residual_mix(torch.zeros(1, 4, 16), **weights, eps=EPS)
