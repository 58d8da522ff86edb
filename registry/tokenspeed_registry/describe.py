"""The part of an op's docstring that follows from its declaration: shapes, dtypes and layout of every argument."""

import inspect
from collections.abc import Iterator

from tokenspeed_registry.contract import Contract
from tokenspeed_registry.parameters import FLOATS, Output, ScalarParameter, TensorParameter


def docstring(contract: Contract) -> str:
    """The declared docstring, then a line an argument and a line a result."""
    lines = [prose(contract), "", "Arguments:", *(f"    {name}: {text}" for name, text in arguments(contract))]
    if contract.outputs:
        lines.append("    out: where to write the results, contiguous; allocated unless given")
    lines.append("    backend: the backend or kernel that must serve the call; chosen by the registry unless given")
    if contract.outputs:
        lines += ["", "Returns:", *(f"    {name}: {text}" for name, text in results(contract))]
    return "\n".join(lines)


def prose(contract: Contract) -> str:
    """The docstring as declared."""
    return inspect.cleandoc(contract.reference.__doc__ or "")


def arguments(contract: Contract) -> Iterator[tuple[str, str]]:
    """Every argument but `out` and `backend`, and what may be passed for it."""
    for parameter in contract.parameters:
        if isinstance(parameter, TensorParameter):
            yield parameter.name, _tensor(contract, parameter)
        else:
            yield parameter.name, _scalar(parameter)


def results(contract: Contract) -> Iterator[tuple[str, str]]:
    """Every result with its shape and dtype."""
    for output in contract.outputs:
        yield output.name, _result(output)


def _tensor(contract: Contract, tensor: TensorParameter) -> str:
    notes = [
        note
        for note, holds in (
            ("changed in place", tensor.name in contract.mutates),
            ("may be strided", tensor.name in contract.strided),
            ("on the host", tensor.name in contract.host),
            ("on the device or in pinned host memory", tensor.name in contract.placeable),
            ("optional", tensor.optional),
        )
        if holds
    ]
    dtypes = "bfloat16, float16 or float32" if tensor.dtypes == FLOATS else tensor.describe_dtypes()
    return ", ".join([f"[{', '.join(tensor.dims)}] {dtypes}", *notes])


def _scalar(scalar: ScalarParameter) -> str:
    kind = " or ".join(map(repr, scalar.choices)) if scalar.choices else scalar.type.__name__
    default = "" if scalar.default is inspect.Parameter.empty else f", {scalar.default!r} unless given"
    return kind + default


def _result(output: Output) -> str:
    dtype = (
        "dtype of " + output.dtype.replace(" or ", ", or of ")
        if isinstance(output.dtype, str)
        else str(output.dtype).removeprefix("torch.")
    )
    return f"[{', '.join(output.dims)}] {dtype}"
