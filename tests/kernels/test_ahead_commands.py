"""`compile` and `warmup`: what they print, what they record, and what becomes of a kernel that does not compile."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tokenspeed_kernels import compile_command
from tokenspeed_kernels.cli import app
from tokenspeed_registry import Kernel, Platform, TokenspeedError, dry_run, known_platform
from tokenspeed_registry.compiled import Compiled, KernelCall, planned_calls
from tokenspeed_registry.evidence import read
from tokenspeed_registry.record import Level
from tokenspeed_registry.registry import default_registry

COLUMNS = {"kernel", "config", "arch", "ok", "registers", "spills", "shared_bytes", "instructions"}


def answer(*arguments: str) -> Any:
    """What the command prints where Triton compiles."""
    command = [sys.executable, "-c", "from tokenspeed_kernels.cli import main; main()", *arguments, "--json"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_compile_crosses_to_both_vendors(tmp_path: Path) -> None:
    options = ("--op", "linear", "--backend", "triton", "--evidence", str(tmp_path))
    rows = answer("compile", "--arch", "sm_100a,gfx950", *options)
    assert {row["arch"] for row in rows} == {"sm_100a", "gfx950"}
    for row in rows:
        assert set(row) == COLUMNS
        assert row["ok"]
        assert row["kernel"] == "triton.linear"
        assert row["registers"] > 0
    matrix = {
        arch: {name for row in rows if row["arch"] == arch for name in row["instructions"]}
        for arch in ("sm_100a", "gfx950")
    }
    assert any(name.startswith("tcgen05") for name in matrix["sm_100a"])
    assert any(name.startswith("v_mfma") for name in matrix["gfx950"])
    (record,) = read(tmp_path / "gfx950.json")
    recorded = [config["config"] for config in record.proofs[Level.COMPILED]["configs"]]
    assert recorded == [row["config"] for row in rows if row["arch"] == "gfx950"]


def broken(kernel: Kernel, platform: Platform, calls: list[KernelCall]) -> list[Compiled]:
    raise RuntimeError("the compiler gave up")


def test_what_does_not_compile_is_a_row_and_no_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_command, "load_compile", lambda name: broken)
    options = ["compile", "--arch", "sm_90a", "--op", "rms_norm", "--evidence", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 1
    (row,) = json.loads(result.stdout)
    assert (row["ok"], row["registers"]) == (False, None)
    assert "the compiler gave up" in result.stderr
    assert not list(tmp_path.glob("*.json"))


def test_planned_calls_are_those_that_the_kernel_takes() -> None:
    contract = default_registry.contract("rms_norm")
    kernels = {kernel.name: kernel for kernel in default_registry.kernels("rms_norm")}
    calls = planned_calls(contract, kernels["triton.rms_norm"], known_platform("gfx950"))
    assert len(calls) >= 4
    assert all(args[0].device.type == "meta" for args, _ in calls)
    assert planned_calls(contract, kernels["triton.rms_norm"], known_platform("cpu")) == []


@pytest.mark.slow
def test_warmup_compiles_what_a_model_calls() -> None:
    folder = Path(__file__).parents[2] / "engine" / "tokenspeed_engine" / "demo" / "checkpoint"
    rows = answer(
        "warmup",
        "--model",
        str(folder),
        "--arch",
        "sm_90a",
        "--max-batch",
        "2",
        "--max-step-tokens",
        "4",
        "--jobs",
        "2",
    )
    assert all(row["ok"] for row in rows)
    assert {"triton.gdn_decode", "triton.moe_experts", "triton.sample"} <= {row["kernel"] for row in rows}


def test_warmup_refuses_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(TokenspeedError, match=r"config\.json"):
        CliRunner().invoke(app, ["warmup", "--model", str(tmp_path)], catch_exceptions=False)


def test_a_dry_run_computes_nothing() -> None:
    import torch

    import tokenspeed_kernels as tk

    x, w = torch.full((3, 8), 2.0), torch.ones(8)
    given = torch.full((3, 8), 7.0)
    with dry_run() as calls:
        assert tk.rms_norm(x, w, eps=0.0, zero_centred=False, out=given) is given
        assert tk.rms_norm(x.to("meta"), w.to("meta"), eps=0.0, zero_centred=False).shape == (3, 8)
    assert given.eq(7.0).all()
    assert [call.op for call in calls] == ["rms_norm", "rms_norm"]


def test_commands_are_there() -> None:
    assert {"compile", "verify", "warmup", "bench", "tune"} <= set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
