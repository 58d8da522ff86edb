"""Which kernel serves: explicit choices are strict, limits hold call by call, and every verdict carries its reasons."""

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.registry.toys import (
    doubling,
    setting,
    with_kernels,
)
from tokenspeed_registry import (
    Dim,
    NoKernelError,
    RegistrationError,
    ShapeError,
    Signature,
    UnknownNameError,
    arch,
    feature,
    known_platform,
    override_platform,
    trace,
    use,
    vendor,
)
from tokenspeed_registry.selection import capturing

X = torch.arange(12.0).reshape(3, 4)


@contextmanager
def ran_by(ran: list[str], *names: str) -> Iterator[None]:
    """Asserts, by the trace and by the kernels' own notes, which kernels served the calls of a block."""
    ran.clear()
    with trace() as calls:
        yield
    assert [call.kernel for call in calls] == list(names)
    assert ran == [name for name in names if not name.startswith("reference.")]


def test_explicit_choice_by_argument() -> None:
    _, op, ran = setting("aa", "bb")
    for choice, name in [("bb", "bb"), ("aa", "aa"), ("reference", "reference.double"), (None, "aa")]:
        with ran_by(ran, name):
            assert torch.equal(op(X, backend=choice), 2 * X)
    ran.clear()
    op(X, backend="bb")  # untraced, with the table already filled
    op(X)
    assert ran == ["bb", "aa"]


def test_explicit_choice_by_context() -> None:
    _, op, ran = setting("aa", "bb")
    with ran_by(ran, "aa", "bb", "bb", "aa", "reference.double", "aa"):
        op(X)
        with use("bb"):
            op(X)
            with use(double="bb"):
                op(X)
                op(X, backend="aa")  # the argument is nearer
            with use(double="reference"):
                op(X)
        op(X)


def test_one_op_in_a_context_beats_all_ops() -> None:
    _, op, ran = setting("aa", "bb")
    with ran_by(ran, "bb", "aa"):
        with use("aa", double="bb"):
            op(X)
        with use("aa", blend="bb"):
            op(X)
    with pytest.raises(UnknownNameError, match="did you mean double"), use(doubel="aa"):
        op(X)


@pytest.mark.parametrize("kernels", [{"double": "bb"}, {"*": "bb"}, {"*": "aa", "double": "bb"}])
def test_explicit_choice_by_configuration(kernels: dict[str, str]) -> None:
    _, op, ran = setting("aa", "bb", kernels=kernels)
    with ran_by(ran, "bb", "aa", "aa", "bb"):
        op(X)
        op(X, backend="aa")
        with use("aa"):
            op(X)
        op(X)


def test_choice_of_a_backend_takes_its_best_kernel_and_of_a_name_that_one() -> None:
    registry, op, ran = setting()
    slow = doubling(op, "mine.slow", ran, backend="mine", priority=100)
    fast = doubling(op, "mine.fast", ran, backend="mine", priority=300, constraints=[Dim("tokens") <= 3])
    with_kernels(registry, [slow, fast])
    with ran_by(ran, "mine.fast", "mine.slow", "mine.slow"):
        op(X, backend="mine")
        op(torch.ones(4, 4), backend="mine")
        op(X, backend="mine.slow")
    with pytest.raises(NoKernelError) as caught:
        op(torch.ones(4, 4), backend="mine.fast")
    assert caught.value.reasons == ("mine.fast: refused: needs tokens <= 3, got 4",)


@pytest.mark.parametrize("way", ["argument", "context", "configuration"])
def test_choice_that_cannot_serve_raises_with_reasons(way: str) -> None:
    registry, op, ran = setting("aa", kernels={"double": "narrow"} if way == "configuration" else {})
    limits: dict[str, Any] = {"constraints": [Dim("tokens").multiple_of(2), Dim("dim") >= 16]}
    limits["dtypes"] = {"x": [torch.bfloat16]}
    registry.add_kernel(doubling(op, "narrow", ran, priority=400, **limits))

    def chosen(x: Tensor) -> Tensor:
        with use("narrow" if way == "context" else None):
            result: Tensor = op(x, backend="narrow" if way == "argument" else None)
        return result

    for _ in range(2):
        with pytest.raises(NoKernelError, match="double: the explicit choice 'narrow' cannot serve it") as caught:
            chosen(X)
        assert not ran
        (reason,) = caught.value.reasons
        assert "needs dtype of x == bfloat16, got float32" in reason
        assert "needs tokens multiple of 2, got 3" in reason
        assert "needs dim >= 16, got 4" in reason
    with ran_by(ran, "narrow"):
        chosen(torch.ones(2, 16, dtype=torch.bfloat16))


@pytest.mark.parametrize("way", ["argument", "context", "configuration"])
def test_choice_of_an_unknown_name_raises(way: str) -> None:
    _, op, ran = setting("aa", "bb", kernels={"*": "cc"} if way == "configuration" else {})
    with (
        use("cc" if way == "context" else None),
        pytest.raises(UnknownNameError, match=r"no backend or kernel 'cc'; .* aa, bb, reference"),
    ):
        op(X, backend="cc" if way == "argument" else None)
    assert not ran


def test_no_kernel_for_a_platform_lists_all_reasons() -> None:
    registry, op, _ = setting()
    registry.add_kernel(doubling(op, "hopper", requires=arch("sm_90a")))
    registry.add_kernel(doubling(op, "amd", requires=vendor("amd")))
    with pytest.raises(NoKernelError) as caught, override_platform(known_platform("sm_100a")):
        op(X, backend="hopper")
    assert caught.value.reasons == ("hopper: refused: needs arch sm_90a, got sm_100a",)
    verdicts = {c.kernel.name: c.reason for c in registry.explain("double", known_platform("gfx950"))}
    assert verdicts == {"amd": "", "hopper": "needs arch sm_90a, got gfx950", "reference.double": ""}


def test_two_kernels_of_one_name() -> None:
    registry, op, ran = setting("aa")
    with pytest.raises(RegistrationError, match="kernel 'aa' is already registered"):
        registry.add_kernel(doubling(op, "aa", ran))
    stranger = dataclasses.replace(doubling(op, "cc"), op="triple")
    with pytest.raises(RegistrationError, match="kernel 'cc': no op 'triple'"):
        registry.add_kernel(stranger)
    assert [each.name for each in registry.kernels("double")] == ["reference.double", "aa"]


def test_temporarily() -> None:
    registry, op, ran = setting("aa")
    guest = doubling(op, "guest", ran, priority=300, constraints=[Dim("tokens") <= 4])
    with ran_by(ran, "aa", "guest", "aa", "aa"):
        op(X)
        with registry.temporarily(guest):
            op(X)
            op(torch.ones(5, 4))
        op(X)
        with pytest.raises(ShapeError), registry.temporarily(guest):
            op(torch.ones(3))
    assert [each.name for each in registry.kernels()] == ["reference.double", "aa"]
    with pytest.raises(UnknownNameError):
        op(X, backend="guest")


def test_explain_answers_yes_no_or_depends() -> None:
    registry, op, _ = setting("rest")
    limits = [Dim("tokens") <= 8, Dim("dim").in_(4, 8)]
    registry.add_kernel(doubling(op, "few", priority=300, constraints=limits, dtypes={"x": [torch.bfloat16]}))

    def few(**known: Any) -> tuple[bool | None, str]:
        found = registry.explain("double", signature=Signature(**known))
        return next((c.accepted, c.reason) for c in found if c.kernel.name == "few")

    dtype = {"x": torch.bfloat16}
    assert few() == (None, "needs dtype of x == bfloat16; needs tokens <= 8; needs dim in 4, 8")
    assert few(dims={"tokens": 8}, dtypes=dtype) == (None, "needs dim in 4, 8")
    assert few(dims={"tokens": 8, "dim": 4}, dtypes=dtype) == (True, "")
    assert few(dims={"tokens": 9}, dtypes=dtype) == (False, "needs tokens <= 8, got 9")
    assert few(dims={"tokens": 9}, dtypes={"x": torch.float32})[0] is False
    order = [c.kernel.name for c in registry.explain("double", signature=Signature({"tokens": 8}))]
    assert order == ["rest", "reference.double", "few"]
    line = registry.explain("double", signature=Signature({"tokens": 9}))[-1].line()
    assert line == "few: refused: needs tokens <= 8, got 9"


def test_explain_for_archs_that_are_not_here() -> None:
    registry, op, _ = setting("anywhere")
    registry.add_kernel(doubling(op, "blackwell", requires=arch("sm_100a", "sm_103a"), priority=300))
    registry.add_kernel(doubling(op, "tma", requires=feature("tma", "wgmma"), priority=200))
    best = {
        name: registry.explain("double", known_platform(name))[0].kernel.name for name in ("sm_90a", "sm_103a", "cpu")
    }
    assert best == {"sm_90a": "tma", "sm_103a": "blackwell", "cpu": "anywhere"}
    refused = {c.kernel.name: c.reason for c in registry.explain("double", known_platform("sm_100a")) if not c.accepted}
    assert refused == {"tma": "needs wgmma, which sm_100a lacks"}
    with pytest.raises(UnknownNameError, match="unknown arch 'sm_42'; known: cpu, sm_90a"):
        arch("sm_42")


def test_override_of_the_platform_leaves_no_trace_in_the_table() -> None:
    registry, op, ran = setting("anywhere")
    registry.add_kernel(doubling(op, "hopper", ran, requires=arch("sm_90a"), priority=300))
    with ran_by(ran, "anywhere", "hopper", "anywhere"):
        op(X)
        with override_platform(known_platform("sm_90a")):
            op(X)
        op(X)


def test_fall_to_the_reference_on_an_accelerator_warns_once() -> None:
    registry, op, _ = setting()
    registry.add_kernel(doubling(op, "hopper", requires=arch("sm_90a")))
    message = r"double falls back to the slow reference on meta:(?s:.*)hopper: refused: needs arch sm_90a, got meta"
    with pytest.warns(RuntimeWarning, match=message):
        op(X.to("meta"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op(torch.ones(3, 8, device="meta"))
        op(X)


def test_no_warning_on_the_host_or_where_the_reference_was_asked_for() -> None:
    _, op, _ = setting()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op(X)
        op(X.to("meta"), backend="reference")
        with use("reference"):
            op(X.to("meta"))


def test_a_kernel_that_cannot_be_captured_is_refused_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, op, ran = setting("plain")
    registry.add_kernel(doubling(op, "reads_back", ran, priority=300, graph_capturable=False))
    monkeypatch.setattr("tokenspeed_registry.dispatcher.capturing", lambda device: True)
    with ran_by(ran, "plain"):
        op(X)
    with pytest.raises(NoKernelError, match="reads_back: refused: cannot be captured in a CUDA graph"):
        op(X, backend="reads_back")
    monkeypatch.setattr("tokenspeed_registry.dispatcher.capturing", lambda device: False)
    with ran_by(ran, "reads_back", "plain"):
        op(X, backend="reads_back")
        op(X, backend="plain")


def test_nothing_is_captured_on_the_host() -> None:
    assert not capturing(torch.device("cpu"))
