"""Every kind of wrong kernel is caught, and what a kernel declares it cannot do is refused, counted and probed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jaxtyping import Float32, Int32
from torch import Tensor

from tests.registry.toys import DOUBLE, FILL, double, doubling, fill_rows, new_registry, report_of, toy
from tokenspeed_registry import Dim, Flag, Kernel, arch, copy_into, kernel, known_platform
from tokenspeed_registry.cases import CaseSet
from tokenspeed_registry.conformance import check_kernel

CPU = torch.device("cpu")


OP: Any = toy(new_registry(), double, **DOUBLE)
FILL_OP: Any = toy(new_registry(), fill_rows, **FILL)


def right(x: Tensor, *, out: Any = None) -> Any:
    return copy_into(out, 2 * x)


def one_element(x: Tensor, *, out: Any = None) -> Any:
    right(x, out=out)
    if out.numel():
        out.view(-1)[-1] *= 1.01
    return out


def unwritten(x: Tensor, *, out: Any = None) -> Any:
    out[:, :-1].copy_(2 * x[:, :-1])
    return out


def last_row_unwritten(x: Tensor, *, out: Any = None) -> Any:
    out[:2].copy_(2 * x[:2])
    return out


def input_changed(x: Tensor, *, out: Any = None) -> Any:
    right(x, out=out)
    x.mul_(2)
    return out


def input_sign_of_zero_changed(x: Tensor, *, out: Any = None) -> Any:
    right(x, out=out)
    x[x.abs() < 1] *= -1.0
    return out


def out_ignored(x: Tensor, *, out: Any = None) -> Any:
    return 2 * x


def out_returned_untouched(x: Tensor, *, out: Any = None) -> Any:
    return out


def nothing_returned(x: Tensor, *, out: Any = None) -> Any:
    right(x, out=out)


def two_returned(x: Tensor, *, out: Any = None) -> Any:
    return right(x, out=out), out


def other_shape_returned(x: Tensor, *, out: Any = None) -> Any:
    return right(x, out=out).T


def raises(x: Tensor, *, out: Any = None) -> Any:
    raise RuntimeError("illegal memory access")


def raises_on_empty(x: Tensor, *, out: Any = None) -> Any:
    assert len(x), "grid of no blocks"
    return right(x, out=out)


def infinite(x: Tensor, *, out: Any = None) -> Any:
    right(x, out=out)
    out[x > 0] = torch.inf
    return out


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (one_element, "error .* above"),
        (unwritten, "error inf above"),
        (last_row_unwritten, "error inf above"),
        (input_changed, "changed its input x"),
        (input_sign_of_zero_changed, "changed its input x"),
        (out_ignored, "did not return the given out"),
        (out_returned_untouched, "error inf above"),
        (nothing_returned, "raised ValueError"),
        (two_returned, "raised ValueError"),
        (other_shape_returned, r"doubled has shape \(4, 3\), not \(3, 4\)"),
        (raises, "raised RuntimeError: illegal memory access"),
        (raises_on_empty, "grid of no blocks"),
        (infinite, "error inf above"),
    ],
)
def test_planted_fault_is_caught(function: Callable[..., Any], fault: str) -> None:
    report = report_of(OP, function)
    assert not report.ok
    assert report.failures
    assert any(_matches(fault, failure) for failure in report.failures), report.failures
    assert not report.worst.ok


def _matches(pattern: str, text: str) -> bool:
    import re

    return re.search(pattern, text) is not None


def test_a_failure_names_its_case() -> None:
    report = report_of(OP, raises_on_empty)
    assert all(failure.startswith("tokens=0, dim=") for failure in report.failures)
    assert len(report.failures) < report.cases


def test_right_kernel_passes_every_case() -> None:
    report = report_of(OP, right)
    assert report.ok
    assert report.refused == 0
    assert report.cases == len({str(case) for case in double_case_list()})
    assert report.worst.ok
    assert (report.op, report.kernel, report.backend) == ("double", "mine.double", "mine")


def double_case_list() -> list[Any]:
    from tests.registry.toys import double_cases

    return double_cases.cases()


def test_the_reference_passes() -> None:
    registry = new_registry()
    op = toy(registry, double, **DOUBLE)
    (reference,) = registry.kernels()
    report = check_kernel(op.contract, reference, CPU)
    assert report.ok
    assert 0 < report.worst.error <= report.worst.tolerance or report.worst.error == 0.0


def writes_all(pool: Tensor, rows: Tensor, values: Tensor) -> None:
    fill_rows(pool, rows, values)


def touches_another_row(pool: Tensor, rows: Tensor, values: Tensor) -> None:
    fill_rows(pool, rows, values)
    others = [row for row in range(len(pool)) if row not in rows.tolist()]
    pool[others[-1], 0] *= 1 + 2**-23


def misses_a_row(pool: Tensor, rows: Tensor, values: Tensor) -> None:
    fill_rows(pool, rows[:-1], values[:-1])


def writes_a_near_value(pool: Tensor, rows: Tensor, values: Tensor) -> None:
    fill_rows(pool, rows, values * 1.001)


def changes_the_rows(pool: Tensor, rows: Tensor, values: Tensor) -> None:
    fill_rows(pool, rows, values)
    rows.fill_(0)


def test_mutated_pool() -> None:
    assert report_of(FILL_OP, writes_all).ok
    faults: dict[Callable[..., Any], str] = {
        touches_another_row: "which the call does not touch",
        misses_a_row: "error .* above",
        writes_a_near_value: "error .* above",
        changes_the_rows: "changed its input rows",
    }
    for function, fault in faults.items():
        report = report_of(FILL_OP, function)
        assert any(_matches(fault, failure) for failure in report.failures), (function, report.failures)


def test_refused_cases_are_counted_and_edges_run() -> None:
    ran: list[tuple[int, ...]] = []

    def run(x: Tensor, *, out: Any = None) -> Any:
        ran.append(tuple(x.shape))
        return right(x, out=out)

    limits = [Dim("tokens") >= 2, Dim("tokens") <= 7, Dim("dim").in_(4, 12, 20)]
    report = report_of(OP, run, constraints=limits)
    assert report.ok
    assert report.refused > 0
    assert report.cases + 1 == len(ran)  # the first case once more, without out
    assert {(2, 4), (7, 4), (3, 12), (3, 20)} <= set(ran)
    assert all(2 <= tokens <= 7 and dim in (4, 12, 20) for tokens, dim in ran)


def test_a_bound_that_the_kernel_does_not_keep_is_caught() -> None:
    def narrow(x: Tensor, *, out: Any = None) -> Any:
        out[:6].copy_(2 * x[:6])
        return out

    assert report_of(OP, narrow, constraints=[Dim("tokens") <= 6]).ok
    assert not report_of(OP, narrow, constraints=[Dim("tokens") <= 7]).ok


def test_a_kernel_that_no_case_reaches_is_not_ok() -> None:
    report = report_of(OP, right, dtypes={"x": [torch.float16]})
    assert (report.cases, report.failures, report.ok) == (0, [], False)
    assert report.refused == len(double_case_list())


def test_cases_may_be_given() -> None:
    (case,) = double_case_list()[:1]
    assert check_kernel(OP.contract, doubling(OP, "given"), CPU, [case]).cases == 1


def shrink(lengths: Int32[Tensor, "slots"], x: Float32[Tensor, "tokens dim"], *, backend: str | None = None) -> None:
    """Mutates a tensor of one dim; reads a strided one."""
    lengths[0] = x.shape[0]


shrink_cases = CaseSet(
    axes={"tokens": [3]},
    build=lambda p, make: {
        "lengths": torch.tensor([9, 9, 9], dtype=torch.int32),
        "x": make.normal(p["tokens"], 8)[:, :4],
    },
)


def test_pools_of_one_dim_and_strided_inputs() -> None:
    facts: dict[str, Any] = {"cases": "tests.registry.test_conformance:shrink_cases", "mutates": ("lengths",)}
    op = toy(new_registry(), shrink, **facts, strided=("x",))
    strides: list[tuple[int, ...]] = []

    def run(lengths: Tensor, x: Tensor) -> None:
        strides.append(x.stride())
        shrink(lengths, x)

    def wrong(lengths: Tensor, x: Tensor) -> None:
        shrink(lengths, x)
        lengths[2] = 8

    assert report_of(op, run).ok
    assert strides == [(8, 1)]
    assert not report_of(op, wrong).ok


def nearly(arguments: Any, got: Any, wanted: Any) -> float:
    return float("nan") if got[0].numel() else 0.0


custom_cases = CaseSet(axes={"tokens": [3]}, build=lambda p, make: {"x": make.normal(p["tokens"], 4)}, compare=nearly)


def test_own_comparison_that_answers_nan_fails() -> None:
    op = toy(new_registry(), double, **(DOUBLE | {"cases": "tests.registry.test_conformance:custom_cases"}))
    report = report_of(op, right)
    assert len(report.failures) == report.cases == 1
    assert not report.worst.ok


def test_a_kernel_must_allocate_where_it_gets_no_out() -> None:
    @kernel(OP, backend="mine", name="mine.never_allocates")
    def never_allocates(x: Tensor, *, out: Any = None) -> Any:
        return copy_into(out, 2 * x)

    report = check_kernel(OP.contract, never_allocates, CPU)
    assert [failure for failure in report.failures if "without out" in failure] == report.failures
    assert report.failures


def wide(
    x: Float32[Tensor, "tokens width"], *, negate: bool = False, out: Any = None, backend: str | None = None
) -> Float32[Tensor, "tokens width"]:
    """Twice `x`; its width is the sum of two parameters of the case set."""
    return -2 * x.double() if negate else 2 * x.double()


wide_cases = CaseSet(
    axes={"tokens": [3, 1], "latent": [8, 16], "rope": [2], "negate": [False]},
    build=lambda p, make: {"x": make.normal(p["tokens"], p["latent"] + p["rope"]), "negate": p["negate"]},
    models={"model": {"tokens": 4096, "latent": 512, "rope": 64}},
    shrink=[{"tokens": 2}],
)
WIDE_OP: Any = toy(
    new_registry(),
    wide,
    cases="tests.registry.test_conformance:wide_cases",
    outputs=("y",),
    output_dtypes={},
    static=("width",),
)


def test_a_kernel_for_a_models_dims_alone_runs_and_its_bounds_are_probed() -> None:
    ran: list[tuple[int, ...]] = []

    def run(x: Tensor, *, negate: bool, out: Any = None) -> Any:
        ran.append(tuple(x.shape))
        return copy_into(out, 2 * x)

    report = report_of(WIDE_OP, run, constraints=[Dim("width").in_(576), Dim("tokens") <= 200, Dim("tokens") >= 2])
    assert report.ok
    assert set(ran) == {(2, 576), (200, 576)}
    assert report.unreached == []


def test_bounds_of_dims_that_no_axis_names() -> None:
    def wrong_at_64(x: Tensor, *, negate: bool, out: Any = None) -> Any:
        return copy_into(out, 2 * x if x.shape[1] < 64 else x)

    assert report_of(WIDE_OP, wrong_at_64, constraints=[Dim("width") <= 63]).ok
    assert not report_of(WIDE_OP, wrong_at_64, constraints=[Dim("width") <= 64]).ok


def test_odd_multiples_of_a_factor_are_probed_within_the_other_limits() -> None:
    widths: set[int] = set()

    def run(x: Tensor, *, negate: bool, out: Any = None) -> Any:
        widths.add(x.shape[1])
        return copy_into(out, 2 * x)

    report = report_of(WIDE_OP, run, constraints=[Dim("width").multiple_of(32), Dim("width") >= 64])
    assert report.ok
    assert report.unreached == []
    assert {96, 64} <= widths
    assert all(width % 32 == 0 for width in widths)


def test_bounds_that_no_case_can_have_are_reported() -> None:
    def run(x: Tensor, *, negate: bool, out: Any = None) -> Any:
        return copy_into(out, 2 * x)

    limits = [Dim("tokens") <= 2**40, Flag("negate").in_(True, False), Dim("width") >= 1]
    report = report_of(WIDE_OP, run, constraints=limits)
    assert report.ok
    assert report.unreached == [f"tokens <= {2**40} at {2**40}", "negate in True, False at True", "width >= 1 at 1"]


def chip_kernel(function: Callable[..., Any]) -> Kernel:
    found: Kernel = kernel(OP, backend="chip", requires=arch("sm_90a"))(function)
    return found


def test_platform_overrides_what_the_device_says() -> None:
    @chip_kernel
    def allocating(x: Tensor, *, out: Any = None) -> Any:
        return 2 * x if out is None else copy_into(out, 2 * x)

    assert check_kernel(OP.contract, allocating, CPU).cases == 0
    report = check_kernel(OP.contract, allocating, CPU, platform=known_platform("sm_90a"))
    assert report.ok
    assert report.refused == 0


def test_run_replaces_the_call_of_the_function() -> None:
    @chip_kernel
    def unrunnable(x: Tensor, *, out: Any = None) -> Any:
        raise RuntimeError("needs a device")

    def emulate(factor: float) -> Any:
        def run(given: Kernel, args: tuple[Any, ...], kwargs: Any) -> Any:
            assert given is unrunnable
            result = factor * args[0]
            return copy_into(kwargs["out"], result) if kwargs.get("out") is not None else result

        return run

    hopper = known_platform("sm_90a")
    assert check_kernel(OP.contract, unrunnable, CPU, platform=hopper, run=emulate(2.0)).ok
    assert not check_kernel(OP.contract, unrunnable, CPU, platform=hopper, run=emulate(2.1)).ok
    assert not check_kernel(OP.contract, unrunnable, CPU, platform=hopper).ok


def test_an_oracle_stands_in_for_the_reference_at_twice_the_tolerance() -> None:
    oracle, right_kernel, wrong = (doubling(OP, n, factor=f) for n, f in (("o", 2.0), ("r", 2.0), ("w", 2.1)))
    (case,) = double_case_list()[:1]
    report = check_kernel(OP.contract, right_kernel, CPU, [case], oracle=oracle)
    assert report.ok
    tolerance = check_kernel(OP.contract, right_kernel, CPU, [case]).worst.tolerance
    assert report.worst.tolerance == pytest.approx(2 * tolerance)
    assert not check_kernel(OP.contract, wrong, CPU, [case], oracle=oracle).ok
    assert check_kernel(OP.contract, wrong, CPU, [case], oracle=wrong).ok  # the reference has no say
