"""What `warmup` compiles is what a model then launches: compile-ahead keys equal those of real calls.

Run with TRITON_INTERPRET=0. No Triton kernel is compiled: keys are all that is asked for.
"""

from collections.abc import Iterable

import pytest

from tokenspeed_cuda.launch import planned_for
from tokenspeed_engine import LLM, SamplingParams
from tokenspeed_engine.llm import EMBEDDED_MODEL, EngineOptions
from tokenspeed_engine.rehearsal import rehearse
from tokenspeed_kernels.benchmark.prepare import launched
from tokenspeed_kernels.triton.device import interpreted
from tokenspeed_kernels.triton.offline import compiling_only, offline
from tokenspeed_kernels.warmup_command import chosen
from tokenspeed_registry import Call, Kernel, Platform, known_platform, trace
from tokenspeed_registry.compiled import KernelCall, on_meta
from tokenspeed_registry.registry import default_registry
from tokenspeed_registry.scope import outlined

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(interpreted(), reason="not run: TRITON_INTERPRET must be 0"),
]


def entries(kernel: Kernel, call: KernelCall, platform: Platform) -> set[str]:
    """What a kernel in CUDA C++ would launch of its own: that is compiled."""
    if kernel.compiler != "nvrtc":
        return set()
    with planned_for(platform.arch) as found, offline(platform), compiling_only(lambda key: False):
        kernel.function(*call[0], **call[1])
    return {f"{entry.name} {dict(entry.macros)}" for entry in found}


def keys(calls: Iterable[Call], platform: Platform) -> dict[str, str]:
    """Of everything that the calls would launch on `platform`, with the op that does."""
    found: dict[str, str] = {}
    for call in calls:
        contract = default_registry.contract(call.op)
        kernel = chosen(call, platform)
        if kernel is not None and kernel.compiler is not None:
            prepared = on_meta(contract, outlined(contract, call.arguments))
            launches = entries(kernel, prepared, platform) | launched(kernel, prepared, platform)
            assert launches or not call.signature.numel(contract.tensors[0].name), call
            found |= dict.fromkeys(launches, call.op)
    return found


@pytest.mark.parametrize("arch", ["sm_90a", "gfx950"])
def test_generation_launches_nothing_that_was_not_warmed_up(arch: str) -> None:
    platform = known_platform(arch)
    options = EngineOptions(dtype="bfloat16", page_size=16, max_step_tokens=32)
    warm = keys(rehearse(EMBEDDED_MODEL, max_batch=4, max_step_tokens=32, page_size=16), platform)
    with trace() as calls:
        LLM(options=options).generate(
            ["a first prompt", "another one, somewhat longer", "x"], SamplingParams(max_new_tokens=4, logprobs=1)
        )
    real = keys(calls, platform)
    assert len(real) > 20
    missing = {key: op for key, op in real.items() if key not in warm}
    assert not missing, missing
