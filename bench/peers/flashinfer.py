"""FlashInfer 0.7.4: the gated delta rule in CuTe, decode and both ways to verify, float32 state.

It takes gates' projections in bfloat16, so it differs from us by their rounding and is not compared.
"""

import importlib.util
import sys
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
    return None


def adapters() -> dict[str, Adapter]:
    if importlib.util.find_spec("flashinfer") is None:
        sys.path.insert(0, str(_bare.folder()))
    return {"gdn_decode": gdn_decode, "gdn_verify": gdn_verify, "gdn_verify_replay": gdn_verify_replay}


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
            q, k, v, state, gates["A_log"], gates["a"], gates["dt_bias"], gates["b"], use_qk_l2norm=True,
            backend="flashinfer",
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
            q, k, v, a["state"], slots, gates["A_log"], gates["a"], gates["dt_bias"], gates["b"],
            intermediate_states_buffer=kept, disable_state_update=True, use_qk_l2norm=True,
        )  # fmt: skip

    return PeerCall(run)


def _fits(a: Mapping[str, Any]) -> bool:
    return a["state"].dtype == torch.float32 and a["q"].dtype == torch.bfloat16 and bool(a["normalise"])
