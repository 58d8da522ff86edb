"""vllm: its gated residual with the down projection in CuTe, which it takes up to 48 tokens."""

import importlib.util
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tokenspeed_kernels.benchmark.peers import Adapter, PeerCall

from . import _bare, vllm

NAME = "vllm (CuTe)"


def available() -> str | None:
    if reason := vllm.available():
        return reason
    _bare.on_path()
    return None if importlib.util.find_spec("cutlass") else "nvidia-cutlass-dsl is not installed"


def version() -> str:
    return f"{vllm.version()} with nvidia-cutlass-dsl {_bare.version('nvidia-cutlass-dsl')}"


def adapters() -> dict[str, Adapter]:
    vllm.prepare()
    return {"residual_inject_mix": residual_inject_mix}


def residual_inject_mix(a: Mapping[str, Any]) -> PeerCall | None:
    from vllm.models.qwen4_exp.nvidia.ops.cute_dsl.hc_down_silu import MAX_FUSED_M, hc_down_silu

    if a["x"].shape[0] > MAX_FUSED_M:
        return None

    def down(normed: Tensor, weights: Tensor, rank: int, streams: int) -> Tensor:
        low: Tensor = hc_down_silu(normed, weights, rank, streams)[0]
        return low

    return vllm.residual_with(down, a)
