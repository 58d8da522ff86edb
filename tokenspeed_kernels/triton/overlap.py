"""Kernels that start while their predecessor still runs, and wait for its end inside: NVIDIA's programmatic dependent
launch, which takes most of the time between two kernels away. Elsewhere kernels follow one another.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed_kernels.triton.device import platform_for


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Lets the next kernel start; what earlier ones wrote can be read from here on."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


def overlapping(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that waits, by `wait_for_predecessor` or by `gdc_wait`."""
    if platform_for(device).vendor == "nvidia" and device.type != "cpu":
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
