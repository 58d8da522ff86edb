"""A kernel with a compiler that never ran on this arch serves only after it passed conformance here, once."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.registry.toys import DOUBLE, double, doubling, new_registry, toy, with_kernels
from tokenspeed_registry import Dim, Kernel, NoKernelError, Registry, known_platform, override_platform, trace
from tokenspeed_registry.evidence import Level, Record, compiler_version

X = torch.arange(12.0).reshape(3, 4)


def setting(cache: Path = Path("absent"), **settings: Any) -> tuple[Registry, Any]:
    registry = new_registry(cache=cache, **settings)
    return registry, toy(registry, double, **DOUBLE)


def served(op: Any, x: Tensor = X, **choice: Any) -> str:
    with trace() as calls:
        op(x, **choice)
    return calls[0].kernel


def checked(op: Any, name: str, ran: list[str] | None = None, **facts: Any) -> Kernel:
    """A kernel with a compiler; results of checks are kept for the process, so `name` must be new in it."""
    return doubling(op, name, ran, **{"priority": 300, "compiler": "triton", **facts})


def test_wrong_kernel_is_refused_with_a_warning_and_the_next_serves() -> None:
    registry, op = setting()
    bad = checked(op, "self_check.bad", factor=2.5)
    with_kernels(registry, [bad, doubling(op, "next")])
    with pytest.warns(RuntimeWarning, match=r"self_check\.bad on cpu: failed its first-use self-check: .*tokens="):
        assert torch.equal(op(X), 2 * X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # checked once, warned once
        assert served(op) == "next"
        assert served(op, torch.ones(1, 8)) == "next"


def test_explicit_choice_of_a_wrong_kernel_raises_with_the_reason() -> None:
    registry, op = setting()
    registry.add_kernel(checked(op, "self_check.chosen", factor=2.5))
    with pytest.warns(RuntimeWarning), pytest.raises(NoKernelError, match="failed its first-use self-check"):
        op(X, backend="self_check.chosen")
    with pytest.raises(NoKernelError, match=r"failed its first-use self-check: .*error"):
        op(X, backend="self_check.chosen")


def test_a_chain_of_wrong_kernels_ends_at_the_reference() -> None:
    registry, op = setting()
    with_kernels(registry, [checked(op, f"self_check.chain{i}", factor=1.5 + i) for i in range(3)])
    with pytest.warns(RuntimeWarning) as caught:
        assert served(op) == "reference.double"
    assert len([w for w in caught if "self-check" in str(w.message)]) == 3


def test_right_kernel_is_checked_once_for_the_process() -> None:
    registry, op = setting()
    ran: list[str] = []
    good = checked(op, "self_check.good", ran)
    registry.add_kernel(good)
    assert served(op) == "self_check.good"
    first = len(ran)
    assert first > 2, "the check ran cases before the call"
    served(op)
    served(op, torch.ones(1, 8))
    assert len(ran) == first + 2
    other = new_registry()
    toy(other, double, **DOUBLE)
    other.add_kernel(good)
    served(other.dispatcher("double").function)
    assert len(ran) == first + 3


def test_kernel_that_no_case_reaches_does_not_serve() -> None:
    registry, op = setting()
    registry.add_kernel(checked(op, "self_check.unreached", dtypes={"x": [torch.float16]}))
    with pytest.warns(RuntimeWarning, match="no case ran"):
        assert served(op, X.half()) == "reference.double"


def test_who_is_exempt(tmp_path: Path) -> None:
    registry, op = setting(tmp_path)
    ran: list[str] = []
    plain = checked(op, "self_check.plain", ran, compiler=None)
    measured = checked(op, "self_check.measured", ran, factor=2.5)
    level = Level.MEASURED
    registry.record(Record(measured.name, measured.source_hash, "cpu", level, compiler_version(measured)))
    with_kernels(registry, [plain, measured])
    assert served(op, backend="self_check.plain") == "self_check.plain"
    assert served(op, backend="self_check.measured") == "self_check.measured"
    assert ran == ["self_check.plain", "self_check.measured"]


@pytest.mark.parametrize("level", [Level.INTERPRETED, Level.COMPILED, Level.EMULATED])
def test_lesser_evidence_is_no_exemption(tmp_path: Path, level: Level) -> None:
    registry, op = setting(tmp_path)
    bad = checked(op, f"self_check.level{level}", factor=2.5)
    registry.record(Record(bad.name, bad.source_hash, "cpu", level, compiler_version(bad)))
    registry.add_kernel(bad)
    with pytest.warns(RuntimeWarning, match="self-check"):
        assert served(op) == "reference.double"


def test_policy_skips_the_check() -> None:
    registry, op = setting(self_check=False)
    ran: list[str] = []
    registry.add_kernel(checked(op, "self_check.unchecked", ran, factor=2.5))
    assert torch.equal(op(X), 2.5 * X)
    assert ran == ["self_check.unchecked"]


def test_planning_for_another_arch_checks_nothing() -> None:
    registry, op = setting()
    ran: list[str] = []
    registry.add_kernel(checked(op, "self_check.elsewhere", ran))
    with override_platform(known_platform("sm_100a")):
        op(X)
    assert ran == ["self_check.elsewhere"]


def test_checks_respect_the_limits_of_the_kernel() -> None:
    registry, op = setting()
    ran: list[str] = []

    registry.add_kernel(checked(op, "self_check.limited", ran, constraints=[Dim("tokens") <= 2]))
    assert served(op) == "reference.double"
    assert ran == [], "a kernel that cannot serve the call is not checked for it"
    assert served(op, torch.ones(1, 4)) == "self_check.limited"
