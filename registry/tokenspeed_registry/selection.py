"""Which kernel serves a call, and why: an explicit choice, else measured time, else priority band, else name.

Nothing is silent: every candidate carries whether it was accepted (None: it depends on a dim that was not given), the
reasons if not, and what is known of it on that arch.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenspeed_registry.errors import NoKernelError, UnknownNameError
from tokenspeed_registry.evidence import EvidenceStore, Level
from tokenspeed_registry.kernel import Kernel
from tokenspeed_registry.platform import Platform
from tokenspeed_registry.signature import Signature


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
    kernels: Iterable[Kernel],
    platform: Platform,
    signature: Signature,
    evidence: EvidenceStore,
    unusable: dict[str, str] | None = None,
) -> list[Candidate]:
    """All kernels of an op, best first. `unusable` maps kernel names to why their plugin cannot run here."""
    found = []
    for kernel in kernels:
        accepted, reasons = kernel.refusals(platform, signature)
        if unusable and kernel.name in unusable:
            accepted, reasons = False, [unusable[kernel.name], *(reasons if accepted is False else [])]
        level = evidence.level(kernel, platform.arch)
        time = _nearest_time(kernel, platform, signature, evidence) if level is Level.MEASURED else None
        description = evidence.describe(kernel, platform.arch)
        found.append(Candidate(kernel, accepted, tuple(reasons), description, level, time))
    return sorted(found, key=_rank)


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


def _rank(candidate: Candidate) -> tuple[int, bool, float, int, str]:
    """Accepted first; among them those with a measured time, fastest first; then by band; then by name."""
    verdict = {True: 0, None: 1, False: 2}[candidate.accepted]
    timed = candidate.microseconds is not None
    return verdict, not timed, candidate.microseconds or 0.0, -candidate.kernel.priority, candidate.kernel.name


def _nearest_time(kernel: Kernel, platform: Platform, signature: Signature, evidence: EvidenceStore) -> float | None:
    """The time recorded for the nearest shape, in log space over the dims that both know."""
    record = evidence.find(kernel, platform.arch)
    if record is None or not record.timings:
        return None

    def distance(dims: Sequence[tuple[str, int]]) -> float:
        pairs = [(size, signature.dims[dim]) for dim, size in dims if dim in signature.dims]
        return sum((_log(size) - _log(here)) ** 2 for size, here in pairs)

    return min(record.timings, key=lambda timing: distance(list(timing.dims.items()))).microseconds


def _log(size: int) -> float:
    """Of sizes that may be zero, and of scalars that may be negative (a window of -1)."""
    return math.log2(max(size, 0) + 1)
