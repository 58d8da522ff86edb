"""Which kernel serves a call, and why. Nothing is silent: every candidate carries whether it was accepted (None: it
depends on a dim that was not given), the reasons if not, and what is known of it on that arch.

An explicit choice decides alone. Else candidates are ordered by, in this order:

| criterion | what goes first                                                                                    |
|-----------|----------------------------------------------------------------------------------------------------|
| verdict   | accepted, then depends, then refused                                                               |
| band      | the higher priority; one that is timed stands no lower than any that was measured no faster        |
| time      | within a band: the timed ones, fastest first, then those without a time                            |
| name      | alphabetical                                                                                       |

A time moves a kernel past others with a time, whatever their bands, and past others without one only where those are
of a lower band than a kernel that it beats. Each criterion is a number or a name of the candidate's own, given the
times of all, so the order is total and has no cycles; a comparison of pairs, by time where both have one and by band
elsewhere, would have them.

A time counts for a call of the same static dims, dtypes and flags whose work, by the op's cost model, is within
`REACH` octaves of the timed call's; the nearest one speaks. Dispatch remembers a choice for all calls whose dynamic
dims share their bit lengths, so times are looked up at that bucket's representative size, not at the first caller's.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tokenspeed_registry.contract import Contract
from tokenspeed_registry.errors import NoKernelError, UnknownNameError
from tokenspeed_registry.evidence import EvidenceStore
from tokenspeed_registry.kernel import Kernel
from tokenspeed_registry.platform import Platform
from tokenspeed_registry.record import Level, Timing
from tokenspeed_registry.signature import Signature, UnknownDimError
from tokenspeed_registry.variant import completed, variant_of, with_dims

REACH = 2.0
"""Octaves, of FLOPs or of bytes, past which a time says nothing of a call."""


@dataclass(frozen=True)
class Candidate:
    """A kernel looked at for a call."""

    kernel: Kernel
    accepted: bool | None
    reasons: tuple[str, ...]
    evidence: str
    level: Level
    microseconds: float | None

    @property
    def reason(self) -> str:
        return "; ".join(self.reasons)

    def line(self) -> str:
        verdict = {True: "accepted", False: "refused", None: "depends"}[self.accepted]
        return f"{self.kernel.name}: {verdict}{': ' if self.reasons else ''}{self.reason}"


def candidates(
    contract: Contract,
    kernels: Iterable[Kernel],
    platform: Platform,
    signature: Signature,
    evidence: EvidenceStore,
    unusable: Mapping[str, str] | None = None,
) -> list[Candidate]:
    """All kernels of an op, best first. `unusable` maps kernel names to why they cannot serve here or now."""
    fixed = {*contract.static, *(flag.name for flag in contract.flags)}
    call = completed(contract, representative(signature, fixed))
    found = []
    for kernel in kernels:
        accepted, reasons = kernel.refusals(platform, signature)
        if unusable and kernel.name in unusable:
            accepted, reasons = False, [unusable[kernel.name], *(reasons if accepted is False else [])]
        record = evidence.counting(kernel, platform.arch)
        timings = record.timings if record.level is Level.MEASURED else ()
        time = nearest_time(contract, call, timings) if call is not None else None
        description = evidence.describe(kernel, platform.arch)
        found.append(Candidate(kernel, accepted, tuple(reasons), description, record.level, time))
    return ordered(found)


def ordered(found: Sequence[Candidate]) -> list[Candidate]:
    """Best first, by the table above."""
    times = [(c.microseconds, c.kernel.priority) for c in found if c.accepted and c.microseconds is not None]

    def rank(candidate: Candidate) -> tuple[int, int, float, str]:
        verdict = {True: 0, None: 1, False: 2}[candidate.accepted]
        time = candidate.microseconds if candidate.accepted else None
        band = candidate.kernel.priority
        if time is None:
            return verdict, -band, math.inf, candidate.kernel.name
        band = max(priority for other, priority in times if other >= time)
        return verdict, -band, time, candidate.kernel.name

    return sorted(found, key=rank)


def choose(op: str, found: Sequence[Candidate], choice: str | None) -> Candidate:
    """The candidate to use. An explicit `choice` of backend or kernel is strict.

    Raises `UnknownNameError` for a choice that no kernel of the op answers to, `NoKernelError` with every reason
    where the choice, or nothing at all, can serve.
    """
    if choice is not None:
        chosen = [c for c in found if choice in (c.kernel.backend, c.kernel.name)]
        if not chosen:
            known = sorted({c.kernel.backend for c in found})
            raise UnknownNameError(f"{op}: no backend or kernel {choice!r}; backends with kernels: {', '.join(known)}")
        found = chosen
    for candidate in found:
        if candidate.accepted:
            return candidate
    asked = f"the explicit choice {choice!r} cannot serve it" if choice else "no kernel can serve it"
    raise NoKernelError(f"{op}: {asked}", [candidate.line() for candidate in found])


def representative(signature: Signature, static_dims: Collection[str]) -> Signature:
    """`signature` with each dim but the static ones at the smallest size of its bit length, 2 ** (bits - 1).

    0 stays 0. Integer scalars are dims too; one below zero is a mark, not a size (a window of -1), and stays.
    """

    def size(dim: str, value: int) -> int:
        return value if dim in static_dims or value <= 0 else 1 << (value.bit_length() - 1)

    return with_dims(signature, {dim: size(dim, value) for dim, value in signature.dims.items()})


def nearest_time(contract: Contract, call: Signature, timings: Iterable[Timing]) -> float | None:
    """Microseconds of the timing that counts for `call` and is nearest to it; None where none counts."""
    variant = variant_of(contract, call)
    alike = [timing for timing in timings if timing.variant(contract) == variant]
    if not alike:
        return None
    try:
        here = _work(contract, call)
    except UnknownDimError:
        return None

    def octaves(timing: Timing) -> float:
        there = _work(contract, with_dims(call, timing.dims))
        return max(abs(a - b) for a, b in zip(here, there, strict=True))

    distance, nearest = min(((octaves(timing), timing) for timing in alike), key=lambda pair: pair[0])
    return nearest.microseconds if distance <= REACH else None


def capturing(device: torch.device) -> bool:
    """Whether what is launched on `device` now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _work(contract: Contract, call: Signature) -> tuple[float, float]:
    """FLOPs and bytes, as powers of two. An op on nothing has none of either."""
    cost = contract.cost(call)
    return math.log2(max(cost.flops, 1)), math.log2(max(cost.nbytes, 1))
