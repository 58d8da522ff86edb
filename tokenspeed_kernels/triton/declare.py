"""How a portable kernel is declared."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from tokenspeed_registry import Kernel, Op, Priority, kernel, vendor
from tokenspeed_registry.constraints import Constraint


def portable(
    op: Op[..., Any],
    *,
    name: str | None = None,
    dtypes: Mapping[str, Iterable[torch.dtype]] | None = None,
    constraints: Iterable[Constraint] = (),
) -> Callable[[Callable[..., Any]], Kernel]:
    """Declares the decorated function as the Triton kernel of `op`; the arguments are those of `kernel`."""
    return kernel(
        op,
        backend="triton",
        name=name,
        requires=vendor("nvidia", "amd"),
        dtypes=dtypes,
        constraints=constraints,
        priority=Priority.PORTABLE,
        compiler="triton",
    )
