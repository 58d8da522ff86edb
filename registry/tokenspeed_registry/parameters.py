"""Reads an op's parameters and outputs from the annotations of the function that declares it.

Tensors are annotated in jaxtyping's notation, `Float[Tensor, "tokens heads dim"]`. A dim is a name, a number or an
expression of names (`seqs+1`, `streams*hidden`). `Float` means bfloat16, float16 or float32; every other dtype is
named (`Float8e4m3fn`, `Int32`, ...). `X | None` is an optional argument. Scalars are bool, int, float, str (or a
`Literal`) and `torch.dtype`. Two keyword parameters are the dispatcher's own: `out`, where the caller may pass the
outputs, and `backend`, an explicit choice of kernel; the reference ignores both.
"""

import inspect
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass

import jaxtyping
import torch
from jaxtyping import AbstractArray

from tokenspeed_registry.errors import RegistrationError

RESERVED = ("out", "backend")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_ANY_FLOAT: typing.Any = jaxtyping.Float
_SCALARS = (bool, int, float, str, torch.dtype)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_BINDING = re.compile(r"([a-z_]\w*)(?:\+(\d+))?\Z")


@dataclass(frozen=True)
class TensorParameter:
    """A tensor: its dim expressions, the dtypes allowed, and whether it may be None or, being so, left out."""

    name: str
    dims: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    optional: bool
    keyword: bool
    omissible: bool = False

    def describe_dtypes(self) -> str:
        return " or ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)


@dataclass(frozen=True)
class ScalarParameter:
    """A scalar: its type, the values allowed (for a `Literal`) and its default (`inspect.Parameter.empty`: none)."""

    name: str
    type: type
    choices: tuple[object, ...]
    optional: bool
    default: object
    keyword: bool


Parameter = TensorParameter | ScalarParameter


@dataclass(frozen=True)
class Output:
    """A result: its dims and its dtype: fixed, or that of a tensor, or the value of a dtype parameter.

    `"dtype or x"` means the first of the two that the call gives.
    """

    name: str
    dims: tuple[str, ...]
    dtype: torch.dtype | str


def binding_of(expr: str) -> tuple[str, int] | None:
    """The dim that a shape can bind by this expression, and what is added to it: `("seqs", 1)` for `seqs+1`.

    `("tokens", 0)` for a plain name; None for any other form.
    """
    match = _BINDING.match(expr)
    return (match[1], int(match[2] or 0)) if match else None


def read_parameters(function: Callable[..., object]) -> tuple[Parameter, ...]:
    """The parameters of an op's declaration, in order, without the reserved ones."""
    hints = typing.get_type_hints(function, include_extras=True)
    parameters: list[Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in RESERVED:
            continue
        keyword = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if name not in hints or name.startswith("_") or parameter.kind in _VARIADIC:
            raise RegistrationError(f"{function.__name__}: parameter {name} is not annotated, private or variadic")
        members, optional = _members(hints[name])
        if all(_is_array(member) for member in members):
            dims = {member.dim_str for member in members}
            if len(dims) != 1:
                raise RegistrationError(f"{function.__name__}: {name} has several shapes: {sorted(dims)}")
            dtypes = tuple(dict.fromkeys(dtype for member in members for dtype in _dtypes(member)))
            omissible = optional and (keyword or parameter.default is None)
            parameters.append(TensorParameter(name, tuple(dims.pop().split()), dtypes, optional, keyword, omissible))
        else:
            kind, choices = _scalar(function.__name__, name, members)
            parameters.append(ScalarParameter(name, kind, choices, optional, parameter.default, keyword))
    return tuple(parameters)


def read_outputs(
    function: Callable[..., object], names: tuple[str, ...], dtypes: typing.Mapping[str, str]
) -> tuple[Output, ...]:
    """The outputs of an op's declaration. `dtypes` says which parameter an output takes its dtype from."""
    hint = typing.get_type_hints(function, include_extras=True).get("return")
    if hint in (None, type(None)):
        arrays: tuple[typing.Any, ...] = ()
    elif typing.get_origin(hint) is tuple:
        arrays = typing.get_args(hint)
    else:
        arrays = (hint,)
    if len(arrays) != len(names):
        raise RegistrationError(f"{function.__name__}: {len(arrays)} outputs annotated, {len(names)} named")
    if unknown := set(dtypes) - set(names):
        raise RegistrationError(f"{function.__name__}: no output {sorted(unknown)}")
    if any(not _is_array(array) for array in arrays):
        raise RegistrationError(f"{function.__name__}: a result is not annotated with dtype and shape: {hint}")
    outputs = []
    for name, array in zip(names, arrays, strict=True):
        allowed = _dtypes(array)
        if name not in dtypes and len(allowed) != 1:
            raise RegistrationError(f"{function.__name__}: output {name} needs a dtype: name the parameter it follows")
        outputs.append(Output(name, tuple(array.dim_str.split()), dtypes.get(name, allowed[0])))
    return tuple(outputs)


def _members(hint: typing.Any) -> tuple[tuple[typing.Any, ...], bool]:
    """The alternatives of a union without None, and whether None was among them."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return (hint,), False
    members = typing.get_args(hint)
    return tuple(member for member in members if member is not type(None)), type(None) in members


def _is_array(hint: typing.Any) -> bool:
    return inspect.isclass(hint) and issubclass(hint, AbstractArray)


def _dtypes(array: typing.Any) -> tuple[torch.dtype, ...]:
    if array.dtypes == _ANY_FLOAT.dtypes:
        return FLOATS
    names = [name for name in array.dtypes if name != "bool_"] if isinstance(array.dtypes, tuple) else []
    if len(names) != 1:
        raise RegistrationError(f"{array.__name__}: name one dtype, or Float for bfloat16, float16 and float32")
    return (getattr(torch, names[0]),)


def _scalar(op: str, name: str, members: tuple[typing.Any, ...]) -> tuple[type, tuple[object, ...]]:
    (hint,) = members if len(members) == 1 else (None,)
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        if len({type(choice) for choice in choices}) != 1 or type(choices[0]) not in _SCALARS:
            raise RegistrationError(f"{op}: the choices of {name} are not of one scalar type: {choices}")
        return type(choices[0]), choices
    if hint not in _SCALARS:
        raise RegistrationError(f"{op}: parameter {name} has an annotation that no torch.library schema has: {hint}")
    return typing.cast(type, hint), ()
