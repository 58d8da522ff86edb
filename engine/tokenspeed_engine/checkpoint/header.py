"""Reads and checks the header of a safetensors file without touching its data.

The format (https://github.com/huggingface/safetensors): 8 bytes little-endian header length, that many bytes of JSON,
then the data of all tensors without gaps.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from tokenspeed_engine.checkpoint.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file declares it.

    `dtype` is safetensors' name, such as "BF16"; `nbytes` its size on disk; `start` where in the file it begins.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    start: int


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, by name.

    Raises CheckpointError naming the file when it is truncated or malformed.
    """

    def fail(problem: str) -> CheckpointError:
        return CheckpointError(str(file), [problem])

    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise fail(f"truncated: {size} bytes, too short for a safetensors header")
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES:
                raise fail(f"not a safetensors file: it declares a header of {length} bytes")
            if 8 + length > size:
                raise fail(f"truncated: its header takes {8 + length} bytes, the file has {size}")
            text = stream.read(length)
    except OSError as error:
        raise fail(f"cannot be read: {error.strerror or error}") from error
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise fail(f"malformed header: {error}") from error
    if not isinstance(entries, dict):
        raise fail("malformed header: not a JSON object")
    entries.pop("__metadata__", None)

    tensors: dict[str, TensorInfo] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        try:
            info, offset = _parse_entry(name, entry, file, 8 + length)
        except ValueError as error:
            raise fail(f"malformed header: tensor {name}: {error}") from error
        tensors[name] = info
        spans.append((offset, offset + info.nbytes, name))

    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            raise fail(f"malformed header: data of {name} starts at {start}, expected {end}")
        end = stop
    available = size - 8 - length
    if available < end:
        raise fail(f"truncated: its tensors take {end} bytes, the file holds {available}")
    if available > end:
        raise fail(f"malformed: {available - end} bytes follow the last tensor")
    return tensors


def _parse_entry(name: str, entry: Any, file: Path, data_start: int) -> tuple[TensorInfo, int]:
    """The tensor, and its offset among the file's data."""
    if not isinstance(entry, dict):
        raise ValueError("not a JSON object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ValueError(f"unknown dtype {dtype!r}")
    if not _are_sizes(shape):
        raise ValueError(f"bad shape {shape!r}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"bad data_offsets {offsets!r}")
    start, stop = offsets
    nbytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
    if stop - start != nbytes:
        raise ValueError(f"{stop - start} bytes of data for {dtype} {shape}, expected {nbytes}")
    return TensorInfo(name, file, dtype, tuple(shape), nbytes, data_start + start), start


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
