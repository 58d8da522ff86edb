"""What ships as evidence of the portable kernels speaks of them as they stand, and says what was hoped for."""

import pytest

from tokenspeed_kernels import triton as backend
from tokenspeed_kernels.triton.interpreter import interpretable
from tokenspeed_registry import Kernel
from tokenspeed_registry.evidence import read
from tokenspeed_registry.record import Level, Record
from tokenspeed_registry.registry import default_registry

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "gfx950")
COMPILERS = ("triton 3.6", "triton 3.9")
"""The oldest and the newest that are supported."""
KERNELS = [kernel for kernel in default_registry.kernels() if kernel.backend == "triton"]


def shipped(kernel: Kernel, arch: str) -> dict[str, Record]:
    """By compiler: the records of the kernel's source as it stands."""
    assert backend.plugin.evidence is not None
    known = read(backend.plugin.evidence / f"{arch}.json")
    return {r.compiler: r for r in known if (r.kernel, r.source_hash) == (kernel.name, kernel.source_hash)}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_kernel_compiles_for_every_arch_on_both_compilers(kernel: Kernel, arch: str) -> None:
    records = shipped(kernel, arch)
    for compiler in COMPILERS:
        assert compiler in records, f"run `make evidence`: nothing of {kernel.name} on {arch} under {compiler}"
        facts = records[compiler].proofs[Level.COMPILED]
        assert facts["configs"]
        for config in facts["configs"]:
            assert not config["spills"], f"{config['config']} spills on {arch} under {compiler}"


@pytest.mark.parametrize("kernel", [k for k in KERNELS if interpretable(k)], ids=lambda kernel: kernel.name)
def test_every_kernel_was_interpreted(kernel: Kernel) -> None:
    assert Level.INTERPRETED in shipped(kernel, "gfx950")["triton 3.9"].proofs
