"""What compute-sanitizer last gave, which is committed since CI has no device: it found nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.sanitize import sharing_ops
from tokenspeed_registry.registry import default_registry

RESULTS = Path(__file__).parent / "gpu" / "results"


def results(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_found_nothing(tool: str) -> None:
    found = results("sanitizer.json")["tools"][tool]
    assert (found["errors"], found["exit_code"]) == (0, 0)
    ops = default_registry.contracts if tool == "memcheck" else sharing_ops()
    names = {kernel.name for op in ops for kernel in default_registry.kernels(op) if kernel.compiler is not None}
    assert names <= set(found["kernels"]), "made before a kernel was added: run `make test-gpu`"
