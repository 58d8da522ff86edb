"""What this device does at best, measured in the process that times kernels, and the floor of a call that follows.

Copy: bytes read and written a second. Read: microseconds of a cold read by size, launch included; small reads pay a
latency that no bandwidth shows. Matrix products: FLOP/s held for a second, when clocks have come down. Launch: an
empty kernel in a graph.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernels.benchmark.errors import line_of
from tokenspeed_kernels.benchmark.timing import Call, stopwatch_of, time_calls
from tokenspeed_registry import Contract, Cost, Signature, platform_of

MB = 1 << 20
SUSTAINED_SECONDS = 1.0


@dataclass(frozen=True)
class Ceilings:
    """`read_us`: pairs of bytes and microseconds, ascending. `matrix`: FLOP/s by dtype. `launch_us`: in a graph.

    `replay_us`: what replaying a graph costs beside its launches. `missing`: why a rate could not be measured.
    """

    copy_bytes_per_second: float
    read_us: Sequence[tuple[int, float]]
    matrix: Mapping[str, float]
    launch_us: float = 0.0
    replay_us: float = 0.0
    missing: Mapping[str, str] = field(default_factory=dict)

    def read_time(self, nbytes: float) -> float:
        """Microseconds of a cold read, between and beyond the measured sizes in a straight line."""
        points = [(0, self.launch_us), *self.read_us]
        for (low, start), (high, end) in itertools.pairwise(points):
            if nbytes <= high:
                return start + (end - start) * (nbytes - low) / (high - low)
        last, us = points[-1]
        return us * nbytes / last

    def rate(self, dtype: torch.dtype) -> float:
        """FLOP/s of products of `dtype`; where it was not measured, that of the next wider one that was."""
        wider = {1: ("float8_e4m3fn", "bfloat16")}.get(dtype.itemsize, ("bfloat16",))
        return next(self.matrix[name] for name in wider if name in self.matrix)

    def floor_us(self, contract: Contract, signature: Signature, cost: Cost) -> float:
        """The least microseconds of a call: its bytes or its FLOPs, whichever takes longer, and a launch.

        Bytes are read cold, or written at the rate of a copy. Of a mutated tensor no shape says how much of it is
        written: all of it, or half of what the cost has beside outputs, whichever is less.
        """
        outputs = min(signature.nbytes(*(output.name for output in contract.outputs)), cost.nbytes)
        mutated = min(signature.nbytes(*contract.mutates), (cost.nbytes - outputs) / 2)
        last, us = self.read_us[-1]
        # What a copy takes beyond reading as many bytes: writing them.
        writing = max(2e6 / self.copy_bytes_per_second - us / last, 0.0)
        memory = self.read_time(cost.nbytes - outputs - mutated) + (outputs + mutated) * writing
        return max(memory, self.launch_us + cost.flops / self.rate(cost.rate) * 1e6)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(device: torch.device, flush: Callable[[], None]) -> Ceilings:
    """A few seconds on a GPU. `flush` evicts everything from the cache."""
    return _of_gpu(device, flush) if device.type == "cuda" else _of_cpu()


def _of_gpu(device: torch.device, flush: Callable[[], None]) -> Ceilings:
    from tokenspeed_kernels.benchmark import read_kernel
    from tokenspeed_kernels.benchmark.read_kernel import CONFIGS

    blank = torch.empty(1, device=device)
    many, one = (time_calls([lambda: read_kernel.empty(blank)] * calls, device, flush) for calls in (1000, 1))
    # A batch costs a replay and its launches: two batches of different size tell one from the other.
    launch = (many.us * many.calls - one.us) / max(many.calls - 1, 1)
    replay = one.us - launch
    units = torch.cuda.get_device_properties(device).multi_processor_count
    memory, target = (torch.zeros(256 * MB, device=device) for _ in range(2))
    copies: list[Call] = [partial(read_kernel.copy, memory, target, units, config) for config in CONFIGS]
    copies += [lambda: target.copy_(memory), lambda: torch.mul(memory, 1.0, out=target)]
    copied = min(time_calls([call] * 4, device, flush, replay_us=replay).us for call in copies)
    del target, copies
    matrix, missing = _matrix_rates(device, 8192)
    return Ceilings(
        copy_bytes_per_second=2 * memory.nbytes / (copied - launch) * 1e6,
        read_us=_read_curve(memory, units, device, flush, replay),
        matrix=matrix,
        launch_us=launch,
        replay_us=replay,
        missing=missing,
    )


def _read_curve(
    memory: Tensor, units: int, device: torch.device, flush: Callable[[], None], replay_us: float
) -> list[tuple[int, float]]:
    """Cold reads of 64 KB to all of `memory`, each by the fastest configuration.

    Small ones also by copying: storing what was read takes less than adding it up.
    """
    from tokenspeed_kernels.benchmark import read_kernel
    from tokenspeed_kernels.benchmark.read_kernel import CONFIGS

    sums = torch.empty(memory.numel() // 1024, device=memory.device)
    curve: list[tuple[int, float]] = []
    size = MB // 16
    while size <= memory.nbytes:
        pieces = torch.split(memory, size // 4)[:64]
        works = [partial(read_kernel.read, sums=sums, units=units, config=config) for config in CONFIGS]
        batches: list[list[Call]] = [[partial(work, piece) for piece in pieces] for work in works]
        if 256 * size <= memory.nbytes:  # then the last quarter, which is not read, has room for all pieces
            targets = torch.split(memory[-(memory.numel() // 4) :], size // 4)
            pairs = list(zip(pieces, targets, strict=False))
            batches += [[partial(read_kernel.copy, *pair, units, config) for pair in pairs] for config in CONFIGS]
        times = [time_calls(calls, device, flush, replay_us=replay_us).us for calls in batches]
        curve.append((size, min(times)))
        size *= 2
    return curve


def _matrix_rates(device: torch.device, size: int) -> tuple[dict[str, float], dict[str, str]]:
    """FLOP/s by dtype, and why one is missing."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    calls: dict[str, Call] = {"bfloat16": lambda: torch.mm(a, b, out=out)}
    if platform_of(device).limits.fp8_rate:
        narrow_a, narrow_b = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
        one = torch.ones(1, device=device)
        calls["float8_e4m3fn"] = lambda: torch._scaled_mm(narrow_a, narrow_b, one, one, out_dtype=torch.bfloat16)
    rates, missing = {}, {}
    for name, call in calls.items():
        try:
            rates[name] = 2.0 * size**3 / _sustained(call, device)
        except RuntimeError as error:  # a build of torch may lack it; `rate` then takes the wider dtype's
            missing[name] = line_of(error)
    return rates, missing


def _sustained(call: Call, device: torch.device) -> float:
    """Seconds a call over `SUSTAINED_SECONDS`."""
    stopwatch = stopwatch_of(device, graph=False)
    stopwatch([call])()
    count = max(1, int(SUSTAINED_SECONDS / max(stopwatch([call] * 10)() / 10, 1e-9)))
    return stopwatch([call] * count)() / count


def _of_cpu() -> Ceilings:
    """Of one moment, in eager calls: enough for a look, not for a claim."""
    cpu = torch.device("cpu")
    source, target = (torch.zeros(16 * MB, dtype=torch.uint8) for _ in range(2))
    copied = time_calls([lambda: target.copy_(source)] * 4, cpu).us
    sizes = [MB, 16 * MB]
    reads = [time_calls([source[:size].view(torch.int64).sum] * 4, cpu).us for size in sizes]
    a = torch.randn(256, 256)
    product = time_calls([lambda: torch.mm(a, a)] * 4, cpu).us
    matrix = {"bfloat16": 2 * 256**3 / product * 1e6}
    return Ceilings(2 * source.nbytes / copied * 1e6, list(zip(sizes, reads, strict=True)), matrix)
