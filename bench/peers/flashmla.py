"""FlashMLA, as vllm builds it: MLA decode in bfloat16 on Hopper, with the plan that it makes on the device.

The plan depends on lengths alone and is made outside the timed region, as its callers do once for all layers of a step.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tokenspeed_kernels.benchmark.peers import Adapter, PeerCall

from . import _bare

NAME = "FlashMLA"


def available() -> str | None:
    return _bare.missing("vllm_so/_flashmla_C.abi3.so")


def version() -> str:
    return f"vllm {_bare.version('vllm')}"


def adapters() -> dict[str, Adapter]:
    torch.ops.load_library(str(_bare.folder()) + "/vllm_so/_flashmla_C.abi3.so")  # type: ignore[no-untyped-call]
    return {"mla_decode": mla_decode}


def mla_decode(a: Mapping[str, Any]) -> PeerCall | None:
    q, cache = a["q"], a["kv_cache"]
    if (
        q.dtype != torch.bfloat16
        or cache.dtype != q.dtype
        or (q.shape[3], a["latent"], cache.shape[1]) != (576, 512, 64)
    ):
        return None
    pages = cache.unsqueeze(2)
    fixed = pages, a["latent"], a["seq_lens"], a["page_table"], a["scale"], True
    *_, plan, splits = torch.ops._flashmla_C.dense_decode_fwd(q, *fixed, None, None, None)

    def run() -> Any:
        return torch.ops._flashmla_C.dense_decode_fwd(q, *fixed, plan, splits, None)

    return PeerCall(run, lambda returned: {"attended": returned[0]})
