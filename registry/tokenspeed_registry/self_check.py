"""First use of a kernel that was not verified on this arch: it must pass a few cases like the call before it serves.

A verdict holds for one variant (static dims, dtypes, flags) of one source under one compiler on one arch. It is kept
with the user's evidence, so that the next process need not check again, and `explain` shows the failures.
"""

import threading
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tokenspeed_registry.contract import Contract
from tokenspeed_registry.errors import NoKernelError
from tokenspeed_registry.evidence import compiler_version
from tokenspeed_registry.kernel import Kernel
from tokenspeed_registry.platform import Platform, platform_of
from tokenspeed_registry.record import PASSED, Level, Record
from tokenspeed_registry.selection import Candidate
from tokenspeed_registry.signature import Signature
from tokenspeed_registry.variant import completed, variant_of

if TYPE_CHECKING:
    from tokenspeed_registry.registry import Registry

CASES = 4
"""Each may compile the kernel anew."""

_lock = threading.RLock()
_verdicts: dict[tuple[str, ...], str] = {}
"""Of this process, with those that evidence does not keep."""


def run(
    registry: "Registry",
    contract: Contract,
    candidate: Candidate,
    platform: Platform,
    device: torch.device,
    signature: Signature,
    capturing: bool = False,
) -> str | None:
    """Why the kernel must not serve a call of `signature`; None where it may.

    Kernels without a compiler of their own run wherever torch does and are not checked; nor is a `verified` one. A
    failure warns, with what was wrong. Policy `TOKENSPEED_KERNELS_SELF_CHECK=0` skips the check. Raises
    `NoKernelError` where a check is due while a CUDA graph is being captured.
    """
    kernel = candidate.kernel
    if not _concerns(registry, kernel, platform) or platform.arch != platform_of(device).arch:
        return None
    variant = str(variant_of(contract, signature))
    with _lock:
        verdict = _known(registry, kernel, platform, variant)
        if verdict is None:
            if capturing:
                reason = f"{kernel.name}: never ran here and must check itself first: call the op once before capture"
                raise NoKernelError(f"{contract.name}: cannot be captured yet", [reason])
            verdict = _check(registry, contract, kernel, platform, device, signature, variant)
    return _reason(verdict)


def failures(
    registry: "Registry", contract: Contract, kernels: Iterable[Kernel], platform: Platform, signature: Signature
) -> dict[str, str]:
    """Why kernels must not serve a call of `signature`, from checks made before, by kernel name."""
    call = completed(contract, signature)
    if call is None:
        return {}
    variant = str(variant_of(contract, call))
    checked = (kernel for kernel in kernels if _concerns(registry, kernel, platform))
    verdicts = {kernel.name: _known(registry, kernel, platform, variant) for kernel in checked}
    return {name: reason for name, verdict in verdicts.items() if verdict and (reason := _reason(verdict))}


def _concerns(registry: "Registry", kernel: Kernel, platform: Platform) -> bool:
    if kernel.compiler is None or not registry.settings.self_check:
        return False
    return registry.evidence.level(kernel, platform.arch) < Level.VERIFIED


def _known(registry: "Registry", kernel: Kernel, platform: Platform, variant: str) -> str | None:
    key = _key(kernel, platform, variant)
    return _verdicts.get(key) or registry.evidence.counting(kernel, platform.arch).self_checks.get(variant)


def _check(
    registry: "Registry",
    contract: Contract,
    kernel: Kernel,
    platform: Platform,
    device: torch.device,
    signature: Signature,
    variant: str,
) -> str:
    from tokenspeed_registry.cases import matching_cases
    from tokenspeed_registry.conformance import check_kernel

    report = check_kernel(contract, kernel, device, cases=matching_cases(contract, signature, limit=CASES))
    verdict = PASSED if report.ok else (report.failures or ["no case ran"])[0]
    _verdicts[_key(kernel, platform, variant)] = verdict
    if not report.ok:
        warnings.warn(f"{kernel.name} on {platform.arch}: {_reason(verdict)}", RuntimeWarning, stacklevel=2)
    # A case set without cases for it, or a device that was full, says nothing of the kernel tomorrow.
    if report.cases and "OutOfMemoryError" not in verdict:
        found = Record(kernel.name, kernel.source_hash, platform.arch, compiler_version(kernel))
        try:
            registry.evidence.record(replace(found, self_checks={variant: verdict}))
        except (OSError, ValueError) as error:
            warnings.warn(f"the self-check of {kernel.name} is not kept: {error}", RuntimeWarning, stacklevel=2)
    return verdict


def _key(kernel: Kernel, platform: Platform, variant: str) -> tuple[str, ...]:
    return kernel.name, kernel.source_hash, compiler_version(kernel), platform.arch, variant


def _reason(verdict: str) -> str | None:
    return None if verdict == PASSED else f"failed its first-use self-check: {verdict}"
