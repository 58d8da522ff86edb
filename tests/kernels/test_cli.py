"""`tokenspeed-kernels` as others script it: the JSON of each command, and exit codes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from tokenspeed_kernels.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def answer(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_doctor() -> None:
    report = answer("doctor")
    assert set(report) == {"platform", "versions", "plugins"}
    assert set(report["platform"]) == {"vendor", "arch", "device", "features"}
    assert report["versions"]["torch"]
    plugins = {plugin["name"]: plugin for plugin in report["plugins"]}
    assert plugins["torch"] == {"name": "torch", "usable": True, "reason": ""}
    assert {"cuda", "rocm"} <= set(plugins)


def test_ops_and_kernels() -> None:
    rows = {row["op"]: row for row in answer("ops")}
    assert rows["mla_decode"]["family"] == "mla"
    assert "torch.mla_decode" in rows["mla_decode"]["kernels"]
    kernels = answer("kernels", "--op", "mla_decode", "--backend", "torch")
    assert [row["kernel"] for row in kernels] == ["torch.mla_decode"]


@pytest.mark.parametrize("arch", ["cpu", "sm_90a", "sm_100a", "sm_103a", "gfx950"])
def test_explain_answers_for_archs_that_are_not_here(arch: str) -> None:
    report = answer("explain", "gdn_decode", "--arch", arch, "--shape", "batch=4", "--dtype", "q=bfloat16")
    assert report["op"] == "gdn_decode"
    assert report["arch"] == arch
    assert report["chosen"] == report["candidates"][0]["kernel"]
    for candidate in report["candidates"]:
        assert set(candidate) == {"kernel", "backend", "accepted", "reason", "evidence"}


def test_explain_fills_in_a_models_call() -> None:
    """What a model's call leaves open is nothing: every candidate is accepted or refused."""
    model = ("explain", "linear", "--arch", "sm_90a", "--model", "qwen4_exp delta rule inputs")
    report = answer(*model)
    assert {candidate["accepted"] for candidate in report["candidates"]} <= {True, False}
    assert report["chosen"] == "triton.linear"
    assert answer(*model, "--shape", "tokens=1", "--dtype", "x=bfloat16")["chosen"] == "cuda.linear_few"


def test_explain_takes_flags_and_optional_tensors() -> None:
    for options in (("--flag", "normalise=False"), ("--flag", "normalise=true", "--shape", "batch=3")):
        assert answer("explain", "gdn_decode", *options)["chosen"] == "torch.gdn_decode"
    assert answer("explain", "linear", "--flag", "dtype=float32", "--given", "bias")["chosen"] == "torch.linear"
    assert answer("explain", "rope", "--flag", "style=neox")["chosen"] == "torch.rope"


def test_what_explain_is_told_reaches_the_constraints() -> None:
    """Each option decides a limit of a kernel that is open without it."""
    code = """
import sys, torch, tokenspeed_kernels
from tokenspeed_registry import Dim, Flag, Given, copy_into, kernel
from tokenspeed_registry.registry import default_registry
from tokenspeed_kernels.cli import main
linear = default_registry.dispatcher("linear").function
limits = {"flag": Flag("dtype").in_(torch.float32), "given": Given("bias").in_(True), "dim": Dim("in_features") <= 2560}
for name, limit in limits.items():
    @kernel(linear, backend="mine", name=name, constraints=[limit])
    def run(x, weight, bias=None, *, dtype=None, out=None):
        raise AssertionError
    default_registry.add_kernel(run)
main()
"""

    def verdicts(*options: str) -> dict[str, bool | None]:
        command = [sys.executable, "-c", code, "explain", "linear", "--arch", "cpu", "--json", *options]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert result.returncode == 0, result.stderr
        rows = {row["kernel"]: row["accepted"] for row in json.loads(result.stdout)["candidates"]}
        return {name: rows[name] for name in ("flag", "given", "dim")}

    assert verdicts() == {"flag": None, "given": None, "dim": None}
    assert verdicts("--flag", "dtype=float32", "--given", "bias") == {"flag": True, "given": True, "dim": None}
    assert verdicts("--flag", "dtype=bfloat16", "--shape", "in_features=4096")["flag"] is False
    model = ("--model", "deepseek_v3 router")
    assert verdicts(*model) == {"flag": True, "given": False, "dim": False}
    assert verdicts(*model, "--given", "bias", "--shape", "in_features=64") == {
        "flag": True,
        "given": True,
        "dim": True,
    }


def test_verify_runs_kernels_whose_backend_has_not_their_plugins_name() -> None:
    code = """
import tokenspeed_kernels
from tokenspeed_registry import copy_into, kernel
from tokenspeed_registry.registry import default_registry
from tokenspeed_kernels.cli import main
silu_mul = default_registry.dispatcher("silu_mul").function
(torch_kernel,) = [k for k in default_registry.kernels("silu_mul") if k.backend == "torch"]
for name in ("fits", "cannot"):
    @kernel(silu_mul, backend="other", name=name)
    def run(gate_up, *, out=None):
        return torch_kernel.function(gate_up, out=out)
    default_registry.add_kernel(run)
default_registry.unusable["cannot"] = "plugin mine: no such device"
main()
"""
    command = [sys.executable, "-c", code, "verify", "--op", "silu_mul", "--backend", "other", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert [row["kernel"] for row in json.loads(result.stdout)] == ["fits"]


def test_verify_reports_error_against_tolerance() -> None:
    (row,) = answer("verify", "--op", "merge_states", "--backend", "torch")
    assert {"op", "kernel", "backend", "cases", "unreached", "worst_error", "tolerance", "ok"} <= set(row)
    assert row["ok"] is True
    assert 0 < row["worst_error"] <= row["tolerance"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "no_such_op"),
        ("explain", "gdn_decode", "--arch", "sm_12"),
        ("explain", "gdn_decode", "--shape", "nonsense=3"),
        ("explain", "gdn_decode", "--shape", "batch=x"),
        ("explain", "gdn_decode", "--dtype", "q=float7"),
        ("explain", "gdn_decode", "--dtype", "q=int32"),
        ("explain", "gdn_decode", "--dtype", "q=float16", "--dtype", "k=bfloat16"),
        ("explain", "gdn_decode", "--shape", "k_heads=3", "--shape", "v_heads=4"),
        ("explain", "gdn_decode", "--arch", ""),
        ("explain", "gdn_decode", "--flag", "normalise=maybe"),
        ("explain", "gdn_decode", "--flag", "scale=1"),
        ("explain", "rope", "--flag", "style=upside_down"),
        ("explain", "linear", "--flag", "dtype=float7"),
        ("explain", "linear", "--given", "weight"),
        ("explain", "linear", "--model", "no such model"),
        ("verify", "--op", "no_such_op"),
        ("verify", "--backend", "nobody"),
        ("kernels", "--backend", "nobody"),
    ],
)
def test_what_no_call_could_be_is_one_line_and_exit_code_2(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith("tokenspeed-kernels: ")


def test_importing_the_api_pulls_in_no_vendor_package_and_no_tools() -> None:
    code = (
        "import sys, torch\n"  # which imports cuda-python where it is installed
        "before = set(sys.modules)\n"
        "import tokenspeed_kernels\n"
        "banned = {'triton', 'cutlass', 'cuda', 'hip', 'hypothesis', 'typer', 'rich', 'pydantic', 'transformers'}\n"
        "found = banned & {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "backends = [name for name in sys.modules if name.startswith(('tokenspeed_cuda', 'tokenspeed_rocm'))]\n"
        "kernels = [name for name in sys.modules if name.startswith('tokenspeed_kernels.torch')]\n"
        "sys.exit(str([found, backends, kernels]) if found or backends or kernels else 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_config_says_where_each_value_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.toml"
    file.write_text("debug = true\n[kernels]\nmla_decode = 'torch'\n")
    monkeypatch.setenv("TOKENSPEED_KERNELS_SELF_CHECK", "0")
    result = run("--config", str(file), "config", "--json")
    rows = {row["field"]: row for row in json.loads(result.stdout)}
    assert rows["debug"] == {"field": "debug", "value": True, "from": f"file {file}"}
    assert rows["kernels"]["value"] == {"mla_decode": "torch"}
    assert rows["self_check"]["from"] == "environment TOKENSPEED_KERNELS_SELF_CHECK"
    assert rows["arch"] == {"field": "arch", "value": None, "from": "default"}
    monkeypatch.setenv("TOKENSPEED_KERNELS_DEBGU", "1")
    assert "did you mean TOKENSPEED_KERNELS_DEBUG?" in run("config").stderr


def test_a_config_file_that_cannot_be_used_is_one_line() -> None:
    for command in ("config", "doctor"):
        result = run("--config", "/no/such/file", command)
        assert result.returncode == 2
        assert len(result.stderr.strip().splitlines()) == 1
        assert "/no/such/file" in result.stderr


def test_cache_is_shown_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_KERNELS_CACHE", str(tmp_path))
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence" / "cpu.json").write_text("[]")
    (tmp_path / "mine.txt").write_text("not the toolkit's")
    (row,) = answer("cache", "show")
    assert row == {"folder": str(tmp_path), "files": 2, "bytes": 19}
    assert answer("cache", "clear") == {"folder": str(tmp_path), "removed": ["evidence"]}
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
