"""Reads tensors from files into places that exist already: several files at once, each from its start to its end."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from threading import Event, Lock

import torch

from tokenspeed_engine.checkpoint.errors import CheckpointError
from tokenspeed_engine.checkpoint.header import TensorInfo

FILES_AT_ONCE = 4
PART_BYTES = 16 * 1024**2
"""Read at a time, so that host memory stays at this for each file that is open."""

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I64": torch.int64,
}


@dataclass(frozen=True)
class Read:
    """A tensor on disk, what of it is taken, and where that goes: a flat tensor, in any dtype and on any device.

    `part`: a range a dim; None takes all.
    """

    source: TensorInfo
    target: torch.Tensor
    part: tuple[range, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's, or that of the plain row of elements which it is where all is taken."""
        return (self.target.numel(),) if self.part is None else self.source.shape

    @property
    def rows(self) -> range:
        """Along the first dim, those that are read."""
        return range(self.shape[0]) if self.part is None else self.part[0]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * DTYPES[self.source.dtype].itemsize


def stream(reads: Sequence[Read], progress: Callable[[int, int], None]) -> None:
    """Performs all reads. `progress` is told bytes read and bytes in all, from several threads but one at a time.

    Raises CheckpointError where a file cannot be read.
    """
    by_file: dict[Path, list[Read]] = defaultdict(list)
    for read in reads:
        by_file[read.source.file].append(read)
    total = sum(len(read.rows) * read.row_bytes for read in reads)
    done, lock, given_up = 0, Lock(), Event()

    def tell(count: int) -> None:
        nonlocal done
        if given_up.is_set():
            raise CancelledError
        with lock:
            done += count
            progress(done, total)

    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        try:
            for finished in as_completed([pool.submit(_read_file, file, part, tell) for file, part in by_file.items()]):
                finished.result()
        except BaseException:
            given_up.set()  # or what is left of all other files would be read first
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _read_file(file: Path, reads: Sequence[Read], tell: Callable[[int], None]) -> None:
    buffer = bytearray(max([PART_BYTES, *(read.row_bytes for read in reads)]))
    try:
        with file.open("rb", buffering=0) as opened:
            for read in sorted(reads, key=lambda read: read.source.start):
                opened.seek(read.source.start + read.rows.start * read.row_bytes)
                _read_rows(opened, read, buffer, tell)
    except OSError as error:
        raise CheckpointError(str(file), [f"cannot be read: {error.strerror or error}"]) from error


def _read_rows(opened: RawIOBase, read: Read, buffer: bytearray, tell: Callable[[int], None]) -> None:
    """As many rows at a time as the buffer holds; of each, the part that is taken."""
    stored = torch.frombuffer(buffer, dtype=DTYPES[read.source.dtype])
    inner = tuple(slice(taken.start, taken.stop) for taken in (read.part or ())[1:])
    row, place = math.prod(read.shape[1:]), 0
    left = len(read.rows)
    while left and read.row_bytes:
        count = min(left, len(buffer) // read.row_bytes)
        _fill(opened, memoryview(buffer)[: count * read.row_bytes])
        taken = stored[: count * row].view(count, *read.shape[1:])[(slice(None), *inner)].reshape(-1)
        read.target[place : place + taken.numel()].copy_(taken)
        place += taken.numel()
        left -= count
        tell(count * read.row_bytes)


def _fill(opened: RawIOBase, view: memoryview) -> None:
    while view:
        count = opened.readinto(view)
        if not count:
            raise OSError("it ends before its last tensor")
        view = view[count:]
