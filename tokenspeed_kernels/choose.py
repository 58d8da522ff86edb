"""Which kernels a command is about: the options `--op` and `--backend`."""

from typing import Annotated

import typer

from tokenspeed_registry import Kernel, UnknownNameError
from tokenspeed_registry.registry import default_registry

Ops = Annotated[list[str] | None, typer.Option("--op", help="Only this op; may be repeated.")]
Backend = Annotated[str | None, typer.Option("--backend", help="Only kernels of these, separated by commas.")]


def chosen_kernels(ops: list[str] | None, backend: str | None) -> list[Kernel]:
    """Raises `UnknownNameError` for an op or a backend that is not there."""
    names = [default_registry.contract(op).name for op in ops] if ops else list(default_registry.contracts)
    found = [kernel for name in names for kernel in default_registry.kernels(name)]
    backends = sorted({kernel.backend for kernel in default_registry.kernels()})
    wanted = backends if backend is None else backend.split(",")
    for name in wanted:
        if name not in backends:
            raise UnknownNameError(f"unknown backend {name!r}; backends with kernels: {', '.join(backends)}")
    return [kernel for kernel in found if kernel.backend in wanted]
