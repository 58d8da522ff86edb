"""Whether what was timed was right: the outputs that the last timed batch left behind are compared with an oracle.

The oracle is the op's plain-torch kernel on the same inputs, or the reference where there is none; as it has errors
too, twice the tolerance is allowed. The comparison is that of conformance: outputs were poisoned, inputs must be as
they were, and of mutated tensors only rows that the oracle touches may differ.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from tokenspeed_kernels.benchmark.rotation import Rotation, device_of
from tokenspeed_registry import Contract, Kernel, Platform, Signature
from tokenspeed_registry.cases import CaseSet
from tokenspeed_registry.conformance import Outcome, Way, check_case


def oracle_of(contract: Contract, kernels: Iterable[Kernel], platform: Platform, signature: Signature) -> Kernel:
    """The kernel that answers are compared with, for any number of checks of one case: it runs once.

    The plain-torch kernel where it takes such a call, else the reference.
    """
    fitting = [kernel for kernel in kernels if kernel.refusals(platform, signature)[0]]
    plain = [kernel for kernel in fitting if kernel.backend == "torch"]
    reference = [kernel for kernel in fitting if kernel.backend == "reference"]
    return _remembering(contract, [*plain, *reference][0])


def check_timed(
    contract: Contract,
    kernel: Kernel,
    source: CaseSet,
    rotation: Rotation,
    index: int,
    oracle: Kernel,
    on_host: tuple[str, ...] = (),
) -> Outcome:
    """Judges what copy `index` of `rotation` holds after the timed calls."""

    def hand_over(_: Kernel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Stands for a call: everything is as the timed call left it."""
        positional = [p.name for p in contract.parameters if not p.keyword]
        given = {**dict(zip(positional, args, strict=True)), **kwargs}
        for name, value in rotation.copies[index].items():
            if isinstance(value, Tensor):
                given[name].copy_(value)
        out = given.get("out")
        for target, timed in zip((out,) if isinstance(out, Tensor) else out or (), rotation.outs[index], strict=True):
            target.copy_(timed)
        return out

    way = Way(device_of(contract, rotation.arguments), on_host, hand_over, oracle)
    return check_case(contract, kernel, source, rotation.arguments, way)


def complaint(outcome: Outcome) -> str | None:
    """What was wrong, in a line; None where nothing was."""
    if outcome.ok:
        return None
    return outcome.fault or f"wrong result: error {outcome.error:.3g} above {outcome.tolerance:.3g}"


def _remembering(contract: Contract, kernel: Kernel) -> Kernel:
    """A kernel whose later calls, on equal arguments, leave and return copies of what the first one did."""
    first: list[tuple[Any, dict[str, Tensor]]] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        positional = [p.name for p in contract.parameters if not p.keyword]
        given = {**dict(zip(positional, args, strict=True)), **kwargs}
        mutated = {name: given[name] for name in contract.mutates if given[name] is not None}
        if not first:
            result = kernel.function(*args, **kwargs)
            first.append((result, {name: tensor.clone() for name, tensor in mutated.items()}))
        result, after = first[0]
        for name, tensor in mutated.items():
            tensor.copy_(after[name])
        return _copied(result)

    return replace(kernel, function=run)


def _copied(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(tensor.clone() for tensor in result)
    return None if result is None else result.clone()
