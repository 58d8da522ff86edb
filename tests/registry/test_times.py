"""Measured times order kernels, where they speak of the call: same variant, near in work, at the bucket's own size."""

import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.registry.toys import BLEND, DOUBLE, blend, blend_arguments, double, doubling, new_registry, toy, with_kernels
from tokenspeed_registry import Cost, Kernel, Registry, Signature
from tokenspeed_registry.evidence import compiler_version
from tokenspeed_registry.record import Level, Record, Timing
from tokenspeed_registry.selection import Candidate, nearest_time, ordered, representative
from tokenspeed_registry.signature import Flag
from tokenspeed_registry.validation import signature_of
from tokenspeed_registry.variant import completed

COST: dict[str, Any] = {"cost": lambda s: Cost(s.numel("x"), s.nbytes("x", "doubled"))}


def setting(cache: Path, **facts: Any) -> tuple[Registry, Any, list[str]]:
    registry = new_registry(cache=cache, self_check=False)
    return registry, toy(registry, double, **{**DOUBLE, **COST, **facts}), []


def doubles(tokens: int, dim: int = 4, dtype: torch.dtype = torch.float32) -> Signature:
    return Signature({"tokens": tokens, "dim": dim}, {"x": dtype})


def timed(registry: Registry, of: Kernel, *times: tuple[int, float], proof: Level = Level.VERIFIED) -> None:
    """Records times, `(tokens, microseconds)`, of a kernel on the CPU."""
    timings = tuple(Timing.of(registry.contract("double"), doubles(tokens), time) for tokens, time in times)
    registry.record(Record(of.name, of.source_hash, "cpu", compiler_version(of), {proof: {}}, timings))


def order(registry: Registry, signature: Signature) -> list[tuple[str, float | None]]:
    return [(c.kernel.name, c.microseconds) for c in registry.explain("double", signature=signature)]


def test_order_is_time_then_band_then_name(tmp_path: Path) -> None:
    registry, op, ran = setting(tmp_path)
    kernels = [
        doubling(op, "slow", ran, priority=100),
        doubling(op, "quick", ran, priority=100),
        doubling(op, "tuned", ran, priority=300),
        doubling(op, "also_tuned", ran, priority=300),
    ]
    with_kernels(registry, kernels)
    untimed = ["also_tuned", "tuned", "quick", "slow", "reference.double"]
    assert [c.kernel.name for c in registry.explain("double")] == untimed
    op(torch.ones(3, 4))
    timed(registry, kernels[0], (3, 20.0))
    timed(registry, kernels[1], (3, 10.0))
    timed(registry, kernels[2], (3, 30.0))
    by_time = [("quick", 10.0), ("slow", 20.0), ("tuned", 30.0), ("also_tuned", None), ("reference.double", None)]
    assert order(registry, doubles(3)) == by_time
    op(torch.ones(3, 4))
    assert ran == ["also_tuned", "quick"]


def test_a_time_alone_does_not_lift_a_kernel_over_a_higher_band(tmp_path: Path) -> None:
    """Nobody has compared the two: the slow kernel that happens to be timed must not win by that."""
    registry, op, _ = setting(tmp_path)
    eager, tuned, other = (doubling(op, name, priority=p) for name, p in [("eager", 100), ("tuned", 300), ("mid", 200)])
    with_kernels(registry, [eager, tuned, other])
    timed(registry, eager, (3, 500.0))
    assert [name for name, _ in order(registry, doubles(3))] == ["tuned", "mid", "eager", "reference.double"]
    timed(registry, tuned, (3, 600.0))
    assert [name for name, _ in order(registry, doubles(3))] == ["eager", "tuned", "mid", "reference.double"]
    timed(registry, tuned, (3, 400.0))
    assert [name for name, _ in order(registry, doubles(3))] == ["tuned", "mid", "eager", "reference.double"]


REGISTRY = new_registry()
OP: Any = toy(REGISTRY, double, **DOUBLE)
verdicts = st.sampled_from([True, True, True, None, False])
found = st.lists(st.tuples(verdicts, st.sampled_from([0, 100, 200, 300]), st.sampled_from([None, 1.0, 2.0, 3.0])))


def candidate(name: str, accepted: bool | None, priority: int, time: float | None) -> Candidate:
    kernel = dataclasses.replace(TEMPLATE, name=name, priority=priority)
    return Candidate(kernel, accepted, (), "none", Level.NONE, time)


TEMPLATE = doubling(OP, "template")


@given(found, st.randoms(use_true_random=False))
def test_the_order_is_total_and_keeps_its_promises(drawn: list[Any], shuffle: random.Random) -> None:
    """One sequence whatever order the kernels come in, so that no three of them can beat each other in a circle."""
    them = [candidate(f"k{index}", *facts) for index, facts in enumerate(drawn)]
    best_first = ordered(them)
    shuffle.shuffle(them)
    assert ordered(them) == best_first
    for a, b in itertools.combinations(best_first, 2):
        if a.accepted is not b.accepted:
            assert [True, None, False].index(a.accepted) < [True, None, False].index(b.accepted)
        elif a.accepted and a.microseconds is not None and b.microseconds is not None:
            assert a.microseconds <= b.microseconds, "timed ones are ordered by time, whatever their bands"
        elif (a.microseconds is None and b.microseconds is None) or not a.accepted:
            assert (-a.kernel.priority, a.kernel.name) < (-b.kernel.priority, b.kernel.name)
        elif a.microseconds is None:
            assert a.kernel.priority > b.kernel.priority, "no kernel beats a timed one of its own band or a higher one"
        elif a.kernel.priority < b.kernel.priority:
            beaten = [c for c in best_first if c.accepted and (c.microseconds or 0.0) >= a.microseconds]
            assert any(c.kernel.priority >= b.kernel.priority for c in beaten), (
                "lifted only past what it was faster than"
            )


@given(found)
def test_without_times_bands_and_names_decide(drawn: list[Any]) -> None:
    them = [candidate(f"k{index}", True, priority, None) for index, (_, priority, _) in enumerate(drawn)]
    wanted = sorted(them, key=lambda c: (-c.kernel.priority, c.kernel.name))
    assert ordered(them) == wanted


def test_the_nearest_time_decides_call_by_call(tmp_path: Path) -> None:
    registry, op, ran = setting(tmp_path)
    small, large = doubling(op, "small", ran, compiler="triton"), doubling(op, "large", ran, compiler="triton")
    timed(registry, small, (1, 1.0), (1024, 50.0))
    timed(registry, large, (1, 5.0), (1024, 10.0))
    with_kernels(registry, [small, large])
    for _ in range(2):
        op(torch.ones(2, 4))
        op(torch.ones(900, 4))
    assert ran == ["small", "large"] * 2


@pytest.mark.parametrize(("tokens", "time"), [(16, None), (31, None), (32, 9.0), (128, 9.0), (1023, 9.0), (1024, None)])
def test_a_time_far_away_says_nothing(tmp_path: Path, tokens: int, time: float | None) -> None:
    """Two octaves, of what the call's bucket [2**n, 2**(n+1)) begins with."""
    registry, op, _ = setting(tmp_path)
    kernel = doubling(op, "kernel")
    registry.add_kernel(kernel)
    timed(registry, kernel, (128, 9.0))
    assert order(registry, doubles(tokens))[0] == ("kernel", time)


def test_a_call_on_nothing(tmp_path: Path) -> None:
    registry, op, ran = setting(tmp_path)
    kernel = doubling(op, "kernel", ran)
    registry.add_kernel(kernel)
    timed(registry, kernel, (0, 3.0), (1024, 9.0))
    assert order(registry, doubles(0))[0] == ("kernel", 3.0)
    op(torch.ones(0, 4))
    assert ran == ["kernel"]


@pytest.mark.parametrize("other", [{"dim": 8}, {"dtype": torch.bfloat16}])
def test_another_variants_time_says_nothing(tmp_path: Path, other: dict[str, Any]) -> None:
    registry, op, _ = setting(tmp_path)
    kernel = doubling(op, "kernel")
    registry.add_kernel(kernel)
    timed(registry, kernel, (64, 9.0))
    assert order(registry, doubles(64))[0] == ("kernel", 9.0)
    assert order(registry, doubles(64, **other))[0] == ("kernel", None)


@pytest.mark.parametrize("proof", [Level.INTERPRETED, Level.COMPILED, Level.EMULATED])
def test_the_time_of_a_kernel_that_was_not_verified_says_nothing(tmp_path: Path, proof: Level) -> None:
    registry, op, _ = setting(tmp_path)
    kernel = doubling(op, "kernel")
    registry.add_kernel(kernel)
    timed(registry, kernel, (64, 9.0), proof=proof)
    assert order(registry, doubles(64))[0] == ("kernel", None)
    timed(registry, kernel)
    assert order(registry, doubles(64))[0] == ("kernel", 9.0)


def test_dispatch_looks_times_up_at_the_buckets_size_not_at_the_first_callers(tmp_path: Path) -> None:
    """512 to 1023 tokens share a key: whoever comes first, the choice must be the same."""
    for first in (512, 1023):
        registry, op, ran = setting(tmp_path / str(first))
        low, high = doubling(op, "low", ran, compiler="triton"), doubling(op, "high", ran, compiler="triton")
        timed(registry, low, (512, 1.0), (1024, 9.0))
        timed(registry, high, (512, 5.0), (1024, 5.0))
        with_kernels(registry, [low, high])
        op(torch.ones(first, 4))
        op(torch.ones(1535 - first, 4))
        assert ran == ["low", "low"]
        assert order(registry, doubles(first))[:2] == [("low", 1.0), ("high", 5.0)]


@pytest.mark.parametrize(
    ("size", "stands_for"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (1023, 512), (-1, -1), (-5, -5)]
)
def test_representative(size: int, stands_for: int) -> None:
    """A window of -1 is no size, and must not be taken for one."""
    flags: dict[str, Flag] = {"window": size, "dim": size, "scale": 0.5, "causal": True}
    signature = Signature({"window": size, "dim": size}, {"x": torch.float32}, flags, {"x": ("window", "dim")})
    found = representative(signature, ("dim",))
    assert found.dims == {"window": stands_for, "dim": size}
    assert found.flags == {**flags, "window": stands_for}
    assert (found.dtypes, found.shapes) == (signature.dtypes, signature.shapes)


def blended(registry: Registry, **changes: Any) -> Signature:
    return signature_of(registry.contract("blend"), blend_arguments() | changes)


def test_flags_presence_and_host_memory_make_a_variant() -> None:
    registry = new_registry()
    op: Any = toy(registry, blend, **{**BLEND, "placeable": ("projection",), "cost": lambda s: Cost(s["tokens"], 0.0)})
    here = blended(registry)
    timing = Timing.of(op.contract, here, 7.0)
    changes: list[tuple[dict[str, Any], float | None]] = [
        ({}, 7.0),
        ({"scale": 0.25, "window": None}, 7.0),
        ({"width": 3}, 7.0),
        ({"mode": "multiply"}, None),
        ({"causal": False}, None),
        ({"bits": 4}, None),
        ({"dtype": torch.bfloat16}, None),
        ({"weight": None}, None),
    ]
    assert [nearest_time(op.contract, blended(registry, **change), [timing]) for change, _ in changes] == [
        time for _, time in changes
    ]
    on_host = {**here.layouts, "projection": dataclasses.replace(here.layouts["projection"], on_host=True)}
    placed = dataclasses.replace(here, layouts=on_host)
    assert nearest_time(op.contract, placed, [timing]) is None
    assert nearest_time(op.contract, placed, [Timing.of(op.contract, placed, 8.0), timing]) == 8.0
    read_back = Record.from_json(Record("k", "h", "cpu", timings=(Timing.of(op.contract, placed, 8.0),)).to_json())
    assert nearest_time(op.contract, placed, read_back.timings) == 8.0


def test_what_the_cost_model_does_not_count_does_not_count() -> None:
    """A pool of a million pages is no further away than one of ten."""
    registry = new_registry()
    op: Any = toy(registry, blend, **{**BLEND, "cost": lambda s: Cost(0.0, s.nbytes("x", "blended"))})
    here = blended(registry)
    far_pool = Timing.of(op.contract, dataclasses.replace(here, dims={**here.dims, "inner": 2**20}), 1.0)
    double_the_tokens = Timing.of(op.contract, dataclasses.replace(here, dims={**here.dims, "tokens": 6}), 2.0)
    assert nearest_time(op.contract, here, [double_the_tokens, far_pool]) == 1.0


def test_a_partial_signature_is_completed_as_a_call_would_be() -> None:
    registry = new_registry()
    op: Any = toy(registry, blend, **{**BLEND, "cost": lambda s: Cost(s["width"], s.nbytes("x", "blended", "sums"))})
    arguments = blend_arguments()
    bare = dict.fromkeys(("weight", "residual", "projection", "window"))
    defaults = {"scale": 1.0, "width": 2, "mode": "add", "causal": True, "bits": 8, "dtype": torch.float32}
    call = signature_of(op.contract, arguments | bare | defaults)
    dtypes = {"x": torch.float32, "cu": torch.int32}
    partial = completed(op.contract, Signature({"tokens": 3, "dim": 4, "seqs": 2}, dtypes))
    assert partial == dataclasses.replace(call, layouts={})
    assert nearest_time(op.contract, partial, [Timing.of(op.contract, call, 4.0)]) == 4.0
    assert completed(op.contract, call) == call
    assert completed(op.contract, Signature({"tokens": 3, "dim": 4}, {"x": torch.float32})) is None
    without_tokens = completed(op.contract, Signature({"dim": 4, "seqs": 2}, dtypes))
    assert without_tokens is not None
    assert nearest_time(op.contract, without_tokens, [Timing.of(op.contract, call, 4.0)]) is None
