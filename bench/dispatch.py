"""What dispatch costs on the CPU: `python bench/dispatch.py [--json]`.

An empty kernel stands in for the real one, so that the difference between the op and the kernel called directly is
dispatch and nothing else. Each figure is the fastest of many short batches, since other processes only ever add time.
The allowance is 1 µs + 0.6 µs a tensor for a validated eager call and 0.3 µs for a bound handle.
"""

import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import tokenspeed_kernels  # noqa: F401  declares the ops
from tokenspeed_registry import Dim, Kernel, Priority
from tokenspeed_registry.cases import case_set
from tokenspeed_registry.constraints import Constraint
from tokenspeed_registry.registry import default_registry

OPS = ("merge_states", "gdn_decode")
BATCH, BATCHES = 500, 400


@dataclass(frozen=True)
class Row:
    """Microseconds a call: over the kernel called directly, and what is allowed."""

    op: str
    tensors: int
    direct: float
    eager_overhead: float
    eager_allowed: float
    bound_overhead: float
    bound_allowed: float


def measure(op: str, limit: Constraint | None = None) -> Row:
    """Times one op at its default case, by position as a caller would. `limit`: what its kernel is limited to."""
    contract = default_registry.contract(op)
    source = case_set(contract)
    arguments = source.arguments(contract, source.case({}))
    positional = [arguments[p.name] for p in contract.parameters if not p.keyword]
    keywords = {p.name: arguments[p.name] for p in contract.parameters if p.keyword}
    tensors = sum(isinstance(value, torch.Tensor) for value in arguments.values())
    function = default_registry.dispatcher(op).function
    default_registry.load_plugins()

    def empty(*args: Any, **kwargs: Any) -> None: ...

    limits = () if limit is None else (limit,)
    kernel = Kernel(f"empty.{op}", op, "empty", empty, priority=Priority.SPECIALISED, constraints=limits)
    with default_registry.temporarily(kernel):
        handle = function.bind(*positional, **keywords)
        direct, eager, bound = fastest(
            lambda: empty(*positional, **keywords, out=None),
            lambda: function(*positional, **keywords),
            lambda: handle(*positional, **keywords, out=None),
        )
    name = op if limit is None else f"{op}, {limit.needs()}"
    return Row(name, tensors, direct, eager - direct, 1 + 0.6 * tensors, bound - direct, 0.3)


def fastest(*calls: Callable[[], Any]) -> list[float]:
    """Microseconds of each, from interleaved batches."""
    best = [float("inf")] * len(calls)
    for _ in range(BATCHES):
        for index, call in enumerate(calls):
            started = time.perf_counter()
            for _ in range(BATCH):
                call()
            best[index] = min(best[index], time.perf_counter() - started)
    return [seconds / BATCH * 1e6 for seconds in best]


def main() -> None:
    # A kernel limited in a dim that changes from call to call adds a guard to the dispatch key.
    rows = [*(measure(op) for op in OPS), measure("gdn_decode", Dim("batch") <= 64)]
    if "--json" in sys.argv[1:]:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}")
    print(f"{'µs a call':26} {'tensors':>7} {'eager':>7} {'allowed':>8} {'bound':>7} {'allowed':>8}")
    for r in rows:
        print(
            f"{r.op:26} {r.tensors:7} {r.eager_overhead:7.2f} {r.eager_allowed:8.2f} "
            f"{r.bound_overhead:7.2f} {r.bound_allowed:8.2f}"
        )


if __name__ == "__main__":
    main()
