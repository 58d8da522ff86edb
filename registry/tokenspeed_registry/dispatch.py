"""Compiles a contract to the public function: straight-line checks, a dispatch key, one dict hit, the kernel.

The generated source reads like this, for an op of one tensor with a static dim:

    def double(x, *, out=None, backend=None):
        if _is_compiling():
            ...the torch.library op...
        try:
            _d_tokens, _d_dim, = x.shape
            _device = None if x.is_cpu else x.device
            _valid = x.is_contiguous() and not x.requires_grad
            _guard = _dispatcher.guard if _valid else None
            _key = (_device, x.dtype, _d_dim, _guard and _guard(_d_tokens, _d_dim))
        except (ArithmeticError, AttributeError, TypeError, ValueError):
            _valid = False
        if not _valid:
            _dispatcher.reject((x,))
        _kernel = _dispatcher.table.get(_key)
        if _kernel is None or backend is not None or _scope.get() is not None:
            _kernel = _dispatcher.resolve(_key, (x,), backend)
        ...
        return _kernel(x, out=out)

What the key holds (dtypes, static dims, flags) is checked in full by `validation` before a key enters the table, so a
hit vouches for it; only what may change under one key is checked on every call. The source of any op is in
`Dispatcher.source`.
"""

import inspect
import keyword
import linecache
import re
from collections.abc import Callable
from typing import Any

from tokenspeed_registry.content import SHORT
from tokenspeed_registry.contract import Contract
from tokenspeed_registry.describe import docstring
from tokenspeed_registry.guard import guard_parameters
from tokenspeed_registry.parameters import ScalarParameter, TensorParameter, binding_of

_IDENTIFIER = re.compile(r"[a-z_]\w*")
_DTYPE = re.compile(r"\b\w+\.dtype(\.\w+)*")


def generate(contract: Contract) -> str:
    """Source of the dispatching function, which hands over to the torch.library op under tracing."""
    names = [p.name for p in contract.parameters]
    tuple_of_args = f"({', '.join(names)},)"
    lines = [f"def {contract.name}({_parameter_list(contract)}):", *_hand_over(contract)]
    dims, checks = _bindings(contract)
    lines += ["    try:", *(f"        {line}" for line in dims)]
    lines += [
        "        _valid = (",
        "            " + " and\n            ".join(checks),
        "        )",
    ]
    lines += [
        "        _guard = _dispatcher.guard if _valid else None",
        f"        _key = ({_key(contract)}, _guard and _guard({_guard_arguments(contract)}))",
        "    except (ArithmeticError, AttributeError, TypeError, ValueError):",
        "        _valid = False",
        "    if not _valid:",
        f"        _dispatcher.reject({tuple_of_args})",
        "    _kernel = _dispatcher.table.get(_key)",
        "    if _kernel is None or backend is not None or _scope.get() is not None:",
        f"        _kernel = _dispatcher.resolve(_key, {tuple_of_args}, backend)",
        *_content(contract),
    ]
    call = _arguments(contract)
    if contract.outputs:
        lines += ["    if out is not None:", f"        _dispatcher.check_out(out, {tuple_of_args})"]
        call += ", out=out"
    lines.append(f"    return _kernel({call})")
    return "\n".join(lines) + "\n"


def without_hand_over(contract: Contract, source: str) -> str:
    """The same function for use as the torch.library op's implementation, which must not hand over to itself."""
    return source.replace("\n".join(_hand_over(contract)) + "\n", "", 1)


def build(contract: Contract, source: str, environment: dict[str, Any]) -> Callable[..., Any]:
    """Executes generated source and dresses the function up as the one that was declared."""
    filename = f"<dispatch of {contract.name}>"
    tables: dict[str, Any] = {f"V{i}": check for i, check in enumerate(contract.checks)}
    tables |= {f"D{i}": scalar.default for i, scalar in enumerate(contract.scalars)}
    tables |= {f"T{i}": scalar.type for i, scalar in enumerate(contract.scalars)}
    # No parameter begins with an underscore, so none hides what the generated code needs.
    namespace: dict[str, Any] = {f"_{name}": value for name, value in {**tables, **environment}.items()}
    exec(compile(source, filename, "exec"), namespace)
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    function: Callable[..., Any] = namespace[contract.name]
    declared = contract.reference
    function.__doc__ = docstring(contract)
    function.__module__ = declared.__module__
    function.__qualname__ = declared.__qualname__
    function.__annotations__ = declared.__annotations__
    return function


def _guard_arguments(contract: Contract) -> str:
    tensors, dims = guard_parameters(contract)
    return ", ".join([*tensors, *(_local(dim) for dim in dims)])


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
            default = "=None" if parameter.omissible else ""
        elif parameter.default is not inspect.Parameter.empty:
            default = f"=_D{scalar_index[parameter.name]}"
        parts.append(parameter.name + default)
    parts += [] if keyword else ["*"]
    return ", ".join([*parts, *(["out=None"] if contract.outputs else []), "backend=None"])


def _arguments(contract: Contract) -> str:
    return ", ".join(f"{p.name}={p.name}" if p.keyword else p.name for p in contract.parameters)


def _hand_over(contract: Contract) -> list[str]:
    call = _arguments(contract)
    if not contract.outputs:
        return ["    if _is_compiling():", f"        return _library_op({call}, backend=backend)"]
    return [
        "    if _is_compiling():",
        f"        _result = _library_op({call}, backend=backend)",
        "        return _result if out is None else _copy_into(out, _result)",
    ]


def _binds(tensor: TensorParameter) -> list[str]:
    return [binding[0] for expr in tensor.dims if (binding := binding_of(expr)) is not None]


def _bindings(contract: Contract) -> tuple[list[str], list[str]]:
    """Statements that bind dims, and the conditions of a valid call; each in dependency order.

    Required tensors come first, so that an optional one is bound to what is surely there; a dim that only optional
    tensors have is None where all of them are absent.
    """
    numbers = [scalar for scalar in contract.scalars if scalar.type is int]
    bound = {scalar.name for scalar in numbers if not scalar.optional}
    statements = [f"{_local(scalar.name)} = {scalar.name}" for scalar in numbers]
    # Scalars first: what a wrong one would do in an expression is anyone's guess.
    checks = [_scalar_check(contract, scalar) for scalar in contract.scalars]
    for index, tensor in enumerate(contract.tensors):
        if tensor.optional:
            continue
        binding, conditions = _shape(contract, index, tensor, bound, {scalar.name for scalar in numbers})
        statements += binding
        checks += conditions + _layout_and_device(contract, tensor)
        if index == 0:
            statements += [f"_on_cpu = {tensor.name}.is_cpu", f"_device = None if _on_cpu else {tensor.name}.device"]
            statements.append(f"_index = -1 if _on_cpu else {tensor.name}.get_device()")
    uncertain = _uncertain(contract)
    statements += [f"{_local(dim)} = None" for dim in uncertain if dim not in {scalar.name for scalar in numbers}]
    for index, tensor in enumerate(contract.tensors):
        if not tensor.optional:
            continue
        binding, conditions = _shape(contract, index, tensor, bound, set(uncertain))
        if binding:
            statements += [f"if {tensor.name} is not None:", *(f"    {line}" for line in binding)]
        checks += [f"({tensor.name} is None or {c})" for c in conditions + _layout_and_device(contract, tensor)]
    # A relation of static dims, flags and dtypes alone was checked before its key entered the table.
    fixed = {*contract.static, *(flag.name for flag in contract.flags)}
    for relation in contract.where:
        names = set(_IDENTIFIER.findall(_DTYPE.sub("", relation))) - set(keyword.kwlist)
        if not names <= fixed:
            absent = "".join(f"{_local(dim)} is None or " for dim in uncertain if dim in names)
            checks.append(f"({absent}({_expression(relation, contract)}))")
    return statements, checks


def _uncertain(contract: Contract) -> list[str]:
    """Dims that a valid call may lack: those that only optional tensors bind, and optional integer scalars."""
    required = {name for tensor in contract.tensors if not tensor.optional for name in _binds(tensor)}
    required |= {scalar.name for scalar in contract.scalars if scalar.type is int and not scalar.optional}
    return sorted(contract.dims - required)


def _shape(
    contract: Contract, index: int, tensor: TensorParameter, bound: set[str], uncertain: set[str]
) -> tuple[list[str], list[str]]:
    """Binds the dims that this tensor is the first to have, and compares the others.

    Dims join `bound`, but for those of `uncertain`, which are bound where they are still None.
    """
    if all(set(_IDENTIFIER.findall(expr)) <= bound for expr in tensor.dims):
        sizes = "".join(f"{_expression(expr, contract)}, " for expr in tensor.dims)
        return [], [f"{tensor.name}.shape == ({sizes.strip()})"]
    targets: list[str] = []
    later: list[str] = []
    conditions: list[str] = []
    for position, expr in enumerate(tensor.dims):
        base, offset = binding_of(expr) or ("", 0)
        if base and offset == 0 and base not in bound | uncertain:
            bound.add(base)
            targets.append(_local(base))
            continue
        size = f"_n{index}_{position}"
        targets.append(size)
        if base and base not in bound:
            first = f"if {_local(base)} is None: " if base in uncertain else ""
            later.append(f"{first}{_local(base)} = {size} - {offset}")
            if base not in uncertain:
                bound.add(base)
            if offset:
                conditions.append(f"{_local(base)} >= 0")
        conditions.append(f"{size} == {_expression(expr, contract)}")
    return [f"{', '.join(targets)}, = {tensor.name}.shape", *later], conditions


def _layout_and_device(contract: Contract, tensor: TensorParameter) -> list[str]:
    name = tensor.name
    conditions = [f"not {name}.requires_grad"]
    if name in contract.strided:
        # Contiguous is the usual case, and much cheaper to ask than one stride.
        conditions.append(f"({name}.is_contiguous() or {name}.stride(-1) == 1 or {name}.shape[-1] <= 1)")
    else:
        conditions.append(f"{name}.is_contiguous()")
    if name in contract.host:
        conditions.append(f"{name}.is_cpu")
    elif tensor is not contract.tensors[0]:
        # Cheaper than comparing torch.device objects, and as strict.
        here = f"not {name}.is_cpu and {name}.get_device() == _index"  # the index of meta tensors is that of the CPU
        here = f"{here} or {name}.is_pinned()" if name in contract.placeable else here
        conditions.append(f"({name}.is_cpu if _on_cpu else {here})")
    return conditions


def _scalar_check(contract: Contract, scalar: ScalarParameter) -> str:
    """The type of a scalar. The key vouches for a flag's value, but not for its type: True, 1 and 1.0 are equal."""
    name = scalar.name
    kind = f"_T{contract.scalars.index(scalar)}"
    condition = f"type({name}) is {kind}"
    if scalar.type is float:
        condition += f" or type({name}) is int"
    return f"({name} is None or {condition})" if scalar.optional else f"({condition})"


def _key(contract: Contract) -> str:
    parts = ["_device"]
    parts += [f"{t.name} is not None and {t.name}.dtype" if t.optional else f"{t.name}.dtype" for t in contract.tensors]
    parts += [f"{name} is not None and {name}.is_cpu" for name in contract.placeable]
    parts += [_local(dim) for dim in contract.static]
    parts += [flag.name for flag in contract.flags]
    return ", ".join(parts)


def _content(contract: Contract) -> list[str]:
    lines = []
    for index, check in enumerate(contract.checks):
        name = check.argument
        tensor = next(tensor for tensor in contract.tensors if tensor.name == name)
        dims = ", ".join(f'"{dim}": {_local(dim)}' for dim in check.needs)
        sizes = "*".join(f"({_expression(expr, contract)})" for expr in tensor.dims) or "1"
        readable = "True" if name in contract.host else "_on_cpu"
        condition = f"{readable} and {sizes} <= {SHORT} or _registry.debug"
        lines.append(f"    if {f'{name} is not None and ({condition})' if tensor.optional else condition}:")
        verify = f"_V{index}.verify({contract.name!r}, {name}, {{{dims}}})"
        quick: str | None = getattr(check, "quick", None)
        if quick is None:
            lines.append(f"        {verify}")
        else:
            flat = name if len(tensor.dims) == 1 else f"{name}.flatten()"
            lines += [
                f"        _values = {flat}.tolist()",
                f"        if not ({_expression(quick, contract)}):",
                f"            {verify}",
            ]
    return lines


def _local(dim: str) -> str:
    return f"_d_{dim}"


def _expression(expr: str, contract: Contract) -> str:
    """A dim expression over the generated function's locals: dims are prefixed, other names are arguments."""
    return _IDENTIFIER.sub(lambda m: _local(m[0]) if m[0] in contract.dims else m[0], expr)
