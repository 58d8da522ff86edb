"""The part of a dispatch key that depends on an op's kernels: what of dynamic dims and layout decides between them.

A guard is one generated expression over the call's tensors and dims, since it runs on every call: the answer to each
constraint on what the key does not hold already, and, where times of several kernels may be known, the magnitude of
each dynamic dim. An op whose kernels have no such limits has no guard.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import cast

from tokenspeed_registry.constraints import Constraint
from tokenspeed_registry.contract import Contract
from tokenspeed_registry.kernel import Kernel, Priority
from tokenspeed_registry.layout import alignment

Guard = Callable[..., Hashable]


def guard_parameters(contract: Contract) -> tuple[list[str], list[str]]:
    """What a guard is called with, in order: the op's tensors, then all its dims; either may be None."""
    return [tensor.name for tensor in contract.tensors], sorted(contract.dims)


def build_guard(contract: Contract, kernels: Iterable[Kernel]) -> Guard | None:
    """The guard for a set of kernels; None where the key without one tells all calls apart."""
    chosen = [kernel for kernel in kernels if kernel.priority != Priority.REFERENCE]
    limits = {limit for kernel in chosen for limit in kernel.constraints if not _in_key(contract, limit)}
    answers = [_answer(limit) for limit in sorted(limits, key=lambda limit: (limit.name, limit.kind, limit.needs()))]
    # Only kernels with a compiler are ever timed, and a time decides only where there is a choice.
    if len(chosen) > 1 and any(kernel.compiler is not None for kernel in chosen):
        dynamic = sorted(contract.dims - set(contract.static))
        # One below zero is a mark, not a size.
        answers += [f"d_{dim} if d_{dim} is None or d_{dim} < 0 else d_{dim}.bit_length()" for dim in dynamic]
    if not answers:
        return None
    tensors, dims = guard_parameters(contract)
    parameters = ", ".join([*(f"t_{name}" for name in tensors), *(f"d_{dim}" for dim in dims)])
    source = f"lambda {parameters}: ({', '.join(answers)},)"
    return cast(Guard, eval(source, {"alignment": alignment}))


def _in_key(contract: Contract, limit: Constraint) -> bool:
    """Dtypes, flags, presence and placement are in every key, static dims too."""
    return limit.kind not in ("dim", "contiguous", "alignment") or limit.name in contract.static


def _answer(limit: Constraint) -> str:
    subject = f"d_{limit.name}" if limit.kind == "dim" else f"t_{limit.name}"
    value = {"dim": subject, "contiguous": f"{subject}.is_contiguous()", "alignment": f"alignment({subject})"}[
        limit.kind
    ]
    relation = {
        "<=": f"{value} <= {limit.bound[0]!r}",
        ">=": f"{value} >= {limit.bound[0]!r}",
        "in": f"{value} in {limit.bound!r}",
        "multiple of": f"{value} % {limit.bound[0]!r} == 0",
    }[limit.relation]
    return f"({subject} is None or {relation})"
