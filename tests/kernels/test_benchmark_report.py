"""What a run leaves behind: the order of its rows, its file, its report, and what the command prints."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tokenspeed_kernels.benchmark.rows import Row, document, fastest, losses_first, unused, write
from tokenspeed_kernels.cli import app
from tokenspeed_registry import TokenspeedError

CEILINGS = {
    "copy_bytes_per_second": 4e12,
    "matrix": {"bfloat16": 7e14},
    "read_us": [],
    "launch_us": 0.7,
    "replay_us": 1,
}
WELL = Row(
    op="rope", kernel="triton.rope", shape="decode, batch=8", us=10.0, spread=0.02, gbs=2000.0, tflops=1.0,
    of_ceiling=0.9, command="tokenspeed-kernels bench rope", device="Toy 1", versions={"torch": "2.11"}, commit="abc",
    date="2026-11-30", model="decode", graph=True, calls=64, nbytes=2e7, flops=1e7, floor_us=9.0,
)  # fmt: skip
PEERLESS = replace(WELL, op="linear", of_ceiling=0.3)
LOST = replace(WELL, op="gdn_decode", peers={"fla": 9.0, "slow": 50.0})
LOST_MORE = replace(WELL, op="mla_decode", peers={"fla": 4.0}, notes=("fla: state not compared",))
WON = replace(WELL, op="sample", peers={"fla": 11.0}, of_ceiling=0.8)
MENDED = replace(LOST_MORE, kernel="torch.sample", op="sample", us=70.0)
WRONG = Row("silu_mul", "triton.silu_mul", "decode", error="wrong <result>", device="Toy 1")
ROWS = [WELL, WON, MENDED, LOST, WRONG, PEERLESS, LOST_MORE]
FACTS: dict[str, Any] = {
    "device": "Toy 1", "versions": {"torch": "2.11"}, "commit": "abc", "date": "2026-11-30", "command": "bench",
    "peers": [], "ceilings": CEILINGS, "notes": ["peer qla: not installed"],
}  # fmt: skip


def test_losses_come_first_by_how_much_then_what_is_far_from_its_ceiling() -> None:
    """Behind the losses of our fastest kernels: those of a kernel that another one of ours replaces."""
    assert losses_first(ROWS) == [WRONG, LOST_MORE, LOST, MENDED, PEERLESS, WON, WELL]


def test_rows_without_a_ceiling_come_last() -> None:
    without = replace(WELL, of_ceiling=None)
    assert losses_first([without, WELL]) == [WELL, without]


def test_the_fastest_kernel_of_each_call() -> None:
    assert fastest([WRONG, MENDED, WON, LOST]) == [WON, LOST]


def test_the_fastest_peer_counts() -> None:
    assert LOST.fastest_peer == ("fla", 9.0)
    assert LOST.behind == pytest.approx(10 / 9)
    assert WELL.behind is None


def test_the_file_has_everything_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "results" / "toy.json"
    write(document(ROWS, **FACTS), path)
    found = json.loads(path.read_text())
    assert set(found) == {"schema", "rows", *FACTS}
    assert {"op", "kernel", "shape", "us", "spread", "gbs", "tflops", "of_ceiling", "peers", "command", "device",
            "versions", "commit", "date"} <= set(found["rows"][0])  # fmt: skip
    assert set(found["rows"][0]) == {each.name for each in fields(Row)}
    assert [Row.from_json(row) for row in found["rows"]] == losses_first(ROWS)


def test_results_of_another_device_are_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    write(document([WELL], **FACTS), path)
    write(document([], **FACTS), path)
    assert json.loads(path.read_text())["rows"] == []
    with pytest.raises(TokenspeedError, match="Toy 1"):
        write(document([], **{**FACTS, "device": "Toy 2"}), path)
    path.write_text("{}")
    with pytest.raises(TokenspeedError, match="something else"):
        write(document([], **FACTS), path)


def test_every_run_of_a_day_has_a_file_of_its_own(tmp_path: Path) -> None:
    assert unused(tmp_path, "NVIDIA H200", "2026-11-30").name == "nvidia-h200-2026-11-30.json"
    (tmp_path / "nvidia-h200-2026-11-30.json").touch()
    assert unused(tmp_path, "NVIDIA H200", "2026-11-30").name == "nvidia-h200-2026-11-30-2.json"


def test_the_report_shows_every_row_losses_first(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tokenspeed_kernels.benchmark.report import write_report

    path = tmp_path / "report.html"
    write_report(document(ROWS, **FACTS), path)
    page = path.read_text()
    table = page[page.index("<tbody>") : page.index("</tbody>")]
    places = [table.index(f"<td>{row.op}</td><td>{row.kernel}</td>") for row in losses_first(ROWS)]
    assert places == sorted(places)
    assert table.count("<tr") == len(ROWS)
    assert "7 rows, 1 with an error. Of 5 calls, by our fastest kernel: 2 of 3 behind a peer, 1 below half" in page
    assert "wrong &lt;result&gt;" in page
    assert "peer qla: not installed" in page
    assert page.count("<svg") == 2
    assert not re.search(r"<(script|link|img)|(src|href)=.http", page)  # self-contained


def test_the_figures_name_ops_and_ceilings() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import rc_context

    from tokenspeed_kernels.benchmark import figures

    with rc_context({"svg.fonttype": "none"}):
        roofline, sweeps = figures.roofline(ROWS, CEILINGS), figures.sweeps(ROWS)
    for row in ROWS[:3]:
        assert f">{row.op}</text>" in roofline
        assert f">{row.op}</tspan>" in sweeps or f">{row.op}</text>" in sweeps
    assert "copy 4.00 TB/s" in roofline
    assert "bfloat16 product 700 TFLOP/s" in roofline
    assert ">silu_mul<" not in roofline + sweeps
    assert ">fla</text>" in sweeps
    assert ">floor</text>" in sweeps


def test_figures_of_nothing() -> None:
    pytest.importorskip("matplotlib")
    from tokenspeed_kernels.benchmark import figures

    assert figures.roofline([], CEILINGS).startswith("<svg")
    assert figures.sweeps([WRONG]).startswith("<svg")


PEER = """
from tokenspeed_kernels.benchmark.peers import PeerCall
NAME = "toy peer"
def available(): return None
def version(): return "1.2"
def adapters():
    return {"silu_mul": lambda arguments: PeerCall(lambda: None)}
"""


def test_the_command_prints_and_writes_the_same_rows(tmp_path: Path) -> None:
    folder = tmp_path / "peers"
    folder.mkdir()
    (folder / "toy.py").write_text(PEER)
    out = tmp_path / "out.json"
    options = ["--case", "shared expert, decode", "--peers", "--peers-dir", str(folder), "--out", str(out), "--json"]
    result = CliRunner().invoke(app, ["bench", "silu_mul", *options])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    written = json.loads(out.read_text())
    assert rows == written["rows"]
    assert written["peers"] == [{"peer": "toy peer", "version": "1.2", "absent": ""}]
    (row,) = rows
    assert (row["op"], row["kernel"], row["error"]) == ("silu_mul", "torch.silu_mul", None)
    assert row["us"] > 0
    assert row["graph"] is False
    assert row["device"] == "cpu, eager calls"
    assert row["peers"].keys() == {"toy peer"}
    assert row["notes"] == ["toy peer: not compared"]
    assert "--peers" in row["command"]
    assert "bench silu_mul" in row["command"]
    assert f"results: {out}" in result.stderr


def test_sweeps_fall_back_to_models_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenspeed_kernels.benchmark import cells as listed
    from tokenspeed_registry.cases import case_set
    from tokenspeed_registry.registry import default_registry

    contract = default_registry.contract("silu_mul")
    swept = replace(case_set(contract), sweeps={"qwen4_exp shared expert, decode": [{"rows": 1}, {"rows": 2}]})
    cells, notes = listed.cells_of(["silu_mul"], listed.Shapes.MODEL, None)
    names = {cell.shape for cell in cells}
    monkeypatch.setattr(listed, "case_set", lambda _: replace(swept, sweeps={}))
    cells, notes = listed.cells_of(["silu_mul"], listed.Shapes.SWEEP, None)
    assert {cell.shape for cell in cells} == names
    assert "no sweeps, so the models' shapes: silu_mul" in notes
    monkeypatch.setattr(listed, "case_set", lambda _: swept)
    cells, notes = listed.cells_of(["silu_mul"], listed.Shapes.SWEEP, None)
    assert [cell.shape for cell in cells] == [f"qwen4_exp shared expert, decode, rows={rows}" for rows in (1, 2)]
    assert {cell.model for cell in cells} == {"qwen4_exp shared expert, decode"}
    assert not any("no sweeps" in note for note in notes)


def test_a_case_by_its_full_name_is_that_case_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the command that a row gives would time other rows too."""
    from tokenspeed_kernels.benchmark.cells import Shapes, cells_of

    cells, _ = cells_of(["gdn_decode"], Shapes.MODEL, "qwen4_exp decode, one request")
    assert [cell.shape for cell in cells] == ["qwen4_exp decode, one request"]
    monkeypatch.setattr("tokenspeed_kernels.benchmark.cells.MOST_BYTES", 1e12)
    cells, _ = cells_of(["gdn_decode"], Shapes.MODEL, "qwen4_exp decode")
    assert [cell.shape for cell in cells] == ["qwen4_exp decode"]
    cells, _ = cells_of(["gdn_decode"], Shapes.MODEL, "decode")
    assert {"qwen4_exp decode", "qwen4_exp decode, one request"} <= {cell.shape for cell in cells}


def test_a_filter_that_leaves_nothing_is_an_error() -> None:
    result = CliRunner().invoke(app, ["bench", "silu_mul", "--case", "no such case"])
    assert result.exit_code != 0
    assert "no such case" in str(result.exception)
