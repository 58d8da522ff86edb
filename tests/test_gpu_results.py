"""What the tests and compute-sanitizer last gave on a device, which is committed since CI has none.

Of the kernels in CUDA C++ no clean result of the sanitizers is recorded yet: see docs/cuda_kernels.md.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.sanitize import SHARING
from tokenspeed_registry.registry import default_registry

RESULTS = Path(__file__).parent / "gpu" / "results"


def results(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_found_nothing(tool: str) -> None:
    found = results("sanitizer.json")["tools"][tool]
    assert (found["errors"], found["exit_code"]) == (0, 0)
    ops = default_registry.contracts if tool == "memcheck" else SHARING
    names = {kernel.name for op in ops for kernel in default_registry.kernels(op) if kernel.compiler == "triton"}
    assert names <= set(found["kernels"]), "made before a kernel was added: run `make test-gpu`"


def test_every_gpu_test_passed() -> None:
    outcomes = results("tests.json")["tests"]
    assert outcomes
    assert set(outcomes.values()) == {"passed"}
    files = {Path(node.partition("::")[0]).name for node in outcomes}
    assert files == {path.name for path in (RESULTS.parent).glob("test_*.py")}, "run `make test-gpu`"


def test_graphs_were_replayed_with_every_kernel() -> None:
    nodes = results("tests.json")["tests"]
    replayed = {node.partition("[")[2].removesuffix("]") for node in nodes if "test_graphs" in node}
    kernels = [kernel for kernel in default_registry.kernels() if kernel.compiler is not None]
    assert {kernel.name for kernel in kernels if kernel.graph_capturable} <= replayed, "run `make test-gpu`"
