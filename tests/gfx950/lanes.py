"""Instructions that move data between lanes: DPP operands, permutes, swizzles, and transposing reads of LDS."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.gfx950.wave import FIRST_VECTOR, LANES, Wave, field, offset16

ROW, INNER = LANES // 16, LANES % 16


def dpp_source(control: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """The lane that each lane reads under a DPP control, and whether there is one."""
    everywhere = np.ones(64, bool)
    shift = control & 15
    match control:
        case _ if control < 0x100:  # quad_perm
            return (LANES & ~3) + np.array([(control >> (2 * i)) & 3 for i in range(4)])[LANES & 3], everywhere
        case _ if 0x101 <= control <= 0x10F:  # row_shl
            return LANES + shift, INNER + shift < 16
        case _ if 0x111 <= control <= 0x11F:  # row_shr
            return LANES - shift, shift <= INNER
        case _ if 0x121 <= control <= 0x12F:  # row_ror
            return ROW * 16 + (INNER - shift) % 16, everywhere
        case 0x130:  # wave_shl
            return LANES + 1, LANES < 63
        case 0x134:  # wave_rol
            return (LANES + 1) % 64, everywhere
        case 0x138:  # wave_shr
            return LANES - 1, LANES > 0
        case 0x13C:  # wave_ror
            return (LANES - 1) % 64, everywhere
        case 0x140:  # row_mirror
            return ROW * 16 + 15 - INNER, everywhere
        case 0x141:  # row_half_mirror
            return (LANES & ~7) + 7 - (LANES & 7), everywhere
        case 0x142:  # row_bcast:15
            return ROW * 16 - 1, ROW > 0
        case 0x143:  # row_bcast:31
            return np.full(64, 31), ROW >= 2
        case _ if 0x150 <= control <= 0x15F:  # row_newbcast
            return ROW * 16 + shift, everywhere
    raise NotImplementedError(f"dpp control {control:#x}")


def dpp(wave: Wave, instruction: Any, run: Callable[[Wave, int], None]) -> None:
    """Puts the moved operand into a spare register and runs the plain encoding under a narrowed mask."""
    source, there = dpp_source(field(instruction, "dpp"))
    if field(instruction, "src1_abs") or field(instruction, "src1_neg"):
        raise NotImplementedError("dpp with a modified second source")
    active = wave.active
    source = np.where(there, source, 0)
    valid = there & active[source]
    rows = (field(instruction, "row_mask") >> ROW) & 1
    banks = (field(instruction, "bank_mask") >> (INNER // 4)) & 1
    enabled = active & rows.astype(bool) & banks.astype(bool)
    moved = np.where(valid, wave.v[field(instruction, "vsrc0")][source], 0).astype(np.uint32)
    if field(instruction, "src0_abs"):
        moved &= np.uint32(0x7FFFFFFF)
    if field(instruction, "src0_neg"):
        moved ^= np.uint32(0x80000000)
    if not field(instruction, "bc"):  # without bound control, lanes that read nothing keep what they have
        enabled &= valid
    taken = field(instruction, "vdst"), field(instruction, "vsrc1", -1)
    spare = next(register for register in range(255, 0, -1) if register not in taken)
    kept = wave.v[spare].copy()
    wave.v[spare] = moved
    wave.active = enabled
    run(wave, (instruction._raw & 0xFFFFFFFF & ~0x1FF) | (FIRST_VECTOR + spare))
    wave.v[spare] = kept
    wave.active = active


def permlane_swap(wave: Wave, instruction: Any) -> None:
    """Swaps odd rows of the destination with even rows of the source; rows have 16 or 32 lanes."""
    row = 32 if "PERMLANE32" in instruction.op.name else 16
    first, second = field(instruction, "vdst"), field(instruction, "src0") - FIRST_VECTOR
    old_first, old_second = wave.v[first].copy(), wave.v[second].copy()
    for start in range(0, 64, 2 * row):
        wave.v[first, start + row : start + 2 * row] = old_second[start : start + row]
        wave.v[second, start : start + row] = old_first[start + row : start + 2 * row]


def bpermute(wave: Wave, instruction: Any) -> None:
    lane = ((wave.v[field(instruction, "addr")] + offset16(instruction)) >> 2) & 63
    active = wave.active
    read = np.where(active[lane], wave.v[field(instruction, "data0")][lane], 0)
    wave.v[field(instruction, "vdst"), active] = read[active]


def swizzle(wave: Wave, instruction: Any) -> None:
    pattern = offset16(instruction)
    if pattern & 0x8000:
        source = (LANES & ~3) + np.array([(pattern >> (2 * i)) & 3 for i in range(4)])[LANES & 3]
    else:
        source = (LANES & ~31) | ((((LANES & 31) & (pattern & 31)) | (pattern >> 5 & 31)) ^ (pattern >> 10 & 31))
    active = wave.active
    read = np.where(active[source], wave.v[field(instruction, "addr")][source], 0)
    wave.v[field(instruction, "vdst"), active] = read[active]


def read_transposed(wave: Wave, instruction: Any) -> None:
    """`ds_read_b64_tr_*`: every 16 lanes read a tile of rows of 16 elements and each keeps a column's part."""
    name = instruction.op.name
    bits, nbytes = int(name.rsplit("_B", 1)[1]), 12 if "B96" in name else 8
    addresses = wave.v[field(instruction, "addr")].astype(np.int64) + offset16(instruction)
    raw = wave.lds.view(np.uint8)[addresses[:, None] + np.arange(nbytes)]
    elements: NDArray[Any]
    if bits == 16:
        elements = np.ascontiguousarray(raw).view(np.uint16)
    elif bits == 8:
        elements = raw
    elif bits == 4:
        elements = np.stack([raw & 15, raw >> 4], 2).reshape(64, 16)
    else:
        raise NotImplementedError(name)
    count = elements.shape[1]
    lane, element = np.arange(16)[:, None], np.arange(count)[None, :]
    columns = np.empty_like(elements)
    for start in range(0, 64, 16):
        columns[start : start + 16] = elements[start + 16 // count * element + lane // count, lane % count]
    if bits == 4:
        columns = columns[:, 0::2] | (columns[:, 1::2] << 4)
    words = np.ascontiguousarray(columns).view(np.uint32)
    registers, active = wave.registers(field(instruction, "acc")), wave.active
    for i in range(nbytes // 4):
        registers[field(instruction, "vdst") + i, active] = words[active, i]
