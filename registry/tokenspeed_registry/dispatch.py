"""Compiles a contract to the public function: straight-line checks, a dispatch key, one dict hit, the kernel.

The generated source reads like this, for a op of one tensor with a static dim:

    def double(x, *, out=None, backend=None):
        if is_compiling():
            ...the torch.library op...
        try:
            d_tokens, d_dim, = x.shape
            valid = x.dtype in T0 and x.is_contiguous() and not x.requires_grad
            guard = dispatcher.guard
            key = (device, x.dtype, d_dim, guard and guard(d_tokens, d_dim))
        except (AttributeError, TypeError, ValueError):
            valid = False
        if not valid:
            dispatcher.reject((x,))
        ...
        kernel = dispatcher.table.get(key)
        if kernel is None or backend is not None or scope.get() is not None:
            kernel = dispatcher.resolve(key, (x,), backend)
        return kernel(x, out=out)

It refuses exactly what `validation` refuses, which then says why. The source of any op is in `Dispatcher.source`.
"""

import inspect
import linecache
import re
from collections.abc import Callable
from typing import Any

import torch

from tokenspeed_registry.content import SHORT
from tokenspeed_registry.contract import Contract
from tokenspeed_registry.parameters import ScalarParameter, TensorParameter, is_name, offset_of

_IDENTIFIER = re.compile(r"[a-z_]\w*")


def generate(contract: Contract, compiled: bool) -> str:
    """Source of the dispatching function. `compiled`: whether it hands over to the torch.library op under tracing."""
    names = [p.name for p in contract.parameters]
    tuple_of_args = f"({', '.join(names)},)"
    lines = [f"def {contract.name}({_parameter_list(contract)}):"]
    if compiled:
        lines += _hand_over(contract)
    dims, checks = _bindings(contract)
    lines += ["    try:", *(f"        {line}" for line in dims)]
    lines += [
        "        valid = (",
        *(f"            {c}{' and' if i else ''}" for i, c in _countdown(checks)),
        "        )",
    ]
    lines += [
        "        guard = dispatcher.guard",
        f"        key = ({_key(contract)}, guard and guard({', '.join(_local(d) for d in guard_dims(contract))}))",
        "    except (AttributeError, TypeError, ValueError):",
        "        valid = False",
        "    if not valid:",
        f"        dispatcher.reject({tuple_of_args})",
        *_content(contract),
    ]
    call = ", ".join(f"{p.name}={p.name}" if p.keyword else p.name for p in contract.parameters)
    if contract.outputs:
        lines += ["    if out is not None:", f"        dispatcher.check_out(out, {tuple_of_args})"]
        call += ", out=out"
    lines += [
        "    kernel = dispatcher.table.get(key)",
        "    if kernel is None or backend is not None or scope.get() is not None:",
        f"        kernel = dispatcher.resolve(key, {tuple_of_args}, backend)",
        f"    return kernel({call})",
    ]
    return "\n".join(lines) + "\n"


def build(contract: Contract, source: str, environment: dict[str, Any]) -> Callable[..., Any]:
    """Executes generated source and dresses the function up as the one that was declared."""
    filename = f"<dispatch of {contract.name}>"
    tables: dict[str, Any] = {f"T{i}": tensor.dtypes for i, tensor in enumerate(contract.tensors)}
    tables |= {f"C{i}": scalar.choices for i, scalar in enumerate(contract.scalars)}
    tables |= {f"V{i}": check for i, check in enumerate(contract.checks)}
    tables |= {f"D{i}": scalar.default for i, scalar in enumerate(contract.scalars)}
    namespace = {**tables, **environment, "dtype_type": torch.dtype}
    exec(compile(source, filename, "exec"), namespace)
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    function: Callable[..., Any] = namespace[contract.name]
    declared = contract.reference
    function.__doc__ = declared.__doc__
    function.__module__ = declared.__module__
    function.__qualname__ = declared.__qualname__
    function.__annotations__ = declared.__annotations__
    return function


def guard_dims(contract: Contract) -> tuple[str, ...]:
    """The dims that are handed to a guard, in its order: those that required tensors bind, and integer scalars."""
    bound = [name for tensor in contract.tensors if not tensor.optional for name in _binds(tensor)]
    return tuple(dict.fromkeys([*bound, *(s.name for s in contract.scalars if s.type is int)]))


def _parameter_list(contract: Contract) -> str:
    parts: list[str] = []
    keyword = False
    scalar_index = {scalar.name: i for i, scalar in enumerate(contract.scalars)}
    for parameter in contract.parameters:
        if parameter.keyword and not keyword:
            parts.append("*")
            keyword = True
        default = ""
        if isinstance(parameter, TensorParameter):
            default = "=None" if parameter.optional and parameter.keyword else ""
        elif parameter.default is not inspect.Parameter.empty:
            default = f"=D{scalar_index[parameter.name]}"
        parts.append(parameter.name + default)
    parts += [] if keyword else ["*"]
    return ", ".join([*parts, *(["out=None"] if contract.outputs else []), "backend=None"])


def _hand_over(contract: Contract) -> list[str]:
    call = ", ".join(f"{p.name}={p.name}" if p.keyword else p.name for p in contract.parameters)
    if not contract.outputs:
        return ["    if is_compiling():", f"        return library_op({call}, backend=backend)"]
    return [
        "    if is_compiling():",
        f"        result = library_op({call}, backend=backend)",
        "        return result if out is None else copy_into(out, result)",
    ]


def _binds(tensor: TensorParameter) -> list[str]:
    names = []
    for expr in tensor.dims:
        offset = offset_of(expr)
        if is_name(expr):
            names.append(expr)
        elif offset is not None:
            names.append(offset[0])
    return names


def _bindings(contract: Contract) -> tuple[list[str], list[str]]:
    """Statements that bind dims, and the conditions of a valid call; each in dependency order."""
    statements: list[str] = []
    checks: list[str] = []
    bound = {scalar.name for scalar in contract.scalars if scalar.type is int}
    statements += [f"{_local(name)} = {name}" for name in sorted(bound)]
    later: list[str] = []
    first = contract.tensors[0].name
    for index, tensor in enumerate(contract.tensors):
        name = tensor.name
        targets, conditions, known = [], [], set(bound)
        for position, expr in enumerate(tensor.dims):
            offset = offset_of(expr)
            if is_name(expr) and expr not in bound:
                bound.add(expr)
                targets.append(_local(expr))
            else:
                size = f"n{index}_{position}"
                targets.append(size)
                if offset is not None and offset[0] not in bound:
                    bound.add(offset[0])
                    conditions.append(f"({_local(offset[0])} := {size} - {offset[1]}) >= 0")
                else:
                    later.append(_unless_absent(tensor, f"{size} == {_expression(expr, contract)}"))
        unpack = f"{', '.join(targets)}, = {name}.shape"
        conditions += [f"{name}.dtype in T{index}", f"not {name}.requires_grad"]
        if name in contract.strided:
            conditions.append(f"({name}.shape[-1] <= 1 or {name}.stride(-1) == 1)")
        else:
            conditions.append(f"{name}.is_contiguous()")
        if name in contract.host:
            conditions.append(f"{name}.is_cpu")
        elif name != first:
            conditions.append(f"{name}.device == device")
        if tensor.optional:
            absent = [_local(dim) for dim in sorted(bound - known)]
            statements += [f"{' = '.join(absent)} = None"] if absent else []
            statements += [f"if {name} is not None:", f"    {unpack}"]
        else:
            statements.append(unpack)
        checks += [_unless_absent(tensor, condition) for condition in conditions]
        if name == first:
            statements.append(f"device = {name}.device")
    checks += later
    for group in contract.same_dtype:
        checks += _agree(contract, group)
    checks += [_scalar_check(contract, i, scalar) for i, scalar in enumerate(contract.scalars)]
    checks += [f"({_expression(relation, contract)})" for relation in contract.where]
    return statements, checks


def _agree(contract: Contract, group: tuple[str, ...]) -> list[str]:
    optional = {tensor.name for tensor in contract.tensors if tensor.optional}
    anchor = next(name for name in group if name not in optional)
    return [
        f"({name} is None or {name}.dtype == {anchor}.dtype)" if name in optional else f"{name}.dtype == {anchor}.dtype"
        for name in group
        if name != anchor
    ]


def _unless_absent(tensor: TensorParameter, condition: str) -> str:
    return f"({tensor.name} is None or {condition})" if tensor.optional else condition


def _scalar_check(contract: Contract, index: int, scalar: ScalarParameter) -> str:
    name = scalar.name
    kinds = {float: f"type({name}) is float or type({name}) is int", torch.dtype: f"type({name}) is dtype_type"}
    condition = kinds.get(scalar.type, f"type({name}) is {scalar.type.__name__}")
    if scalar.choices:
        condition = f"{name} in C{index}"
    return f"({name} is None or {condition})" if scalar.optional else f"({condition})"


def _key(contract: Contract) -> str:
    parts = ["device"]
    parts += [f"{t.name} is not None and {t.name}.dtype" if t.optional else f"{t.name}.dtype" for t in contract.tensors]
    parts += [_local(dim) for dim in contract.static]
    parts += [flag.name for flag in contract.flags]
    return ", ".join(parts)


def _content(contract: Contract) -> list[str]:
    lines = []
    for index, check in enumerate(contract.checks):
        name = check.argument
        optional = any(tensor.name == name and tensor.optional for tensor in contract.tensors)
        dims = ", ".join(f'"{dim}": {_local(dim)}' for dim in guard_dims(contract))
        condition = f"{name}.is_cpu and {name}.numel() <= {SHORT} or settings.debug"
        lines += [
            f"    if {f'{name} is not None and ({condition})' if optional else condition}:",
            f"        V{index}.verify({contract.name!r}, {name}, {{{dims}}})",
        ]
    return lines


def _local(dim: str) -> str:
    return f"d_{dim}"


def _expression(expr: str, contract: Contract) -> str:
    """A dim expression over the generated function's locals: dims are prefixed, other names are arguments."""
    return _IDENTIFIER.sub(lambda m: _local(m[0]) if m[0] in contract.dims else m[0], expr)


def _countdown(items: list[str]) -> list[tuple[int, str]]:
    return [(len(items) - 1 - i, item) for i, item in enumerate(items)]
