"""What ships as evidence of the kernels in CUDA C++ speaks of them as they stand: they compile and spill nothing."""

import pytest

import tokenspeed_cuda as backend
import tokenspeed_kernels  # noqa: F401  declares the ops
from tokenspeed_registry import Kernel
from tokenspeed_registry.evidence import compiler_version, read
from tokenspeed_registry.record import Level
from tokenspeed_registry.registry import default_registry

SPILLS = {
    # With two consumers, one value a chunk, stored and loaded once.
    "cuda.gdn_prefill_many": 8,
    "cuda.gdn_prefill_cut": 8,
    # Around the loop over tiles, not in it.
    "cuda.mla_decode_many": 48,
    # In the plan for 17 to 32 tokens; not mended.
    "cuda.moe_experts_fp8_block_few": 16,
    # Of the portable kernel that puts pairs in order, which these launch: a local array at 64 registers.
    "cuda.moe_experts_fp8_block_prefill": 16,
    "cuda.moe_experts_nvfp4_prefill": 16,
    # A stack frame at 80 registers, not looked into.
    "cuda.residual_inject_mix_few": 8,
    "cuda.residual_mix_few": 8,
}
"""The most that a kernel may spill, in bytes, and why it does; those not named, nothing."""
KERNELS = [
    (kernel, arch)
    for kernel in default_registry.kernels()
    if kernel.backend == "cuda"
    for arch in sorted(kernel.requires.archs)
]


@pytest.mark.parametrize(("kernel", "arch"), KERNELS, ids=lambda value: getattr(value, "name", value))
def test_every_kernel_compiles_for_its_archs(kernel: Kernel, arch: str) -> None:
    assert backend.plugin.evidence is not None
    (record,) = [
        record
        for record in read(backend.plugin.evidence / f"{arch}.json")
        if (record.kernel, record.source_hash, record.compiler)
        == (kernel.name, kernel.source_hash, compiler_version(kernel))
    ]
    configs = record.proofs[Level.COMPILED]["configs"]
    assert configs
    for config in configs:
        assert config["spills"] <= SPILLS.get(kernel.name, 0), f"{config['config']} spills on {arch}"
