"""What ships as evidence of the portable kernels speaks of them as they stand, and says what was hoped for."""

import pytest

from tokenspeed_kernels import triton as backend
from tokenspeed_kernels.triton.interpreter import interpretable
from tokenspeed_registry import Kernel
from tokenspeed_registry.evidence import read
from tokenspeed_registry.record import Level, Record
from tokenspeed_registry.registry import default_registry

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "gfx950")
OLDEST, NEWEST = "triton 3.6", "triton 3.9"
"""That are supported."""
SPILLS = {
    # The sine's table of 2/pi in local memory, which counts as a spill, under Triton 3.6.
    "triton.index_cache_write": 32,
    # 8 warps, which spill nothing, took 8 % longer on H200 at 16 rows.
    "triton.mla_decode": 40,
    # A local array of one-byte values where rows are put in order, at 64 registers.
    "triton.moe_experts": 16,
    "triton.moe_experts_fp8_block": 16,
    "triton.moe_experts_nvfp4": 16,
    # 128 rows of 256 columns a tile in prefill: tiles of half the rows or keys, which spill less, took 1.4 to 2.1 times
    # as long on H200. None is inside of the loop over keys.
    "triton.paged_attention": 448,
    # The up projection in FP8 on Blackwell, at 32 tokens; not mended.
    "triton.residual_inject_mix": 8,
    # With a float8 cache: 4 warps, which spill nothing, took a fifth longer on H200.
    "triton.sparse_attention": 376,
}
"""The most that a kernel may spill at its chosen configurations, and why it does; those not named, nothing."""
KERNELS = [kernel for kernel in default_registry.kernels() if kernel.backend == "triton"]


def shipped(kernel: Kernel, arch: str) -> dict[str, Record]:
    """By compiler: the records of the kernel's source as it stands."""
    assert backend.plugin.evidence is not None
    known = read(backend.plugin.evidence / f"{arch}.json")
    return {r.compiler: r for r in known if (r.kernel, r.source_hash) == (kernel.name, kernel.source_hash)}


@pytest.mark.parametrize("compiler", [NEWEST, pytest.param(OLDEST, marks=pytest.mark.slow)])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_kernel_compiles_for_every_arch(kernel: Kernel, arch: str, compiler: str) -> None:
    records = shipped(kernel, arch)
    assert compiler in records, f"run `make evidence`: nothing of {kernel.name} on {arch} under {compiler}"
    configs = records[compiler].proofs[Level.COMPILED]["configs"]
    assert configs
    for config in configs:
        assert config["spills"] <= SPILLS.get(kernel.name, 0), f"{config['config']} spills on {arch} under {compiler}"


@pytest.mark.parametrize("kernel", [k for k in KERNELS if interpretable(k)], ids=lambda kernel: kernel.name)
def test_every_kernel_was_interpreted(kernel: Kernel) -> None:
    assert Level.INTERPRETED in shipped(kernel, "gfx950")[NEWEST].proofs
