"""What is known of a kernel on an arch, as data: shipped with its backend, extended on the user's machine.

A record is keyed by the kernel's name, its source hash, the arch and the major.minor of its compiler; a record for
another source or compiler is shown but does not count. Files are JSON, one an arch: `<folder>/<arch>.json`.
"""

import json
import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tokenspeed_registry.kernel import Kernel


class Level(IntEnum):
    """How much is known; each level includes the ones before it only in strength of claim, not in fact."""

    NONE = 0
    INTERPRETED = 1
    """Passed conformance in the compiler's interpreter."""
    COMPILED = 2
    """Cross-compiles for the arch; resources recorded."""
    EMULATED = 3
    """Machine code passed conformance in an instruction-level emulator."""
    MEASURED = 4
    """Passed conformance on the device, and its time was taken there."""


@dataclass(frozen=True)
class Timing:
    """Median microseconds of one call at the given dims, measured by the command in the record's `facts`."""

    dims: Mapping[str, int]
    microseconds: float


@dataclass(frozen=True)
class Record:
    """One kernel on one arch. `facts` holds versions, date, command, registers, spills and the like."""

    kernel: str
    source_hash: str
    arch: str
    level: Level
    compiler: str = ""
    timings: tuple[Timing, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "level": self.level.name.lower()}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Record":
        timings = tuple(Timing(timing["dims"], timing["microseconds"]) for timing in data.get("timings", ()))
        level = Level[data["level"].upper()]
        facts = data.get("facts", {})
        return Record(
            data["kernel"], data["source_hash"], data["arch"], level, data.get("compiler", ""), timings, facts
        )


class EvidenceStore:
    """Records from several folders; a later folder's record of a kernel replaces an earlier one's."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = list(folders)
        self._by_arch: dict[str, dict[str, Record]] = {}

    def add_folder(self, folder: Path) -> None:
        """Adds a plugin's folder, before the user's own."""
        self._folders.insert(0, folder)
        self._by_arch.clear()

    def find(self, kernel: Kernel, arch: str) -> Record | None:
        """The record of `kernel` on `arch`, whether or not it still counts."""
        if arch not in self._by_arch:
            paths = [folder / f"{arch}.json" for folder in self._folders]
            self._by_arch[arch] = {record.kernel: record for path in paths for record in _read_or_warn(path)}
        return self._by_arch[arch].get(kernel.name)

    def level(self, kernel: Kernel, arch: str) -> Level:
        """The level that counts: of this source and this compiler."""
        record = self.find(kernel, arch)
        return record.level if record is not None and counts(record, kernel) else Level.NONE

    def describe(self, kernel: Kernel, arch: str) -> str:
        """In words: `measured`, `compiled`, `measured for another source`, `none`."""
        record = self.find(kernel, arch)
        if record is None:
            return "none"
        name = record.level.name.lower()
        if record.source_hash != kernel.source_hash:
            return f"{name} for another source"
        return name if counts(record, kernel) else f"{name} on {record.compiler}"

    def record(self, record: Record) -> None:
        """Writes a record into the user's folder, atomically; other processes may write other kernels' meanwhile."""
        folder = self._folders[-1]
        path = folder / f"{record.arch}.json"
        records = {known.kernel: known for known in read(path)} | {record.kernel: record}
        text = json.dumps([records[name].to_json() for name in sorted(records)], indent=1) + "\n"
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".json")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
        self._by_arch.pop(record.arch, None)


def read(path: Path) -> list[Record]:
    """The records of one file; none where there is no file."""
    if not path.exists():
        return []
    return [Record.from_json(item) for item in json.loads(path.read_text())]


def _read_or_warn(path: Path) -> list[Record]:
    """As `read`, but dispatch must not end because a backend ships, or a crash left, a file that cannot be read."""
    try:
        return read(path)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        warnings.warn(f"evidence {path} is ignored: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
        return []


def counts(record: Record, kernel: Kernel) -> bool:
    """Whether the record speaks of this source under the installed compiler."""
    return record.source_hash == kernel.source_hash and record.compiler == compiler_version(kernel)


def compiler_version(kernel: Kernel) -> str:
    """`triton 3.7` for a Triton kernel where 3.7.x is installed; empty for kernels that need no compiler."""
    packages = {"triton": "triton", "cute": "nvidia-cutlass-dsl", "nvrtc": "cuda-python", "hiprtc": "hip-python"}
    if kernel.compiler is None:
        return ""
    try:
        return f"{kernel.compiler} {'.'.join(version(packages.get(kernel.compiler, kernel.compiler)).split('.')[:2])}"
    except PackageNotFoundError:
        return f"{kernel.compiler} absent"
