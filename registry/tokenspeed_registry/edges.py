"""The bounds that a kernel declares, and cases that lie on them."""

from collections.abc import Iterator, Sequence

from tokenspeed_registry.cases import Case, CaseSet
from tokenspeed_registry.constraints import Constraint
from tokenspeed_registry.contract import Contract
from tokenspeed_registry.kernel import Kernel
from tokenspeed_registry.platform import Platform
from tokenspeed_registry.signature import Signature
from tokenspeed_registry.steering import Fact, reach, static_dims

BASES = 4
"""Static combinations from which a case at a bound is looked for."""
PROBED = ("dim", "dtype", "flag", "given")
"""Kinds of limits whose bounds must be tried; how tensors lie in memory is up to the case set's strided inputs."""


def edges(kernel: Kernel) -> Iterator[tuple[Constraint, list[Fact]]]:
    """Every declared bound with what must have been tried of it; of each list one fact will do."""
    for limit in kernel.constraints:
        if limit.kind not in PROBED:
            continue
        if limit.relation == "multiple of":
            yield limit, _odd_multiples(kernel, limit)
        else:
            yield from ((limit, [Fact(limit.kind, limit.name, value)]) for value in limit.bound)


def edge_case(
    contract: Contract,
    kernel: Kernel,
    source: CaseSet,
    platform: Platform,
    ran: Sequence[tuple[Case, Signature]],
    goals: Sequence[Fact],
) -> Case | None:
    """A case that the kernel takes and of which one of the facts holds, made from one of those that ran."""
    bases: dict[tuple[int | None, ...], Case] = {}
    for case, signature in ran:
        bases.setdefault(static_dims(contract, signature), case)
    for goal in goals:
        for case in list(bases.values())[:BASES]:
            edge = reach(contract, source, case, goal)
            if edge is not None and kernel.refusals(platform, source.signature(contract, edge))[0]:
                return edge
    return None


def _odd_multiples(kernel: Kernel, limit: Constraint) -> list[Fact]:
    """Of a factor, the first few that the kernel's other limits allow: even ones would do for twice the factor too."""
    (factor,) = limit.bound
    assert isinstance(factor, int), limit
    others = [other for other in kernel.constraints if (other.kind, other.name) == ("dim", limit.name)]
    multiples = [factor * odd for odd in range(1, 64, 2)]
    allowed = [size for size in multiples if all(other.holds(Signature({limit.name: size})) for other in others)]
    return [Fact("dim", limit.name, size) for size in allowed[:4]]
