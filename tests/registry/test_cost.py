"""The roofline floor follows the matrix rate of the dtype in which products may be taken."""

import pytest
import torch

from tokenspeed_registry import Cost, known_platform
from tokenspeed_registry.platform import PLATFORMS, Limits
from tokenspeed_registry.signature import Signature


@pytest.mark.parametrize(
    ("arch", "dtype", "rate"),
    [
        ("sm_90a", torch.bfloat16, 989e12),
        ("sm_90a", torch.float16, 989e12),
        ("sm_90a", torch.float32, 989e12),
        ("sm_90a", torch.float8_e4m3fn, 1979e12),
        ("sm_90a", torch.float4_e2m1fn_x2, 1979e12),  # no units for four bits: the next wider ones
        ("sm_100a", torch.float8_e5m2, 4500e12),
        ("sm_100a", torch.float4_e2m1fn_x2, 9000e12),
        ("cpu", torch.bfloat16, 0.0),
    ],
)
def test_rates(arch: str, dtype: torch.dtype, rate: float) -> None:
    platform = known_platform(arch)
    assert platform.limits.matrix_rate(dtype) == rate
    assert Cost(flops=1e15, nbytes=0, rate=dtype).seconds(platform) == (pytest.approx(1e15 / rate) if rate else 0.0)


def test_narrower_is_never_slower() -> None:
    for platform in PLATFORMS.values():
        limits = platform.limits
        rates = [limits.matrix_rate(t) for t in (torch.bfloat16, torch.float8_e4m3fn, torch.float4_e2m1fn_x2)]
        assert rates == sorted(rates)


def test_a_chip_without_narrow_units() -> None:
    assert Limits(bf16_rate=3.0).matrix_rate(torch.float8_e4m3fn) == 3.0


def test_counts_replace_what_dims_can_only_bound() -> None:
    assert Signature(counts={"experts_hit": 3}).count("experts_hit", 8) == 3
    assert Signature().count("experts_hit", 8) == 8
