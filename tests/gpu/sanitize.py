"""compute-sanitizer over the compiled kernels: each once, at a model's static dims and small sizes.

    python -m tests.gpu.sanitize RESULTS.json

runs memcheck over all and racecheck over those of `sharing_ops`, and writes what was run and what was found.
`python -m tests.gpu.sanitize --calls [OP ...]` makes the calls alone.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import tokenspeed_kernels  # noqa: F401  declares the ops
from tests.gpu.calls import model_arguments, run
from tokenspeed_kernels.facts import facts_now
from tokenspeed_registry.registry import default_registry

SHARING = (
    "gdn_prefill",
    "linear",
    "mla_decode",
    "moe_experts",
    "paged_attention",
    "residual_inject_mix",
    "rms_norm",
    "sample",
    "sparse_attention",
    "topk_blocks",
)
"""Ops whose Triton kernels share memory across warps: products and reductions over several warps."""


def sharing_ops() -> list[str]:
    """Those of `SHARING`, and all with a kernel in CUDA C++."""
    return sorted({*SHARING, *(kernel.op for kernel in default_registry.kernels() if kernel.compiler == "nvrtc")})


def make_calls(ops: list[str]) -> None:
    """Calls every compiled kernel of the ops, or of all, and prints its name."""
    for op in ops or sorted(default_registry.contracts):
        contract = default_registry.contract(op)
        for kernel in default_registry.kernels(op):
            if kernel.compiler is not None:
                run(contract, kernel, model_arguments(contract, kernel))
                torch.cuda.synchronize()
                print(f"called {kernel.name}", flush=True)


def sanitised(tool: str, ops: list[str]) -> dict[str, Any]:
    """The kernels that `tool` watched and the errors it found, None where it said nothing of them."""
    command = ["compute-sanitizer", "--tool", tool, "--target-processes", "application-only"]
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]  # cuda-python asks the driver for functions that it may lack
    command += [sys.executable, "-m", "tests.gpu.sanitize", "--calls", *ops]
    found = subprocess.run(command, capture_output=True, text=True)
    text = found.stdout + found.stderr
    # "ERROR SUMMARY: 0 errors", and of racecheck "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)".
    summary = re.search(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", text)
    if found.returncode or summary is None or "0" not in summary.groups():
        print(text, file=sys.stderr)
    return {
        "kernels": re.findall(r"^called (\S+)$", text, re.MULTILINE),
        "errors": None if summary is None else int(summary[1] or summary[2]),
        "exit_code": found.returncode,
    }


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--calls"]:
        make_calls(arguments[1:])
        return
    (file,) = arguments
    results = {"memcheck": sanitised("memcheck", []), "racecheck": sanitised("racecheck", sharing_ops())}
    document = facts_now() | {"command": "python -m tests.gpu.sanitize", "tools": results}
    Path(file).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
