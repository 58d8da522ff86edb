"""vllm: its Triton kernels for MLA decode, gated residual and n-grams.

On Hopper vllm itself would decode MLA by FlashMLA or FlashAttention-3, which are no Triton kernels.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed_kernels.benchmark.peers import Adapter, PeerCall

from . import _bare

NAME = "vllm (Triton)"


def available() -> str | None:
    return _bare.missing("vllm")


def version() -> str:
    return _bare.version("vllm")


def adapters() -> dict[str, Adapter]:
    prepare()
    return {"mla_decode": mla_decode, "residual_inject_mix": residual_inject_mix, "ngram_embed": ngram_embed}


def prepare() -> None:
    """Lets its single modules be imported."""
    if "vllm" in sys.modules:
        return
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    class Capability(tuple[int, int]):
        major, minor = torch.cuda.get_device_capability()

        def to_int(self) -> int:
            return self.major * 10 + self.minor

    class Platform:
        """Yes to what a Hopper card is asked, no to all else."""

        def __getattr__(self, name: str) -> Any:
            if name == "get_device_capability":
                return lambda *args: Capability(torch.cuda.get_device_capability())
            return lambda *args, **kwargs: (
                name
                in (
                    "is_cuda",
                    "is_cuda_alike",
                    "is_arch_support_pdl",
                    "has_device_capability",
                )
            )

    for part in (
        "v1.attention.ops",
        "v1.attention.backends",
        "models.qwen4_exp.nvidia.ops.cute_dsl",
        "models.qwen4_exp.common.ops",
        "model_executor.layers",
        "model_executor.kernels.linear",
    ):
        _bare.bare(f"vllm.{part}")
    _bare.stand_in("vllm.platforms", current_platform=Platform(), __path__=[])
    _bare.stand_in("vllm.triton_utils", tl=tl, triton=triton, HAS_TRITON=True, tldevice=libdevice)
    _bare.stand_in("vllm.envs", VLLM_BATCH_INVARIANT=False, __getattr__=lambda name: None)
    _bare.stand_in("vllm.logger", init_logger=_bare.quiet_logger)
    _bare.stand_in("vllm.v1.attention.backends.utils", NULL_BLOCK_ID=0, PAD_SLOT_ID=-1)
    _bare.stand_in("vllm.model_executor.layers.batch_invariant", vllm_is_batch_invariant=lambda: False)


def mla_decode(a: Mapping[str, Any]) -> PeerCall | None:
    """Its Triton kernel takes one query a sequence: rows of a verify become sequences."""
    import triton
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    q, cache = a["q"], a["kv_cache"]
    batch, q_len, heads, _ = q.shape
    latent, device, rows = a["latent"], q.device, batch * q_len
    longest = a["page_table"].shape[1] * cache.shape[1]
    splits = min(triton.next_power_of_2(max(1, longest // 512)), 264)
    if q.dtype != torch.bfloat16 or cache.dtype != q.dtype or rows * heads * splits * (latent + 1) * 4 > 9e9:
        return None
    if 2 * rows * heads * longest * (latent + q.shape[3]) > 3e11:
        return None  # minutes
    partial = torch.empty(rows, heads, splits, latent + 1, device=device)
    lse = torch.empty(rows, heads, dtype=q.dtype, device=device)
    out = torch.empty(rows, heads, latent, dtype=q.dtype, device=device)
    pages = a["page_table"].repeat_interleave(q_len, 0).contiguous()
    steps = torch.arange(q_len, device=device, dtype=torch.int32)
    lengths = (a["seq_lens"][:, None] - q_len + 1 + steps).reshape(-1).contiguous()
    queries, rows_of_cache, one = q.reshape(rows, heads, -1), cache.unsqueeze(2), torch.ones((), device=device)

    def run() -> Tensor:
        decode_attention_fwd(
            queries, rows_of_cache, rows_of_cache[..., :latent], out, lse, pages, lengths, partial, splits, a["scale"],
            cache.shape[1], k_scale=one, v_scale=one, is_mla=True,
        )  # fmt: skip
        return out

    return PeerCall(run, lambda returned: {"attended": returned.view(batch, q_len, heads, latent)})


def residual_inject_mix(a: Mapping[str, Any]) -> PeerCall | None:
    """Triton kernels around two products by cuBLAS."""
    from vllm.models.qwen4_exp.nvidia.ops.hc import hc_silu

    def down(normed: Tensor, weights: Tensor, rank: int, streams: int) -> Tensor:
        low: Tensor = hc_silu(F.linear(normed, weights)[:, :rank], streams)
        return low

    return residual_with(down, a)


def residual_with(down: Callable[[Tensor, Tensor, int, int], Tensor], a: Mapping[str, Any]) -> PeerCall | None:
    """With `down` for the product with the weights that lead down, and its activation."""
    from vllm.models.qwen4_exp.nvidia.ops.hc import hc_combine_norm, hc_gate_mix

    if a["w_down"].dtype != torch.bfloat16 or a["w_inject"].shape[0] == 0:
        return None
    tokens, streams, _ = a["x"].shape
    rank, gates = a["w_down"].shape[0], a["w_inject"].shape[0]
    padding = -(rank + gates) % 16
    weights = F.pad(torch.cat([a["w_down"], a["w_inject"]]), (0, 0, 0, padding))
    x, norm = a["x"].view(tokens, -1), a["norm_weight"].reshape(-1)
    logits = (streams * torch.logit((a["inject"] / 2).clamp(1e-6, 1 - 1e-6))).to(x.dtype)

    def run() -> Any:
        combined, normed = hc_combine_norm(x, a["y"], logits, norm, a["eps"], streams)
        low = down(normed, weights, rank, streams)
        return combined, hc_gate_mix(normed, F.linear(low, a["w_up"]), streams)

    return PeerCall(run, lambda out: {"mixed": out[1], "x": out[0].view(a["x"].shape)})


def ngram_embed(a: Mapping[str, Any]) -> PeerCall | None:
    """Its hash in one kernel, the lookup by torch."""
    from vllm.models.qwen4_exp.common.ops.ple import ple_ngram_ids

    table, scale = a["table"], a["scale"]
    if table.dtype != torch.float8_e4m3fn or scale is None or scale.numel() != 1 or a["first_row"] is not None:
        return None
    ids = a["ids"].to(torch.int32)
    heads = a["moduli"].shape[0] // (a["multipliers"].shape[0] - 1)
    narrow = scale.to(a["dtype"])

    def run() -> Tensor:
        rows = ple_ngram_ids(
            ids, a["cu_seqlens"], a["context"], a["multipliers"], a["moduli"], a["offsets"], a["eos"], heads
        )
        embedded: Tensor = F.embedding(rows, table).to(a["dtype"]) * narrow
        return embedded.flatten(-2)

    return PeerCall(run, lambda out: {"embedding": out.view(ids.shape[0], -1)})
