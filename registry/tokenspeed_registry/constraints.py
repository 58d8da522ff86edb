"""Limits of a kernel as data: a name, a relation and a bound, so that `explain` can say "needs q_len <= 8, got 16".

constraints=[Dim("q_len") <= 8, Dim("page_size").in_(32, 64), Dim("head_dim").multiple_of(16), Flag("causal").in_(True)]
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenspeed_registry.signature import Flag as FlagValue
from tokenspeed_registry.signature import Signature, UnknownDimError

Bound = tuple[FlagValue, ...]

_RELATIONS: dict[str, Callable[[object, Bound], bool]] = {
    "<=": lambda value, bound: value <= bound[0],  # type: ignore[operator]
    ">=": lambda value, bound: value >= bound[0],  # type: ignore[operator]
    "in": lambda value, bound: value in bound,
    "multiple of": lambda value, bound: value % bound[0] == 0,  # type: ignore[operator]
}


@dataclass(frozen=True)
class Constraint:
    """`kind`: "dim", "dtype", "flag", "given" (an optional tensor's presence), or how a tensor lies in memory: "host",
    "contiguous", "alignment". `bound`: one value or a choice.
    """

    kind: str
    name: str
    relation: str
    bound: Bound

    def value(self, signature: Signature) -> FlagValue:
        """What the call has. Raises `UnknownDimError` where the signature does not say."""
        match self.kind:
            case "dim":
                return signature.dims.get(self.name) if signature.shapes else signature[self.name]
            case "dtype":
                return signature.dtypes.get(self.name) if signature.shapes else signature.dtype(self.name)
            case "flag":
                return signature.flag(self.name)
            case "host" | "contiguous" | "alignment":
                return self._layout(signature)
            case _:
                if not signature.shapes and not signature.given(self.name):
                    raise UnknownDimError(self.name)
                return signature.given(self.name)

    def _layout(self, signature: Signature) -> FlagValue:
        if not signature.layouts:
            raise UnknownDimError(self.name)
        layout = signature.layouts.get(self.name)
        if layout is None:
            return None
        facts = {"host": layout.on_host, "contiguous": layout.contiguous, "alignment": layout.alignment}
        return facts[self.kind]

    def holds(self, signature: Signature) -> bool | None:
        """Whether the call meets the limit; None where the signature does not say.

        What is absent from a call, an optional tensor's dtype, layout or a dim that only it has, is within every limit.
        """
        try:
            value = self.value(signature)
        except UnknownDimError:
            return None
        return (self.kind not in ("flag", "given") and value is None) or _RELATIONS[self.relation](value, self.bound)

    def needs(self) -> str:
        """The limit in words, for example `q_len <= 8`."""
        names = {
            "dtype": f"dtype of {self.name}",
            "given": f"{self.name} given",
            "host": f"{self.name} in host memory",
            "contiguous": f"{self.name} contiguous",
            "alignment": f"alignment of {self.name}",
        }
        bound = ", ".join(str(value).removeprefix("torch.") for value in self.bound)
        relation = {"in": "in" if len(self.bound) > 1 else "=="}.get(self.relation, self.relation)
        return f"{names.get(self.kind, self.name)} {relation} {bound}"

    def explain(self, signature: Signature) -> str | None:
        """Why the call is refused or undecided; None where the limit holds."""
        holds = self.holds(signature)
        if holds is None:
            return f"needs {self.needs()}"
        if holds:
            return None
        return f"needs {self.needs()}, got {str(self.value(signature)).removeprefix('torch.')}"


@dataclass(frozen=True)
class Dim:
    """A dim of the contract, static or not, to be compared with a bound."""

    name: str

    def __le__(self, bound: int) -> Constraint:
        return Constraint("dim", self.name, "<=", (bound,))

    def __ge__(self, bound: int) -> Constraint:
        return Constraint("dim", self.name, ">=", (bound,))

    def in_(self, *values: int) -> Constraint:
        return Constraint("dim", self.name, "in", values)

    def multiple_of(self, factor: int) -> Constraint:
        return Constraint("dim", self.name, "multiple of", (factor,))


@dataclass(frozen=True)
class Flag:
    """A scalar argument, to be compared with the values a kernel was written for."""

    name: str

    def in_(self, *values: FlagValue) -> Constraint:
        return Constraint("flag", self.name, "in", values)


@dataclass(frozen=True)
class Dtype:
    """The dtype of a tensor parameter."""

    role: str

    def in_(self, *dtypes: torch.dtype) -> Constraint:
        return Constraint("dtype", self.role, "in", dtypes)


@dataclass(frozen=True)
class Given:
    """The presence of an optional tensor parameter."""

    role: str

    def in_(self, *values: bool) -> Constraint:
        return Constraint("given", self.role, "in", values)


@dataclass(frozen=True)
class OnHost:
    """Whether a tensor that the contract lets lie on the host does so, in a call on an accelerator."""

    role: str

    def in_(self, *values: bool) -> Constraint:
        return Constraint("host", self.role, "in", values)


@dataclass(frozen=True)
class Contiguous:
    """Whether a tensor that the contract lets be strided is contiguous all the same."""

    role: str

    def in_(self, *values: bool) -> Constraint:
        return Constraint("contiguous", self.role, "in", values)


@dataclass(frozen=True)
class Alignment:
    """Bytes, a power of two up to 256, that divide the start of every row of a tensor."""

    role: str

    def __ge__(self, nbytes: int) -> Constraint:
        return Constraint("alignment", self.role, ">=", (nbytes,))
