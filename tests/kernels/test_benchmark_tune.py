"""Compile-time choices are picked by time, of configurations that are right, and kept beside what the table held."""

import json
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from tests.kernels.benchmark_toys import CEILINGS, CPU, cell_of, doubles
from tokenspeed_kernels.benchmark.cells import spread
from tokenspeed_kernels.benchmark.measure import Bench
from tokenspeed_kernels.benchmark.prepare import _alternatives, _call, outlines_of
from tokenspeed_kernels.benchmark.timing import Flush, Timed
from tokenspeed_kernels.benchmark.tune import Choice, Tuner, ordered_configs, pick, save
from tokenspeed_kernels.cli import app
from tokenspeed_kernels.triton.tuning import Tunable
from tokenspeed_registry import Kernel, copy_into, kernel
from tokenspeed_registry.cases import case_set
from tokenspeed_registry.conformance import Outcome
from tokenspeed_registry.registry import default_registry

TILE = Tunable(
    "toy_tile",
    space=lambda dims: [{"TILE": size} for size in (16, 32, 64, 128)],
    default=lambda platform, dims: {"TILE": 64},
)
WARPS = Tunable("toy_warps", space=lambda dims: [{"WARPS": n} for n in (1, 2)], default=lambda p, dims: {"WARPS": 1})


def tuned(op: Any, ran: list[tuple[int, int]], wrong: int | None = None) -> Kernel:
    """Asks for two choices; at tile `wrong` it computes something else, at 128 it cannot be launched."""

    @kernel(op, backend="triton", name="toy", compiler="triton")
    def run(x: Tensor, *, out: Tensor | None = None) -> Any:
        tile = TILE.pick(x.device, dim=x.shape[1])["TILE"]
        warps = WARPS.pick(x.device, dim=x.shape[1])["WARPS"]
        ran.append((tile, warps))
        if tile == 128:
            raise RuntimeError("out of shared memory")
        result = 2 * x if tile != wrong else 3 * x
        return result if out is None else copy_into(out, result)

    return run


class Scripted(Bench):
    """Says what each configuration takes, but runs and checks it for real."""

    def script(self, ran: list[tuple[int, int]], times: Mapping[tuple[int, int], float]) -> None:
        self.ran, self.times = ran, times

    def time(self, *args: Any, **kwargs: Any) -> tuple[Timed, str | None]:
        timed, wrong = super().time(*args, **kwargs)
        return Timed(self.times[self.ran[-1]], 0.0, timed.calls, timed.batches, timed.graph), wrong


def tune(times: Mapping[tuple[int, int], float], wrong: int | None = None, *cells: str) -> Tuner:
    registry, op = doubles()
    ran: list[tuple[int, int]] = []
    registry.add_kernel(tuned(op, ran, wrong))
    bench = Scripted(registry, CPU, CEILINGS, Flush(CPU), batches=5)
    bench.script(ran, times)
    tuner = Tuner(bench)
    for name in cells or ("model",):
        tuner.tune(cell_of(op, name=name), bench.kernels("double"))
    assert not tuner.skipped
    return tuner


def table(tuner: Tuner, tmp_path: Path) -> Any:
    save(tuner.choices, tmp_path / "table.json", {"device": "toy"})
    return json.loads((tmp_path / "table.json").read_text())


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ([[10.0, 9.0, 8.0]], 2),
        ([[10.0, 9.95, 9.91]], 0),  # within one percent: the default
        ([[10.0, 9.0, 8.95]], 1),  # the earlier of two that tie
        ([[None, 9.0, 8.0]], 2),
        ([[10.0, 5.0, 9.0], [10.0, None, 9.0]], 2),  # wrong in one case is wrong
        ([[10.0, 5.0, 9.0], [100.0, 300.0, 90.0]], 2),  # by ratios, not by the slowest case alone
        ([[10.0, 5.0], [100.0, 120.0]], 1),
        ([[None, None]], None),
        ([], None),
    ],
)
def test_the_fastest_wins_and_ties_go_to_the_earliest(times: list[list[float | None]], best: int | None) -> None:
    assert pick(times) == best


def test_the_default_is_tried_first_and_once() -> None:
    configs = ordered_configs(TILE, Bench.platform.fget(Scripted(doubles()[0], CPU, CEILINGS, Flush(CPU))), {})  # type: ignore[attr-defined]
    assert configs == [{"TILE": 64}, {"TILE": 16}, {"TILE": 32}, {"TILE": 128}]


SLOW = {(tile, warps): 10.0 for tile in (16, 32, 64, 128) for warps in (1, 2)}


def test_choices_are_tuned_one_after_another(tmp_path: Path) -> None:
    """Two warps pay at tile 32 only: the second choice is tuned with the best of the first."""
    found = table(tune({**SLOW, (32, 1): 8.0, (32, 2): 6.0}), tmp_path)
    assert found["choices"] == {"toy_tile": {"dim=4": {"TILE": 32}}, "toy_warps": {"dim=4": {"WARPS": 2}}}
    assert found["device"] == "toy"


def test_a_wrong_configuration_does_not_win(tmp_path: Path) -> None:
    tuner = tune({**SLOW, (16, 1): 5.0, (32, 1): 8.0}, wrong=16)
    assert table(tuner, tmp_path)["choices"]["toy_tile"] == {"dim=4": {"TILE": 32}}
    failures = tuner.choices["toy_tile", "dim=4"].failures
    assert "wrong result" in failures["TILE=16"]
    assert "out of shared memory" in failures["TILE=128"]


def test_cases_of_the_same_dims_are_weighed_together() -> None:
    tuner = tune({**SLOW, (16, 1): 5.0}, None, "model, tokens=16", "model, tokens=32")
    choice = tuner.choices["toy_tile", "dim=4"]
    assert set(choice.times) == {"toy, model, tokens=16", "toy, model, tokens=32"}
    row = choice.row()
    assert (row["config"], row["us"], row["default_us"], row["cases"]) == ({"TILE": 16}, 10.0, 20.0, 2)


def test_a_table_keeps_what_it_held(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "table.json"
    one = Choice("tile", "dim=4", [{"TILE": 1}, {"TILE": 2}], times={"case": [2.0, 1.0]})
    save({("tile", "dim=4"): one}, path, {"device": "toy"})
    two = Choice("tile", "dim=8", [{"TILE": 1}], times={"case": [2.0]})
    nothing = Choice("other", "", [{"TILE": 1}], times={"case": [None]})
    save({("tile", "dim=8"): two, ("other", ""): nothing}, path, {"device": "toy", "date": "later"})
    found = json.loads(path.read_text())
    assert found["choices"] == {"tile": {"dim=4": {"TILE": 2}, "dim=8": {"TILE": 1}}}
    assert found["date"] == "later"
    assert [each.name for each in path.parent.iterdir()] == ["table.json"]


def test_a_machine_without_an_accelerator_tunes_nothing() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = CliRunner().invoke(app, ["tune", "rms_norm"])
    assert "no accelerator" in str(result.exception)


def test_compiling_ahead_covers_every_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each choice at each of its configurations, the others as they are by default."""
    forced = list(_alternatives({"a": (TILE, {}), "b": (WARPS, {})}))
    assert forced == [{"a": {"TILE": size}} for size in (16, 32, 64, 128)] + [{"b": {"WARPS": n}} for n in (1, 2)]


def test_the_first_call_of_every_op_compiles_before_the_second_of_any() -> None:
    _, double = doubles()
    _, other = doubles()
    one, two = (cell_of(double, name=f"model, tokens={size}") for size in (16, 32))
    third = replace(cell_of(other), contract=replace(other.contract, name="other"))
    assert spread([one, two, third]) == [one, third, two]


def test_outlines_travel_and_arrive_as_meta_tensors() -> None:
    contract = default_registry.contract("gdn_prefill")
    source = case_set(contract)
    arguments = source.arguments(contract, source.case({"strided": True}))
    sent = pickle.loads(pickle.dumps(outlines_of(contract, arguments)))
    assert len(pickle.dumps(sent)) < 5000
    args, kwargs = _call(default_registry.kernels("gdn_prefill")[0], sent)
    arrived = dict(zip([p.name for p in contract.parameters if not p.keyword], args, strict=True)) | dict(kwargs)
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            assert arrived[name].stride() == value.stride()
            assert (arrived[name].shape, arrived[name].dtype) == (value.shape, value.dtype)
            assert arrived[name].device.type == ("cpu" if name in contract.host else "meta")
        else:
            assert arrived[name] == value


def test_outcomes_are_said_in_a_line() -> None:
    from tokenspeed_kernels.benchmark.check import complaint

    assert complaint(Outcome(0.1, 0.2)) is None
    assert complaint(Outcome(0.3, 0.2)) == "wrong result: error 0.3 above 0.2"
    assert complaint(Outcome(float("nan"), 0.2)) == "wrong result: error nan above 0.2"
    assert complaint(Outcome(0.0, 0.2, "changed its input x")) == "changed its input x"
