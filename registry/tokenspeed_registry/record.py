"""One record of evidence: what was proven of a kernel, how long its calls took, and how its self-checks went."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import Any

from tokenspeed_registry.contract import Contract
from tokenspeed_registry.signature import Signature
from tokenspeed_registry.variant import Value, Variant, variant_of

Facts = Mapping[str, Any]
"""Versions, date, command, registers, spills and the like, as JSON can hold them."""

PASSED = "passed"


class Level(IntEnum):
    """How much is known: the strongest proof there is; it need not include the weaker ones."""

    NONE = 0
    INTERPRETED = 1
    """Passed conformance in the compiler's interpreter."""
    COMPILED = 2
    """Cross-compiles for the arch; resources recorded."""
    EMULATED = 3
    """Machine code passed conformance in an instruction-level emulator."""
    VERIFIED = 4
    """Passed conformance on the device."""
    MEASURED = 5
    """Verified, and timed there: follows from both, and is no proof of its own."""


PROOFS = (Level.INTERPRETED, Level.COMPILED, Level.EMULATED, Level.VERIFIED)


@dataclass(frozen=True)
class Timing:
    """Median microseconds of one call with these dims (all of them), dtypes of tensors, flags and host tensors."""

    dims: Mapping[str, int]
    dtypes: Mapping[str, str]
    flags: Mapping[str, Value]
    microseconds: float
    host: tuple[str, ...] = ()
    facts: Facts = field(default_factory=dict)

    @staticmethod
    def of(contract: Contract, signature: Signature, microseconds: float, facts: Facts | None = None) -> "Timing":
        """The time of a call with that signature."""
        variant = variant_of(contract, signature)
        return Timing(dict(signature.dims), variant.dtypes, variant.flags, microseconds, variant.host, facts or {})

    def variant(self, contract: Contract) -> Variant:
        """What a call must equal for the time to say something of it."""
        static = {dim: self.dims[dim] for dim in contract.static if dim in self.dims}
        return Variant(static, self.dtypes, self.flags, self.host)

    @property
    def call(self) -> str:
        """A key for the call that was timed, which also orders timings."""
        return json.dumps([self.dims, self.dtypes, self.flags, self.host], sort_keys=True)


@dataclass(frozen=True)
class Record:
    """One kernel, of one source and compiler, on one arch.

    `proofs` maps levels (all but NONE and MEASURED, which follow) to the facts of how each was come by. `self_checks`
    maps variants, as text, to "passed" or to what was wrong. `recorded` is the UTC time of the last addition.
    """

    kernel: str
    source_hash: str
    arch: str
    compiler: str = ""
    proofs: Mapping[Level, Facts] = field(default_factory=dict)
    timings: tuple[Timing, ...] = ()
    self_checks: Mapping[str, str] = field(default_factory=dict)
    recorded: str = ""

    def __post_init__(self) -> None:
        if derived := set(self.proofs) - set(PROOFS):
            raise ValueError(f"{self.kernel}: {', '.join(level.name for level in derived)}: not a proof, but derived")

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kernel, self.source_hash, self.compiler

    @property
    def level(self) -> Level:
        best = max(self.proofs, default=Level.NONE)
        return Level.MEASURED if best is Level.VERIFIED and self.timings else best

    def with_added(self, later: "Record") -> "Record":
        """Both together; of two proofs, times or checks of the same thing, the later."""
        timings = {timing.call: timing for timing in (*self.timings, *later.timings)}
        return replace(
            self,
            proofs={**self.proofs, **later.proofs},
            timings=tuple(timings[call] for call in sorted(timings)),
            self_checks={**self.self_checks, **later.self_checks},
            recorded=max(self.recorded, later.recorded),
        )

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"kernel": self.kernel, "source_hash": self.source_hash, "arch": self.arch}
        data |= {"compiler": self.compiler, "recorded": self.recorded}
        data["proofs"] = {level.name.lower(): facts for level, facts in sorted(self.proofs.items())}
        data["timings"] = [asdict(timing) for timing in sorted(self.timings, key=lambda timing: timing.call)]
        data["self_checks"] = dict(sorted(self.self_checks.items()))
        return {name: value for name, value in data.items() if value}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Record":
        """Raises `KeyError`, `TypeError`, `ValueError` or `AttributeError` for what is no record."""
        return Record(
            kernel=data["kernel"],
            source_hash=data["source_hash"],
            arch=data["arch"],
            compiler=data.get("compiler", ""),
            proofs={Level[name.upper()]: facts for name, facts in data.get("proofs", {}).items()},
            timings=tuple(Timing(**{**t, "host": tuple(t.get("host", ()))}) for t in data.get("timings", ())),
            self_checks=data.get("self_checks", {}),
            recorded=data.get("recorded", ""),
        )
