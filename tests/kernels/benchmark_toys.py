"""Toy ops and a bench of them, on the CPU and with ceilings that nobody measured."""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

from tests.registry.toys import DOUBLE, doubling, new_registry, toy
from tests.registry.toys import double as double_reference
from tokenspeed_kernels.benchmark.ceilings import Ceilings
from tokenspeed_kernels.benchmark.cells import Cell
from tokenspeed_kernels.benchmark.measure import Bench
from tokenspeed_kernels.benchmark.timing import Flush
from tokenspeed_registry import Cost, Op, Registry, kernel
from tokenspeed_registry.cases import CaseSet

CPU = torch.device("cpu")
CEILINGS = Ceilings(
    copy_bytes_per_second=1e9, read_us=[(1000, 2.0), (3000, 4.0)], matrix={"bfloat16": 1e9}, launch_us=1.0
)


def accumulate(
    pool: Float32[Tensor, "slots dim"], more: Float32[Tensor, "slots dim"], *, backend: str | None = None
) -> None:
    """Adds to `pool`: twice is not once."""
    pool += more


double_cases = CaseSet(
    axes={"tokens": [4], "dim": [4], "dtype": [torch.float32]},
    build=lambda p, make: {"x": make.normal(p["tokens"], p["dim"], dtype=p["dtype"])},
    models={"model": {"tokens": 8}},
    sweeps={"model": [{"tokens": 16}, {"tokens": 32}]},
)
accumulate_cases = CaseSet(
    axes={"slots": [4]},
    build=lambda p, make: {"pool": make.normal(p["slots"], 4), "more": make.normal(p["slots"], 4)},
    models={"model": {"slots": 8}},
)


def doubles(cache: Path = Path("absent"), **facts: Any) -> tuple[Registry, Any]:
    """A registry with `double`, which has a right kernel of backend "torch"."""
    registry = new_registry(cache=cache)
    cost = {"cost": lambda s: Cost(flops=2 * s.numel("x"), nbytes=s.nbytes("x", "doubled"))}
    op = toy(registry, double_reference, **{**DOUBLE, **cost, **facts})
    registry.add_kernel(doubling(op, "torch"))
    return registry, op


def accumulates() -> tuple[Registry, Any]:
    registry = new_registry()
    op = toy(registry, accumulate, mutates=("pool",), cases="tests.kernels.benchmark_toys:accumulate_cases")

    @kernel(op, backend="torch")
    def run(pool: Tensor, more: Tensor) -> None:
        pool += more

    registry.add_kernel(run)
    return registry, op


def bench_of(registry: Registry, **facts: Any) -> Bench:
    return Bench(registry, CPU, CEILINGS, Flush(CPU), batches=5, **facts)


def cell_of(op: Op[..., Any], source: CaseSet = double_cases, name: str = "model") -> Cell:
    case = source.model(name) if name in source.models else source.swept()[name]
    return Cell(op.contract, source, "model", name, case, f"bench {op.__name__}")
