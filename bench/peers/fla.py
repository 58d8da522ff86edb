"""flash-linear-attention (fla-core): recurrent and chunked gated delta rule, float32 state."""

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernels.benchmark.peers import Adapter, PeerCall

from . import _bare

NAME = "FLA"


def available() -> str | None:
    if importlib.util.find_spec("fla") is None and (reason := _bare.missing("fla")):
        return reason
    return None


def version() -> str:
    return _bare.version("fla-core")


def adapters() -> dict[str, Adapter]:
    _bare.on_path()
    return {"gdn_decode": gdn_decode, "gdn_verify_replay": gdn_verify_replay, "gdn_prefill": gdn_prefill}


def gdn_decode(a: Mapping[str, Any]) -> PeerCall | None:
    """It returns the new states in tensors of its own; ours are read in place."""
    return _recurrent(a, {name: a[name][:, None] for name in ("q", "k", "v", "g", "beta")})


def gdn_verify_replay(a: Mapping[str, Any]) -> PeerCall | None:
    """It keeps the last state, ours only reads; it replays nothing, so its outputs are not compared."""
    return _recurrent(a, {name: a[name] for name in ("q", "k", "v", "g", "beta")}, compared=False)


def _recurrent(a: Mapping[str, Any], inputs: Mapping[str, Tensor], compared: bool = True) -> PeerCall | None:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    slots = a["slots"].long()
    if a["state"].dtype != torch.float32 or bool((slots < 0).any()):
        return None
    state = a["state"][slots].clone()

    def run() -> Any:
        return fused_recurrent_gated_delta_rule(
            **inputs,
            scale=a["scale"],
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=a["normalise"],
            state_v_first=True,
        )

    def outputs(returned: Any) -> dict[str, Tensor]:
        after = a["state"].clone()
        after[slots] = returned[1]
        return {"o": returned[0][:, 0], "state": after}

    return PeerCall(run, outputs if compared else None)


def gdn_prefill(a: Mapping[str, Any]) -> PeerCall | None:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    slots = a["slots"].long()
    if a["state"].dtype != torch.float32 or bool((slots < 0).any()):
        return None
    initial = a["state"][slots].where(~a["fresh"][:, None, None, None], 0.0).contiguous()
    several = len(slots) > 1
    bounds = {"cu_seqlens": a["cu_seqlens"].long(), "cu_seqlens_cpu": a["cu_seqlens"].long().cpu()} if several else {}
    inputs = {name: a[name][None].contiguous() for name in ("q", "k", "v", "g", "beta")}

    def run() -> Any:
        return chunk_gated_delta_rule(
            **inputs,
            scale=a["scale"],
            initial_state=initial,
            output_final_state=True,
            use_qk_l2norm_in_kernel=a["normalise"],
            state_v_first=True,
            **bounds,
        )

    def outputs(returned: Any) -> dict[str, Tensor]:
        after = a["state"].clone()
        after[slots] = returned[1]
        return {"o": returned[0][0], "state": after}

    return PeerCall(run, outputs)
