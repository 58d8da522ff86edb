"""Every op has a portable kernel, and it conforms in Triton's interpreter on small cases in float32 and float16."""

import pytest
import torch

import tokenspeed_kernels  # noqa: F401  declares the ops
from tokenspeed_kernels.triton.device import interpreted
from tokenspeed_kernels.triton.interpreter import interpretable_cases
from tokenspeed_registry import Kernel, known_platform
from tokenspeed_registry.conformance import check_kernel
from tokenspeed_registry.registry import default_registry

CASES = 8
OPS = sorted(default_registry.contracts)


def portable_kernel(op: str) -> Kernel:
    (kernel,) = (kernel for kernel in default_registry.kernels(op) if kernel.backend == "triton")
    return kernel


@pytest.mark.parametrize("op", OPS)
def test_portable_kernel_conforms(op: str) -> None:
    assert interpreted()
    contract = default_registry.contract(op)
    cases = interpretable_cases(contract, CASES)
    assert cases
    report = check_kernel(contract, portable_kernel(op), torch.device("cpu"), cases, platform=known_platform("sm_90a"))
    assert report.ok, report.failures
    assert report.refused < len(cases)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_portable_kernel_conforms_on_all_small_cases(op: str) -> None:
    contract = default_registry.contract(op)
    report = check_kernel(
        contract,
        portable_kernel(op),
        torch.device("cpu"),
        interpretable_cases(contract),
        platform=known_platform("sm_90a"),
    )
    assert report.ok, report.failures
