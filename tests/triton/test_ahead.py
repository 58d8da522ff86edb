"""Compiling ahead: each distinct launch once, and what is compiled is what the real call launches.

Run with TRITON_INTERPRET=0.
"""

import pytest

import tokenspeed_kernels  # noqa: F401  declares the ops
from tokenspeed_kernels.benchmark.prepare import Ahead, compile_task, launched, outlines_of
from tokenspeed_kernels.triton import tuning
from tokenspeed_kernels.triton.device import interpreted
from tokenspeed_kernels.triton.offline import compiling_only, offline
from tokenspeed_registry import known_platform
from tokenspeed_registry.cases import case_set
from tokenspeed_registry.compiled import on_meta
from tokenspeed_registry.registry import default_registry

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(interpreted(), reason="not run: TRITON_INTERPRET must be 0"),
]
PLATFORM = known_platform("sm_90a")


def test_every_launch_of_every_configuration_is_planned_once() -> None:
    contract = default_registry.contract("gdn_decode")
    source = case_set(contract)
    kernel = next(k for k in default_registry.kernels("gdn_decode") if k.backend == "triton")
    ahead = Ahead(PLATFORM, tunes=True)
    tasks, wanted = [], set()
    for name, case in source.swept().items():
        arguments = source.blank(contract, case)
        tasks += list(ahead.tasks(kernel, name, outlines_of(contract, arguments)))
        call = on_meta(contract, arguments)
        with tuning.asked() as asked:
            wanted |= launched(kernel, call, PLATFORM)
        ((choice, (tunable, dims)),) = asked.items()
        for config in tunable.space(dims):
            wanted |= launched(kernel, call, PLATFORM, {choice: config})
    keys = [task.key for task in tasks]
    assert len(keys) == len(set(keys))
    assert set(keys) == wanted
    assert len(keys) > 4


def test_what_a_task_compiles_is_what_the_call_launches() -> None:
    contract = default_registry.contract("rms_norm")
    source = case_set(contract)
    kernel = next(k for k in default_registry.kernels("rms_norm") if k.backend == "triton")
    arguments = source.arguments(contract, source.case({}))
    (task,) = Ahead(PLATFORM).tasks(kernel, "default", outlines_of(contract, arguments))
    assert compile_task(task) == 1
    args, kwargs = on_meta(contract, arguments)
    with offline(PLATFORM) as launches, compiling_only(lambda key: key == task.key):
        kernel.function(*args, **kwargs)
    assert len(launches) == 1
