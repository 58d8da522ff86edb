"""One case of an op: all its kernels and peers timed on the same copies, each answer checked."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tokenspeed_kernels.benchmark.ceilings import Ceilings
from tokenspeed_kernels.benchmark.cells import Cell
from tokenspeed_kernels.benchmark.check import check_timed, complaint, oracle_of
from tokenspeed_kernels.benchmark.errors import line_of, survive
from tokenspeed_kernels.benchmark.peer_times import peer_times
from tokenspeed_kernels.benchmark.peers import Peer
from tokenspeed_kernels.benchmark.prepare import outlines_of
from tokenspeed_kernels.benchmark.rotation import Rotation, copies_needed, footprint
from tokenspeed_kernels.benchmark.rows import Row
from tokenspeed_kernels.benchmark.timing import BATCH_SECONDS, BATCHES, Flush, Timed, cache_bytes, time_calls
from tokenspeed_registry import Contract, Kernel, Platform, Registry, Signature, platform_of
from tokenspeed_registry.evidence import compiler_version
from tokenspeed_registry.record import Record, Timing


@dataclass(frozen=True)
class Call:
    """A cell's call on the device, rotated."""

    signature: Signature
    rotation: Rotation
    oracle: Kernel


@dataclass
class Bench:
    """What all cells of a run share. `facts`: fields of every row, such as `device`, `date`. `record` keeps times."""

    registry: Registry
    device: torch.device
    ceilings: Ceilings
    flush: Flush
    peers: Sequence[Peer] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    record: Callable[[Record], None] | None = None
    batches: int = BATCHES
    batch_seconds: float = BATCH_SECONDS

    @property
    def platform(self) -> Platform:
        return platform_of(self.device)

    def kernels(self, op: str, backend: str | None = None) -> list[Kernel]:
        """Those that may serve the op here, but for the reference; `backend`: of these alone, separated by commas."""
        usable = [kernel for kernel in self.registry.kernels(op) if kernel.name not in self.registry.unusable]
        wanted = None if backend is None else backend.split(",")
        return [k for k in usable if k.backend != "reference" and (wanted is None or k.backend in wanted)]

    def rows(self, cell: Cell, kernels: Sequence[Kernel]) -> list[Row]:
        """A row for each of `kernels` that takes the case. Raises `DeviceLostError`."""
        blank = [self._blank(cell, kernel) for kernel in kernels]
        try:
            arguments = cell.source.arguments(cell.contract, cell.case, self.device)
            signature = cell.source.describe(cell.contract, arguments)
            serving = [each for each in kernels if each.refusals(self.platform, placed_for(each, signature))[0]]
            if not serving:
                return []
            call = self.prepare(cell, arguments, signature)
        except Exception as error:  # no memory for the data, for example
            survive(self.device, error)
            return [replace(row, error=f"no data: {line_of(error)}") for row in blank]
        rows = []
        by_kernel = {row.kernel: row for row in blank}
        for kernel in serving:
            rows.append(self._row(cell, call, kernel, by_kernel[kernel.name]))
        times, notes = peer_times(self, cell, call)
        on_device = {kernel.name for kernel in serving if not kernel.on_host}  # where the peers' data is
        return [
            replace(row, peers=times, notes=(*row.notes, *notes)) if row.kernel in on_device else row for row in rows
        ]

    def failed(self, cell: Cell, kernel: Kernel, error: str) -> Row:
        """The row of a kernel that was not timed."""
        return replace(self._blank(cell, kernel), error=error)

    def outlines(self, cell: Cell) -> dict[str, Any] | None:
        """The outlines of a cell's arguments, for compiling ahead; None where there is no memory for them."""
        try:
            return outlines_of(cell.contract, cell.source.arguments(cell.contract, cell.case, self.device))
        except Exception as error:  # timing says so
            survive(self.device, error)
            return None

    def prepare(
        self, cell: Cell, arguments: Mapping[str, Any], signature: Signature, on_host: Iterable[str] = ()
    ) -> Call:
        """Rotated arguments and the oracle of a call."""
        size = footprint(cell.contract, signature, arguments)
        moved = cell.contract.cost(signature).nbytes
        copies = copies_needed(moved, size, cache_bytes(self.device), free_memory(self.device))
        rotation = Rotation(cell.contract, signature, arguments, copies, on_host)
        oracle = oracle_of(cell.contract, self.registry.kernels(cell.contract.name), self.platform, signature)
        return Call(signature, rotation, oracle)

    def time(self, cell: Cell, call: Call, kernel: Kernel) -> tuple[Timed, str | None]:
        """How long calls of `kernel` take, and what is wrong with what they computed."""
        rotation = call.rotation

        def before() -> None:
            rotation.restore()
            rotation.poison()
            self.flush()

        timed = time_calls(
            rotation.calls(kernel.function),
            self.device,
            before,
            graph=kernel.graph_capturable,
            batches=self.batches,
            batch_seconds=self.batch_seconds,
            replay_us=self.ceilings.replay_us,
        )
        outcome = check_timed(
            cell.contract, kernel, cell.source, rotation, timed.calls - 1, call.oracle, kernel.on_host
        )
        return timed, complaint(outcome)

    def _row(self, cell: Cell, call: Call, kernel: Kernel, blank: Row) -> Row:
        try:
            on_host = kernel.on_host
            if on_host and self.device.type == "cuda":
                call = self.prepare(cell, call.rotation.arguments, call.signature, on_host)
            timed, wrong = self.time(cell, call, kernel)
        except Exception as error:  # a kernel may fail in any way; the row says how
            survive(self.device, error)
            return replace(blank, error=line_of(error))
        if wrong is not None:
            return replace(blank, error=wrong)
        signature = placed_for(kernel, call.signature)
        cost = cell.contract.cost(signature)
        floor = self.ceilings.floor_us(cell.contract, signature, cost)
        row = replace(
            blank,
            us=timed.us,
            spread=timed.spread,
            gbs=cost.nbytes / timed.us / 1e3 if timed.us else None,
            tflops=cost.flops / timed.us / 1e6 if timed.us else None,
            of_ceiling=None if on_host or not timed.us else floor / timed.us,
            floor_us=None if on_host else floor,
            nbytes=cost.nbytes,
            flops=cost.flops,
            graph=timed.graph,
            calls=timed.calls,
            notes=_notes(kernel, self.device, on_host),
        )
        return row if self.record is None else self._recorded(self.record, cell.contract, kernel, signature, row)

    def _recorded(
        self, record: Callable[[Record], None], contract: Contract, kernel: Kernel, signature: Signature, row: Row
    ) -> Row:
        """Keeps the time as evidence."""
        kept = ("spread", "of_ceiling", "graph", "versions", "commit", "date", "command", "device")
        facts = {name: getattr(row, name) for name in kept}
        timing = Timing.of(contract, signature, row.us or 0.0, facts)
        found = Record(kernel.name, kernel.source_hash, self.platform.arch, compiler_version(kernel), timings=(timing,))
        try:
            record(found)
        except (OSError, ValueError) as error:  # a folder that cannot be written, a file that cannot be read
            return replace(row, notes=(*row.notes, f"not recorded: {error}"))
        return row

    def _blank(self, cell: Cell, kernel: Kernel) -> Row:
        return Row(cell.contract.name, kernel.name, cell.shape, command=cell.command, model=cell.model, **self.facts)


def placed_for(kernel: Kernel, signature: Signature) -> Signature:
    """The signature of the call that the kernel is given."""
    return signature.placed(kernel.on_host) if kernel.on_host else signature


def free_memory(device: torch.device) -> float:
    """Bytes that tensors may still take."""
    if device.type != "cuda":
        return 4e9
    torch.cuda.empty_cache()
    return float(torch.cuda.mem_get_info(device)[0])


def _notes(kernel: Kernel, device: torch.device, on_host: tuple[str, ...]) -> tuple[str, ...]:
    eager = ["eager: cannot be captured"] if device.type == "cuda" and not kernel.graph_capturable else []
    return (*eager, *(f"{name} in host memory: no ceiling is measured of that" for name in on_host))
