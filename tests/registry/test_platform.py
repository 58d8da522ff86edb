"""The table of archs, and what is made of a device."""

import types
from typing import Any

import pytest
import torch

from tests.registry.toys import new_registry
from tokenspeed_registry import (
    ANYWHERE,
    Cost,
    Platform,
    Registry,
    Requirement,
    UnknownNameError,
    arch,
    feature,
    known_platform,
    platform_of,
    present_platform,
    vendor,
)
from tokenspeed_registry import platform as module
from tokenspeed_registry.platform import PLATFORMS, assume_arch
from tokenspeed_registry.settings import Settings


def detected(monkeypatch: pytest.MonkeyPatch, hip: str | None = None, **properties: Any) -> Platform:
    """What `platform_of` makes of an accelerator with these properties."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(**properties))
    monkeypatch.setattr(torch.version, "hip", hip)
    module._detect.cache_clear()
    try:
        return platform_of(torch.device("cuda", 0))
    finally:
        module._detect.cache_clear()


def test_table_is_keyed_by_arch_and_complete() -> None:
    for name, platform in PLATFORMS.items():
        assert platform.arch == name
        assert platform.device is None
        if platform.vendor != "cpu":
            limits = platform.limits
            assert limits.warp_size == {"nvidia": 32, "amd": 64}[platform.vendor]
            assert min(limits.compute_units, limits.shared_memory_per_block, limits.l2_cache) > 0
            assert 1e12 < limits.hbm_bandwidth < limits.bf16_rate


def test_known_platform() -> None:
    assert known_platform("gfx950").vendor == "amd"
    with pytest.raises(UnknownNameError, match="unknown arch 'sm_90'; known: cpu, sm_90a, sm_100a, sm_103a, gfx950"):
        known_platform("sm_90")


def test_cpu_and_other_devices() -> None:
    assert platform_of(torch.device("cpu")) == PLATFORMS["cpu"]
    meta = platform_of(torch.device("meta"))
    assert (meta.vendor, meta.arch, meta.features) == ("meta", "meta", frozenset())


def test_nvidia_device(monkeypatch: pytest.MonkeyPatch) -> None:
    found = detected(monkeypatch, major=10, minor=3, name="NVIDIA B300")
    assert (found.vendor, found.arch, found.device) == ("nvidia", "sm_103a", "NVIDIA B300")
    assert found.features == PLATFORMS["sm_103a"].features
    assert found.limits == PLATFORMS["sm_103a"].limits


def test_amd_device(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {"major": 9, "minor": 5, "name": "MI355X", "gcnArchName": "gfx950:sramecc+:xnack-"}
    found = detected(monkeypatch, hip="7.0", **properties)
    assert (found.vendor, found.arch, found.device) == ("amd", "gfx950", "MI355X")


def test_unknown_device_keeps_its_name_and_has_no_features(monkeypatch: pytest.MonkeyPatch) -> None:
    found = detected(monkeypatch, hip="7.0", gcnArchName="gfx1201", name="RX 9070")
    assert found == Platform("amd", "gfx1201", device="RX 9070")
    found = detected(monkeypatch, major=12, minor=0, name="RTX 5090")
    assert (found.vendor, found.arch, found.features) == ("nvidia", "sm_120a", frozenset())
    assert ANYWHERE.explain(found) is None
    assert arch("sm_100a").explain(found) == "needs arch sm_100a, got sm_120a"


def test_the_configuration_overrides_what_the_device_says(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(new_registry().namespace, settings=Settings(arch="sm_90a"), plugins=False)
    try:
        assert registry.settings.arch == "sm_90a"
        found = detected(monkeypatch, major=10, minor=0, name="NVIDIA B200")
        assert (found.arch, found.features, found.device) == ("sm_90a", PLATFORMS["sm_90a"].features, "NVIDIA B200")
    finally:
        assume_arch(None)


def test_present_platform_without_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert present_platform() == PLATFORMS["cpu"]


@pytest.mark.parametrize(
    ("requirement", "platform", "reason"),
    [
        (ANYWHERE, "cpu", None),
        (arch("sm_90a", "sm_100a"), "sm_100a", None),
        (arch("sm_90a", "sm_100a"), "gfx950", "needs arch sm_100a or sm_90a, got gfx950"),
        (vendor("nvidia"), "sm_90a", None),
        (vendor("nvidia", "amd"), "cpu", "needs a device of amd or nvidia, got cpu"),
        (feature("fp8"), "gfx950", None),
        (feature("tma", "wgmma"), "sm_100a", "needs wgmma, which sm_100a lacks"),
        (Requirement(vendors=frozenset({"nvidia"}), features=frozenset({"tma"})), "gfx950",
         "needs a device of nvidia, got amd"),
    ],
)  # fmt: skip
def test_requirements(requirement: Requirement, platform: str, reason: str | None) -> None:
    assert requirement.explain(known_platform(platform)) == reason


def test_roofline_floor_is_the_larger_of_the_two_times() -> None:
    hopper = known_platform("sm_90a")
    assert Cost(flops=0, nbytes=4.8e12).seconds(hopper) == pytest.approx(1.0)
    assert Cost(flops=989e12 * 2, nbytes=4.8e12).seconds(hopper) == pytest.approx(2.0)
    assert Cost(flops=1, nbytes=1).seconds(known_platform("cpu")) == 0.0
