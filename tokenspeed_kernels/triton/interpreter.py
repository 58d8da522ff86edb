"""Which cases a kernel is checked on in Triton's interpreter (`TRITON_INTERPRET=1`), on CPU tensors.

The interpreter takes milliseconds a program instance, truncates where it stores bfloat16 and rounds to float8 in its
own way: so small cases only, whose results are float32 or float16. The rest is the device's to prove.
"""

from collections.abc import Iterable

import torch

from tokenspeed_registry import Contract, Kernel
from tokenspeed_registry.cases import Case, case_set
from tokenspeed_registry.signature import Signature

EXACT = (torch.float32, torch.float16, torch.int32, torch.int64, torch.bool, torch.uint8)
LARGEST = 1 << 17
"""Elements of all tensors together."""


def interpretable(kernel: Kernel) -> bool:
    """Whether the kernel can run on CPU tensors: one that needs a table in host memory beside a device cannot."""
    return not kernel.on_host


def interpretable_cases(contract: Contract, limit: int | None = None) -> list[Case]:
    """The op's own cases that the interpreter can judge, smallest first; at most `limit` of them."""
    source = case_set(contract)
    sized = [
        (_size(signature), case)
        for case in source.cases()
        if _exact(contract, signature := source.signature(contract, case))
    ]
    fitting = [case for size, case in sorted(sized, key=lambda item: item[0]) if size <= LARGEST]
    return fitting if limit is None else _spread(fitting, limit)


def _exact(contract: Contract, signature: Signature) -> bool:
    """Whether what the interpreter does wrong is not in it: bfloat16 anywhere, float8 in what is written."""
    written = {output.name for output in contract.outputs} | set(contract.mutates)
    exact = (dtype in EXACT for role, dtype in signature.dtypes.items() if role in written)
    return torch.bfloat16 not in signature.dtypes.values() and all(exact)


def _size(signature: Signature) -> int:
    return sum(signature.numel(role) for role in signature.dtypes)


def _spread(cases: Iterable[Case], limit: int) -> list[Case]:
    """Cases that between them take as many values of as many parameters as `limit` of them can."""
    left, seen, chosen = list(cases), set[tuple[str, str]](), list[Case]()
    while left and len(chosen) < limit:
        best = max(left, key=lambda case: len(_values(case) - seen))
        left.remove(best)
        seen |= _values(best)
        chosen.append(best)
    return chosen


def _values(case: Case) -> set[tuple[str, str]]:
    return {(name, str(value)) for name, value in case.params.items()}
