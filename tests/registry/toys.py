"""Toy ops for tests of the registry core, their case sets, and registries in torch.library namespaces of their own."""

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from tokenspeed_registry import Cost, Kernel, Op, Registry, copy_into, kernel, op, rounded_sum
from tokenspeed_registry.cases import CaseSet
from tokenspeed_registry.conformance import Report, check_kernel
from tokenspeed_registry.settings import Settings
from tokenspeed_registry.validation import signature_of

P = ParamSpec("P")
R = TypeVar("R")
_serial = itertools.count()

FACTS: dict[str, Any] = {
    "family": "toy",
    "cases": "tests.registry.toys:double_cases",
    "cost": lambda s: Cost(0.0, 0.0),
    "tolerance": lambda s, role: rounded_sum(s.dtype(role), terms=1),
}
DOUBLE: dict[str, Any] = {"outputs": ("doubled",), "output_dtypes": {"doubled": "x"}, "static": ("dim",)}
FILL: dict[str, Any] = {"cases": "tests.registry.toys:fill_cases", "mutates": ("pool",)}
BLEND: dict[str, Any] = {
    "cases": "tests.registry.toys:blend_cases",
    "outputs": ("blended", "sums"),
    "output_dtypes": {"blended": "dtype"},
    "static": ("dim",),
    "strided": ("x",),
    "host": ("cu",),
    "same_dtype": (("x", "weight"),),
    "where": ("width >= 1", "dim % 2 == 0", "tokens >= seqs", "window is None or window < 100"),
}


def new_registry(cache: Path = Path("absent"), plugins: bool = False, **settings: Any) -> Registry:
    """An empty registry without evidence, unless `cache` holds some."""
    return Registry(f"toys_{next(_serial)}", settings=Settings(cache=cache, **settings), plugins=plugins)


def toy(registry: Registry, function: Callable[P, R], **facts: Any) -> Op[P, R]:
    """Declares `function` as an op of `registry`, with the facts that no test cares about filled in."""
    return op(registry=registry, **{**FACTS, **facts})(function)


def double(
    x: Float[Tensor, "tokens dim"], *, out: Tensor | None = None, backend: str | None = None
) -> Float[Tensor, "tokens dim"]:
    """Twice `x`."""
    return 2 * x.double()


def fill_rows(
    pool: Float32[Tensor, "slots dim"],
    rows: Int32[Tensor, "count"],
    values: Float32[Tensor, "count dim"],
    *,
    backend: str | None = None,
) -> None:
    """Sets rows of `pool`."""
    pool[rows.long()] = values


def blend(
    x: Float[Tensor, "tokens dim"],
    weight: Float[Tensor, "dim"] | None,
    cu: Int32[Tensor, "seqs+1"],
    *,
    residual: Float32[Tensor, "tokens inner"] | None = None,
    projection: Float32[Tensor, "inner dim*2"] | None = None,
    scale: float = 1.0,
    width: int = 2,
    window: int | None = None,
    mode: Literal["add", "multiply"] = "add",
    causal: bool = True,
    bits: Literal[4, 8] = 8,
    dtype: torch.dtype = torch.float32,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Float[Tensor, "tokens dim"], Float32[Tensor, "tokens width"]]:
    """One of every kind of parameter."""
    y = x.double() * scale * bits
    if weight is not None:
        y = y + weight.double() if mode == "add" else y * weight.double()
    if residual is not None:
        y = y + residual.double().sum(-1, keepdim=True)
    y = y if causal else -y
    return y, y.sum(-1, keepdim=True).expand(-1, width).clone()


double_cases = CaseSet(
    axes={"tokens": [3, 0, 1], "dim": [4, 8], "dtype": [torch.float32, torch.bfloat16]},
    build=lambda p, make: {"x": make.normal(p["tokens"], p["dim"], dtype=p["dtype"])},
    models={"large": {"tokens": 64}},
)
fill_cases = CaseSet(
    axes={"count": [2, 0, 3]},
    build=lambda p, make: {
        "pool": make.normal(5, 4),
        "rows": make.permutation(5)[: p["count"]].clone(),
        "values": make.normal(p["count"], 4),
    },
)
blend_cases = CaseSet(
    axes={"tokens": [3, 4], "weight": [True, False], "width": [2, 3], "mode": ["add", "multiply"]},
    build=lambda p, make: {
        "x": make.normal(p["tokens"], 4),
        "weight": make.normal(4) if p["weight"] else None,
        "cu": torch.tensor([0, 1, p["tokens"]], dtype=torch.int32),
        "width": p["width"],
        "mode": p["mode"],
    },
)


def doubling(
    target: Op[..., Any], name: str, ran: list[str] | None = None, factor: float = 2.0, **facts: Any
) -> Kernel:
    """A kernel of `double` that notes its name in `ran`; a `factor` other than 2 makes it wrong."""
    facts = {"backend": name, **facts}

    @kernel(target, name=name, **facts)
    def run(x: Tensor, *, out: Tensor | None = None) -> Any:
        if ran is not None:
            ran.append(name)
        result = (factor * x.float()).to(x.dtype)
        return result if out is None else copy_into(out, result)

    return run


def with_kernels(registry: Registry, kernels: Sequence[Kernel]) -> None:
    for each in kernels:
        registry.add_kernel(each)


def blend_arguments(device: str = "cpu") -> dict[str, Any]:
    """A valid call of `blend` with everything given; `cu` stays on the host."""
    return {
        "x": torch.arange(12.0, device=device).reshape(3, 4),
        "weight": torch.arange(4.0, device=device),
        "cu": torch.tensor([0, 1, 3], dtype=torch.int32),
        "residual": torch.ones(3, 2, device=device),
        "projection": torch.ones(2, 8, device=device),
        "scale": 0.5,
        "width": 2,
        "window": 7,
        "mode": "add",
        "causal": True,
        "bits": 8,
        "dtype": torch.float32,
    }


def setting(*names: str, **settings: Any) -> tuple[Registry, Any, list[str]]:
    """A registry with kernels of `double` called `names`, and the list of what ran."""
    registry = new_registry(**settings)
    op = toy(registry, double, **DOUBLE)
    ran: list[str] = []
    with_kernels(registry, [doubling(op, name, ran) for name in names])
    return registry, op, ran


def report_of(target: Any, function: Callable[..., Any], **facts: Any) -> Report:
    """Conformance, on the CPU, of a function declared as a kernel; it need not allocate its outputs."""

    @functools.wraps(function)
    def allocating(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        if out is None and target.contract.outputs:
            wanted = target.contract.reference(*args, **kwargs)
            signature = signature_of(
                target.contract, dict(zip(inspect.signature(function).parameters, args, strict=False)) | kwargs
            )
            results = wanted if isinstance(wanted, tuple) else (wanted,)
            names = [output.name for output in target.contract.outputs]
            empty = tuple(torch.empty(r.shape, dtype=signature.dtype(n)) for r, n in zip(results, names, strict=True))
            out = empty if len(empty) > 1 else empty[0]
        return function(*args, **kwargs, out=out) if target.contract.outputs else function(*args, **kwargs)

    found: Kernel = kernel(target, backend="mine", **facts)(allocating)
    return check_kernel(target.contract, found, torch.device("cpu"))
