"""Limits on how tensors lie in memory, tensors that may stay on the host, and outputs whose dtype may be chosen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from tests.registry.toys import FACTS, new_registry, toy
from tokenspeed_registry import (
    Alignment,
    Contiguous,
    DeviceError,
    Dim,
    Kernel,
    OnHost,
    RegistrationError,
    Registry,
    Signature,
    kernel,
    trace,
)
from tokenspeed_registry.guard import build_guard
from tokenspeed_registry.layout import Layout, alignment
from tokenspeed_registry.validation import signature_of


def gather(
    x: Float[Tensor, "tokens dim"],
    table: Float[Tensor, "rows dim"],
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "tokens dim"]:
    """x plus the table's first row."""
    return x.double() + table[0].double()


GATHER: dict[str, Any] = {
    "outputs": ("sums",),
    "output_dtypes": {"sums": "dtype or x"},
    "strided": ("x",),
    "placeable": ("table",),
}


def setting() -> tuple[Registry, Any]:
    registry = new_registry()
    return registry, toy(registry, gather, **{**FACTS, **GATHER})


def named(op: Any, name: str, *limits: Any) -> Kernel:
    @kernel(op, backend=name, name=name, constraints=limits)
    def run(x: Tensor, table: Tensor, *, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        return x + table[0]

    return run


def kernels_that_ran(call: Callable[[], object]) -> list[str]:
    with trace() as calls:
        call()
    return [each.kernel for each in calls]


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(4, 64), 256),
        (torch.zeros(4, 3), 4),
        (torch.zeros(4, 6)[:, :2], 8),
        (torch.zeros(1, 3), 256),
        (torch.zeros(8)[1:], 4),
        (torch.zeros(4, 64, dtype=torch.uint8)[:, 2:], 2),
    ],
)
def test_alignment_is_that_of_every_row(tensor: Tensor, expected: int) -> None:
    start = tensor.untyped_storage().data_ptr()
    assert start % 64 == 0, "torch aligns its allocations"
    assert alignment(tensor) == min(expected, start & -start)


def test_layout_decides_call_by_call_also_after_a_hit() -> None:
    registry, op = setting()
    registry.add_kernel(named(op, "any"))
    registry.add_kernel(named(op, "a_compact", Contiguous("x").in_(True)))
    table = torch.ones(2, 4)
    compact, strided = torch.ones(3, 4), torch.ones(3, 8)[:, :4]
    for _ in range(2):
        assert kernels_that_ran(lambda: op(compact, table)) == ["a_compact"]
        assert kernels_that_ran(lambda: op(strided, table)) == ["any"]
        op(compact, table)
        op(strided, table)


def test_alignment_limits_are_explained_and_kept() -> None:
    registry, op = setting()
    registry.add_kernel(named(op, "any"))
    registry.add_kernel(named(op, "a_wide", Alignment("x") >= 16))
    table = torch.ones(2, 4)
    shifted = torch.ones(13)[1:].view(3, 4)
    for _ in range(2):
        assert kernels_that_ran(lambda: op(torch.ones(3, 4), table)) == ["a_wide"]
        assert kernels_that_ran(lambda: op(shifted, table)) == ["any"]
    (wide,) = (c for c in registry.explain("gather", signature=Signature({"dim": 4})) if c.kernel.name == "a_wide")
    assert (wide.accepted, wide.reason) == (None, "needs alignment of x >= 16")
    signature = signature_of(registry.contract("gather"), {"x": shifted, "table": table, "dtype": None})
    (wide,) = (c for c in registry.explain("gather", signature=signature) if c.kernel.name == "a_wide")
    assert (wide.accepted, wide.reason) == (False, "needs alignment of x >= 16, got 4")


def test_limits_on_what_the_contract_fixes_are_refused() -> None:
    _, op = setting()
    with pytest.raises(RegistrationError, match="contiguous"):
        named(op, "k", Contiguous("table").in_(True))
    with pytest.raises(RegistrationError, match="host"):
        named(op, "k", OnHost("x").in_(True))


def test_placement_is_judged_from_the_layout() -> None:
    registry, op = setting()
    registry.add_kernel(named(op, "on_device", OnHost("table").in_(False)))
    registry.add_kernel(named(op, "from_host", OnHost("table").in_(True)))
    signature = signature_of(
        registry.contract("gather"), {"x": torch.ones(3, 4), "table": torch.ones(2, 4), "dtype": None}
    )
    for on_host, chosen in ((False, "on_device"), (True, "from_host")):
        layouts = {**signature.layouts, "table": Layout(on_host, True, 256)}
        placed = Signature(signature.dims, signature.dtypes, signature.flags, signature.shapes, layouts)
        accepted = [c.kernel.name for c in registry.explain("gather", signature=placed) if c.accepted]
        assert accepted[0] == chosen
        assert len(accepted) == 2, "the reference serves either"


def test_host_memory_that_is_not_pinned_is_refused_for_a_call_on_a_device() -> None:
    _, op = setting()
    op(torch.ones(3, 4), torch.ones(2, 4))
    for _ in range(2):
        with pytest.raises(DeviceError, match="pinned") as refusal:
            op(torch.ones(3, 4, device="meta"), torch.ones(2, 4))
        assert refusal.value.argument == "table"


def test_an_output_takes_the_dtype_that_is_asked_for_else_that_of_the_input() -> None:
    _, op = setting()
    x, table = torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(2, 4)
    assert op(x, table).dtype == torch.bfloat16
    assert op(x, table, dtype=torch.float32).dtype == torch.float32
    wide = torch.empty(3, 4)
    assert op(x, table, dtype=torch.float32, out=wide) is wide
    with pytest.raises(TypeError, match="out"):
        op(x, table, out=wide)
    compiled = torch.compile(lambda x, t: op(x, t, dtype=torch.float32) + 1, fullgraph=True, backend="aot_eager")
    assert compiled(x, table).dtype == torch.float32


def test_no_guard_where_the_key_tells_calls_apart() -> None:
    registry, op = setting()
    contract = registry.contract("gather")
    assert build_guard(contract, [named(op, "plain")]) is None
    assert build_guard(contract, [named(op, "host", OnHost("table").in_(True))]) is None
    guard = build_guard(contract, [named(op, "few", Dim("tokens") <= 8)])
    assert guard is not None
    x, table = torch.ones(3, 4), torch.ones(2, 4)
    assert guard(x, table, 4, 2, 8) == (True,)
    assert guard(x, table, 4, 2, 9) == (False,)
