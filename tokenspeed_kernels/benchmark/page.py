"""`docs/benchmarks.md` from the results in `bench/results`: written by `make docs`, compared by a test."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenspeed_kernels.benchmark.rows import Row, fastest, losses_first, peers_with_versions

INTRODUCTION = """# Benchmarks

Written by `make docs` from the files in `bench/results`, which `tokenspeed-kernels bench` makes; do not edit.

```
tokenspeed-kernels bench [OP ...] [--shapes model|sweep] [--peers] [--record] [--html FILE] [--json]
```

How it measures: calls are captured in one CUDA graph, each on its own copy of the arguments, up to 64 of them, and the
L2 cache is flushed before each replay: calls find cold data. What an op changes in place is restored before each
replay. The time is the median of at least five replays over the number of calls; *spread* is (max − min) over it. The
output of the last timed call is checked against the plain-torch kernel, by twice the op's tolerance, and a wrong one
gets an error instead of a time. *Of floor* is the time that the op's bytes and products must take by the ceilings which
the same process measured (copy, cold reads by size, a sustained matrix product, an empty launch), over the time that it
took.

*Peers* are other projects' kernels on the same data in the same process, by the [adapters](../bench/peers/README.md):
the one kernel that an adapter names, which need not be what that project would select. Those of FlashInfer and
tokenspeed-kernel for the delta rule make its gates too, which ours are given. † marks a peer whose answer was not
compared with ours, for example because it rounds activations to FP8 or computes part of the op; the others agree within
8 times the op's tolerance. Clocks were left as they are, so only ratios within one run are claimed.

Each table has the fastest of our kernels for a call. Those where a peer is faster come first.
"""


def page(folder: Path) -> str:
    """All results of `folder`, newest first."""
    found = [json.loads(path.read_text()) | {"file": path.name} for path in sorted(folder.glob("*.json"), reverse=True)]
    sections = ["\n".join(_section(results)) for results in found]
    return "\n".join([INTRODUCTION, *(sections or ["Nothing was measured yet.\n"])])


def _section(results: Mapping[str, Any]) -> Iterator[str]:
    rows = losses_first(fastest(Row.from_json(row) for row in results["rows"]))
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    yield f"## {results['device']}, {results['date']}\n"
    yield f"`{results['command']}`, commit {results['commit']}; {versions}."
    yield f"[All rows](../bench/results/{results['file']}).\n"
    if peers := peers_with_versions(results):
        yield f"Peers: {peers}.\n"
    yield f"Ceilings: {_ceilings(results['ceilings'])}.\n"
    lost = [row for row in rows if row.behind is not None and row.behind > 1]
    compared = [row for row in rows if row.behind is not None]
    yield f"Ops that were timed: {', '.join(sorted({row.op for row in rows}))}; the command names what was asked for.\n"
    yield f"{len(rows)} calls; a peer was timed at {len(compared)} of them and is faster at {len(lost)}.\n"
    errors = [row for row in map(Row.from_json, results["rows"]) if row.error is not None]
    remarks = [f"- no time: {row.kernel}, {row.shape}: {row.error}" for row in errors]
    remarks += [f"- {note}" for note in results.get("notes", ())]
    remarks += [f"- {row.op}, {row.shape}: {note}" for row in rows for note in row.notes if _failed(note)]
    yield from dict.fromkeys(remarks)
    yield "\n" * bool(remarks) + "| op | call | kernel | µs | spread | of floor | fastest peer | time / peer's |"
    yield "|---|---|---|---|---|---|---|---|"
    yield from map(_row, rows)
    yield ""


def _row(row: Row) -> str:
    peer = row.fastest_peer
    cells = [
        row.op,
        row.shape,
        f"`{row.kernel}`",
        _us(row.us),
        "" if row.spread is None else f"{row.spread:.1%}",
        "" if row.of_ceiling is None else f"{row.of_ceiling:.0%}",
        "" if peer is None else f"{peer[0]} {_us(peer[1])}{' †' if f'{peer[0]}: not compared' in row.notes else ''}",
        ""
        if row.behind is None
        else f"{'**' if row.behind > 1 else ''}{row.behind:.2f}{'**' if row.behind > 1 else ''}",
    ]
    return f"| {' | '.join(cells)} |"


def _failed(note: str) -> bool:
    """Whether a note says that a peer has no time though its adapter was there."""
    return ": wrong " in note or ": failed: " in note


def _us(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}" if us < 1000 else f"{us:,.0f}"


def _ceilings(found: Mapping[str, Any]) -> str:
    matrix: Iterable[tuple[str, float]] = found["matrix"].items()
    parts = [f"copy {found['copy_bytes_per_second'] / 1e12:.2f} TB/s (read and written)"]
    parts += [f"{dtype} product {rate / 1e12:,.0f} TFLOP/s sustained" for dtype, rate in matrix]
    parts += [f"cold read of {nbytes >> 20} MB {us:.1f} µs" for nbytes, us in found["read_us"] if nbytes in _SHOWN]
    return ", ".join([*parts, f"empty launch {found['launch_us']:.2f} µs"])


_SHOWN = (1 << 20, 1 << 24, 1 << 30)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(Path(sys.argv[2])), "utf-8")
