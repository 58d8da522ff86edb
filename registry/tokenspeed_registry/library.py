"""Registers an op with torch.library: schema and fake implementation follow from the contract.

The implementation is the eager dispatching function itself, so a compiled graph validates, selects and traces at run
time as an eager call does. Implementations are registered with `Library.impl`, whose calls cost a few microseconds;
`torch.library.custom_op` costs tens.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tokenspeed_registry.contract import Contract
from tokenspeed_registry.parameters import Parameter, TensorParameter
from tokenspeed_registry.signature import evaluate
from tokenspeed_registry.validation import bind_dims, output_dtype

_libraries: dict[str, torch.library.Library] = {}
_TYPES = {bool: "bool", int: "SymInt", float: "float", str: "str", torch.dtype: "ScalarType"}


def define(namespace: str, contract: Contract, eager: Callable[..., Any]) -> Any:
    """Defines `torch.ops.<namespace>.<op>` and returns its default overload."""
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    library: Any = _libraries[namespace]
    library.define(schema(contract))
    library.impl(contract.name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{namespace}::{contract.name}", without_data(contract), lib=library)
    return getattr(getattr(torch.ops, namespace), contract.name).default


def schema(contract: Contract) -> str:
    """The torch.library schema: the op's parameters, `backend`, and `(a!)` marks on what is mutated."""
    parts: list[str] = []
    for parameter in contract.parameters:
        if parameter.keyword and "*" not in parts:
            parts.append("*")
        parts.append(_argument(contract, parameter))
    parts += [] if "*" in parts else ["*"]
    returns = ", ".join("Tensor" for _ in contract.outputs)
    returns = returns if len(contract.outputs) == 1 else f"({returns})"
    return f"{contract.name}({', '.join([*parts, 'str? backend=None'])}) -> {returns}"


def _argument(contract: Contract, parameter: Parameter) -> str:
    if isinstance(parameter, TensorParameter):
        alias = (
            f"({chr(ord('a') + contract.mutates.index(parameter.name))}!)" if parameter.name in contract.mutates else ""
        )
        default = "=None" if parameter.omissible else ""
        return f"Tensor{alias}{'?' if parameter.optional else ''} {parameter.name}{default}"
    # A free integer may be a size that stays symbolic under tracing; one of a few choices decides about kernels.
    kind = "int" if parameter.type is int and parameter.choices else _TYPES[parameter.type]
    kind += "?" if parameter.optional else ""
    default = ""
    if parameter.default is not inspect.Parameter.empty:
        quoted = isinstance(parameter.default, str)
        default = f'="{parameter.default}"' if quoted else f"={str(parameter.default).removeprefix('torch.')}"
    return f"{kind} {parameter.name}{default}"


def without_data(contract: Contract) -> Callable[..., Any]:
    """What takes an op's arguments and returns its outputs in shape, dtype and device alone, their content arbitrary.

    Dims may be symbolic; tensors that the op mutates stay as they are.
    """
    names = [parameter.name for parameter in contract.parameters]
    defaults: Mapping[str, Any] = {scalar.name: scalar.default for scalar in contract.scalars}
    optional = {tensor.name: None for tensor in contract.tensors if tensor.optional}

    def fake(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        given = kwargs.pop("out", None)
        if given is not None:
            return given
        arguments = {**optional, **defaults, **dict(zip(names, args, strict=False)), **kwargs}
        dims = bind_dims(contract, arguments)
        device = arguments[contract.tensors[0].name].device
        dtypes = {name: value.dtype for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        results = tuple(
            torch.empty(
                [evaluate(expr, dims) for expr in output.dims],
                dtype=output_dtype(output, dtypes, arguments),
                device=device,
            )
            for output in contract.outputs
        )
        if not results:
            return None
        return results if len(results) > 1 else results[0]

    return fake
