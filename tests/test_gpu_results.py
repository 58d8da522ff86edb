"""What the GPU tests last gave, which is committed since CI has no device: all of it passed."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.sanitize import SHARING
from tokenspeed_registry.registry import default_registry

RESULTS = Path(__file__).parent / "gpu" / "results"


def results(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def test_all_tests_passed_on_a_named_device() -> None:
    found = results("tests.json")
    assert found["device"]
    assert found["tests"]
    assert set(found["tests"].values()) == {"passed"}


def test_every_file_of_gpu_tests_was_run() -> None:
    files = {node.partition("::")[0].rpartition("/")[2] for node in results("tests.json")["tests"]}
    assert files == {path.name for path in (RESULTS.parent).glob("test_*.py")}


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_found_nothing(tool: str) -> None:
    found = results("sanitizer.json")["tools"][tool]
    assert (found["errors"], found["exit_code"]) == (0, 0)
    ops = default_registry.contracts if tool == "memcheck" else SHARING
    names = {kernel.name for op in ops for kernel in default_registry.kernels(op) if kernel.backend == "triton"}
    assert names <= set(found["kernels"]), "made before a kernel was added: run `make test-gpu`"
