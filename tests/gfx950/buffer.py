"""Buffer instructions: loads, stores, loads straight into LDS, atomics; each checked against the tensors' bounds."""

import ctypes
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.gfx950.wave import LANES, MEMORY, PAGE, Wave, field, rounded_bfloat16, wide_bfloat16

WIDTHS = {
    "UBYTE": 1, "SBYTE": 1, "BYTE": 1, "USHORT": 2, "SSHORT": 2, "SHORT": 2,
    "DWORD": 4, "DWORDX2": 8, "DWORDX3": 12, "DWORDX4": 16,
}  # fmt: skip
SIGNED = {"SBYTE", "SSHORT"}
FORM = re.compile(r"BUFFER_(LOAD|STORE)_(UBYTE|SBYTE|USHORT|SSHORT|SHORT|BYTE|DWORD(?:X[234])?)(_D16)?(_HI)?")
LDS_BASE = 124
"""Scalar register that says where in LDS a direct load lands (M0)."""


class Bounds:
    """Address ranges of the tensors of the running launch; nothing outside may be touched."""

    def __init__(self) -> None:
        self._starts = self._ends = np.zeros(0, np.int64)

    def set(self, ranges: Sequence[tuple[int, int]]) -> None:
        ordered = sorted(ranges)
        self._starts = np.array([start for start, _ in ordered], np.int64)
        self._ends = np.array([end for _, end in ordered], np.int64)

    def check(self, addresses: NDArray[np.int64], size: int, what: str) -> None:
        """Raises `RuntimeError` where a lane's bytes lie in no tensor."""
        if len(addresses) == 0 or len(self._starts) == 0:
            return
        at = np.searchsorted(self._starts, addresses, "right") - 1
        bad = (at < 0) | (addresses + size > self._ends[np.maximum(at, 0)])
        if bad.any():
            raise RuntimeError(f"{what}: {bad.sum()} lanes outside every tensor, first {addresses[bad][0]:#x}")


bounds = Bounds()


def buffer(wave: Wave, instruction: Any) -> None:
    name = instruction.op.name
    if name in ("BUFFER_WBL2", "BUFFER_INV", "BUFFER_WBINVL1"):
        return  # caches are not modelled
    if field(instruction, "idxen"):
        raise NotImplementedError(f"{name} with an index")
    resource = field(instruction, "srsrc") * 4
    base = (int(wave.s[resource]) | int(wave.s[resource + 1]) << 32) & 0xFFFFFFFFFFFF
    records = int(wave.s[resource + 2])
    lane = (
        wave.v[field(instruction, "vaddr")].astype(np.int64) if field(instruction, "offen") else np.zeros(64, np.int64)
    )
    inner = lane + field(instruction, "offset")
    base += int(wave.s[field(instruction, "soffset")])
    registers = wave.registers(field(instruction, "acc"))
    form = FORM.fullmatch(name)
    if form is None:
        _atomic(wave, instruction, name, base + inner, wave.active & (inner < records), registers)
        return
    kind, unit, half, high = form.groups()
    size = WIDTHS[unit]
    inside = wave.active & (inner + size <= records)
    addresses = base + inner[inside]
    bounds.check(addresses, size, name)
    places = (addresses - PAGE)[:, None] + np.arange(size)
    first = field(instruction, "vdata")
    if kind == "STORE":
        words = max(size // 4, 1)
        data = np.stack([registers[first + i] for i in range(words)], 1)
        data = data >> 16 if high else data
        MEMORY[places] = np.ascontiguousarray(data).view(np.uint8)[:, :size][inside]
        return
    loaded = np.zeros((64, max(size, 4)), np.uint8)
    loaded[inside, :size] = MEMORY[places]
    if field(instruction, "lds"):
        start = (int(wave.s[LDS_BASE]) & 0x3FFFF) + field(instruction, "offset") + LANES * loaded.shape[1]
        wave.lds.view(np.uint8)[start[wave.active][:, None] + np.arange(loaded.shape[1])] = loaded[wave.active]
        return
    _keep(wave, registers, first, loaded.view(np.uint32), size, unit in SIGNED, half, high)


def _keep(
    wave: Wave,
    registers: NDArray[np.uint32],
    first: int,
    words: NDArray[np.uint32],
    size: int,
    signed: bool,
    half: str | None,
    high: str | None,
) -> None:
    """What was loaded, in the registers of the active lanes."""
    active = wave.active
    if size >= 4:
        for i in range(size // 4):
            registers[first + i, active] = words[active, i]
        return
    word = words[:, 0]
    if signed:
        word = (word.astype(np.int32) << (32 - 8 * size) >> (32 - 8 * size)).astype(np.uint32)
    if half:
        old, low = registers[first], word & 0xFFFF
        word = (low << 16) | (old & 0xFFFF) if high else low | (old & 0xFFFF0000)
    registers[first, active] = word[active]


def _float(bits: int) -> NDArray[np.float32]:
    return np.array([bits], np.uint32).view(np.float32)


def _packed_bfloat16(old: int, new: int) -> int:
    sums = [
        int(
            rounded_bfloat16(
                wide_bfloat16(np.array([old >> at & 0xFFFF])) + wide_bfloat16(np.array([new >> at & 0xFFFF]))
            )[0]
        )
        for at in (0, 16)
    ]
    return sums[0] | sums[1] << 16


def _packed_float16(old: int, new: int) -> int:
    both = [np.array([bits], np.uint32).view(np.float16) for bits in (old, new)]
    return int((both[0] + both[1]).view(np.uint32)[0])


ATOMICS: dict[str, Callable[[int, int], int]] = {
    "ADD": lambda old, new: old + new,
    "SUB": lambda old, new: old - new,
    "SWAP": lambda old, new: new,
    "AND": lambda old, new: old & new,
    "OR": lambda old, new: old | new,
    "XOR": lambda old, new: old ^ new,
    "UMAX": max,
    "UMIN": min,
    "ADD_F32": lambda old, new: int((_float(old) + _float(new)).view(np.uint32)[0]),
    "PK_ADD_BF16": _packed_bfloat16,
    "PK_ADD_F16": _packed_float16,
}


def _atomic(
    wave: Wave,
    instruction: Any,
    name: str,
    addresses: NDArray[np.int64],
    active: NDArray[np.bool_],
    registers: NDArray[np.uint32],
) -> None:
    """One lane after another, in lane order."""
    operation = name.removeprefix("BUFFER_ATOMIC_")
    double = operation.endswith("_X2")
    operation = operation.removesuffix("_X2")
    bits = 64 if double else 32
    first = field(instruction, "vdata")

    def data(lane: int, at: int) -> int:
        low = int(registers[first + at, lane])
        return low | int(registers[first + at + 1, lane]) << 32 if double else low

    def signed(value: int) -> int:
        return value - (1 << bits) if value >> (bits - 1) else value

    bounds.check(addresses[active], bits // 8, name)
    for lane in np.nonzero(active)[0]:
        place = (ctypes.c_uint64 if double else ctypes.c_uint32).from_address(int(addresses[lane]))
        old, new = int(place.value), data(int(lane), 0)
        if operation == "CMPSWAP":
            result = new if old == data(int(lane), 2 if double else 1) else old
        elif operation in ("SMAX", "SMIN"):
            result = (max if operation == "SMAX" else min)(signed(old), signed(new))
        elif operation in ATOMICS:
            result = ATOMICS[operation](old, new)
        else:
            raise NotImplementedError(name)
        place.value = result & ((1 << bits) - 1)
        if field(instruction, "sc0"):  # returns what was there
            registers[first, lane] = old & 0xFFFFFFFF
            if double:
                registers[first + 1, lane] = old >> 32
