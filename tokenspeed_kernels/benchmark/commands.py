"""`tokenspeed-kernels bench` and `tune`."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tokenspeed_kernels.benchmark import ceilings as device_ceilings
from tokenspeed_kernels.benchmark.cells import Cell, Shapes, cells_of, spread
from tokenspeed_kernels.benchmark.errors import DeviceLostError
from tokenspeed_kernels.benchmark.measure import Bench
from tokenspeed_kernels.benchmark.peers import FOLDER, Peer, find_peers
from tokenspeed_kernels.benchmark.prepare import Ahead, Task
from tokenspeed_kernels.benchmark.rows import Row, check_replaceable, document, losses_first, unused, write
from tokenspeed_kernels.benchmark.timing import LEAST_BATCHES, Flush
from tokenspeed_kernels.choose import Backend, chosen_kernels
from tokenspeed_kernels.compile_command import Evidence, Jobs
from tokenspeed_kernels.facts import facts_now
from tokenspeed_kernels.printing import Json, print_json, print_table
from tokenspeed_registry import TokenspeedError
from tokenspeed_registry.evidence import write_record
from tokenspeed_registry.record import Record
from tokenspeed_registry.registry import default_registry

CHECKOUT = Path(__file__).parents[2]
RESULTS = CHECKOUT / "bench" / "results"
OpNames = Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Ops; all of them unless given.")]
ShapesOption = Annotated[Shapes, typer.Option(help="The models' calls, or those of the sweeps over them.")]
TUNING_BATCH_SECONDS = 0.05
"""Enough to tell configurations apart; there are hundreds of them."""
COMPILER_DIED = "the process that compiled it died, and again when it ran alone"
CaseOption = Annotated[str | None, typer.Option("--case", help="Only cases whose name contains this.")]


def bench(
    op: OpNames = None,
    shapes: ShapesOption = Shapes.MODEL,
    case: CaseOption = None,
    backend: Backend = None,
    peers: Annotated[bool, typer.Option("--peers", help="Also time other projects' kernels.")] = False,
    peers_dir: Annotated[Path, typer.Option(help="The folder of their adapters.")] = FOLDER,
    record: Annotated[bool, typer.Option("--record", help="Keep the times as evidence: calls select by it.")] = False,
    evidence: Evidence = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with figures to this file.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file of results; one under bench/results unless given.")] = None,
    jobs: Jobs = 1,
    as_json: Json = False,
) -> None:
    """How long kernels take at the shapes of models, beside what this device could do; what a peer beats comes first.

    Calls are replayed as a CUDA graph on cold data and fresh state, and every answer is checked. Exit code 1 where one
    was wrong.
    """
    report = _report() if html is not None else None
    chosen_kernels(op, backend)  # raises for what is not there
    cells, notes = cells_of(op, shapes, case, peers)
    found = find_peers(peers_dir) if peers else []
    notes += [f"peer {peer.name}: {peer.reason}" for peer in found if peer.reason]
    # A module that failed to import took its kernels along: their absence must not go unsaid.
    notes += [
        f"plugin {each.name}: {each.reason}" for each in default_registry.plugins() if each.usable and each.reason
    ]
    seconds: dict[str, float] = {}
    with counted(seconds, "ceilings"):
        run = new_bench(found, _recorder(record, evidence))
    path = results_file(out, run)
    with counted(seconds, "compiling ahead"):
        ahead = compile_cells(cells, run, backend, jobs, tunes=False)
    rows: list[Row] = []

    def results() -> dict[str, Any]:
        """All there is so far: a run that is cut short has not run for nothing."""
        known = [{"peer": peer.name, "version": peer.version, "absent": peer.reason} for peer in found]
        facts = {**facts_now(), **run.facts, "peers": known, "ceilings": run.ceilings.to_json()}
        return document(rows, **facts, notes=notes, seconds={name: round(took, 2) for name, took in seconds.items()})

    lost = False
    try:
        for cell in progress(cells):
            with counted(seconds, cell.contract.name):
                kernels, lethal = ahead.sort_out(run.kernels(cell.contract.name, backend), cell.shape)
                timed = run.rows(cell, kernels) + [run.failed(cell, kernel, COMPILER_DIED) for kernel in lethal]
            rows += timed
            notes += [] if timed else [f"no kernel to time: {cell.contract.name}, {cell.shape}"]
            if path is not None:
                write(results(), path)
    except DeviceLostError as error:
        lost = True
        notes.append(f"the device is lost, the rest was not timed: {error}")
    files = {"results": path, "report": html}
    if path is not None:
        write(results(), path)
    if report is not None and html is not None:
        report(results(), html)
    for note in [*notes, *(f"{what}: {file}" for what, file in files.items() if file is not None)]:
        print(note, file=sys.stderr)
    rows = losses_first(rows)
    if as_json:
        print_json([row.to_json() for row in rows])
    else:
        print_table(f"bench on {run.facts['device']}", [shown(row) for row in rows])
    if lost or any(row.error for row in rows):
        raise typer.Exit(1)


def tune(
    op: OpNames = None,
    shapes: ShapesOption = Shapes.SWEEP,
    case: CaseOption = None,
    out: Annotated[Path | None, typer.Option(help="The table's file; this user's unless given.")] = None,
    jobs: Jobs = 1,
    as_json: Json = False,
) -> None:
    """Picks the compile-time choices of Triton kernels for this device by time, on tensors of its own.

    Every configuration is checked before its time counts. The table holds for all later calls of this user.
    """
    from tokenspeed_kernels.benchmark.tune import Tuner, save
    from tokenspeed_kernels.triton import tuning

    if not torch.cuda.is_available():
        raise TokenspeedError("tune: no accelerator here to tune for")
    cells, notes = cells_of(op, shapes, case)
    seconds: dict[str, float] = {}
    with counted(seconds, "ceilings"):
        run = new_bench()
        run.batches, run.batch_seconds = LEAST_BATCHES, TUNING_BATCH_SECONDS
    with counted(seconds, "compiling ahead"):
        ahead = compile_cells(cells, run, None, jobs, tunes=True)
    tuner = Tuner(run)
    path = out or tuning.user_table(run.platform)
    facts = facts_now()
    lost = False
    try:
        for cell in progress(cells):
            with counted(seconds, cell.contract.name):
                kernels, lethal = ahead.sort_out(run.kernels(cell.contract.name), cell.shape)
                tuner.tune(cell, kernels)
                tuner.skipped += [f"{kernel.name}, {cell.shape}: {COMPILER_DIED}" for kernel in lethal]
            save(tuner.choices, path, facts)  # a run that is cut short has not run for nothing
    except DeviceLostError as error:
        lost = True
        notes.append(f"the device is lost, the rest was not tuned: {error}")
    notes.append("seconds: " + ", ".join(f"{name} {took:.0f}" for name, took in seconds.items()))
    for note in [*notes, *tuner.skipped, f"table: {path}"]:
        print(note, file=sys.stderr)
    rows = [choice.row() for choice in tuner.choices.values()]
    if as_json:
        print_json(rows)
    else:
        print_table(f"tuned for {run.platform.device}", rows)
    if lost:
        raise typer.Exit(1)


def results_file(out: Path | None, run: Bench) -> Path | None:
    """Where results go: `out`, else a new file of the checkout; nowhere outside of one, or without an accelerator.

    Raises `TokenspeedError` where `out` holds something else.
    """
    if out is not None:
        check_replaceable(out, run.facts["device"])
        return out
    if run.device.type == "cpu" or not RESULTS.parent.is_dir():
        return None
    return unused(RESULTS, run.facts["device"], run.facts["date"])


def _recorder(record: bool, folder: Path | None) -> Callable[[Record], None] | None:
    """What keeps times: in `folder`, else with the user's evidence, where asked for."""
    if folder is not None:
        return partial(write_record, folder)
    return default_registry.record if record else None


def new_bench(peers: Sequence[Peer] = (), record: Callable[[Record], None] | None = None) -> Bench:
    """With the ceilings of this device measured."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    flush = Flush(device)
    facts = {name: value for name, value in facts_now().items() if name != "command"}
    if device.type == "cpu":
        facts["device"] = "cpu, eager calls"
    ceilings = device_ceilings.measure(device, flush)
    return Bench(default_registry, device, ceilings, flush, peers, facts, record)


def compile_cells(cells: Sequence[Cell], run: Bench, backend: str | None, jobs: int, tunes: bool) -> Ahead:
    """Ahead of timing, in `jobs` processes; with one, each kernel compiles when it is timed."""
    ahead = Ahead(run.platform, tunes)
    if jobs == 1 or run.device.type == "cpu":
        return ahead

    def tasks() -> Iterator[Task]:
        for cell in spread(cells):
            kernels = [each for each in run.kernels(cell.contract.name, backend) if each.compiler == "triton"]
            outlines = run.outlines(cell) if kernels else None
            for kernel in kernels if outlines is not None else []:
                yield from ahead.tasks(kernel, cell.shape, outlines or {})

    with _bar("compiling", None) as advance:
        ahead.compile(tasks(), jobs, lambda: advance(""))
    return ahead


def progress(cells: Sequence[Cell]) -> Iterator[Cell]:
    """The cells, with a bar where stderr is a terminal, else a line an op."""
    last = ""
    with _bar("timing", len(cells)) as advance:
        for cell in cells:
            if not sys.stderr.isatty() and cell.contract.name != last:
                print(cell.contract.name, file=sys.stderr, flush=True)
            last = cell.contract.name
            yield cell
            advance(f"{cell.contract.name}, {cell.shape}")


@contextmanager
def counted(seconds: dict[str, float], what: str) -> Iterator[None]:
    """Adds the time of the block, by the clock on the wall."""
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[what] = seconds.get(what, 0.0) + time.perf_counter() - started


@contextmanager
def _bar(title: str, total: int | None) -> Iterator[Callable[[str], None]]:
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=total)
        yield lambda text: bars.update(task, advance=1, description=f"{title} {text}")


def _report() -> Callable[[Mapping[str, Any], Path], None]:
    """Imported before anything is timed. Raises `TokenspeedError` where matplotlib is missing."""
    try:
        from tokenspeed_kernels.benchmark.report import write_report
    except ModuleNotFoundError as error:
        raise TokenspeedError(f"--html: {error}; pip install 'tokenspeed-kernels[bench]'") from None
    return write_report


def shown(row: Row) -> dict[str, Any]:
    """A row of the table for people."""
    peer = row.fastest_peer
    return {
        "op": row.op,
        "kernel": row.kernel,
        "shape": row.shape,
        "us": row.us,
        "±": None if row.spread is None else f"{row.spread:.1%}",
        "GB/s": None if row.gbs is None else round(row.gbs),
        "TFLOP/s": row.tflops,
        "of ceiling": None if row.of_ceiling is None else f"{row.of_ceiling:.0%}",
        "best peer": None if peer is None else f"{peer[0]} {peer[1]:.3g}",
        "x peer": row.behind,
        "notes": "; ".join([*([f"ERROR {row.error}"] if row.error else []), *row.notes]),
    }
