"""The page of benchmarks says what the results say, losses first."""

import json
from pathlib import Path
from typing import Any

from tokenspeed_kernels.benchmark.page import page

ROOT = Path(__file__).parents[2]


def results(*rows: dict[str, Any]) -> dict[str, Any]:
    ceilings = {
        "copy_bytes_per_second": 4.3e12,
        "read_us": [[1 << 20, 2.0]],
        "matrix": {"bfloat16": 680e12},
        "launch_us": 0.67,
    }
    return {
        "device": "a chip",
        "date": "2030-01-01",
        "command": "tokenspeed-kernels bench",
        "commit": "abc",
        "versions": {"torch": "2"},
        "ceilings": ceilings,
        "rows": list(rows),
    }


def row(op: str, kernel: str, us: float | None, peer: float | None = None, error: str | None = None) -> dict[str, Any]:
    peers = {} if peer is None else {"them": peer}
    return {"op": op, "kernel": kernel, "shape": "a call", "us": us, "peers": peers, "error": error, "of_ceiling": 0.5}


def test_losses_come_first_and_errors_are_named(tmp_path: Path) -> None:
    rows = [row("won", "k.won", 1.0, 2.0), row("lost", "k.lost", 3.0, 2.0), row("lost", "k.slow", 9.0, 2.0)]
    rows.append(row("wrong", "k.wrong", None, error="NaN in y"))
    (tmp_path / "chip.json").write_text(json.dumps(results(*rows)))
    text = page(tmp_path)
    assert text.index("| lost |") < text.index("| won |")
    assert "**1.50**" in text
    assert "k.slow" not in text
    assert "k.wrong, a call: NaN in y" in text
    assert "a peer was timed at 2 of them and is faster at 1" in text


def test_peers_stand_there_with_their_versions(tmp_path: Path) -> None:
    known = [("FLA", "0.6.0", ""), ("away", "", "not installed"), ("vllm", "0.33.0", "")]
    found = results(row("lost", "k.lost", 3.0, 2.0))
    found["peers"] = [{"peer": name, "version": version, "absent": absent} for name, version, absent in known]
    (tmp_path / "chip.json").write_text(json.dumps(found))
    assert "\nPeers: FLA 0.6.0, vllm 0.33.0.\n" in page(tmp_path)


def test_nothing_measured_is_said(tmp_path: Path) -> None:
    assert "Nothing was measured yet." in page(tmp_path)


def test_the_page_is_that_of_the_results() -> None:
    written = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    assert written == page(ROOT / "bench" / "results"), "run `make docs`"
