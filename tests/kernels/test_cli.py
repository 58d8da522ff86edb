"""`tokenspeed-kernels` as others script it: the JSON of each command, and exit codes."""

import json
import subprocess
import sys
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


def test_verify_reports_error_against_tolerance() -> None:
    (row,) = answer("verify", "--op", "merge_states", "--backend", "torch")
    assert {"op", "kernel", "backend", "cases", "worst_error", "tolerance", "ok"} <= set(row)
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
        "import sys, tokenspeed_kernels\n"
        "banned = {'triton', 'cutlass', 'cuda', 'hip', 'hypothesis', 'typer', 'rich', 'pydantic', 'transformers'}\n"
        "found = banned & {name.split('.')[0] for name in sys.modules}\n"
        "backends = [name for name in sys.modules if name.startswith(('tokenspeed_cuda', 'tokenspeed_rocm'))]\n"
        "kernels = [name for name in sys.modules if name.startswith('tokenspeed_kernels.torch')]\n"
        "sys.exit(str([found, backends, kernels]) if found or backends or kernels else 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
