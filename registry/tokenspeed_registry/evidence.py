"""What is known of a kernel on an arch, as data: shipped with its backend, extended on the user's machine.

A record is keyed by the kernel's name, its source hash, the major.minor of its compiler and the arch; one for another
source or compiler is shown but does not count. What is found out later is added to a record and replaces nothing but
an older finding of the same thing. Files are JSON, one an arch: `<folder>/<arch>.json`.
"""

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tokenspeed_registry.kernel import Kernel
from tokenspeed_registry.record import PASSED, Level, Record

try:
    import fcntl
except ImportError:  # no POSIX system: of several processes that write at one moment, the last one wins
    fcntl = None  # type: ignore[assignment]


class EvidenceStore:
    """Records from several folders; what a later folder knows of a kernel goes before an earlier one's."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = list(folders)
        self._by_arch: dict[str, dict[str, list[Record]]] = {}

    def add_folder(self, folder: Path) -> None:
        """Adds a plugin's folder, before the user's own."""
        self._folders.insert(0, folder)
        self._by_arch.clear()

    def find(self, kernel: Kernel, arch: str) -> Record | None:
        """The record of `kernel` on `arch` that counts, else the newest of another source or compiler."""
        known = self._records(arch).get(kernel.name, [])
        for record in known:
            if counts(record, kernel):
                return record
        return max(known, key=lambda record: record.recorded, default=None)

    def counting(self, kernel: Kernel, arch: str) -> Record:
        """What counts of `kernel` on `arch`: of this source and this compiler; an empty record where nothing does."""
        record = self.find(kernel, arch)
        if record is not None and counts(record, kernel):
            return record
        return Record(kernel.name, "", arch)

    def level(self, kernel: Kernel, arch: str) -> Level:
        """The level that counts."""
        return self.counting(kernel, arch).level

    def describe(self, kernel: Kernel, arch: str) -> str:
        """In words: `measured`, `compiled`, `measured on triton 3.6`, `measured for another source`, `none`."""
        record = self.find(kernel, arch)
        if record is None:
            return "none"
        words = record.level.name.lower()
        if record.level < Level.VERIFIED and record.self_checks:
            failed = sorted(variant for variant, verdict in record.self_checks.items() if verdict != PASSED)
            words = "self-checked" if words == "none" else f"{words}, self-checked"
            words += f" and failed at {'; '.join(failed)}" if failed else ""
        if record.source_hash != kernel.source_hash:
            return f"{words} for another source"
        return words if counts(record, kernel) else f"{words} on {record.compiler}"

    def record(self, found: Record) -> None:
        """Adds to what the user's folder knows, atomically, also beside other processes.

        Raises `ValueError` for a file there that cannot be read, `OSError` for a folder that cannot be written.
        """
        _add(self._folders[-1], found, lambda known: not _is_outdated_check(known, found))
        self._by_arch.pop(found.arch, None)

    def _records(self, arch: str) -> dict[str, list[Record]]:
        known = self._by_arch.get(arch)
        if known is None:
            known = {}
            paths = [folder / f"{arch}.json" for folder in self._folders]
            for record in _joined(record for path in paths for record in _read_or_warn(path)).values():
                known.setdefault(record.kernel, []).append(record)
            self._by_arch[arch] = known
        return known


def write_record(folder: Path, found: Record) -> None:
    """Adds to a folder that will be shipped: what it knew of the kernel under another source goes.

    Raises as `EvidenceStore.record`.
    """
    _add(folder, found, lambda known: known.kernel != found.kernel or known.source_hash == found.source_hash)


def read(path: Path) -> list[Record]:
    """The records of one file; none where there is no file. Raises `ValueError` that names a file it cannot read."""
    try:
        return [Record.from_json(item) for item in json.loads(path.read_text())]
    except FileNotFoundError:
        return []
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"evidence {path}: {type(error).__name__}: {error}") from error


def _add(folder: Path, found: Record, keeps: Callable[[Record], bool]) -> None:
    if not found.recorded:
        found = replace(found, recorded=datetime.now(UTC).isoformat(timespec="seconds"))
    path = folder / f"{found.arch}.json"
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f".{found.arch}.lock"):
        records = _joined([*(known for known in read(path) if keeps(known)), found])
        _write(path, json.dumps([records[key].to_json() for key in sorted(records)], indent=1) + "\n")


def counts(record: Record, kernel: Kernel) -> bool:
    """Whether the record speaks of this source under the installed compiler."""
    return record.source_hash == kernel.source_hash and record.compiler == compiler_version(kernel)


def compiler_version(kernel: Kernel) -> str:
    """`triton 3.7` for a Triton kernel where 3.7.x is installed; empty for kernels that need no compiler."""
    return "" if kernel.compiler is None else _installed(kernel.compiler)


@cache
def _installed(compiler: str) -> str:
    """Reads a file, and every selection asks for it."""
    packages = {"triton": "triton", "cute": "nvidia-cutlass-dsl", "nvrtc": "nvidia-cuda-nvrtc", "hiprtc": "hip-python"}
    try:
        return f"{compiler} {'.'.join(version(packages.get(compiler, compiler)).split('.')[:2])}"
    except PackageNotFoundError:
        return f"{compiler} absent"


def _joined(records: Iterable[Record]) -> dict[tuple[str, str, str], Record]:
    joined: dict[tuple[str, str, str], Record] = {}
    for record in records:
        joined[record.key] = joined[record.key].with_added(record) if record.key in joined else record
    return joined


def _is_outdated_check(known: Record, found: Record) -> bool:
    """Whether nothing but self-checks of an older source is in it: a developer makes many of those."""
    other_source = known.kernel == found.kernel and known.source_hash != found.source_hash
    return other_source and not known.proofs and not known.timings


def _read_or_warn(path: Path) -> list[Record]:
    """As `read`, but dispatch must not end because a backend ships, or a crash left, a file that cannot be read."""
    try:
        return read(path)
    except (OSError, ValueError) as error:
        warnings.warn(f"{error}; it is ignored", RuntimeWarning, stacklevel=2)
        return []


def _write(path: Path, text: str) -> None:
    """Replaces a file whole: nobody ever reads half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".json")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(temporary, path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among threads and processes that lock the same path."""
    with open(path, "w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
