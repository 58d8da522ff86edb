"""torch.compile of our plain-torch kernels, where a compiler that fuses has something to fuse and no loop to unroll."""

import functools
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernels.benchmark.peers import Adapter, PeerCall
from tokenspeed_registry import Contract
from tokenspeed_registry.registry import default_registry

NAME = "torch.compile"
OPS = (
    "add_rms_norm",
    "gated_rms_norm",
    "ngram_embed",
    "ngram_lookup",
    "residual_inject",
    "residual_inject_mix",
    "residual_mix",
    "rms_norm",
    "rope",
    "silu_mul",
)


def available() -> str | None:
    """Inductor writes Triton kernels; those it writes for a CPU are no peer of ours."""
    if not torch.cuda.is_available():
        return "no accelerator"
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def version() -> str:
    return str(torch.__version__)


def adapters() -> dict[str, Adapter]:
    return {op: functools.partial(adapt, default_registry.contract(op)) for op in OPS}


def adapt(contract: Contract, arguments: Mapping[str, Any]) -> PeerCall | None:
    """The plain-torch kernel, compiled for exactly these shapes."""
    torch_kernel = next(k for k in default_registry.kernels(contract.name) if k.name == f"torch.{contract.name}")
    compiled = _compiled(torch_kernel.function)
    positional = [arguments[p.name] for p in contract.parameters if not p.keyword]
    keywords = {p.name: arguments[p.name] for p in contract.parameters if p.keyword}

    def outputs(returned: Any) -> dict[str, Tensor]:
        results = returned if isinstance(returned, tuple) else (returned,) if contract.outputs else ()
        named = dict(zip([output.name for output in contract.outputs], results, strict=True))
        return named | {name: arguments[name] for name in contract.mutates}

    return PeerCall(lambda: compiled(*positional, **keywords), outputs)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # One compilation a shape. Past the limit a call would silently run uncompiled, but for `fullgraph`.
    torch._dynamo.config.recompile_limit = 1000
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False, fullgraph=True)
    return compiled
