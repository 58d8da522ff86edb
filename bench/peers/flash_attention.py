"""FlashAttention-3, as vllm builds it: MLA decode over a paged cache, and prefill of heads 192 wide with values of 128.

Decode is planned outside the timed region, as its callers do once for all layers of a step.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernels.benchmark.peers import Adapter, PeerCall

from . import _bare

NAME = "FlashAttention-3"


def available() -> str | None:
    return _bare.missing("vllm_so/_vllm_fa3_C.abi3.so")


def version() -> str:
    return f"vllm {_bare.version('vllm')}"


def adapters() -> dict[str, Adapter]:
    torch.ops.load_library(str(_bare.folder()) + "/vllm_so/_vllm_fa3_C.abi3.so")  # type: ignore[no-untyped-call]
    return {"mla_decode": mla_decode, "mla_prefill": mla_prefill}


def mla_decode(a: Mapping[str, Any]) -> PeerCall | None:
    q, cache, latent, lengths = a["q"], a["kv_cache"], a["latent"], a["seq_lens"]
    batch, q_len, heads, width = q.shape
    page = cache.shape[1]
    if q.dtype != torch.bfloat16 or cache.dtype != q.dtype or (width, latent) != (576, 512):
        return None
    longest = a["page_table"].shape[1] * page
    bounds = torch.arange(0, (batch + 1) * q_len, q_len, dtype=torch.int32, device=q.device)
    nope, rope = (part.flatten(0, 1).contiguous() for part in q.split([latent, width - latent], -1))
    values, keys = (part.unsqueeze(2) for part in cache.split([latent, width - latent], -1))
    plan = torch.ops._vllm_fa3_C.get_scheduler_metadata(
        batch, q_len, longest, heads, 1, width - latent, latent, q.dtype, lengths, bounds, None, None, None, None,
        page, 0, True, -1, -1, False, 0, None, 0,
    )  # fmt: skip

    def run() -> Any:
        return _forward(
            rope, keys, values, nope, bounds, None, lengths, q_len, longest, a["page_table"], a["scale"], True, plan, 0
        )

    return PeerCall(run, lambda returned: {"attended": returned[0].view(batch, q_len, heads, latent)})


def mla_prefill(a: Mapping[str, Any]) -> PeerCall | None:
    q, k, v = (a[name].contiguous() for name in ("q", "k", "v"))
    if q.dtype != torch.bfloat16 or (q.shape[2], v.shape[2]) != (192, 128):
        return None
    bounds_q, bounds_k = a["cu_seqlens_q"], a["cu_seqlens_k"]
    most_q, most_k = (int(each.diff().max()) for each in (bounds_q, bounds_k))

    def run() -> Any:
        return _forward(
            q, k, v, None, bounds_q, bounds_k, None, most_q, most_k, None, a["scale"], a["causal"], None, 1
        )  # fmt: skip

    return PeerCall(run, lambda returned: {"attended": returned[0], "lse": returned[1].T})


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_v: Tensor | None,
    bounds_q: Tensor,
    bounds_k: Tensor | None,
    lengths: Tensor | None,
    longest_q: int,
    longest_k: int,
    pages: Tensor | None,
    scale: float,
    causal: bool,
    plan: Tensor | None,
    splits: int,
) -> Any:
    return torch.ops._vllm_fa3_C.fwd(
        q, k, v, None, None, q_v, None, bounds_q, bounds_k, None, None, lengths, longest_q, longest_k, pages, None,
        None, None, None, None, None, None, None, scale, causal, -1, -1, 0.0, True, plan, splits, None, 0, None, 1, 0,
        None,
    )  # fmt: skip
