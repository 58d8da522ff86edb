"""How calls are timed: the arithmetic, the rotation of their data, fresh state, and that wrong kernels get no time."""

import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.benchmark_toys import (
    CEILINGS,
    CPU,
    accumulate_cases,
    accumulates,
    bench_of,
    cell_of,
    double_cases,
    doubles,
)
from tests.registry.toys import doubling
from tokenspeed_kernels.benchmark.ceilings import measure
from tokenspeed_kernels.benchmark.rotation import LEAST_BYTES, MOST, Rotation, copies_needed
from tokenspeed_kernels.benchmark.rows import losses_first
from tokenspeed_kernels.benchmark.timing import Flush, device_events, summarise, time_calls, wall_clock
from tokenspeed_registry import Cost, Kernel, copy_into, kernel
from tokenspeed_registry.reference import as_kernel


def rotation_of(op: Any, source: Any, copies: int) -> Rotation:
    arguments = source.arguments(op.contract, source.model("model"))
    return Rotation(op.contract, source.describe(op.contract, arguments), arguments, copies)


def test_the_median_of_batches_and_their_spread() -> None:
    """Four calls a batch, of which the replay itself took 4 µs."""
    timed = summarise([24e-6, 44e-6, 28e-6, 32e-6, 26e-6], calls=4, replay_us=4.0)
    assert timed.us == pytest.approx(6.0)
    assert timed.spread == pytest.approx((10.0 - 5.0) / 6.0)
    assert (timed.calls, timed.batches) == (4, 5)


def test_the_wall_clock_times_all_calls_of_a_batch() -> None:
    ticks = iter([100.0, 103.0])
    ran: list[int] = []
    batch = wall_clock([lambda: ran.append(1), lambda: ran.append(2)], clock=lambda: next(ticks))
    assert batch() == 3.0
    assert ran == [1, 2]


def test_eager_calls_on_a_device_hold_no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of them would fill its memory."""

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...
        def record(self) -> None: ...
        def synchronize(self) -> None: ...
        def elapsed_time(self, _: object) -> float:
            return 5.0

    class Result: ...

    alive = weakref.WeakSet[Result]()
    most = []

    def call() -> Result:
        most.append(len(alive))
        result = Result()
        alive.add(result)
        return result

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert device_events([call] * 5)() == 0.005
    assert max(most) <= 1


def test_before_runs_outside_of_every_batch() -> None:
    """Restoring and flushing precede each timed batch, the untimed first one too."""
    log: list[str] = []

    def stopwatch(calls: Any) -> Any:
        def batch() -> float:
            log.append("batch")
            return 1e-6 * len(calls)

        return batch

    timed = time_calls([lambda: log.append("call")] * 3, CPU, lambda: log.append("before"), stopwatch=stopwatch)
    assert timed.us == pytest.approx(1.0)
    assert log.count("batch") == timed.batches + 1
    assert all(log[i - 1] == "before" for i, entry in enumerate(log) if entry == "batch")


def test_a_median_of_few_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 5"):
        time_calls([lambda: None], CPU, batches=4)


@pytest.mark.parametrize(
    ("moved", "size", "cache", "free", "wanted"),
    [
        (1e6, 1e6, 0, 1e12, MOST),  # 250 would make 250 MB, but a graph holds 64
        (1e7, 1e7, 0, 1e12, 25),
        (1e7, 1e7, 120_000_000, 1e12, 36),  # three times the cache
        (1e7, 1e9, 0, 1e12, 25),  # what a call moves counts, not what lies beside it
        (1e9, 1e9, 0, 1e12, 4),
        (1e9, 1e9, 0, 1e10, 3),  # memory: 0.7 of it, less what the check needs
        (1e9, 1e9, 0, 1e9, 1),
    ],
)
def test_as_many_copies_as_make_data_cold(moved: float, size: float, cache: int, free: float, wanted: int) -> None:
    copies = copies_needed(moved, size, cache, free)
    assert copies == wanted
    assert copies in (MOST, wanted) or copies * moved >= max(LEAST_BYTES, 3 * cache)


def test_every_call_has_data_and_outputs_of_its_own() -> None:
    _, op = doubles()
    rotation = rotation_of(op, double_cases, copies=3)
    inputs = {copy["x"].data_ptr() for copy in rotation.copies} | {rotation.arguments["x"].data_ptr()}
    outputs = {out[0].data_ptr() for out in rotation.outs}
    assert len(inputs) == 4
    assert len(outputs) == 3
    seen: list[tuple[int, int]] = []
    for call in rotation.calls(lambda x, *, out: seen.append((x.data_ptr(), out.data_ptr()))):
        call()
    assert seen == [(c["x"].data_ptr(), o[0].data_ptr()) for c, o in zip(rotation.copies, rotation.outs, strict=True)]


def test_copies_keep_strides_and_padding() -> None:
    _, op = accumulates()
    arguments = accumulate_cases.arguments(op.contract, accumulate_cases.model("model"))
    signature = accumulate_cases.describe(op.contract, arguments)
    wide = torch.arange(64.0).reshape(8, 8)
    rotation = Rotation(op.contract, signature, {**arguments, "pool": wide[:, :4]}, 2)
    copy = rotation.copies[1]["pool"]
    assert copy.stride() == (8, 1)
    assert torch.equal(copy, wide[:, :4])
    whole = copy.as_strided((8, 8), (8, 1), 0)
    whole.zero_()
    rotation.restore()
    assert torch.equal(whole, wide)


def test_mutated_tensors_are_restored_in_place() -> None:
    _, op = accumulates()
    rotation = rotation_of(op, accumulate_cases, copies=2)
    pools = [copy["pool"] for copy in rotation.copies]
    for call in rotation.calls(lambda pool, more: pool.add_(more)):
        call()
    assert not torch.equal(pools[0], rotation.arguments["pool"])
    rotation.restore()
    assert all(torch.equal(pool, rotation.arguments["pool"]) for pool in pools)
    assert [copy["pool"].data_ptr() for copy in rotation.copies] == [pool.data_ptr() for pool in pools]


def test_a_kernel_that_changes_its_state_is_right_in_the_last_batch_too() -> None:
    registry, op = accumulates()
    bench = bench_of(registry)
    (row,) = bench.rows(cell_of(op, accumulate_cases), bench.kernels("accumulate"))
    assert row.error is None
    assert row.us


def row_of(*kernels: Kernel) -> Any:
    """The row of the last of the kernels."""
    registry, op = doubles()
    for each in kernels:
        registry.add_kernel(each)
    bench = bench_of(registry)
    return {row.kernel: row for row in bench.rows(cell_of(op), bench.kernels("double"))}[kernels[-1].name]


def lazy(op: Any) -> Kernel:
    """Writes its result once for each output, as one would that caches by address."""
    done: set[int] = set()

    @kernel(op, backend="lazy", name="lazy")
    def run(x: Tensor, *, out: Tensor | None = None) -> Any:
        assert out is not None
        if out.data_ptr() not in done:
            done.add(out.data_ptr())
            out.copy_(2 * x)
        return out

    return run


def greedy(op: Any) -> Kernel:
    @kernel(op, backend="greedy", name="greedy")
    def run(x: Tensor, *, out: Tensor | None = None) -> Any:
        result = copy_into(out, 2 * x)
        x.zero_()
        return result

    return run


def failing(op: Any) -> Kernel:
    @kernel(op, backend="failing", name="failing")
    def run(x: Tensor, *, out: Tensor | None = None) -> Any:
        raise OSError("no such instruction")

    return run


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda op: doubling(op, "nan", factor=float("nan")), "error inf"),
        (lambda op: doubling(op, "off", factor=2.001), "wrong result"),
        (lazy, "error inf"),
        (greedy, "changed its input x|wrong result"),
        (failing, "OSError: no such instruction"),
    ],
)
def test_a_wrong_kernel_gets_an_error_and_no_time(make: Any, wrong: str) -> None:
    _, op = doubles()
    row = row_of(make(op))
    assert row.error is not None
    assert re.search(wrong, row.error)
    assert row.us is None
    assert row.of_ceiling is None


def test_twice_the_tolerance_is_right_and_more_is_not() -> None:
    """The oracle has errors too. The largest element's error counts by about three quarters of its relative error."""
    _, op = doubles()
    tolerance = op.contract.tolerance(double_cases.signature(op.contract, double_cases.model("model")), "doubled")
    for factor, right in ((2.0, True), (6.0, False)):
        row = row_of(doubling(op, "off", factor=2 * (1 + factor * tolerance)))
        assert (row.error is None) is right, factor


def test_a_row_has_the_rates_of_the_cost_model() -> None:
    registry, op = doubles()
    bench = bench_of(registry, facts={"device": "toy", "date": "2026-11-30"})
    (row,) = bench.rows(cell_of(op), bench.kernels("double"))
    assert row.us is not None
    assert row.nbytes == 2 * 32 * 4
    assert row.gbs == pytest.approx(256 / row.us / 1e3)
    assert row.tflops == pytest.approx(64 / row.us / 1e6)
    assert row.floor_us is not None
    assert row.of_ceiling == pytest.approx(row.floor_us / row.us)
    assert (row.device, row.date, row.command, row.graph) == ("toy", "2026-11-30", "bench double", False)


def test_the_floor_is_the_longer_of_bytes_and_flops() -> None:
    _, op = doubles()
    signature = double_cases.signature(op.contract, double_cases.model("model"))
    # 128 bytes are written: 2 ns a byte that is copied, of which reading takes 4/3.
    written = 0.128 * 2 / 3
    assert CEILINGS.floor_us(op.contract, signature, Cost(flops=0, nbytes=256)) == pytest.approx(1.128 + written)
    assert CEILINGS.floor_us(op.contract, signature, Cost(flops=5000, nbytes=256)) == pytest.approx(1.0 + 5.0)
    assert CEILINGS.floor_us(op.contract, signature, Cost(flops=0, nbytes=2128)) == pytest.approx(3.0 + written)


def test_the_floor_of_a_mutated_pool_is_that_of_a_copy() -> None:
    _, op = accumulates()
    signature = accumulate_cases.signature(op.contract, accumulate_cases.model("model"))
    few = CEILINGS.floor_us(op.contract, signature, Cost(flops=0, nbytes=100))  # 50 of the pool's 128 bytes are written
    assert few == pytest.approx(1.05 + 0.05 * 2 / 3)
    all_of_it = CEILINGS.floor_us(op.contract, signature, Cost(flops=0, nbytes=1128))
    assert all_of_it == pytest.approx(2.0 + 0.128 * 2 / 3)


@pytest.mark.parametrize(("nbytes", "us"), [(0, 1.0), (500, 1.5), (1000, 2.0), (2000, 3.0), (3000, 4.0), (6000, 8.0)])
def test_reads_between_and_beyond_the_measured_sizes(nbytes: int, us: float) -> None:
    assert CEILINGS.read_time(nbytes) == pytest.approx(us)


def test_ceilings_of_a_cpu() -> None:
    found = measure(CPU, Flush(CPU))
    assert found.copy_bytes_per_second > 0
    assert found.rate(torch.float8_e4m3fn) == found.rate(torch.bfloat16) > 0
    assert found.read_time(1 << 20) > 0


def test_the_reference_is_not_timed_and_judges_where_no_torch_kernel_can() -> None:
    registry, op = accumulates()
    bench = bench_of(registry)
    assert [each.name for each in bench.kernels("accumulate")] == ["torch.accumulate"]
    from tokenspeed_kernels.benchmark.check import oracle_of

    signature = accumulate_cases.signature(op.contract, accumulate_cases.model("model"))
    only = oracle_of(op.contract, [as_kernel(op.contract)], bench.platform, signature)
    assert only.backend == "reference"
    assert oracle_of(op.contract, registry.kernels("accumulate"), bench.platform, signature).backend == "torch"


def test_times_are_recorded_of_what_was_right(tmp_path: Path) -> None:
    registry, op = doubles(cache=tmp_path)
    wrong = doubling(op, "wrong", factor=3.0)
    registry.add_kernel(wrong)
    bench = bench_of(registry, record=registry.record, facts={"commit": "abc"})
    rows = {row.kernel: row for row in bench.rows(cell_of(op), bench.kernels("double"))}
    right = next(each for each in registry.kernels("double") if each.name == "torch")
    (timing,) = registry.evidence.counting(right, "cpu").timings
    assert timing.microseconds == rows["torch"].us
    assert timing.dims == {"tokens": 8, "dim": 4}
    assert timing.facts["commit"] == "abc"
    assert timing.facts["command"] == "bench double"
    assert not registry.evidence.counting(wrong, "cpu").timings


def test_nothing_is_recorded_unasked(tmp_path: Path) -> None:
    registry, op = doubles(cache=tmp_path)
    bench = bench_of(registry)
    assert bench.rows(cell_of(op), bench.kernels("double"))
    assert not list(tmp_path.rglob("*.json"))


def test_errors_and_losses_come_first() -> None:
    registry, op = doubles()
    registry.add_kernel(doubling(op, "wrong", factor=3.0))
    bench = bench_of(registry)
    rows = losses_first(bench.rows(cell_of(op), bench.kernels("double")))
    assert [row.kernel for row in rows] == ["wrong", "torch"]
