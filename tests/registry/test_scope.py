"""Choices, traces and bound handles: how they nest, end, and keep to their thread."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from jaxtyping import Float32
from torch import Tensor

from tests.registry.toys import DOUBLE, FILL, double, doubling, fill_rows, new_registry, toy, with_kernels
from tokenspeed_registry import (
    ArgumentError,
    Call,
    Dim,
    Registry,
    arch,
    copy_into,
    kernel,
    known_platform,
    override_platform,
    trace,
    use,
)
from tokenspeed_registry.scope import current_scope

X = torch.ones(3, 4)


def setting(*names: str, **facts: Any) -> tuple[Registry, Any, list[str]]:
    registry = new_registry()
    op = toy(registry, double, **DOUBLE)
    ran: list[str] = []
    with_kernels(registry, [doubling(op, name, ran, **facts) for name in names])
    return registry, op, ran


def test_trace_says_what_ran() -> None:
    _, op, _ = setting("aa", "bb")
    with trace() as calls:
        op(X)
        op(X, backend="bb")
        with pytest.raises(ArgumentError):
            op(X.double())
    op(X)
    assert calls == [Call("double", "aa", "aa"), Call("double", "bb", "bb")]


def test_timed_trace() -> None:
    _, op, _ = setting("aa")
    with trace(timed=True) as calls:
        op(X)
        op(x=X)
    assert all(call.seconds is not None and 0 < call.seconds < 10 for call in calls)
    assert len(calls) == 2


def scalar_first(
    n: int, x: Float32[Tensor, "tokens"], *, out: Tensor | None = None, backend: str | None = None
) -> Float32[Tensor, "tokens"]:
    """The first argument is no tensor."""
    return x * n


def all_keywords(
    *, n: int = 2, x: Float32[Tensor, "tokens"], out: Tensor | None = None, backend: str | None = None
) -> Float32[Tensor, "tokens"]:
    """No positional argument."""
    return x * n


def test_timed_trace_finds_the_device_wherever_the_tensor_is() -> None:
    registry = new_registry()
    first = toy(registry, scalar_first, outputs=("y",))
    keywords = toy(registry, all_keywords, outputs=("y",))
    with trace(timed=True) as calls:
        assert first(3, torch.ones(2)).tolist() == [3, 3]
        assert keywords(x=torch.ones(2)).tolist() == [2, 2]
    assert [call.op for call in calls] == ["scalar_first", "all_keywords"]


def test_a_call_that_fails_in_its_kernel_is_not_recorded_as_done() -> None:
    registry, op, _ = setting()

    @kernel(op, backend="broken")
    def broken(x: Tensor, *, out: Any = None) -> Any:
        raise RuntimeError("launch failed")

    registry.add_kernel(broken)
    with trace() as calls:
        with pytest.raises(RuntimeError, match="launch failed"):
            op(X, backend="broken")
        op(X, backend="reference")
    assert [call.kernel for call in calls] == ["reference.double"]


def test_nested_traces_both_record() -> None:
    """A library that traces for its own ends must not blind whoever traces around it."""
    _, op, _ = setting("aa", "bb")
    with trace() as outer:
        op(X)
        with trace(timed=True) as inner:
            op(X, backend="bb")
        op(X)
    assert [call.kernel for call in inner] == ["bb"]
    assert [call.kernel for call in outer] == ["aa", "bb", "aa"]


def test_scopes_combine_and_end_even_when_the_block_raises() -> None:
    registry, op, ran = setting("aa", "bb")
    registry.add_kernel(doubling(op, "hopper", ran, requires=arch("sm_90a")))
    with use("bb"), trace() as calls, override_platform(known_platform("sm_90a")), use(double="hopper"):
        op(X)
    assert [call.kernel for call in calls] == ["hopper"]
    with pytest.raises(ArgumentError), use("bb"), trace(), override_platform(known_platform("sm_90a")):
        op(None)
    assert current_scope.get() is None
    op(X)
    assert ran == ["hopper", "aa"]


def test_a_choice_does_not_leak_into_other_threads() -> None:
    _, op, _ = setting("aa", "bb")
    start = threading.Barrier(4)

    def work(choice: str | None) -> set[str]:
        with use(choice), trace() as calls:
            start.wait()
            for _ in range(50):
                op(X)
        return {call.kernel for call in calls}

    with use("bb"), trace() as mine, ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, ["aa", "bb", None, "reference"]))
        op(X)
    assert results == [{"aa"}, {"bb"}, {"aa"}, {"reference.double"}]
    assert [call.kernel for call in mine] == ["bb"]


def test_a_choice_does_not_leak_into_other_async_tasks() -> None:
    _, op, _ = setting("aa", "bb")

    async def work(choice: str) -> set[str]:
        with use(choice), trace() as calls:
            for _ in range(5):
                op(X)
                await asyncio.sleep(0)
        return {call.kernel for call in calls}

    async def both() -> list[set[str]]:
        return list(await asyncio.gather(work("aa"), work("bb")))

    assert asyncio.run(both()) == [{"aa"}, {"bb"}]


def test_concurrent_first_calls_choose_rightly() -> None:
    for _ in range(5):
        registry, op, ran = setting("rest")
        registry.add_kernel(doubling(op, "few", ran, priority=300, constraints=[Dim("tokens") <= 2]))
        start = threading.Barrier(8)

        def work(tokens: int, op: Any = op, start: threading.Barrier = start) -> str:
            x = torch.full((tokens, 4), float(tokens))
            start.wait()
            assert torch.equal(op(x), 2 * x)
            with trace() as calls:
                op(x)
            return calls[0].kernel

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, [1, 2, 3, 4] * 2)) == ["few", "few", "rest", "rest"] * 2
        assert len(ran) == 16


def test_kernels_may_come_and_go_while_others_call() -> None:
    registry, op, _ = setting("rest")
    guest = doubling(op, "guest", priority=300, constraints=[Dim("tokens") <= 2])
    stop = threading.Event()
    wrong: list[int] = []

    def work() -> None:
        while not stop.is_set():
            for tokens in (1, 3):
                x = torch.ones(tokens, 4)
                if not torch.equal(op(x), 2 * x):
                    wrong.append(tokens)

    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(work) for _ in range(2)]
        for _ in range(50):
            with registry.temporarily(guest):
                op(torch.ones(1, 4))
        stop.set()
        for task in tasks:
            task.result()
    assert wrong == []
    with trace() as calls:
        op(torch.ones(1, 4))
    assert [call.kernel for call in calls] == ["rest"]


def test_bind_gives_the_kernel_that_serves() -> None:
    registry, op, ran = setting("rest")
    registry.add_kernel(doubling(op, "few", ran, priority=300, constraints=[Dim("tokens") <= 4]))
    few, rest, chosen = op.bind(X), op.bind(x=torch.ones(9, 4)), op.bind(X, backend="rest")
    assert ran == []
    assert torch.equal(few(X), 2 * X)
    assert torch.equal(rest(torch.ones(7, 4)), torch.full((7, 4), 2.0))
    assert torch.equal(chosen(X), 2 * X)
    out = torch.empty(3, 4)
    assert few(X, out=out) is out
    assert ran == ["few", "rest", "rest", "few"]
    with use("rest"):
        op.bind(X)(X)
    assert ran[-1] == "rest"


def test_bind_validates_its_example() -> None:
    _, op, ran = setting("aa")
    with pytest.raises(ArgumentError):
        op.bind(X.double())
    with pytest.raises(ArgumentError) as caught:
        op.bind(X, out=torch.empty(2, 4))
    assert caught.value.argument == "out"
    with pytest.raises(TypeError):
        op.bind()
    assert ran == []


def test_a_handle_knows_the_ops_defaults() -> None:
    registry = new_registry()
    op: Any = toy(registry, all_keywords, outputs=("y",))

    @kernel(op, backend="mine")
    def tripled(*, n: int, x: Tensor, out: Tensor | None = None) -> Any:
        return n * x if out is None else copy_into(out, n * x)

    registry.add_kernel(tripled)
    handle = op.bind(x=torch.ones(2))
    assert handle(x=torch.ones(3)).tolist() == [2, 2, 2]
    assert handle(x=torch.ones(1), n=5).tolist() == [5]


def test_bind_of_an_op_that_mutates() -> None:
    op: Any = toy(new_registry(), fill_rows, **FILL)
    pool, rows, values = torch.zeros(2, 2), torch.tensor([1], dtype=torch.int32), torch.ones(1, 2)
    handle = op.bind(pool, rows, values)
    assert pool.sum() == 0
    assert handle(pool, rows, values) is None
    assert pool.tolist() == [[0, 0], [1, 1]]


def test_a_handle_bound_under_a_trace_records_while_the_trace_lasts() -> None:
    _, op, _ = setting("aa")
    with trace() as calls:
        handle = op.bind(X)
        handle(X)
    handle(X)
    assert [call.kernel for call in calls] == ["aa"]
