"""What ships as evidence of the kernels in CUDA C++ speaks of them as they stand: they compile and spill nothing."""

import pytest

import tokenspeed_cuda as backend
import tokenspeed_kernels  # noqa: F401  declares the ops
from tokenspeed_registry import Kernel
from tokenspeed_registry.evidence import compiler_version, read
from tokenspeed_registry.record import Level
from tokenspeed_registry.registry import default_registry

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
        assert config["spills"] == 0, f"{config['config']} spills on {arch}"
