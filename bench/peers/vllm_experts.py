"""vllm's experts at decode: its Triton kernel with FP8 blocks, and Marlin with 4-bit weights.

Marlin's 4-bit integers with groups of 128 stand for our NVFP4: 8% fewer weight bytes, other numbers, so its results
are not compared. Between its two products both run our `silu_mul`; vllm's tuned tile sizes are not searched. Its
library is `vllm_so/_moe_C_stable_libtorch.abi3.so`; `vllm_moe_kernels.py` holds the functions
`invoke_fused_moe_triton_kernel` and `_per_token_group_quant_fp8` of vllm with what they call.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernels.benchmark.peers import Adapter, PeerCall

from . import _bare

NAME = "vllm experts"
U4B8 = 1125899907892224
"""Its code for 4-bit integers stored with a bias of 8."""
GROUP = 128


def available() -> str | None:
    return _bare.missing("vllm_so/_moe_C_stable_libtorch.abi3.so") or _bare.missing("vllm_moe_kernels.py")


def version() -> str:
    return _bare.version("vllm")


def adapters() -> dict[str, Adapter]:
    folder = _bare.folder()
    torch.ops.load_library(str(folder) + "/vllm_so/_moe_C_stable_libtorch.abi3.so")  # type: ignore[no-untyped-call]
    _bare.on_path()
    return {"moe_experts": bfloat16, "moe_experts_fp8_block": fp8, "moe_experts_nvfp4": marlin}


def _silu_mul(gate_up: Tensor) -> Tensor:
    from tokenspeed_kernels.moe import silu_mul

    activated: Tensor = silu_mul(gate_up, backend="triton")
    return activated


def _align(ids: Tensor, block: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    most = min(ids.numel() * block, ids.numel() + experts * (block - 1))
    sizes = most, -(-most // block), 1
    rows, owners, count = (torch.empty(size, dtype=torch.int32, device=ids.device) for size in sizes)
    torch.ops._moe_C.moe_align_block_size(ids, experts, block, rows, owners, count, None, None)
    return rows, owners, count


def bfloat16(a: Mapping[str, Any]) -> PeerCall | None:
    if a["x"].dtype != torch.bfloat16:
        return None
    return _triton(a, a["gate_up"], a["down"], None, None)


def fp8(a: Mapping[str, Any]) -> PeerCall | None:
    """It quantises activations too, so it differs from us by that rounding."""
    experts, _, inter, hidden = a["gate_up"].shape
    scales = a["gate_up_scale"].float().reshape(experts, -1, a["gate_up_scale"].shape[3])
    return _triton(a, a["gate_up"].view(experts, 2 * inter, hidden), a["down"], scales, a["down_scale"].float())


def _triton(
    a: Mapping[str, Any], gate_up: Tensor, down: Tensor, up_scale: Tensor | None, down_scale: Tensor | None
) -> PeerCall | None:
    import triton.language as tl
    import vllm_moe_kernels

    tokens, top_k = a["ids"].shape
    experts, hidden = gate_up.shape[0], a["x"].shape[1]
    if a["first_expert"] != 0 or tokens > 512:
        return None
    narrow = up_scale is not None
    config = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "SPLIT_K": 1}
    config |= {"num_warps": 4, "num_stages": 4}
    if narrow:
        config |= {"BLOCK_SIZE_N": 64 if tokens <= 8 else 128, "GROUP_SIZE_M": 1 if tokens <= 16 else 32}
        config |= {"num_stages": 4 if tokens <= 4 else 3}
    flags = dict.fromkeys(("use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant"), False)
    options = {
        **flags,
        "compute_type": tl.bfloat16,
        "use_fp8_w8a8": narrow,
        "block_shape": [128, 128] if narrow else None,
    }
    few = tokens * top_k * 4 <= experts
    count = torch.full((1,), tokens * top_k * 16, dtype=torch.int32, device=a["x"].device)

    def quantised(x: Tensor) -> tuple[Tensor, Tensor | None]:
        if not narrow:
            return x, None
        codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        scale = torch.empty(x.shape[0], x.shape[1] // GROUP, device=x.device)
        vllm_moe_kernels._per_token_group_quant_fp8[(x.numel() // GROUP,)](
            x, codes, scale, GROUP, x.shape[1], x.stride(0), 1e-10, fp8_min=-448.0, fp8_max=448.0, use_ue8m0=False,
            BLOCK=GROUP, num_warps=1, num_stages=1,
        )  # fmt: skip
        return codes, scale

    def run() -> Tensor:
        rows, owners, used = (None, a["ids"].view(-1), count) if few else _align(a["ids"], 16, experts)
        product = functools.partial(vllm_moe_kernels.invoke_fused_moe_triton_kernel, **options)
        x, scale = quantised(a["x"])
        both = a["x"].new_empty(tokens, top_k, gate_up.shape[1])
        product(x, gate_up, both, scale, up_scale, a["weights"], rows, owners, used, False, top_k, config)
        x, scale = quantised(_silu_mul(both.view(tokens * top_k, -1)))
        parts = a["x"].new_empty(tokens, top_k, hidden)
        product(x, down, parts, scale, down_scale, a["weights"], rows, owners, used, True, 1, config)
        out: Tensor = a["x"].new_empty(tokens, hidden)
        torch.ops._moe_C.moe_sum(parts, out)
        return out

    return PeerCall(run, None if narrow else lambda out: {"y": out})


def marlin(a: Mapping[str, Any]) -> PeerCall | None:
    x, ids = a["x"], a["ids"]
    tokens, top_k = ids.shape
    if x.dtype != torch.bfloat16 or a["first_expert"] != 0 or tokens > 512:
        return None
    experts, _, inter, _ = a["gate_up"].shape
    hidden = x.shape[1]
    weights = _marlin_weights(experts, hidden, inter, x.device)
    block = next((size for size in (8, 16, 32, 48) if tokens * top_k / experts / size < 0.9), 64)

    def product(
        rows: Tensor,
        out: Tensor,
        side: str,
        plan: tuple[Tensor, ...],
        tops: int,
        weighted: bool,
        width: int,
        depth: int,
    ) -> Tensor:
        result: Tensor = torch.ops._moe_C.moe_wna16_marlin_gemm(
            rows, out, weights[side], None, weights[side + "_scale"], None, None, None, weights["workspace"], *plan,
            a["weights"], block, tops, weighted, U4B8, rows.shape[0], width, depth, False, True, False, -1, -1, -1,
        )  # fmt: skip
        return result

    def run() -> Tensor:
        plan = _align(ids, block, experts)
        pairs = tokens * top_k
        both = product(x, x.new_empty(pairs, 2 * inter), "up", plan, top_k, False, 2 * inter, hidden)
        parts = product(_silu_mul(both), x.new_empty(pairs, hidden), "down", plan, 1, True, hidden, inter)
        summed: Tensor = parts.view(tokens, top_k, hidden).sum(1)
        return summed

    return PeerCall(run)


@functools.cache
def _marlin_weights(experts: int, hidden: int, inter: int, device: torch.device) -> dict[str, Tensor]:
    """Random weights in its layout: 4.125 bits each with their scales, far more than a cache holds."""

    def codes(depth: int, width: int) -> Tensor:
        shape = experts, depth // 16, 2 * width
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=device)

    def scales(depth: int, width: int) -> Tensor:
        return torch.rand(experts, depth // GROUP, width, device=device).mul_(0.01).to(torch.bfloat16)

    return {
        "up": codes(hidden, 2 * inter),
        "up_scale": scales(hidden, 2 * inter),
        "down": codes(inter, hidden),
        "down_scale": scales(inter, hidden),
        "workspace": torch.zeros(132 * 4, dtype=torch.int32, device=device),
    }
