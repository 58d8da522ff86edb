"""One wave of 64 lanes as numpy views of its registers, and how an instruction's fields and operands are read."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LANES = np.arange(64)
FIRST_VECTOR = 256
"""Operand numbers from here on are vector registers; below are scalar registers and inline constants."""
EXEC, PC = 126, 256
"""Scalar registers that hold the mask of active lanes and, in the emulator, the program counter (two words each)."""

PAGE = 4096
MEMORY = np.ctypeslib.as_array((ctypes.c_uint8 * (1 << 47)).from_address(PAGE))
"""The process's own memory, by address − 4096."""


@dataclass
class Wave:
    """`v`, `a`: vector and accumulation registers [256, 64], uint32. `s`: scalar registers. `lds`: of the workgroup.

    `state` is the emulator's own; `pointers` are what its compiled instructions take.
    """

    state: Any
    v: NDArray[np.uint32]
    a: NDArray[np.uint32]
    s: NDArray[np.uint32]
    lds: NDArray[np.uint32]
    pointers: list[Any]
    done: bool = False

    @property
    def pc(self) -> int:
        return int(self.s[PC]) | int(self.s[PC + 1]) << 32

    @pc.setter
    def pc(self, address: int) -> None:
        self.s[PC], self.s[PC + 1] = address & 0xFFFFFFFF, address >> 32

    @property
    def active(self) -> NDArray[np.bool_]:
        """Which lanes execute."""
        mask = np.uint64(int(self.s[EXEC]) | int(self.s[EXEC + 1]) << 32)
        return ((mask >> LANES.astype(np.uint64)) & np.uint64(1)).astype(bool)

    @active.setter
    def active(self, lanes: NDArray[np.bool_]) -> None:
        mask = sum(1 << int(lane) for lane in np.nonzero(lanes)[0])
        self.s[EXEC], self.s[EXEC + 1] = mask & 0xFFFFFFFF, mask >> 32

    def registers(self, accumulation: int) -> NDArray[np.uint32]:
        """The register file that an instruction's bit names."""
        return self.a if accumulation else self.v

    def operand(self, number: int, negative: int = 0, absolute: int = 0) -> NDArray[np.uint32]:
        """A source of any kind, one word a lane."""
        vector = number >= FIRST_VECTOR
        word = self.v[number - FIRST_VECTOR].copy() if vector else np.full(64, int(self.s[number]), np.uint32)
        if absolute:
            word &= np.uint32(0x7FFFFFFF)
        if negative:
            word ^= np.uint32(0x80000000)
        return word


def field(instruction: Any, name: str, default: int = 0) -> int:
    """A field of an instruction's encoding; `default` where its format has none of that name."""
    bits = getattr(type(instruction), name, None)
    return default if bits is None else (instruction._raw >> bits.lo) & bits.mask


def offset16(instruction: Any) -> int:
    """The offset of an LDS instruction, in bytes."""
    return field(instruction, "offset0") | field(instruction, "offset1") << 8


def wide_bfloat16(bits: NDArray[Any]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded_bfloat16(values: NDArray[Any]) -> NDArray[np.uint32]:
    """Bits, to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint32)
