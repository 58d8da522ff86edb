"""Declares an op once: the annotated function is its signature, and its body is the reference.

    @op(family="mla", cases="tokenspeed_kernels.cases.mla:merge_states", outputs=("merged", "merged_lse"), ...)
    def merge_states(out_a: Float[Tensor, "tokens heads dim"], ...) -> tuple[...]:
        '''Docstring with shapes, dtypes, units, errors and source.'''
        naive float64 torch, which returns its results unrounded

`op` turns the function into the public op: a plain function that validates, selects and calls a kernel, with the
attributes `contract` and `bind`.
"""

import ast
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ParamSpec, Protocol, Required, TypedDict, TypeVar, Unpack

import torch

from tokenspeed_registry.content import ContentCheck
from tokenspeed_registry.cost import Cost
from tokenspeed_registry.errors import RegistrationError
from tokenspeed_registry.parameters import (
    Output,
    Parameter,
    ScalarParameter,
    TensorParameter,
    binding_of,
    read_outputs,
    read_parameters,
)
from tokenspeed_registry.signature import Signature

CONTRACT_VERSION = 1
"""Grows when kernels written against older contracts would no longer be called rightly."""

_EXPRESSION = re.compile(r"\w+((\+|-|\*|//)\w+)*")
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
CostModel = Callable[[Signature], Cost]
ToleranceModel = Callable[[Signature, str], float]


@dataclass(frozen=True)
class Contract:
    """Everything that is known of an op without any kernel.

    `static` dims are part of the dispatch key, all other dims may change from call to call at no cost. `strided`
    tensors need unit stride in the last dim only, all others are contiguous. `host` tensors lie on the CPU,
    `placeable` ones on the device or in pinned host memory, all others share one device. `same_dtype` groups parameters
    that must agree. `where` holds relations between dims and integer scalars, as Python expressions. `cases` names the
    case set (`module:attribute`), which only tests and conformance import.
    """

    name: str
    family: str
    reference: Callable[..., object]
    parameters: tuple[Parameter, ...]
    outputs: tuple[Output, ...]
    cases: str
    cost: CostModel
    tolerance: ToleranceModel
    static: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    strided: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    placeable: tuple[str, ...] = ()
    same_dtype: tuple[tuple[str, ...], ...] = ()
    where: tuple[str, ...] = ()
    checks: tuple[ContentCheck, ...] = ()
    tensors: tuple[TensorParameter, ...] = field(init=False)
    scalars: tuple[ScalarParameter, ...] = field(init=False)

    def __post_init__(self) -> None:
        tensors = tuple(p for p in self.parameters if isinstance(p, TensorParameter))
        object.__setattr__(self, "tensors", tensors)
        object.__setattr__(self, "scalars", tuple(p for p in self.parameters if isinstance(p, ScalarParameter)))
        names = {tensor.name for tensor in tensors}
        groups = {name for group in self.same_dtype for name in group}
        mentioned = {
            *self.mutates,
            *self.strided,
            *self.host,
            *self.placeable,
            *groups,
            *(check.argument for check in self.checks),
        }
        if mentioned - names:
            raise RegistrationError(f"{self.name}: no tensor parameter {sorted(mentioned - names)}")
        if set(self.static) - self.dims:
            raise RegistrationError(f"{self.name}: no dim {sorted(set(self.static) - self.dims)}")
        for check in self.checks:
            if missing := set(check.needs) - self.dims:
                raise RegistrationError(f"{self.name}: the check of {check.argument} reads {sorted(missing)}, no dims")
        if not tensors or tensors[0].optional or tensors[0].name in self.host:
            raise RegistrationError(f"{self.name}: the first tensor says which device runs, so it must be required")
        if clash := {"mode", "ctx"} & {p.name for p in self.parameters if self.mutates}:
            # torch passes a mutating op's arguments by keyword beside these of its own when it compiles a graph.
            raise RegistrationError(f"{self.name}: mutates: torch.compile forbids the parameter name {clash.pop()!r}")
        self._check_dims()
        if not (self.reference.__doc__ or "").strip():
            raise RegistrationError(f"{self.name}: has no docstring")

    def _check_dims(self) -> None:
        """Every dim that an expression mentions must be one that a shape or an integer scalar binds."""
        bound = {scalar.name for scalar in self.scalars if scalar.type is int}
        for tensor in self.tensors:
            bound |= {binding[0] for expr in tensor.dims if (binding := binding_of(expr)) is not None}
        roles: tuple[TensorParameter | Output, ...] = (*self.tensors, *self.outputs)
        for role in roles:
            malformed = [expr for expr in role.dims if not _EXPRESSION.fullmatch(expr)]
            if malformed:
                raise RegistrationError(f"{self.name}: {role.name} has dims that are no expressions: {malformed}")
            if unbound := {name for expr in role.dims for name in _names(expr)} - bound:
                raise RegistrationError(f"{self.name}: no shape binds {sorted(unbound)} of {role.name}")
        known = {*bound, *(parameter.name for parameter in self.parameters)}
        for relation in self.where:
            if unknown := relation_names(relation) - known:
                raise RegistrationError(f"{self.name}: {relation!r} mentions {sorted(unknown)}, no dims or arguments")
        sources = {*(tensor.name for tensor in self.tensors), *(s.name for s in self.scalars if s.type is torch.dtype)}
        for output in self.outputs:
            if isinstance(output.dtype, str) and not set(output.dtype.split(" or ")) <= sources:
                raise RegistrationError(f"{self.name}: {output.name} takes its dtype from {output.dtype!r}, unknown")

    @functools.cached_property
    def dims(self) -> frozenset[str]:
        """Names of all dims that shapes bind and of all integer scalars."""
        expressions = (dim for tensor in self.tensors for dim in tensor.dims)
        bound = {name for expr in expressions for name in _names(expr)}
        return frozenset(bound | {scalar.name for scalar in self.scalars if scalar.type is int})

    @functools.cached_property
    def flags(self) -> tuple[ScalarParameter, ...]:
        """Scalars that are part of the dispatch key: all but free numbers, which may change from call to call."""
        return tuple(scalar for scalar in self.scalars if scalar.choices or scalar.type not in (int, float))


class Op(Protocol[P, R_co]):
    """A public op: call it, or `bind` it to example arguments to get its kernel as a plain callable."""

    __name__: str
    __module__: str
    contract: Contract

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> Callable[..., R_co]:
        """The kernel that serves calls like this one: validated and selected once, then called without either.

        The handle stays right while dtypes, device, static dims and flags stay those of the example, and dynamic
        dims stay within the chosen kernel's constraints. It takes the op's arguments without `backend`.
        """
        ...


class Facts(TypedDict, total=False):
    """What an op's declaration says beside its annotations; see `Contract`. `cases`, `cost`, `tolerance` are a must.

    `outputs` names the results; `output_dtypes` maps one to the tensor or dtype parameter whose dtype it takes.
    """

    family: Required[str]
    cases: Required[str]
    cost: Required[CostModel]
    tolerance: Required[ToleranceModel]
    outputs: tuple[str, ...]
    output_dtypes: Mapping[str, str]
    static: tuple[str, ...]
    mutates: tuple[str, ...]
    strided: tuple[str, ...]
    host: tuple[str, ...]
    placeable: tuple[str, ...]
    same_dtype: tuple[tuple[str, ...], ...]
    where: tuple[str, ...]
    checks: tuple[ContentCheck, ...]


def declare(function: Callable[..., object], **facts: Unpack[Facts]) -> Contract:
    """The contract that an annotated function and the facts beside it declare. Raises `RegistrationError`."""
    name = function.__name__
    missing = [fact for fact in ("family", "cases", "cost", "tolerance") if not facts.get(fact)]
    if missing:
        raise RegistrationError(f"{name}: an op needs {', '.join(missing)}")
    return Contract(
        name=name,
        family=facts["family"],
        reference=function,
        parameters=read_parameters(function),
        outputs=read_outputs(function, facts.get("outputs", ()), facts.get("output_dtypes", {})),
        cases=facts["cases"],
        cost=facts["cost"],
        tolerance=facts["tolerance"],
        static=facts.get("static", ()),
        mutates=facts.get("mutates", ()),
        strided=facts.get("strided", ()),
        host=facts.get("host", ()),
        placeable=facts.get("placeable", ()),
        same_dtype=facts.get("same_dtype", ()),
        where=facts.get("where", ()),
        checks=facts.get("checks", ()),
    )


def relation_names(relation: str) -> set[str]:
    """The dims and arguments that a relation of `where` mentions."""
    return {node.id for node in ast.walk(ast.parse(relation)) if isinstance(node, ast.Name)}


def _names(expr: str) -> set[str]:
    return {part for part in re.findall(r"\w+", expr) if not part.isdecimal()}
