"""Every op has a portable kernel, and it conforms in Triton's interpreter on small cases in float32 and float16."""

import pytest
import torch

import tokenspeed_kernels  # noqa: F401  declares the ops
from tokenspeed_kernels.triton.device import interpreted
from tokenspeed_kernels.triton.interpreter import interpretable, interpretable_cases
from tokenspeed_registry import Kernel, known_platform
from tokenspeed_registry.conformance import check_kernel
from tokenspeed_registry.registry import default_registry

CASES = 8
KERNELS = [kernel for kernel in default_registry.kernels() if kernel.backend == "triton" and interpretable(kernel)]
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


def check(kernel: Kernel, limit: int | None) -> None:
    contract = default_registry.contract(kernel.op)
    cases = interpretable_cases(contract, limit)
    report = check_kernel(contract, kernel, torch.device("cpu"), cases, platform=known_platform("sm_90a"))
    assert report.ok, report.failures
    assert report.refused < len(cases)


def test_every_op_has_a_portable_kernel() -> None:
    assert interpreted()
    assert {kernel.op for kernel in KERNELS} == set(default_registry.contracts)


@each_kernel
def test_portable_kernel_conforms(kernel: Kernel) -> None:
    check(kernel, CASES)


@pytest.mark.slow
@each_kernel
def test_portable_kernel_conforms_on_all_small_cases(kernel: Kernel) -> None:
    check(kernel, None)
