"""Words in device memory by which the blocks of a kernel count themselves."""

import torch
from torch import Tensor

from tokenspeed_cuda.driver import checked, cuda_driver
from tokenspeed_cuda.launch import planned_arch

_words: dict[tuple[int | None, int, str, int, bool], tuple[int, Tensor]] = {}


def counters(device: torch.device, count: int = 256, owner: str = "") -> Tensor:
    """Words [count] of int32 that are zero at first, for kernels that leave what they found.

    An `owner` has words of its own, which need not be left so. Calls of one stream share them: its kernels follow one
    another. A captured graph has its own, zeroed at each replay, since it may run beside other work of the stream that
    it was captured on.
    """
    if planned_arch() is not None:
        return torch.empty(count, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream
    capturing = torch.cuda.is_current_stream_capturing()
    capture = _capture(stream) if capturing else 0
    key = (device.index, stream, owner, count, capturing)
    known = _words.get(key)
    if known is None or known[0] != capture:
        known = _words[key] = capture, torch.zeros(count, dtype=torch.int32, device=device)
    return known[1]


def _capture(stream: int) -> int:
    """The number of the capture that goes on."""
    driver = cuda_driver()
    found = driver.cuStreamGetCaptureInfo(driver.CUstream(stream))
    checked(found[:1], "capture of a graph")
    return int(found[2])
