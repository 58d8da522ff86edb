"""gfx950 machine code of every portable kernel, executed instruction by instruction and held against the reference.

Never compared with a real MI355X: "emulated" is not "ran". Runs where TINYGRAD_DIR names a checkout of tinygrad at
a9069c177a9da9cca18593edf55acd2e6073cca6 and clang-19 is installed, with TRITON_INTERPRET=0; see README.md.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tokenspeed_kernels  # noqa: F401  declares the ops
from tokenspeed_kernels.facts import facts_now
from tokenspeed_kernels.triton.device import interpreted, planned_for
from tokenspeed_kernels.triton.interpreter import interpretable, interpretable_cases
from tokenspeed_registry import known_platform
from tokenspeed_registry.conformance import check_kernel
from tokenspeed_registry.evidence import compiler_version, write_record
from tokenspeed_registry.record import Level, Record
from tokenspeed_registry.registry import default_registry

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("TINYGRAD_DIR" not in os.environ, reason="not run: TINYGRAD_DIR names no tinygrad"),
    pytest.mark.skipif(interpreted(), reason="not run: TRITON_INTERPRET must be 0"),
]
CASES = 3
KERNELS = [kernel.name for kernel in default_registry.kernels() if kernel.backend == "triton" and interpretable(kernel)]
EVIDENCE = os.environ.get("TOKENSPEED_EVIDENCE")
"""The folder to record into, if any."""


@pytest.mark.parametrize("name", KERNELS)
def test_machine_code_conforms(name: str) -> None:
    from tests.gfx950.driver import emulated

    (kernel,) = (kernel for kernel in default_registry.kernels() if kernel.name == name)
    contract, platform = default_registry.contract(kernel.op), known_platform("gfx950")
    cases = interpretable_cases(contract, CASES)
    with emulated() as run, planned_for(platform):
        for run.last_first in (True, False):
            run.counts.clear()
            report = check_kernel(contract, kernel, torch.device("cpu"), cases, platform=platform)
            assert report.ok, f"with {'last' if run.last_first else 'first'} waves first: {report.failures}"
            assert run.counts, "nothing was launched"
    if EVIDENCE is not None:
        facts = {**facts_now(), "cases": report.cases, "refused": report.refused, "wave_instructions": sum(run.counts)}
        facts |= {"worst_error": report.worst.error, "tolerance": report.worst.tolerance}
        found = Record(name, kernel.source_hash, "gfx950", compiler_version(kernel))
        write_record(Path(EVIDENCE), replace(found, proofs={Level.EMULATED: facts}))
