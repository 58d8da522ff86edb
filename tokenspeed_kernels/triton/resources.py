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
# The same in NVIDIA's machine code.
MACHINE = re.compile(r"\b([HQI]MMA|[HQ]GMMA|UTC[A-Z]*MMA|UBLKCP|UTMALDG|UTMASTG|LDGSTS)\b")


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


def cubin_resources(cubin: bytes, name: str, dynamic: int) -> Resources:
    """Of the kernel `name` of a cubin, launched with `dynamic` bytes of shared memory beside what it declares."""
    sections = inspected(cubin, "cuobjdump", "-res-usage").split("Function ")
    usage = next(section for section in sections if section.startswith(f"{name}:"))
    registers, spills, shared = _usage(usage)
    code = inspected(cubin, "cuobjdump", "-sass", "-fun", name)
    shared -= 1024  # the system's own, at the start of each block's
    return Resources(registers, spills, shared + dynamic, dict(sorted(Counter(MACHINE.findall(code)).items())))


def _nvidia(cubin: bytes, ptx: str, shared: int) -> Resources:
    registers, spills, _ = _usage(inspected(cubin, "cuobjdump", "-res-usage"))
    return Resources(registers, spills, shared, _instructions(ptx))


def _usage(text: str) -> tuple[int, int, int]:
    """Registers, spilled bytes and static shared memory."""
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|LOCAL|STACK|SHARED):(\d+)", text)}
    return numbers["REG"], numbers.get("LOCAL", 0) + numbers.get("STACK", 0), numbers.get("SHARED", 0)


def inspected(cubin: bytes, tool: str, *options: str) -> str:
    """What one of the tools that come with Triton prints of a cubin."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout


def _instructions(text: str) -> dict[str, int]:
    return dict(sorted(Counter(MATRIX.findall(text) + COPIES.findall(text)).items()))
