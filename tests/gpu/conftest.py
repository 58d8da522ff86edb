"""Writes what the GPU tests of a session gave to the file that TOKENSPEED_GPU_RESULTS names: evidence, as committed."""

import json
import os
from pathlib import Path

import pytest

from tokenspeed_kernels.facts import facts_now

_OUTCOMES: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "tests/gpu/" in report.nodeid and (report.when == "call" or report.outcome != "passed"):
        _OUTCOMES[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    file = os.environ.get("TOKENSPEED_GPU_RESULTS")
    if file and _OUTCOMES:
        results = facts_now() | {"command": "make test-gpu", "tests": dict(sorted(_OUTCOMES.items()))}
        Path(file).write_text(json.dumps(results, indent=1) + "\n")
