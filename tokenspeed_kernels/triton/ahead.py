"""Compiles what calls of a Triton kernel would launch, for any arch."""

from collections.abc import Sequence
from typing import Any

from tokenspeed_kernels.triton.offline import offline
from tokenspeed_kernels.triton.resources import resources
from tokenspeed_registry import Kernel
from tokenspeed_registry.compiled import Compiled, KernelCall
from tokenspeed_registry.platform import Platform


def compile_calls(kernel: Kernel, platform: Platform, calls: Sequence[KernelCall]) -> list[Compiled]:
    """See `tokenspeed_registry.compiled`. Raises what Triton's compiler raises."""
    with offline(platform) as launches:
        for args, kwargs in calls:
            kernel.function(*args, **kwargs)
    return [described(launch) for launch in launches]


def described(launch: Any) -> Compiled:
    """Of a launch that `offline` collected."""
    used = resources(launch)
    return Compiled(_config(launch), used.registers, used.spills, used.shared_bytes, used.instructions)


def _config(launch: Any) -> str:
    """Entry point, dtypes of pointers, constexprs, warps and stages, in the order of the kernel's parameters."""
    names = launch.src.fn.arg_names
    constants = {names[path[0]]: value for path, value in launch.src.constants.items() if len(path) == 1}
    words = [launch.metadata.name]
    for name, kind in launch.src.signature.items():
        if name in constants:
            words.append(f"{name}={constants[name]}")
        elif str(kind).startswith("*"):
            words.append(f"{name}:{kind}")
    return " ".join([*words, f"num_warps={launch.metadata.num_warps}", f"num_stages={launch.metadata.num_stages}"])
