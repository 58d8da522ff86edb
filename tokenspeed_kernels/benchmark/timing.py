"""The median time of a call.

On a device all calls are captured in one CUDA graph, back to back, each on its own data, and the graph is replayed:
what launching costs the host does not count. Before each replay, outside the timed region, `before` restores what the
calls mutate and evicts everything from the cache. What cannot be captured is timed eagerly, and `Timed.graph` says so.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_registry import platform_of

Call = Callable[[], Any]
Batch = Callable[[], float]
"""Runs all calls once and returns the seconds they took together."""
Stopwatch = Callable[[Sequence[Call]], Batch]

BATCHES = 7
LEAST_BATCHES = 5
BATCH_SECONDS = 0.2
"""A batch of slow calls holds fewer of them."""


@dataclass(frozen=True)
class Timed:
    """Median microseconds of a call; `spread` is (max - min) / median over the batches, each of `calls` calls."""

    us: float
    spread: float
    calls: int
    batches: int
    graph: bool


def time_calls(
    calls: Sequence[Call],
    device: torch.device,
    before: Callable[[], None] = lambda: None,
    *,
    graph: bool = True,
    batches: int = BATCHES,
    batch_seconds: float = BATCH_SECONDS,
    replay_us: float = 0.0,
    stopwatch: Stopwatch | None = None,
) -> Timed:
    """Times `calls`, which do the same work on different data.

    `batch_seconds`: what a batch takes at most, of more than one call. `replay_us`: what a replay costs beside its
    launches, which is taken off (see `Ceilings`). `stopwatch` replaces that of the device. Raises what a call raises.
    """
    if batches < LEAST_BATCHES:
        raise ValueError(f"a median of {batches} batches says too little; at least {LEAST_BATCHES}")
    graph = graph and device.type == "cuda"
    before()
    calls[0]()  # compiles
    before()
    calls = calls[: _affordable(calls[0], device, batch_seconds)]
    batch = (stopwatch or stopwatch_of(device, graph))(calls)
    before()
    batch()
    totals = []
    for _ in range(batches):
        before()
        totals.append(batch())
    return summarise(totals, len(calls), graph, replay_us)


def summarise(totals: Sequence[float], calls: int, graph: bool = True, replay_us: float = 0.0) -> Timed:
    """From the seconds of each batch."""
    each = [max(seconds * 1e6 - replay_us, 0.0) / calls for seconds in totals]
    median = statistics.median(each)
    spread = (max(each) - min(each)) / median if median else 0.0
    return Timed(median, spread, calls, len(totals), graph)


def stopwatch_of(device: torch.device, graph: bool) -> Stopwatch:
    if device.type != "cuda":
        return wall_clock
    return graph_replay if graph else device_events


def graph_replay(calls: Sequence[Call]) -> Batch:
    """One graph of all calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]  # what they allocated lives as long as the graph

    def replay(kept: object = kept) -> None:
        graph.replay()

    return _between_events(replay)


def device_events(calls: Sequence[Call]) -> Batch:
    """Eager calls, by the device's clock: where the host is slower than the device, it shows the host's pace."""

    def run() -> None:
        for call in calls:
            call()  # what it returns is let go of, as a caller would

    return _between_events(run)


def wall_clock(calls: Sequence[Call], clock: Callable[[], float] = time.perf_counter) -> Batch:
    """Eager calls on the CPU."""

    def batch() -> float:
        started = clock()
        for call in calls:
            call()
        return clock() - started

    return batch


class Flush:
    """Evicts everything from the caches of a GPU, by reading: no written line waits to be stored when timing starts."""

    LEAST_BYTES = 256 << 20

    def __init__(self, device: torch.device) -> None:
        size = max(self.LEAST_BYTES, 4 * cache_bytes(device))
        self._buffer = torch.zeros(size // 4, device=device) if device.type == "cuda" else None

    def __call__(self) -> None:
        if self._buffer is not None:
            self._buffer.sum()


def cache_bytes(device: torch.device) -> int:
    """Of the last level, which some drivers do not report; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    reported = torch.cuda.get_device_properties(device).L2_cache_size
    return max(reported, platform_of(device).limits.l2_cache)


def _between_events(work: Callable[[], object]) -> Batch:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def batch() -> float:
        # The device is still busy with what came before: when it gets here, the work already waits for it.
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return batch


def _affordable(call: Call, device: torch.device, batch_seconds: float) -> int:
    """How many such calls make a batch of so many seconds, at least one."""
    _wait(device)
    started = time.perf_counter()
    call()
    _wait(device)
    return max(1, int(batch_seconds / max(time.perf_counter() - started, 1e-9)))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
