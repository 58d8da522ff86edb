"""A kernel with a compiler that never ran on this arch serves only after it passed a few cases like the call, once."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.registry.toys import DOUBLE, double, doubling, new_registry, toy, with_kernels
from tokenspeed_registry import (
    Dim,
    Kernel,
    NoKernelError,
    Registry,
    copy_into,
    kernel,
    known_platform,
    override_platform,
    self_check,
    trace,
)
from tokenspeed_registry.evidence import compiler_version, read
from tokenspeed_registry.record import PASSED, Level, Record
from tokenspeed_registry.validation import signature_of

X = torch.arange(12.0).reshape(3, 4)
Setting = tuple[Registry, Any]


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    next_process(monkeypatch)


def next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process remembers of its checks is gone in the next; files stay."""
    monkeypatch.setattr(self_check, "_verdicts", {})


def setting(cache: Path, **settings: Any) -> Setting:
    registry = new_registry(cache=cache, **settings)
    return registry, toy(registry, double, **DOUBLE)


def explained(registry: Registry, x: Tensor = X) -> dict[str, tuple[bool | None, str, str]]:
    signature = signature_of(registry.contract("double"), {"x": x})
    found = registry.explain("double", signature=signature)
    return {c.kernel.name: (c.accepted, c.reason, c.evidence) for c in found}


def served(op: Any, x: Tensor = X, **choice: Any) -> str:
    with trace() as calls:
        op(x, **choice)
    return calls[0].kernel


def checked(op: Any, name: str, ran: list[str] | None = None, **facts: Any) -> Kernel:
    """A kernel with a compiler, first by priority."""
    return doubling(op, name, ran, **{"priority": 300, "compiler": "triton", **facts})


def test_wrong_kernel_is_refused_with_a_warning_and_the_next_serves(tmp_path: Path) -> None:
    registry, op = setting(tmp_path)
    with_kernels(registry, [checked(op, "bad", factor=2.5), doubling(op, "next")])
    with pytest.warns(RuntimeWarning, match=r"bad on cpu: failed its first-use self-check: .*tokens="):
        assert torch.equal(op(X), 2 * X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # checked once, warned once
        assert served(op) == "next"
        assert served(op, torch.ones(1, 4)) == "next"


def test_explicit_choice_of_a_wrong_kernel_raises_with_the_reason(tmp_path: Path) -> None:
    registry, op = setting(tmp_path)
    registry.add_kernel(checked(op, "chosen", factor=2.5))
    with pytest.warns(RuntimeWarning), pytest.raises(NoKernelError, match="failed its first-use self-check"):
        op(X, backend="chosen")
    with pytest.raises(NoKernelError, match=r"failed its first-use self-check: .*error"):
        op(X, backend="chosen")


def test_a_chain_of_wrong_kernels_ends_at_the_reference(tmp_path: Path) -> None:
    registry, op = setting(tmp_path)
    with_kernels(registry, [checked(op, f"chain{i}", factor=1.5 + i) for i in range(3)])
    with pytest.warns(RuntimeWarning) as caught:
        assert served(op) == "reference.double"
    assert len([w for w in caught if "self-check" in str(w.message)]) == 3


def test_a_few_cases_of_the_calls_own_variant_are_run(tmp_path: Path) -> None:
    """Each may compile anew: no more than four, of the call's static dims and dtypes."""
    registry, op = setting(tmp_path)
    seen: list[tuple[int, torch.dtype]] = []

    @kernel(op, backend="noted", priority=300, compiler="triton")
    def noted(x: Tensor, *, out: Tensor | None = None) -> Tensor:
        seen.append((x.shape[1], x.dtype))
        return 2 * x if out is None else copy_into(out, 2 * x)

    registry.add_kernel(noted)
    for x in (torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(2, 4)):
        op(x)
        # One of them a second time, to see it allocate; then the call itself.
        assert 3 <= len(seen) <= self_check.CASES + 2
        assert set(seen) == {(x.shape[1], x.dtype)}
        seen.clear()
        op(x)
        op(torch.ones(900, x.shape[1], dtype=x.dtype))
        assert len(seen) == 2
        seen.clear()


def test_a_kernel_right_for_one_variant_may_be_wrong_for_another(tmp_path: Path) -> None:
    registry, op = setting(tmp_path)

    @kernel(op, backend="narrow", priority=300, compiler="triton")
    def narrow(x: Tensor, *, out: Tensor | None = None) -> Tensor:
        result = 2 * x if x.shape[1] == 4 else 3 * x
        return result if out is None else copy_into(out, result)

    registry.add_kernel(narrow)
    assert served(op) == "narrow.double"
    with pytest.warns(RuntimeWarning, match="self-check"):
        assert served(op, torch.ones(3, 8)) == "reference.double"
    assert served(op) == "narrow.double"
    assert explained(registry)["narrow.double"][0] is True
    accepted, reason, evidence = explained(registry, torch.ones(3, 8))["narrow.double"]
    assert accepted is False
    assert "failed its first-use self-check" in reason
    assert evidence == "self-checked and failed at dim=8, x=float32"


@pytest.mark.parametrize("right", [True, False])
def test_the_next_process_knows_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: bool) -> None:
    ran: list[str] = []
    registry, op = setting(tmp_path)
    registry.add_kernel(checked(op, "kept", ran, factor=2.0 if right else 2.5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        op(X)
    assert len(ran) > 1
    ran.clear()

    next_process(monkeypatch)
    registry, op = setting(tmp_path)
    registry.add_kernel(checked(op, "kept", ran, factor=2.0 if right else 2.5))
    assert explained(registry)["kept"][0] is right
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert served(op) == ("kept" if right else "reference.double")
    assert ran == (["kept"] if right else [])
    (known,) = read(tmp_path / "evidence" / "cpu.json")
    assert known.level is Level.NONE, "a few cases are not conformance"
    (verdict,) = known.self_checks.items()
    assert verdict[0] == "dim=4, x=float32"
    assert (verdict[1] == PASSED) is right


@pytest.mark.parametrize("changed", ["source", "compiler"])
def test_another_source_or_compiler_is_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    registry, op = setting(tmp_path)
    ran: list[str] = []
    again = checked(op, "again", ran)
    version = compiler_version(again)
    old = Record("again", again.source_hash, "cpu", version, self_checks={"dim=4, x=float32": "error 2 above 1"})
    other: dict[str, Any] = {"source": {"source_hash": "0" * 16}, "compiler": {"compiler": "triton 1.0"}}[changed]
    registry.record(replace(old, **other))
    registry.add_kernel(again)
    assert served(op) == "again"
    assert len(ran) > 1


def test_what_says_nothing_of_the_kernel_is_not_kept(tmp_path: Path) -> None:
    registry, op = setting(tmp_path)

    @kernel(op, backend="hungry", priority=300, compiler="triton")
    def hungry(x: Tensor, *, out: Tensor | None = None) -> Tensor:
        raise torch.cuda.OutOfMemoryError("the device is full of pages")

    unreached = checked(op, "unreached", dtypes={"x": [torch.float16]})
    with_kernels(registry, [hungry, unreached])
    with pytest.warns(RuntimeWarning) as caught:
        assert [served(op), served(op, X.half())] == ["reference.double"] * 2
    assert [("OutOfMemory" in str(w.message), "no case ran" in str(w.message)) for w in caught] == [
        (True, False),
        (True, False),
        (False, True),
    ]
    assert explained(registry)["hungry.double"][0] is False
    assert read(tmp_path / "evidence" / "cpu.json") == []


def test_a_verdict_that_cannot_be_kept_holds_for_the_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    registry, op = setting(tmp_path / "file")
    ran: list[str] = []
    registry.add_kernel(checked(op, "unkept", ran))
    with pytest.warns(RuntimeWarning) as caught:
        assert served(op) == "unkept"
    assert any("the self-check of unkept is not kept" in str(w.message) for w in caught)
    ran.clear()
    registry.dispatcher("double").forget()
    assert served(op) == "unkept"
    assert len(ran) == 1


def test_who_is_exempt(tmp_path: Path) -> None:
    registry, op = setting(tmp_path)
    ran: list[str] = []
    plain = checked(op, "plain", ran, compiler=None)
    verified = checked(op, "verified", ran, factor=2.5)
    known = Record(verified.name, verified.source_hash, "cpu", compiler_version(verified), {Level.VERIFIED: {}})
    registry.record(replace(known, self_checks={"dim=4, x=float32": "an older failure"}))
    with_kernels(registry, [plain, verified])
    assert served(op, backend="plain") == "plain"
    assert served(op, backend="verified") == "verified"
    assert ran == ["plain", "verified"]


@pytest.mark.parametrize("level", [Level.INTERPRETED, Level.COMPILED, Level.EMULATED])
def test_lesser_evidence_is_no_exemption(tmp_path: Path, level: Level) -> None:
    registry, op = setting(tmp_path)
    bad = checked(op, "bad", factor=2.5)
    registry.record(Record(bad.name, bad.source_hash, "cpu", compiler_version(bad), {level: {}}))
    registry.add_kernel(bad)
    with pytest.warns(RuntimeWarning, match="self-check"):
        assert served(op) == "reference.double"


def test_policy_skips_the_check(tmp_path: Path) -> None:
    registry, op = setting(tmp_path, self_check=False)
    ran: list[str] = []
    unchecked = checked(op, "unchecked", ran, factor=2.5)
    failed = {"dim=4, x=float32": "error 2 above 1"}
    registry.record(Record("unchecked", unchecked.source_hash, "cpu", compiler_version(unchecked), self_checks=failed))
    registry.add_kernel(unchecked)
    assert torch.equal(op(X), 2.5 * X)
    assert ran == ["unchecked"]


def test_planning_for_another_arch_checks_nothing(tmp_path: Path) -> None:
    registry, op = setting(tmp_path)
    ran: list[str] = []
    registry.add_kernel(checked(op, "elsewhere", ran))
    with override_platform(known_platform("sm_100a")):
        op(X)
    assert ran == ["elsewhere"]


def test_a_kernel_that_cannot_serve_the_call_is_not_checked_for_it(tmp_path: Path) -> None:
    registry, op = setting(tmp_path)
    ran: list[str] = []
    registry.add_kernel(checked(op, "limited", ran, constraints=[Dim("tokens") <= 2]))
    assert served(op) == "reference.double"
    assert ran == []
    assert served(op, torch.ones(1, 4)) == "limited"


def test_no_check_while_a_graph_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check would go into the graph, and reads what it computed, which a capture forbids."""
    registry, op = setting(tmp_path)
    ran: list[str] = []
    registry.add_kernel(checked(op, "fresh", ran))
    with monkeypatch.context() as patch:
        patch.setattr("tokenspeed_registry.dispatcher.capturing", lambda device: True)
        with pytest.raises(NoKernelError, match=r"fresh: never ran here .* call the op once before capture"):
            op(X)
    assert ran == []
    assert served(op) == "fresh"
    registry.dispatcher("double").forget()
    monkeypatch.setattr("tokenspeed_registry.dispatcher.capturing", lambda device: True)
    assert served(op) == "fresh"
