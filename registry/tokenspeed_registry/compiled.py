"""Compiling a kernel ahead, for an arch that need not be here: what a plugin offers for it, and what comes of it.

A plugin whose kernels have a compiler names a function, `Plugin(..., compile="package.module:function")`:

    function(kernel, platform, calls) -> list[Compiled]

`calls` are (args, kwargs) of the kernel's function with all tensors on the meta device; the function returns every
distinct piece of machine code that these calls would launch on `platform`. It needs no device. What it compiles lands
in the compiler's own cache, where the real call finds it.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tokenspeed_registry.cases import case_set
from tokenspeed_registry.contract import Contract
from tokenspeed_registry.kernel import Kernel
from tokenspeed_registry.platform import Platform

KernelCall = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Compiled:
    """Machine code of one launch. `config` tells it from the kernel's others: entry point and compile-time choices.

    `registers` a thread; `spills` bytes (NVIDIA) or registers (AMD) a thread that did not fit; `shared_bytes` a block;
    `instructions` counts the matrix and asynchronous copy instructions in the code.
    """

    config: str
    registers: int
    spills: int
    shared_bytes: int
    instructions: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Compile = Callable[[Kernel, Platform, Sequence[KernelCall]], list[Compiled]]


def load_compile(name: str) -> Compile:
    """Imports what a plugin names. Raises as imports do."""
    module, _, attribute = name.partition(":")
    function: Compile = getattr(importlib.import_module(module), attribute)
    return function


def planned_calls(contract: Contract, kernel: Kernel, platform: Platform) -> list[KernelCall]:
    """The calls that the op's case set names, at models' shapes and those of its sweeps, which `kernel` would serve."""
    source = case_set(contract)
    named = {**{name: source.model(name) for name in source.models}, **source.swept()}
    calls = []
    for case in named.values():
        arguments = source.blank(contract, case)
        if kernel.refusals(platform, source.describe(contract, arguments).placed(kernel.on_host))[0]:
            calls.append(on_meta(contract, arguments))
    return calls


def on_meta(contract: Contract, arguments: Mapping[str, Any]) -> KernelCall:
    """The arguments of a call as a kernel gets them, tensors without data; those of `host` stay as they are."""
    outlines = {
        name: value.to("meta") if isinstance(value, torch.Tensor) and name not in contract.host else value
        for name, value in arguments.items()
    }
    positional = tuple(outlines[p.name] for p in contract.parameters if not p.keyword)
    return positional, {p.name: outlines[p.name] for p in contract.parameters if p.keyword}
