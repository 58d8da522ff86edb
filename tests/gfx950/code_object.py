"""An AMDGPU code object placed in memory: its segments, its relocations, and what its kernel descriptor says.

Layouts: ELF64; kernel descriptor of code object version 5, https://llvm.org/docs/AMDGPUUsage.html#kernel-descriptor.
"""

import ctypes
import struct
from dataclasses import dataclass
from typing import Any

PAGE = 4096
LOAD, SYMBOLS, DYNAMIC_SYMBOLS, RELOCATIONS = 1, 2, 11, 4
RELATIVE64 = 13


@dataclass(frozen=True)
class CodeObject:
    """`entry`: address of the first instruction. `image` owns the memory. `private`: scratch bytes a lane."""

    name: str
    image: Any
    entry: int
    static_lds: int
    private: int
    kernarg_size: int
    rsrc2: int
    properties: int
    preload: int


def load(blob: bytes, name: str) -> CodeObject:
    """Places `blob` and reads the descriptor of kernel `name`. Raises `NotImplementedError` for odd relocations."""
    header_offset, section_offset = struct.unpack_from("<QQ", blob, 32)
    (header_count,) = struct.unpack_from("<H", blob, 56)
    section_size, section_count, _ = struct.unpack_from("<HHH", blob, 58)
    segments = []
    for i in range(header_count):
        kind, _, offset, address, _, size, memory, _ = struct.unpack_from("<IIQQQQQQ", blob, header_offset + 56 * i)
        if kind == LOAD:
            segments.append((offset, address, size, memory))
    image = (ctypes.c_uint8 * (max(address + memory for _, address, _, memory in segments) + 2 * PAGE))()
    base = (ctypes.addressof(image) + PAGE - 1) & -PAGE
    for offset, address, size, _ in segments:
        ctypes.memmove(base + address, blob[offset : offset + size], size)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", blob, section_offset + section_size * i) for i in range(section_count)
    ]
    symbols: dict[str, int] = {}
    for section in sections:
        if section[1] in (SYMBOLS, DYNAMIC_SYMBOLS):
            symbols |= _symbols(blob, section, sections[section[6]])
        if section[1] == RELOCATIONS:
            _relocate(blob, section, base)
    descriptor = base + symbols[f"{name}.kd"]
    words = bytes((ctypes.c_uint8 * 64).from_address(descriptor))
    static_lds, private, kernarg_size = struct.unpack_from("<III", words, 0)
    _, _, rsrc2 = struct.unpack_from("<III", words, 44)
    properties, preload = struct.unpack_from("<HH", words, 56)
    entry = descriptor + struct.unpack_from("<q", words, 16)[0]
    return CodeObject(name, image, entry, static_lds, private, kernarg_size, rsrc2, properties, preload)


def _symbols(blob: bytes, section: tuple[int, ...], names: tuple[int, ...]) -> dict[str, int]:
    found = {}
    for offset in range(section[4], section[4] + section[5], 24):
        name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", blob, offset)
        start = names[4] + name
        if text := blob[start : blob.index(b"\0", start)].decode():
            found[text] = value
    return found


def _relocate(blob: bytes, section: tuple[int, ...], base: int) -> None:
    for offset in range(section[4], section[4] + section[5], 24):
        where, info, addend = struct.unpack_from("<QQq", blob, offset)
        if info & 0xFFFFFFFF != RELATIVE64:
            raise NotImplementedError(f"relocation {info & 0xFFFFFFFF}")
        ctypes.c_uint64.from_address(base + where).value = base + addend
