"""Times peers on the copies that our kernels were timed on, and holds them to the same answer."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tokenspeed_kernels.benchmark.cells import Cell
from tokenspeed_kernels.benchmark.errors import line_of, survive
from tokenspeed_kernels.benchmark.peers import Adapter, PeerCall, adapters_of, compare
from tokenspeed_kernels.benchmark.timing import Timed, time_calls
from tokenspeed_registry import Contract

if TYPE_CHECKING:
    from tokenspeed_kernels.benchmark.measure import Bench, Call


def peer_times(bench: "Bench", cell: Cell, call: "Call") -> tuple[dict[str, float], list[str]]:
    """Microseconds by peer, and what to know of them."""
    times: dict[str, float] = {}
    notes: list[str] = []
    wanted: dict[str, Tensor] = {}
    for name, adapter in adapters_of(bench.peers, cell.contract.name):
        try:
            wanted = wanted or _wanted(cell.contract, call)
            us, note = _peer_time(bench, cell, call, adapter, wanted)
        except Exception as error:  # a peer may fail in any way
            survive(bench.device, error)
            us, note = None, f"failed: {line_of(error)}"
        if us is not None:
            times[name] = us
        notes += [f"{name}: {note}"] if note else []
    return times, notes


def _peer_time(
    bench: "Bench", cell: Cell, call: "Call", adapter: Adapter, wanted: Mapping[str, Tensor]
) -> tuple[float | None, str | None]:
    rotation = call.rotation
    rotation.restore()
    prepared = [adapter(copy) for copy in rotation.copies]
    ready = [each for each in prepared if each is not None]
    if len(ready) < len(prepared):
        return None, "cannot do this call"
    returned: list[Any] = [None] * len(ready)

    def before() -> None:
        rotation.restore()
        for each in ready:
            if each.restore is not None:
                each.restore()
        bench.flush()

    calls = [_noting(each, returned, index) for index, each in enumerate(ready)]
    timed, note = _captured_or_eager(bench, calls, before)
    last = ready[timed.calls - 1]
    if last.outputs is None:
        return timed.us, f"{note}not compared"
    got = last.outputs(returned[timed.calls - 1])
    wrong, remark = compare(cell.contract, cell.source, call.signature, rotation.arguments, got, wanted)
    return (None, wrong) if wrong else (timed.us, f"{note}{remark or ''}".rstrip("; ") or None)


def _captured_or_eager(
    bench: "Bench", calls: Sequence[Callable[[], Any]], before: Callable[[], None]
) -> tuple[Timed, str]:
    options: dict[str, Any] = {"batches": bench.batches, "replay_us": bench.ceilings.replay_us}
    try:
        return time_calls(calls, bench.device, before, **options), ""
    except RuntimeError as error:
        survive(bench.device, error)
        return time_calls(calls, bench.device, before, graph=False, batches=bench.batches), "eager; "


def _wanted(contract: Contract, call: "Call") -> dict[str, Tensor]:
    """What the oracle computes: outputs and mutated tensors by name."""
    rotation = call.rotation
    rotation.restore()
    copy = rotation.copies[0]
    positional = [copy[p.name] for p in contract.parameters if not p.keyword]
    keywords = {p.name: copy[p.name] for p in contract.parameters if p.keyword}
    results = call.oracle.function(*positional, **keywords)
    results = results if isinstance(results, tuple) else (results,) if contract.outputs else ()
    wanted = dict(zip([output.name for output in contract.outputs], results, strict=True))
    return wanted | {name: copy[name].clone() for name in contract.mutates if copy[name] is not None}


def _noting(prepared: PeerCall, returned: list[Any], index: int) -> Callable[[], Any]:
    def call() -> Any:
        returned[index] = prepared.run()
        return returned[index]

    return call
