"""FlashInfer's prefill of the gated delta rule told not to split sequences: which of the two is faster varies."""

import functools

from tokenspeed_kernels.benchmark.peers import Adapter

from . import flashinfer

NAME = "FlashInfer (sequences whole)"
available = flashinfer.available
version = flashinfer.version


def adapters() -> dict[str, Adapter]:
    return {"gdn_prefill": functools.partial(flashinfer.gdn_prefill, use_cp=False)}
