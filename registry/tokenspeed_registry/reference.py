"""Makes a contract's own body a kernel, so that an op without any other still answers, slowly and exactly.

The body returns float64 or float32; the kernel rounds once to the dtypes that the contract promises.
"""

from typing import Any

import torch

from tokenspeed_registry.contract import Contract
from tokenspeed_registry.kernel import Kernel, Priority
from tokenspeed_registry.validation import output_dtype


def as_kernel(contract: Contract) -> Kernel:
    """The `reference` kernel of an op. It may read index tensors on the host, so graphs cannot capture it."""
    names = [parameter.name for parameter in contract.parameters]

    def run(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        results = contract.reference(*args, **kwargs)
        if not contract.outputs:
            return None
        results = results if isinstance(results, tuple) else (results,)
        dtypes = {name: value.dtype for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        rounded = tuple(
            result.to(output_dtype(output, dtypes, arguments)).contiguous()
            for output, result in zip(contract.outputs, results, strict=True)
        )
        final = rounded if len(rounded) > 1 else rounded[0]
        return final if out is None else copy_into(out, final)

    name = f"reference.{contract.name}"
    return Kernel(name, contract.name, "reference", run, priority=Priority.REFERENCE, graph_capturable=False)


def copy_as_promised(out: Any, result: Any) -> Any:
    """`copy_into` for a caller's `out` that was not validated: refuses what a copy would silently cast or broadcast."""
    pairs = zip(out, result, strict=True) if isinstance(out, tuple) else [(out, result)]
    for target, source in pairs:
        if target.dtype != source.dtype or target.shape != source.shape:
            raise ValueError(
                f"out: expected {source.dtype} {tuple(source.shape)}, got {target.dtype} {tuple(target.shape)}"
            )
    return copy_into(out, result)


def copy_into(out: Any, result: Any) -> Any:
    """Copies an op's result or results into the caller's tensors and returns those."""
    if isinstance(out, tuple):
        for target, source in zip(out, result, strict=True):
            target.copy_(source)
    else:
        out.copy_(result)
    return out
