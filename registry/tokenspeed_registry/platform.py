"""What we run on: vendor, arch, features and limits. The one place where chips have names.

Nothing is probed at import: `platform_of(device)` asks torch the first time a tensor of that device is dispatched.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import torch

from tokenspeed_registry.errors import UnknownNameError


@dataclass(frozen=True)
class Limits:
    """Per-chip limits that kernels are planned against; zero where the notion does not apply.

    Units: bytes for memories, bytes/s for `hbm_bandwidth`, FLOP/s (dense) for the matrix rates. Vendor data sheets,
    except that the CPU has none: measure it.
    """

    warp_size: int = 0
    compute_units: int = 0
    shared_memory_per_block: int = 0
    registers_per_thread: int = 0
    l2_cache: int = 0
    hbm_bandwidth: float = 0.0
    bf16_rate: float = 0.0
    fp8_rate: float = 0.0
    fp4_rate: float = 0.0

    def matrix_rate(self, dtype: torch.dtype) -> float:
        """FLOP/s of the matrix units for products of `dtype`; a chip that lacks it takes the next wider one it has."""
        rates = [self.bf16_rate]
        if dtype.itemsize == 1:
            rates.append(self.fp8_rate)
        if dtype == torch.float4_e2m1fn_x2:
            rates.append(self.fp4_rate)
        return next((rate for rate in reversed(rates) if rate), 0.0)


@dataclass(frozen=True)
class Platform:
    """A vendor's arch with its features and limits. `device` is the marketing name once a device was seen."""

    vendor: str
    arch: str
    features: frozenset[str] = field(default_factory=frozenset)
    limits: Limits = field(default_factory=Limits)
    device: str | None = None


_KB = 1024
_MB = 1024 * 1024

PLATFORMS: Mapping[str, Platform] = {
    platform.arch: platform
    for platform in (
        Platform("cpu", "cpu"),
        Platform(
            "nvidia",
            "sm_90a",
            frozenset({"tma", "wgmma", "clusters", "programmatic_launch", "fp8"}),
            Limits(
                warp_size=32,
                compute_units=132,
                shared_memory_per_block=227 * _KB,
                registers_per_thread=255,
                l2_cache=60 * _MB,
                hbm_bandwidth=4.8e12,
                bf16_rate=989e12,
                fp8_rate=1979e12,
            ),
        ),
        Platform(
            "nvidia",
            "sm_100a",
            frozenset({"tma", "tcgen05", "tensor_memory", "clusters", "programmatic_launch", "fp8", "nvfp4"}),
            Limits(
                warp_size=32,
                compute_units=148,
                shared_memory_per_block=227 * _KB,
                registers_per_thread=255,
                l2_cache=126 * _MB,
                hbm_bandwidth=8.0e12,
                bf16_rate=2250e12,
                fp8_rate=4500e12,
                fp4_rate=9000e12,
            ),
        ),
        Platform(
            "nvidia",
            "sm_103a",
            frozenset({"tma", "tcgen05", "tensor_memory", "clusters", "programmatic_launch", "fp8", "nvfp4"}),
            Limits(
                warp_size=32,
                compute_units=160,
                shared_memory_per_block=227 * _KB,
                registers_per_thread=255,
                l2_cache=126 * _MB,
                hbm_bandwidth=8.0e12,
                bf16_rate=2500e12,
                fp8_rate=5000e12,
                fp4_rate=15000e12,
            ),
        ),
        Platform(
            "amd",
            "gfx950",
            frozenset({"mfma", "mfma_scaled", "direct_to_lds", "fp8", "mxfp4"}),
            Limits(
                warp_size=64,
                compute_units=256,
                shared_memory_per_block=160 * _KB,
                registers_per_thread=512,
                l2_cache=256 * _MB,
                hbm_bandwidth=8.0e12,
                bf16_rate=2516e12,
                fp8_rate=5033e12,
                fp4_rate=10066e12,
            ),
        ),
    )
}


def known_platform(arch: str) -> Platform:
    """The table's entry for `arch`. Raises `UnknownNameError` that lists the known ones."""
    try:
        return PLATFORMS[arch]
    except KeyError:
        raise UnknownNameError(f"unknown arch {arch!r}; known: {', '.join(PLATFORMS)}") from None


def platform_of(device: torch.device) -> Platform:
    """The platform that serves tensors on `device`.

    The configuration's `arch` overrides what an accelerator says of itself. One that the table does not know gets its
    own arch name and no features, so that portable kernels still run and vendor kernels say why they do not.
    """
    return _detect(device.type, device.index)


def assume_arch(arch: str | None) -> None:
    """Take accelerators for `arch` from now on, in all threads; None: for what they say they are."""
    global _assumed
    _assumed = arch
    _detect.cache_clear()


_assumed: str | None = None


@cache
def _detect(device_type: str, index: int | None) -> Platform:
    if device_type != "cuda":
        return PLATFORMS.get(device_type) or Platform(device_type, device_type)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    # Torch on ROCm calls its devices "cuda" too; only the build and gcnArchName tell them apart.
    if torch.version.hip is not None:
        arch, vendor = properties.gcnArchName.split(":")[0], "amd"
    else:
        # From Hopper on an arch has features of its own, which the suffix "a" stands for.
        suffix = "a" if properties.major >= 9 else ""
        arch, vendor = f"sm_{properties.major}{properties.minor}{suffix}", "nvidia"
    arch = _assumed or arch
    known = PLATFORMS.get(arch, Platform(vendor, arch))
    return Platform(known.vendor, arch, known.features, known.limits, properties.name)


def present_platform() -> Platform:
    """The platform of the first accelerator that torch sees, else the CPU."""
    if torch.cuda.is_available():
        return platform_of(torch.device("cuda", torch.cuda.current_device()))
    return platform_of(torch.device("cpu"))
