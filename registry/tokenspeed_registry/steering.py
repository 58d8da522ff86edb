"""Finds parameters of a case set whose arguments have given dims, dtypes and flags.

Nobody declares how parameters become dims (`qk` is `latent + rope`, `tokens` the sum of a list of lengths), so it is
found out: each integer among the parameters is moved a little, and where the dim follows, moved to where the dim is
right. Dtypes and flags are looked for among the values of the axes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenspeed_registry.contract import Contract
from tokenspeed_registry.signature import Signature, evaluate

if TYPE_CHECKING:
    from tokenspeed_registry.cases import Case, CaseSet

LARGEST = 1 << 25
"""Elements of all arguments and outputs together, past which no case is made: a reference would take minutes."""

Lever = tuple[str, tuple[int, ...] | None]
"""An axis and where in its value the integer stands: () for the value itself, None for the length of a list."""


class Fact(NamedTuple):
    """`kind`: "dim", "dtype", "flag" or "given", as a `Constraint` has it; the value None is that of an absent one."""

    kind: str
    name: str
    value: Any

    def holds(self, signature: Signature) -> bool:
        return fact(signature, self.kind, self.name) == self

    def distance(self, signature: Signature) -> float:
        """How far the signature is off: in octaves for a dim, 0 or 1 for all else."""
        here = fact(signature, self.kind, self.name).value
        if self.kind == "dim" and self.value is not None and here is not None:
            return abs(math.log2(max(self.value, 0) + 1) - math.log2(max(here, 0) + 1))
        return float(here != self.value)


def fact(signature: Signature, kind: str, name: str) -> Fact:
    """What a complete signature has of this kind and name."""
    if kind == "given":
        return Fact(kind, name, signature.given(name))
    found: Mapping[str, Any] = {"dim": signature.dims, "dtype": signature.dtypes, "flag": signature.flags}[kind]
    return Fact(kind, name, found.get(name))


def facts_of(contract: Contract, signature: Signature) -> list[Fact]:
    """All that kernels are specialised to: flags, optional tensors and dtypes, and the static dims."""
    wanted = [("flag", flag.name) for flag in contract.flags]
    wanted += [("given", tensor.name) for tensor in contract.tensors if tensor.optional]
    wanted += [("dtype", tensor.name) for tensor in contract.tensors]
    wanted += [("dim", dim) for dim in contract.static]
    return [fact(signature, kind, name) for kind, name in wanted]


def static_dims(contract: Contract, signature: Signature) -> tuple[int | None, ...]:
    """The static dims in the contract's order; None for one that only an absent tensor has."""
    return tuple(signature.dims.get(dim) for dim in contract.static)


def differences(signature: Signature, wanted: Sequence[Fact]) -> tuple[int, float]:
    """How many facts do not hold, and how far off they are together: a rank of cases."""
    off = [each.distance(signature) for each in wanted if not each.holds(signature)]
    return len(off), sum(off)


def steer(contract: Contract, source: "CaseSet", case: "Case", wanted: Sequence[Fact]) -> "Case":
    """`case` changed so that as many of the facts hold as can be made to, one after the other."""
    signature = source.signature(contract, case)
    for goal in wanted:
        if not goal.holds(signature):
            kept = [each for each in wanted if each.holds(signature)]
            case = reach(contract, source, case, goal, kept) or case
            signature = source.signature(contract, case)
    return case


def reach(contract: Contract, source: "CaseSet", case: "Case", goal: Fact, kept: Sequence[Fact] = ()) -> "Case | None":
    """`case` with parameters such that `goal` holds and those `kept` still do; None where none are found."""
    start = source.signature(contract, case)
    if goal.holds(start):
        return case
    if goal.kind == "dim" and (goal.value is None or elements(start, goal) > LARGEST):
        return None

    def settled(params: Mapping[str, Any]) -> Signature | None:
        """The signature of such a case; None for parameters that do not go together."""
        try:
            return source.signature(contract, source.case(params))
        except Exception:  # builders promise nothing for values that no axis lists
            return None

    def fits(params: Mapping[str, Any]) -> bool:
        found = settled(params)
        return found is not None and all(each.holds(found) for each in (goal, *kept))

    trials = _by_value(source, case.params, goal)
    if goal.kind == "dim":
        trials = (solved for lever in _levers(case.params, goal.name) for solved in _solve(case, lever, goal, settled))
    return next((source.case(params) for params in trials if fits(params)), None)


def elements(signature: Signature, goal: Fact) -> int:
    """Elements of all tensors of such a call, were one dim as the goal says."""
    dims = {**signature.dims, goal.name: goal.value}
    return sum(math.prod(evaluate(expr, dims) for expr in shape) for shape in signature.shapes.values())


def _by_value(source: "CaseSet", params: Mapping[str, Any], goal: Fact) -> Iterator[Mapping[str, Any]]:
    """The parameters with one axis at another of its values; for a dtype or flag only at the value looked for."""
    for axis, values in sorted(source.axes.items(), key=lambda item: item[0] != goal.name):
        for value in values:
            wanted = goal.kind == "given" or (type(value) is type(goal.value) and value == goal.value)
            if wanted and value != params[axis]:
                yield {**params, axis: value}


def _solve(case: "Case", lever: Lever, goal: Fact, settled: Any) -> Iterator[Mapping[str, Any]]:
    """The parameters at which the dim would be right, if it follows the lever in a straight line."""
    here, before = _get(case.params, lever), settled(case.params).dims.get(goal.name)
    for there in (here + 1, 2 * here):
        moved = settled(_set(case.params, lever, there)) if there != here else None
        if moved is None or before is None:
            continue
        step = moved.dims[goal.name] - before
        if step:
            place = here + Fraction((goal.value - before) * (there - here), step)
            if place.denominator == 1 and place >= 0:
                yield _set(case.params, lever, int(place))
            return


def _levers(params: Mapping[str, Any], name: str) -> Iterator[Lever]:
    """Every integer among the parameters, that of the dim's own name first; of long lists the first two items."""
    for axis, value in sorted(params.items(), key=lambda item: item[0] != name):
        yield from ((axis, path) for path in _integers(value))
        if isinstance(value, (list, tuple)) and value:
            yield axis, None


def _integers(value: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    if type(value) is int:
        yield path
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value[:2]):
            yield from _integers(item, (*path, index))


def _get(params: Mapping[str, Any], lever: Lever) -> int:
    axis, path = lever
    value = params[axis]
    if path is None:
        return len(value)
    for index in path:
        value = value[index]
    return int(value)


def _set(params: Mapping[str, Any], lever: Lever, to: int) -> Mapping[str, Any]:
    axis, path = lever
    old = params[axis]
    if path is None:
        return {**params, axis: type(old)(old[i] if i < len(old) else old[-1] for i in range(to))}
    return {**params, axis: _replaced(old, path, to)}


def _replaced(value: Any, path: tuple[int, ...], to: int) -> Any:
    if not path:
        return to
    return type(value)(_replaced(item, path[1:], to) if i == path[0] else item for i, item in enumerate(value))
