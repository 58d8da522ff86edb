"""FlashInfer: the gated delta rule in CuTe, float32 state, and MLA decode (its FlashAttention-3 kernel).

At decode it takes projections of the gates in bfloat16, so it differs from us by their rounding and is not compared.
"""

import functools
import importlib.util
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernels.benchmark.peers import Adapter, PeerCall

from . import _bare, _gates

NAME = "FlashInfer"


def available() -> str | None:
    if importlib.util.find_spec("flashinfer") is None and (reason := _bare.missing("flashinfer")):
        return reason
    _bare.on_path()
    return None if importlib.util.find_spec("cutlass") else "nvidia-cutlass-dsl is not installed"


def version() -> str:
    return _bare.version("flashinfer-python")


def adapters() -> dict[str, Adapter]:
    return {
        "gdn_decode": gdn_decode,
        "gdn_verify": gdn_verify,
        "gdn_verify_replay": gdn_verify_replay,
        "gdn_prefill": functools.partial(gdn_prefill, use_cp="auto"),
        "mla_decode": mla_decode,
    }


def gdn_decode(a: Mapping[str, Any]) -> PeerCall | None:
    """Its states lie in the order of the batch; ours are picked from the pool."""
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

    if not _fits(a):
        return None
    state = a["state"][a["slots"].long()].clone()
    gates = _gates.projections(a["g"][:, None], a["beta"][:, None], torch.bfloat16)
    q, k, v = (a[name][:, None].contiguous() for name in ("q", "k", "v"))

    def run() -> Any:
        return gated_delta_rule_decode_pretranspose(
            q, k, v, state, gates["A_log"], gates["a"], gates["dt_bias"], gates["b"], scale=a["scale"],
            use_qk_l2norm=True, backend="flashinfer",
        )  # fmt: skip

    return PeerCall(run)


def gdn_verify(a: Mapping[str, Any]) -> PeerCall | None:
    batch, q_len = a["v"].shape[:2]
    return _verify(a, a["initial_slots"], torch.empty(batch, q_len, *a["state"].shape[1:], device=a["v"].device))


def gdn_verify_replay(a: Mapping[str, Any]) -> PeerCall | None:
    """State only read; nothing is replayed."""
    return _verify(a, a["slots"], None)


def _verify(a: Mapping[str, Any], slots: Tensor, kept: Tensor | None) -> PeerCall | None:
    from flashinfer.gdn_decode import gated_delta_rule_mtp

    if not _fits(a):
        return None
    gates = _gates.projections(a["g"], a["beta"], torch.bfloat16)
    q, k, v = (a[name].contiguous() for name in ("q", "k", "v"))

    def run() -> Any:
        return gated_delta_rule_mtp(
            q, k, v, a["state"], slots, gates["A_log"], gates["a"], gates["dt_bias"], gates["b"], scale=a["scale"],
            intermediate_states_buffer=kept, disable_state_update=True, use_qk_l2norm=True,
        )  # fmt: skip

    return PeerCall(run)


def gdn_prefill(a: Mapping[str, Any], use_cp: Any) -> PeerCall | None:
    """`use_cp`: whether it splits sequences, so that few of them occupy the whole device."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    slots = a["slots"].long()
    if not _fits(a) or bool((slots < 0).any()):
        return None
    initial = a["state"][slots].where(~a["fresh"][:, None, None, None], 0.0).contiguous()
    final = torch.empty_like(initial)
    q, k, v, g, beta = (a[name].contiguous() for name in ("q", "k", "v", "g", "beta"))
    bounds = a["cu_seqlens"].long()

    def run() -> Any:
        return chunk_gated_delta_rule(
            q, k, v, g, beta, scale=a["scale"], initial_state=initial, output_final_state=True, output_state=final,
            cu_seqlens=bounds, use_qk_l2norm_in_kernel=True, use_cp=use_cp, gate_domain="log",
            backend="auto" if use_cp else "flashinfer",
        )  # fmt: skip

    def outputs(returned: Any) -> dict[str, Tensor]:
        after = a["state"].clone()
        after[slots] = final
        return {"o": returned[0], "state": after}

    return PeerCall(run, outputs)


def mla_decode(a: Mapping[str, Any]) -> PeerCall | None:
    """Planned outside the timed region, as its callers plan once for all layers of a step."""
    import flashinfer.mla

    q, cache, latent = a["q"], a["kv_cache"], a["latent"]
    batch, q_len, heads, width = q.shape
    lengths = a["seq_lens"].tolist()
    if q.dtype != torch.bfloat16 or cache.dtype != q.dtype or (latent, width - latent) != (512, 64) or min(lengths) < 1:
        return None
    page = cache.shape[1]
    pages = [-(-length // page) for length in lengths]
    starts = torch.tensor([0, *itertools.accumulate(pages)], dtype=torch.int32, device=q.device)
    listed = torch.cat([row[:count] for row, count in zip(a["page_table"], pages, strict=True)])
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(_workspace(q.device), backend="fa3")
    wrapper.plan(
        torch.arange(0, (batch + 1) * q_len, q_len, dtype=torch.int32, device=q.device), starts, listed, a["seq_lens"],
        heads, latent, width - latent, page, True, a["scale"], q.dtype, cache.dtype,
    )  # fmt: skip
    nope, rope = (part.flatten(0, 1).contiguous() for part in q.split([latent, width - latent], -1))
    values, keys = cache.split([latent, width - latent], -1)
    out = torch.empty_like(nope)

    def run() -> Tensor:
        wrapper.run(q_nope=nope, q_pe=rope, ckv_cache=values, kpe_cache=keys, out=out)
        return out

    return PeerCall(run, lambda returned: {"attended": returned.view(batch, q_len, heads, latent)})


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    """Calls come one after another: all may share it."""
    return torch.empty(512 << 20, dtype=torch.uint8, device=device)


def _fits(a: Mapping[str, Any]) -> bool:
    return a["state"].dtype == torch.float32 and a["q"].dtype == torch.bfloat16 and bool(a["normalise"])
