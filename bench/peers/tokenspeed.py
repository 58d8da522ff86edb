"""tokenspeed-kernel: its Triton kernels, on the Triton that is installed."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernels.benchmark.peers import Adapter, PeerCall

from . import _bare, _gates

NAME = "tokenspeed-kernel"


def available() -> str | None:
    return _bare.missing("tokenspeed_kernel")


def version() -> str:
    return _bare.version("tokenspeed-kernel")


def adapters() -> dict[str, Adapter]:
    _prepare()
    return {
        "gdn_decode": gdn_decode,
        "gdn_verify": gdn_verify,
        "gdn_verify_replay": gdn_verify_replay,
        "residual_inject_mix": residual_inject_mix,
        "ngram_embed": ngram_embed,
    }


def _prepare() -> None:
    if "tokenspeed_kernel" in sys.modules:
        return
    sys.meta_path.insert(0, _bare.Renamed("tokenspeed_triton", "triton"))
    for part in ("residual", "layernorm", "attention.gdn", "attention._triton", "embedding"):
        _bare.bare(f"tokenspeed_kernel.ops.{part}")

    class Layout(StrEnum):
        NONE = "none"
        FLA = "fla"
        FLASHINFER = "flashinfer"

    @dataclass
    class Result:
        out: object = None
        final_state: object = None
        h: object = None
        h_layout: object = Layout.NONE

    package = sys.modules["tokenspeed_kernel.ops.attention.gdn"]
    vars(package).update(GdnCheckpointLayout=Layout, GdnChunkPrefillResult=Result)


def gdn_decode(a: Mapping[str, Any]) -> PeerCall | None:
    from tokenspeed_kernel.ops.attention.gdn.triton import triton_gdn_decode_step

    if a["state"].dtype != torch.float32 or not a["normalise"]:
        return None
    gates = _gates.projections(a["g"][:, None], a["beta"][:, None])
    q, k, v = (a[name][:, None].contiguous() for name in ("q", "k", "v"))

    def run() -> Any:
        return triton_gdn_decode_step(q, k, v, initial_state=a["state"], initial_state_indices=a["slots"], **gates)

    return PeerCall(run, lambda out: {"o": out.reshape(a["v"].shape), "state": a["state"]})


def gdn_verify(a: Mapping[str, Any]) -> PeerCall | None:
    """Each state kept, in a buffer of its own; ours go to slots of the pool."""
    kept = torch.empty(*a["v"].shape[:2], *a["state"].shape[1:], device=a["v"].device)
    return _verify(a, a["initial_slots"], kept)


def gdn_verify_replay(a: Mapping[str, Any]) -> PeerCall | None:
    """State only read; its outputs are those of a call without tokens to replay, so they are not compared."""
    return _verify(a, a["slots"], None)


def _verify(a: Mapping[str, Any], slots: Tensor, kept: Tensor | None) -> PeerCall | None:
    from tokenspeed_kernel.ops.attention.gdn.triton import triton_gdn_decode_mtp

    if a["state"].dtype != torch.float32 or not a["normalise"]:
        return None
    gates = _gates.projections(a["g"], a["beta"])
    q, k, v = (a[name].contiguous() for name in ("q", "k", "v"))

    def run() -> Any:
        return triton_gdn_decode_mtp(
            q,
            k,
            v,
            initial_state=a["state"],
            initial_state_indices=slots,
            disable_state_update=True,
            intermediate_states_buffer=kept,
            parent_indices=None,
            **gates,
        )

    return PeerCall(run, None if kept is None else lambda out: {"o": out.reshape(a["v"].shape)})


def residual_inject_mix(a: Mapping[str, Any]) -> PeerCall | None:
    from tokenspeed_kernel.ops.layernorm.triton import gated_residual_combine_norm
    from tokenspeed_kernel.ops.residual.triton import triton_hyperconnection_mix

    if a["w_down"].dtype != torch.bfloat16 or a["w_inject"].shape[0] == 0:
        return None
    tokens, streams, hidden = a["x"].shape
    rank = a["w_down"].shape[0]
    x = a["x"].view(tokens, -1)
    weights = torch.cat([a["w_down"], a["w_inject"]])
    norm = a["norm_weight"].reshape(-1)
    # It keeps logits, over the number of streams, where we keep gates.
    logits = torch.logit((a["inject"] / 2).clamp(1e-6, 1 - 1e-6)).to(x.dtype)

    def run() -> Any:
        combined, normed = gated_residual_combine_norm(a["y"], x, logits, norm, hidden, a["eps"], True)
        mixed, inject = triton_hyperconnection_mix(
            normed, weights, a["w_up"], streams, hidden, rank, 1.0 / streams, True
        )
        return combined, mixed, inject

    def outputs(returned: Any) -> dict[str, Tensor]:
        return {"mixed": returned[1], "x": returned[0].view(a["x"].shape)}

    return PeerCall(run, outputs)


def ngram_embed(a: Mapping[str, Any]) -> PeerCall | None:
    """Its hash takes sequences of one length, and products that are not negative."""
    from tokenspeed_kernel.ops.ple import _ple_host_gather_kernel, ple_ngram_ids, prepare_ngram_reciprocals

    lengths = a["cu_seqlens"].diff()
    table, scale = a["table"], a["scale"]
    if table.dtype != torch.float8_e4m3fn or scale is None or scale.numel() != 1 or a["first_row"] is not None:
        return None
    length = int(lengths[0])
    if not bool((lengths == length).all()) or bool((a["multipliers"] < 0).any()):
        return None
    tokens, seqs, device = a["ids"].shape[0], lengths.shape[0], a["ids"].device
    heads, width = a["moduli"].shape[0], table.shape[1]
    reciprocals = prepare_ngram_reciprocals(tuple(a["moduli"].tolist()), device=device)
    ids, raw, factor = a["ids"].contiguous(), table.view(torch.uint8), float(scale)
    work = [torch.empty(size, device=device, dtype=torch.int64) for size in (tokens, tokens, seqs, seqs)]

    def run() -> Tensor:
        rows = ple_ngram_ids(
            ids,
            a["context"],
            *work,
            a["multipliers"],
            a["moduli"],
            a["offsets"],
            ngram_size=a["multipliers"].shape[0],
            heads_per_ngram=heads // (a["multipliers"].shape[0] - 1),
            eos_token_id=a["eos"],
            uniform_length=length,
            mod_reciprocals=reciprocals,
        )[0]
        out = torch.empty(rows.numel(), width, dtype=a["dtype"], device=device)
        _ple_host_gather_kernel[(rows.numel(),)](
            raw.data_ptr(), rows.reshape(-1), factor, out, out, width, 0, raw.shape[0],
            IS_FP8=True, HAS_SCALE=True, ROW_SCALE=False, BLOCK_D=256, num_warps=1,
        )  # fmt: skip
        return out

    return PeerCall(run, lambda out: {"embedding": out.view(tokens, heads * width)})
