"""First use of a kernel that never ran on this arch: it must pass conformance on this device before it serves."""

import threading
import warnings
from typing import TYPE_CHECKING

import torch

from tokenspeed_registry.contract import Contract
from tokenspeed_registry.evidence import Level
from tokenspeed_registry.platform import Platform, platform_of
from tokenspeed_registry.selection import Candidate

if TYPE_CHECKING:
    from tokenspeed_registry.registry import Registry

_lock = threading.RLock()
_results: dict[tuple[str, str, str], str | None] = {}


def run(
    registry: "Registry", contract: Contract, candidate: Candidate, platform: Platform, device: torch.device
) -> str | None:
    """Why the kernel must not serve; None where it may.

    Kernels without a compiler of their own run wherever torch does and are not checked; nor is a `measured` one. A
    failure warns, with what was wrong. Policy `TOKENSPEED_KERNELS_SELF_CHECK=0` skips the check.
    """
    kernel = candidate.kernel
    exempt = kernel.compiler is None or candidate.level is Level.MEASURED or not registry.settings.self_check
    if exempt or platform.arch != platform_of(device).arch:
        return None
    key = (kernel.name, kernel.source_hash, platform.arch)
    with _lock:
        if key not in _results:
            from tokenspeed_registry.conformance import check_kernel

            report = check_kernel(contract, kernel, device)
            _results[key] = (
                None if report.ok else f"failed its first-use self-check: {(report.failures or ['no case ran'])[0]}"
            )
            if not report.ok:
                warnings.warn(f"{kernel.name} on {platform.arch}: {_results[key]}", RuntimeWarning, stacklevel=2)
        return _results[key]
