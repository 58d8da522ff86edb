"""Compiles a contract to the public function: straight-line checks, a dispatch key, one dict hit, the kernel.

The generated source reads like this, for an op of one tensor with a static dim:

    def double(x, *, out=None, backend=None):
        if is_compiling():
            ...the torch.library op...
        try:
            d_tokens, d_dim, = x.shape
            device = x.device
            valid = x.is_contiguous() and not x.requires_grad
            guard = dispatcher.guard
            key = (device, x.dtype, d_dim, guard and guard(d_tokens, d_dim))
        except (AttributeError, TypeError, ValueError):
            valid = False
        if not valid:
            dispatcher.reject((x,))
        kernel = dispatcher.table.get(key)
        if kernel is None or backend is not None or scope.get() is not None:
            kernel = dispatcher.resolve(key, (x,), backend)
        ...
        return kernel(x, out=out)

What the key holds (dtypes, static dims, flags) is checked in full by `validation` before a key enters the table, so a
hit vouches for it; only what may change under one key is checked on every call. The source of any op is in
`Dispatcher.source`.
"""

import inspect
import linecache
import re
from collections.abc import Callable
from typing import Any

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
        "    kernel = dispatcher.table.get(key)",
        "    if kernel is None or backend is not None or scope.get() is not None:",
        f"        kernel = dispatcher.resolve(key, {tuple_of_args}, backend)",
        *_content(contract),
    ]
    call = ", ".join(f"{p.name}={p.name}" if p.keyword else p.name for p in contract.parameters)
    if contract.outputs:
        lines += ["    if out is not None:", f"        dispatcher.check_out(out, {tuple_of_args})"]
        call += ", out=out"
    lines.append(f"    return kernel({call})")
    return "\n".join(lines) + "\n"


def build(contract: Contract, source: str, environment: dict[str, Any]) -> Callable[..., Any]:
    """Executes generated source and dresses the function up as the one that was declared."""
    filename = f"<dispatch of {contract.name}>"
    tables: dict[str, Any] = {f"V{i}": check for i, check in enumerate(contract.checks)}
    tables |= {f"D{i}": scalar.default for i, scalar in enumerate(contract.scalars)}
    namespace = {**tables, **environment}
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
    bound = {scalar.name for scalar in contract.scalars if scalar.type is int}
    statements = [f"{_local(name)} = {name}" for name in sorted(bound)]
    checks: list[str] = []
    for index, tensor in enumerate(contract.tensors):
        known = set(bound)
        binding, conditions = _shape(contract, index, tensor, bound)
        conditions += _layout_and_device(contract, tensor)
        checks += [_unless_absent(tensor, condition) for condition in conditions]
        if tensor.optional and binding:
            absent = [_local(dim) for dim in sorted(bound - known)]
            statements += [f"{' = '.join([*absent, 'None'])}"] if absent else []
            statements.append(f"if {tensor.name} is not None:")
            binding = [f"    {line}" for line in binding]
        statements += binding
        if index == 0:
            statements += [f"device = {tensor.name}.device", f"on_cpu = {tensor.name}.is_cpu"]
            statements.append(f"index = -1 if on_cpu else {tensor.name}.get_device()")
    checks += [check for scalar in contract.scalars if (check := _scalar_check(scalar))]
    # A relation of static dims alone was checked before its key entered the table.
    fixed = {*contract.static, *(flag.name for flag in contract.flags)}
    checks += [f"({_expression(r, contract)})" for r in contract.where if not set(_IDENTIFIER.findall(r)) <= fixed]
    return statements, checks


def _shape(contract: Contract, index: int, tensor: TensorParameter, bound: set[str]) -> tuple[list[str], list[str]]:
    """Binds the dims that this tensor is the first to have (adding them to `bound`), and compares the others."""
    if all(set(_IDENTIFIER.findall(expr)) <= bound for expr in tensor.dims):
        sizes = "".join(f"{_expression(expr, contract)}, " for expr in tensor.dims)
        return [], [f"{tensor.name}.shape == ({sizes.strip()})"]
    targets: list[str] = []
    conditions: list[str] = []
    names: list[str] = []
    for position, expr in enumerate(tensor.dims):
        offset = offset_of(expr)
        if is_name(expr) and expr not in bound | set(names):
            names.append(expr)
            targets.append(_local(expr))
            continue
        size = f"n{index}_{position}"
        targets.append(size)
        if offset is not None and offset[0] not in bound | set(names):
            names.append(offset[0])
            conditions.insert(0, f"({_local(offset[0])} := {size} - {offset[1]}) >= 0")
        else:
            conditions.append(f"{size} == {_expression(expr, contract)}")
    bound.update(names)
    return [f"{', '.join(targets)}, = {tensor.name}.shape"], conditions


def _layout_and_device(contract: Contract, tensor: TensorParameter) -> list[str]:
    name = tensor.name
    conditions = [f"not {name}.requires_grad"]
    if name in contract.strided:
        conditions.append(f"({name}.stride(-1) == 1 or {name}.shape[-1] <= 1)")
    else:
        conditions.append(f"{name}.is_contiguous()")
    if name in contract.host:
        conditions.append(f"{name}.is_cpu")
    elif tensor is not contract.tensors[0]:
        # Cheaper than comparing torch.device objects, and as strict.
        conditions.append(f"({name}.is_cpu if on_cpu else {name}.get_device() == index)")
    return conditions


def _unless_absent(tensor: TensorParameter, condition: str) -> str:
    return f"({tensor.name} is None or {condition})" if tensor.optional else condition


def _scalar_check(scalar: ScalarParameter) -> str | None:
    """The type of a number; flags are part of the key, which vouches for them."""
    name = scalar.name
    if scalar.type not in (int, float):
        return None
    condition = f"type({name}) is float or type({name}) is int" if scalar.type is float else f"type({name}) is int"
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
