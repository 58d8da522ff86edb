"""Matrix products (MFMA), plain and with block scales, and the conversions that come with scales."""

import functools
import re
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.gfx950.wave import FIRST_VECTOR, LANES, Wave, field, rounded_bfloat16, wide_bfloat16

FORM = re.compile(
    r"V_MFMA_(SCALE_)?(F32|I32)_(16|32)X(?:16|32)X(\d+)_(F32|F16|BF16|I8|F8F6F4|(?:BF8|FP8)_(?:BF8|FP8))(?:_E64)?"
)
BITS = {"f32": 32, "f16": 16, "bf16": 16, "i8": 8, "fp8": 8, "bf8": 8, "fp4": 4}
NARROW = {0: "fp8", 1: "bf8", 4: "fp4"}
"""Operand formats of F8F6F4 by their code; the 6-bit ones are not covered."""
FLOAT8 = {"fp8": torch.float8_e4m3fn, "bf8": torch.float8_e5m2}
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@functools.cache
def values(kind: str) -> NDArray[np.float32]:
    """The numbers that the codes of a narrow format stand for."""
    return FP4 if kind == "fp4" else torch.arange(256, dtype=torch.uint8).view(FLOAT8[kind]).float().numpy()


def mfma(wave: Wave, instruction: Any) -> None:
    form = FORM.fullmatch(instruction.op.name)
    if form is None:
        raise NotImplementedError(instruction.op.name)
    scaled, result, rows, depth, operands = form[1], form[2], int(form[3]), int(form[4]), form[5]
    codes = field(instruction, "cbsz"), field(instruction, "blgp")
    if operands == "F8F6F4":
        kinds = [NARROW[code] for code in codes]
    elif codes != (0, 0):
        raise NotImplementedError(f"{instruction.op.name} with broadcast")
    else:
        kinds = operands.lower().split("_") * (1 if "_" in operands else 2)
    groups = 64 // rows
    per_group = depth // groups
    accumulation = field(instruction, "acc")
    first, second = (
        _matrix(wave, field(instruction, source), kind, accumulation & bit, rows, per_group, operands == "F8F6F4")
        for source, kind, bit in (("src0", kinds[0], 1), ("src1", kinds[1], 2))
    )
    if scaled:
        first, second = (
            first * _scales(wave, instruction, 0, rows, depth),
            second * _scales(wave, instruction, 1, rows, depth),
        )
    product = first @ second.T
    count = rows * rows // 64
    register = np.arange(count)[:, None]
    lane = LANES[None, :]
    row = 4 * (lane // 16) + register if rows == 16 else 8 * (register // 4) + 4 * (lane // 32) + register % 4
    column = np.broadcast_to(lane % rows, row.shape)
    dtype = np.int32 if result == "I32" else np.float32
    destination = wave.registers(field(instruction, "acc_cd"))
    added = field(instruction, "src2")
    if added >= FIRST_VECTOR:
        start = destination[added - FIRST_VECTOR : added - FIRST_VECTOR + count].view(dtype)
    else:
        start = np.array([int(wave.s[added])], np.uint32).view(dtype)
    at = field(instruction, "vdst")
    destination[at : at + count] = (product[row, column].astype(dtype) + start).astype(dtype).view(np.uint32)


def _matrix(
    wave: Wave, operand: int, kind: str, accumulation: int, rows: int, per_group: int, halved: bool
) -> NDArray[Any]:
    """An operand [rows, depth] from its registers: lane g·rows + r holds row r, and of its depth the g-th part.

    The 8-bit operands of F8F6F4 come in two halves of 16 bytes: one from each half of the depth.
    """
    registers = wave.registers(accumulation)
    at = operand - FIRST_VECTOR
    words = registers[at : at + per_group * BITS[kind] // 32]
    parts = _unpacked(np.ascontiguousarray(words.T), kind).reshape(64 // rows, rows, per_group)
    if halved and BITS[kind] == 8:
        return parts.reshape(64 // rows, rows, 2, 16).transpose(1, 2, 0, 3).reshape(rows, -1)
    return parts.transpose(1, 0, 2).reshape(rows, -1)


def _unpacked(words: NDArray[np.uint32], kind: str) -> NDArray[Any]:
    """Values [64, n] of the registers of each lane [64, n · bits / 32]."""
    match kind:
        case "f32":
            return words.view(np.float32)
        case "bf16":
            return wide_bfloat16(words.view(np.uint16))
        case "f16":
            return words.view(np.float16).astype(np.float32)
        case "i8":
            return words.view(np.int8).astype(np.int32)
    octets = words.view(np.uint8)
    if kind == "fp4":
        octets = np.stack([octets & 15, octets >> 4], 2).reshape(64, -1)
    return values(kind)[octets]


def _scales(wave: Wave, instruction: Any, side: int, rows: int, depth: int) -> NDArray[np.float32]:
    """E8M0 scales [rows, depth] of an operand: lane g·rows + r holds that of row r, depth part g."""
    word = wave.operand(field(instruction, f"scale_src{side}"))
    select = (field(instruction, "opsel") >> side & 1) | (field(instruction, "opsel_hi") >> side & 1) << 1
    scale = np.exp2(((word >> (8 * select)) & 255).astype(np.float32) - 127)
    groups = 64 // rows
    return np.repeat(scale.reshape(groups, rows).T, depth // groups, 1)


CONVERSION = re.compile(r"V_CVT_SCALEF32_PK_(F32|F16|BF16|FP8|BF8|FP4)_(F32|F16|BF16|FP8|BF8|FP4)(?:_E64)?")


def convert_scaled(wave: Wave, instruction: Any) -> None:
    """Two numbers a lane between formats, times or over a scale that counts by its exponent alone."""
    form = CONVERSION.fullmatch(instruction.op.name)
    if form is None:
        raise NotImplementedError(instruction.op.name)
    to, source = form[1].lower(), form[2].lower()
    select, active, at = field(instruction, "opsel"), wave.active, field(instruction, "vdst")
    scale_word = wave.operand(field(instruction, "src2" if source == "f32" else "src1"))
    scale = np.exp2(((scale_word >> 23) & 255).astype(np.float32) - 127)
    negative, absolute = field(instruction, "neg"), field(instruction, "abs")
    if source in ("fp8", "bf8", "fp4"):
        word = wave.operand(field(instruction, "src0"))
        if source == "fp4":
            octet = (word >> (8 * (select & 3))) & 255
            pair = [FP4[octet & 15] * scale, FP4[octet >> 4] * scale]
        else:
            half = (word >> (16 * (select & 1))) & 0xFFFF
            pair = [values(source)[half & 255] * scale, values(source)[half >> 8] * scale]
        if to == "f32":
            for i in (0, 1):
                wave.v[at + i, active] = pair[i].astype(np.float32).view(np.uint32)[active]
            return
        low, high = (
            rounded_bfloat16(x) if to == "bf16" else x.astype(np.float16).view(np.uint16).astype(np.uint32)
            for x in pair
        )
        wave.v[at, active] = (low | high << 16)[active]
        return
    word = wave.operand(field(instruction, "src0"), negative & 1, absolute & 1)
    if source == "f32":
        pair = [
            word.view(np.float32),
            wave.operand(field(instruction, "src1"), negative & 2, absolute & 2).view(np.float32),
        ]
    elif source == "bf16":
        pair = [wide_bfloat16(word & 0xFFFF), wide_bfloat16(word >> 16)]
    else:
        pair = [(part.astype(np.uint16)).view(np.float16).astype(np.float32) for part in (word & 0xFFFF, word >> 16)]
    low, high = (_narrowed(x / scale, to) for x in pair)
    if to == "fp4":
        shift, mask, packed = 8 * (select >> 2), 0xFF, low | high << 4
    else:
        shift, mask, packed = 16 * (select >> 3), 0xFFFF, low | high << 8
    kept = wave.v[at] & np.uint32(~(mask << shift) & 0xFFFFFFFF)
    wave.v[at, active] = (kept | packed << shift)[active]


def _narrowed(numbers: NDArray[Any], kind: str) -> NDArray[np.uint32]:
    """Codes of a narrow format, to nearest even; beyond its range, saturated (the clamp mode is assumed)."""
    if kind in FLOAT8:
        limit = torch.finfo(FLOAT8[kind]).max
        clipped = np.where(np.isnan(numbers), numbers, np.clip(numbers, -limit, limit)).astype(np.float32)
        octets = torch.from_numpy(clipped).to(FLOAT8[kind]).view(torch.uint8).numpy()
        saturated: NDArray[np.uint32] = octets.astype(np.uint32)
        return saturated
    magnitude = np.abs(numbers)
    codes = np.zeros(numbers.shape, np.uint32)
    for i, middle in enumerate(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)):
        codes += (magnitude > middle) | ((magnitude == middle) & (i % 2 == 1))
    signs: NDArray[np.uint32] = np.signbit(numbers).astype(np.uint32) << 3
    return codes | signs
