"""FlashQLA: prefill of the gated delta rule, written in TileLang."""

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernels.benchmark.peers import Adapter, PeerCall

from . import _bare

NAME = "FlashQLA"


def available() -> str | None:
    if importlib.util.find_spec("flash_qla") is None and (reason := _bare.missing("flash_qla")):
        return reason
    _bare.on_path()
    return None if importlib.util.find_spec("tilelang") else "tilelang is not installed"


def version() -> str:
    return _bare.version("flash-qla")


def adapters() -> dict[str, Adapter]:
    return {"gdn_prefill": gdn_prefill}


def gdn_prefill(a: Mapping[str, Any]) -> PeerCall | None:
    """Its states lie in the order of the sequences; ours are picked from the pool."""
    import flash_qla

    slots = a["slots"].long()
    if (
        a["state"].dtype != torch.float32
        or a["q"].dtype != torch.bfloat16
        or not a["normalise"]
        or bool((slots < 0).any())
    ):
        return None
    initial = a["state"][slots].where(~a["fresh"][:, None, None, None], 0.0).contiguous()
    q, k, v, g = (a[name].unsqueeze(0).contiguous() for name in ("q", "k", "v", "g"))
    beta, bounds = a["beta"].unsqueeze(0).float().contiguous(), a["cu_seqlens"].int()

    def run() -> Any:
        return flash_qla.chunk_gated_delta_rule(
            q, k, v, g, beta, scale=a["scale"], initial_state=initial, output_final_state=True,
            use_qk_l2norm_in_kernel=True, cu_seqlens=bounds, state_v_first=True,
        )  # fmt: skip

    def outputs(returned: Any) -> dict[str, Tensor]:
        after = a["state"].clone()
        after[slots] = returned[1]
        return {"o": returned[0][0], "state": after}

    return PeerCall(run, outputs)
