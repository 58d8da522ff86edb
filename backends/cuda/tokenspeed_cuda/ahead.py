"""Compiles what calls of a kernel in CUDA C++ would launch, for any arch; some launch Triton kernels beside."""

from collections.abc import Sequence

from tokenspeed_cuda.launch import Entry, planned_for
from tokenspeed_kernels.triton.ahead import described
from tokenspeed_kernels.triton.offline import offline
from tokenspeed_kernels.triton.resources import cubin_resources
from tokenspeed_registry import Kernel
from tokenspeed_registry.compiled import Compiled, KernelCall
from tokenspeed_registry.platform import Platform


def compile_calls(kernel: Kernel, platform: Platform, calls: Sequence[KernelCall]) -> list[Compiled]:
    """See `tokenspeed_registry.compiled`. Raises what NVRTC and Triton do."""
    with planned_for(platform.arch) as entries, offline(platform) as launches:
        for args, kwargs in calls:
            kernel.function(*args, **kwargs)
    return [*(_described(entry) for entry in entries), *(described(launch) for launch in launches)]


def _described(entry: Entry) -> Compiled:
    used = cubin_resources(entry.cubin, entry.name, entry.shared)
    config = " ".join([entry.name, *(f"{name}={value}" for name, value in entry.macros.items())])
    return Compiled(config, used.registers, used.spills, used.shared_bytes, used.instructions)
