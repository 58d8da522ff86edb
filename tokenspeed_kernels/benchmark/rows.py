"""Results: one row a kernel and case, losses first, and the file that keeps them."""

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenspeed_registry import TokenspeedError

SCHEMA = 1


@dataclass(frozen=True)
class Row:
    """One kernel at one case. A row with an `error` has no time: what computes something else was not timed.

    `us`: median microseconds of a call; `spread`: (max - min) / median of the batches. `gbs`, `tflops`: from the op's
    cost model. `of_ceiling`: the floor by this device's measured ceilings, over `us`. `peers`: their microseconds in
    the same process on the same data. `graph`: by graph replay; else eager, with what launching costs the host.
    `calls`: of a batch, each on its own data. `notes`: what else a reader must know, of peers for example.
    """

    op: str
    kernel: str
    shape: str
    us: float | None = None
    spread: float | None = None
    gbs: float | None = None
    tflops: float | None = None
    of_ceiling: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)
    command: str = ""
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None
    date: str = ""
    model: str = ""
    graph: bool = False
    calls: int = 0
    nbytes: float = 0.0
    flops: float = 0.0
    floor_us: float | None = None
    notes: tuple[str, ...] = ()
    error: str | None = None

    @property
    def fastest_peer(self) -> tuple[str, float] | None:
        """Name and microseconds."""
        return min(self.peers.items(), key=lambda item: item[1], default=None)

    @property
    def behind(self) -> float | None:
        """Its time over that of the fastest peer: above 1 it loses."""
        peer = self.fastest_peer
        return None if peer is None or self.us is None else self.us / peer[1]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Row":
        return Row(**{**data, "notes": tuple(data.get("notes", ()))})


def losses_first(rows: Iterable[Row]) -> list[Row]:
    """Errors, then what a peer beats, by how much, then the rest, farthest from its ceiling first.

    Of the losses those of our fastest kernel at a shape go before those that another kernel of ours mends.
    """
    rows = list(rows)
    best = {id(row) for row in fastest(rows)}

    def rank(row: Row) -> tuple[int, float, float, str, str]:
        behind = row.behind or 0.0
        if row.error is not None:
            return 0, 0.0, 0.0, row.op, row.shape
        if behind > 1:
            return 1 if id(row) in best else 2, -behind, 0.0, row.op, row.shape
        return 3, 0.0, math.inf if row.of_ceiling is None else row.of_ceiling, row.op, row.shape

    return sorted(rows, key=rank)


def fastest(rows: Iterable[Row]) -> list[Row]:
    """Of each call the row of our fastest kernel."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        call = row.op, row.shape
        if row.us and (call not in best or row.us < (best[call].us or 0)):
            best[call] = row
    return list(best.values())


def document(rows: Iterable[Row], **facts: Any) -> dict[str, Any]:
    """All that a run found out, as JSON holds it: `device`, `date`, `ceilings` and the like beside the rows."""
    return {"schema": SCHEMA, **facts, "rows": [row.to_json() for row in losses_first(rows)]}


def peers_with_versions(found: Mapping[str, Any]) -> str:
    """The peers that were there, for people; empty where none was asked for."""
    there = (peer for peer in found.get("peers", ()) if not peer["absent"])
    return ", ".join(f"{peer['peer']} {peer['version']}".strip() for peer in there)


def write(found: Mapping[str, Any], path: Path) -> None:
    """Atomically. Raises `TokenspeedError` as `check_replaceable` does."""
    check_replaceable(path, found["device"])
    write_whole(path, json.dumps(found, indent=1) + "\n")


def check_replaceable(path: Path, device: str) -> None:
    """Raises `TokenspeedError` where `path` holds results of another device, or something else."""
    if path.exists() and (other := _device_of(path)) != device:
        held = f"results of {other}" if other else "something else than results"
        raise TokenspeedError(f"{path} holds {held}: those of {device} would replace it")


def unused(folder: Path, device: str, date: str) -> Path:
    """`folder/<device>-<date>.json`, with a number where there was a run before."""
    slug = "-".join(device.lower().replace(",", " ").split())
    names = (f"{slug}-{date}{f'-{number}' if number > 1 else ''}.json" for number in range(1, 1000))
    return next(folder / name for name in names if not (folder / name).exists())


def write_whole(path: Path, text: str) -> None:
    """Replaces a file whole: nobody ever reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


def _device_of(path: Path) -> str | None:
    try:
        device = json.loads(path.read_text())["device"]
    except (KeyError, TypeError, ValueError):
        return None
    return str(device)
