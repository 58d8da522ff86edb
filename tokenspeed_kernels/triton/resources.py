"""What a compiled kernel takes of a chip, read from its binary: registers, spills, shared memory, instructions."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

MATRIX = re.compile(r"\b(tcgen05\.mma|wgmma\.mma_async|mma\.sync|v_s?mfma_(?:scale_)?[a-z]*\d+_\d+x\d+x\d+)")
COPIES = re.compile(
    r"\b(cp\.async\.bulk(?:\.tensor)?|cp\.async\.c[ag]|buffer_load_dword\w*(?=[^\n]*\blds\b)|global_load_lds)"
)


@dataclass(frozen=True)
class Resources:
    """Of one compiled kernel: registers a thread, spilled bytes (NVIDIA) or registers (AMD) a thread, bytes of shared
    memory a block, and how often each matrix and asynchronous copy instruction stands in its code."""

    registers: int
    spills: int
    shared_bytes: int
    instructions: dict[str, int]


def resources(compiled: Any) -> Resources:
    """Of a `triton.compiler.CompiledKernel`, for any arch. Needs no device."""
    if compiled.metadata.target.backend == "hip":
        return _amd(compiled.asm["amdgcn"], compiled.metadata.shared)
    return _nvidia(compiled.asm["cubin"], compiled.asm["ptx"], compiled.metadata.shared)


def _amd(text: str, shared: int) -> Resources:
    def field(name: str) -> int:
        return int(next(iter(re.findall(rf"\.{name}:\s+(\d+)", text)), 0))

    return Resources(field("vgpr_count"), field("vgpr_spill_count"), shared, _instructions(text))


def _nvidia(cubin: bytes, ptx: str, shared: int) -> Resources:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = dict(re.findall(r"\b(REG|LOCAL|STACK):(\d+)", usage))
    spills = int(numbers.get("LOCAL", 0)) + int(numbers.get("STACK", 0))
    return Resources(int(numbers["REG"]), spills, shared, _instructions(ptx))


def _instructions(text: str) -> dict[str, int]:
    return dict(sorted(Counter(MATRIX.findall(text) + COPIES.findall(text)).items()))
