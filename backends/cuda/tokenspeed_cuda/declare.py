"""How a kernel of this backend is declared."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tokenspeed_cuda.code import Code
from tokenspeed_registry import Kernel, Op, Priority, arch, kernel
from tokenspeed_registry.constraints import Constraint


def tuned(
    op: Op[..., Any],
    *codes: Code,
    name: str | None = None,
    archs: Iterable[str] = ("sm_90a",),
    dtypes: Mapping[str, Iterable[torch.dtype]] | None = None,
    constraints: Iterable[Constraint] = (),
    priority: int = Priority.TUNED,
) -> Callable[[Callable[..., Any]], Kernel]:
    """Declares the decorated function as a CUDA C++ kernel of `op` that launches entries of `codes`.

    The other arguments are those of `kernel`. The files of `codes`, with all that they include, count as its sources.
    """

    def declare(function: Callable[..., Any]) -> Kernel:
        folder = Path(function.__code__.co_filename).resolve().parent
        files = dict.fromkeys(file for code in codes for file in code.files)
        return kernel(
            op,
            backend="cuda",
            name=name,
            requires=arch(*archs),
            dtypes=dtypes,
            constraints=constraints,
            priority=priority,
            compiler="nvrtc",
            sources=[Path(os.path.relpath(file, folder)).as_posix() for file in files],
        )(function)

    return declare
