"""Says what is wrong with a call: the slow, interpreted twin of the checks that `dispatch` generates.

It runs only after the fast checks refused a call, to name the argument, and to make the `Signature` of a call that
they accepted when its kernel is selected for the first time.
"""

import re
from collections.abc import Mapping, Sequence

import torch

from tokenspeed_registry.contract import Contract, relation_names
from tokenspeed_registry.errors import (
    ArgumentTypeError,
    DeviceError,
    DtypeError,
    GradError,
    ShapeError,
    StrideError,
)
from tokenspeed_registry.layout import is_on_host, layout_of
from tokenspeed_registry.parameters import Output, ScalarParameter, TensorParameter, binding_of
from tokenspeed_registry.signature import Flag, Signature, evaluate

Arguments = Mapping[str, object]
_IDENTIFIER = re.compile(r"[a-z_]\w*")


def signature_of(contract: Contract, arguments: Arguments) -> Signature:
    """Validates a call in full and returns its signature. Raises the `ArgumentError` that names what is wrong."""
    for scalar in contract.scalars:
        _check_scalar(contract, scalar, arguments[scalar.name])
    present = _present(contract, arguments)
    dims = bind_dims(contract, arguments)
    device = next(iter(present.values())).device
    for parameter in contract.tensors:
        if parameter.name in present:
            _check_tensor(contract, parameter, present[parameter.name], dims, device)
    dtypes = {name: tensor.dtype for name, tensor in present.items()}
    for group in contract.same_dtype:
        _check_group(contract, group, dtypes)
    for relation in contract.where:
        _check_relation(contract, relation, dims, arguments)
    flags: dict[str, Flag] = {scalar.name: arguments[scalar.name] for scalar in contract.scalars}  # type: ignore[misc]
    shapes: dict[str, Sequence[str]] = {p.name: p.dims for p in contract.tensors if p.name in present}
    for output in contract.outputs:
        shapes[output.name] = output.dims
        dtypes[output.name] = output_dtype(output, dtypes, flags)
    layouts = {name: layout_of(tensor, device) for name, tensor in present.items()}
    return Signature(dims, dtypes, flags, shapes, layouts)


def check_partial(contract: Contract, dims: Mapping[str, int], dtypes: Mapping[str, torch.dtype]) -> None:
    """Validates what is known of a call of which only some dims and dtypes are: no kernel will be handed a wrong one.

    Raises `DtypeError` or `ShapeError`, as the call itself would.
    """
    for parameter in contract.tensors:
        if parameter.name in dtypes:
            _check_dtype(contract, parameter, dtypes[parameter.name])
    for group in contract.same_dtype:
        _check_group(contract, group, dtypes)
    for relation in contract.where:
        if relation_names(relation) <= dims.keys():
            _check_relation(contract, relation, dims, {})


def check_out(contract: Contract, out: object, arguments: Arguments) -> None:
    """Validates the caller's output tensors: contiguous, of the shapes and dtypes that the op would allocate."""
    signature = signature_of(contract, arguments)
    device = next(iter(_present(contract, arguments).values())).device
    given = out if isinstance(out, tuple) and len(contract.outputs) > 1 else (out,)
    if len(given) != len(contract.outputs):
        raise ArgumentTypeError(contract.name, "out", f"{len(contract.outputs)} tensors", f"{len(given)}")
    for output, tensor in zip(contract.outputs, given, strict=True):
        allocated = TensorParameter("out", output.dims, (signature.dtype(output.name),), False, True)
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentTypeError(contract.name, "out", f"a tensor for {output.name}", type(tensor).__name__)
        _check_tensor(contract, allocated, tensor, signature.dims, device)


def output_dtype(output: Output, dtypes: Mapping[str, torch.dtype], flags: Mapping[str, Flag]) -> torch.dtype:
    """The dtype that an output takes in a call with these tensor dtypes and flags."""
    if isinstance(output.dtype, torch.dtype):
        return output.dtype
    for source in output.dtype.split(" or "):
        dtype = dtypes.get(source, flags.get(source))
        if isinstance(dtype, torch.dtype):
            return dtype
    raise AssertionError(output)


def bind_dims(contract: Contract, arguments: Arguments) -> dict[str, int]:
    """Dim values from shapes (the first tensor that has a name binds it) and integer scalars."""
    dims = {s.name: arguments[s.name] for s in contract.scalars if s.type is int and arguments[s.name] is not None}
    for parameter in contract.tensors:
        tensor = arguments[parameter.name]
        if tensor is None:
            continue
        assert isinstance(tensor, torch.Tensor)
        if tensor.dim() != len(parameter.dims):
            got = f"shape {tuple(tensor.shape)}"
            raise ShapeError(contract.name, parameter.name, f"shape [{' '.join(parameter.dims)}]", got)
        for expr, size in zip(parameter.dims, tensor.shape, strict=True):
            if (binding := binding_of(expr)) is None:
                continue
            name, offset = binding
            if size < offset:
                raise ShapeError(contract.name, parameter.name, f"at least {offset} elements ({expr})", str(size))
            dims.setdefault(name, size - offset)
    return dims  # type: ignore[return-value]


def _present(contract: Contract, arguments: Arguments) -> dict[str, torch.Tensor]:
    present = {}
    for parameter in contract.tensors:
        value = arguments[parameter.name]
        if value is None and parameter.optional:
            continue
        if not isinstance(value, torch.Tensor):
            expected = "a tensor or None" if parameter.optional else "a tensor"
            raise ArgumentTypeError(contract.name, parameter.name, expected, type(value).__name__)
        present[parameter.name] = value
    return present


def _check_scalar(contract: Contract, scalar: ScalarParameter, value: object) -> None:
    if value is None and scalar.optional:
        return
    allowed = (int, float) if scalar.type is float else (scalar.type,)
    if type(value) not in allowed:
        raise ArgumentTypeError(contract.name, scalar.name, f"a value of type {scalar.type.__name__}", repr(value))
    if scalar.choices and value not in scalar.choices:
        raise ArgumentTypeError(contract.name, scalar.name, f"one of {list(scalar.choices)}", repr(value))


def _check_tensor(
    contract: Contract, parameter: TensorParameter, tensor: torch.Tensor, dims: Mapping[str, int], device: torch.device
) -> None:
    op, name = contract.name, parameter.name
    _check_dtype(contract, parameter, tensor.dtype)
    expected = tuple(evaluate(expr, dims) for expr in parameter.dims)
    if tuple(tensor.shape) != expected:
        want = f"shape [{' '.join(parameter.dims)}] = {expected}"
        raise ShapeError(op, name, want, str(tuple(tensor.shape)))
    wanted = torch.device("cpu") if name in contract.host else device
    if name in contract.placeable and is_on_host(tensor, device):
        # A device reads host memory only where it is pinned.
        if not tensor.is_pinned():
            raise DeviceError(op, name, f"device {wanted}, or pinned host memory", "host memory that is not pinned")
    elif tensor.device != wanted:
        raise DeviceError(op, name, f"device {wanted}", str(tensor.device))
    if name in contract.strided:
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise StrideError(op, name, "unit stride in the last dim", f"strides {tensor.stride()}")
    elif not tensor.is_contiguous():
        raise StrideError(op, name, "a contiguous tensor", f"shape {tuple(tensor.shape)}, strides {tensor.stride()}")
    if tensor.requires_grad:
        raise GradError(op, name, "a tensor without grad (inference only)", "requires_grad=True")


def _check_dtype(contract: Contract, parameter: TensorParameter, dtype: torch.dtype) -> None:
    if dtype not in parameter.dtypes:
        expected = f"dtype {parameter.describe_dtypes()}"
        raise DtypeError(contract.name, parameter.name, expected, str(dtype).removeprefix("torch."))


def _check_group(contract: Contract, group: tuple[str, ...], dtypes: Mapping[str, torch.dtype]) -> None:
    members = [name for name in group if name in dtypes]
    for name in members[1:]:
        if dtypes[name] != dtypes[members[0]]:
            expected = f"the dtype of {members[0]}, {dtypes[members[0]]}".replace("torch.", "")
            raise DtypeError(contract.name, name, expected, str(dtypes[name]).removeprefix("torch."))


def _check_relation(contract: Contract, relation: str, dims: Mapping[str, int], arguments: Arguments) -> None:
    if not _relation(contract, relation, dims, arguments):
        values = ", ".join(f"{name}={value}" for name, value in dims.items() if name in relation)
        raise ShapeError(contract.name, contract.tensors[0].name, f"dims with {relation}", values)


def _relation(contract: Contract, relation: str, dims: Mapping[str, int], arguments: Arguments) -> bool:
    """Whether the relation holds; one that mentions a dim of an absent argument says nothing."""
    known = {**arguments, **dims}
    if any(known.get(dim) is None for dim in contract.dims if dim in _IDENTIFIER.findall(relation)):
        return True
    try:
        return bool(eval(relation, {"__builtins__": {}}, known))
    except ZeroDivisionError:
        return False
