"""Speculative verify of the gated delta rule.

`gdn_verify` is decode with more tokens. `gdn_verify_replay` brings a tile up to date in registers and goes on from
there, so that it writes a state only where it folds. There the new keys and gates go to rows of the buffers that
programs of other tiles still read: a second launch brings them, once all have read. All else the first one writes.
"""

import torch
import triton
from torch import Tensor

from tokenspeed_kernels import gdn_speculative
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.gdn_recurrent import advance
from tokenspeed_kernels.triton.gdn_replay import fold, keep_after_fold, verify_replay
from tokenspeed_kernels.triton.gdn_tile import chunks_of, few_batches, tile, tile_space
from tokenspeed_kernels.triton.overlap import overlapping
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry import Dim
from tokenspeed_registry.platform import Platform

_FEW = 4
"""Batches up to this leave registers to spare, with which to wait once for all tokens."""


def _asking_ahead(dims: Dims) -> list[Config]:
    """Tiles of at most 2048 elements a warp: larger ones leave no registers to ask ahead with."""
    most = 2048 // triton.next_power_of_2(dims["d_k"])
    small = [each for each in tile_space(dims) if each["num_warps"] < 4 and each["ROWS"] <= most * each["num_warps"]]
    return [{**each, "AHEAD": ahead} for ahead in sorted({1, min(dims["q_len"], 4)}) for each in small]


def _replay_space(dims: Dims) -> list[Config]:
    if dims["batch"] <= _FEW:
        return _asking_ahead(dims)
    return [{**each, "AHEAD": 0} for each in tile_space(dims)]


def _default_replay(platform: Platform, dims: Dims) -> Config:
    """Small tiles fill a chip with one request; large ones do what every tile does, such as the norms, less often."""
    if dims["batch"] <= _FEW:
        return {**tile(dims, 2048, 2), "AHEAD": min(dims["q_len"], 4)}
    return {**tile(dims, 2048 if dims["batch"] < 32 else 4096, 1), "AHEAD": 0}


def _default_verify(platform: Platform, dims: Dims) -> Config:
    return {**tile(dims, 1024, 1), "AHEAD": min(dims["q_len"], 4)}


VERIFY = Tunable("gdn_verify", _asking_ahead, _default_verify)
REPLAY = Tunable("gdn_verify_replay", _replay_space, _default_replay)
FOLD = Tunable("gdn_fold", tile_space, lambda platform, dims: tile(dims, 2048, 1))


@portable(gdn_speculative.gdn_verify, constraints=[Dim("d_k") >= 1])
def gdn_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    initial_slots: Tensor,
    slots: Tensor,
    *,
    scale: float,
    normalise: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    batch, q_len, v_heads, d_v = v.shape
    if out.numel():
        config = VERIFY.pick(v.device, batch=few_batches(batch), q_len=q_len, v_heads=v_heads, d_k=k.shape[3], d_v=d_v)
        advance(q, k, v, g, beta, state, initial_slots, slots, out, scale=scale, normalise=normalise, config=config)
    return out


_SIZES = [Dim(name) >= 1 for name in ("v_heads", "d_k", "d_v")]


@portable(gdn_speculative.gdn_verify_replay, constraints=_SIZES)
def gdn_verify_replay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    kept_k: Tensor,
    kept_v: Tensor,
    kept_g: Tensor,
    kept_beta: Tensor,
    slots: Tensor,
    kept: Tensor,
    *,
    scale: float,
    normalise: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    batch, q_len, v_heads, d_v = v.shape
    capacity, k_heads, d_k = kept_k.shape[1:]
    if out.numel() == 0:
        return out
    config = REPLAY.pick(v.device, batch=few_batches(batch), q_len=q_len, v_heads=v_heads, d_k=d_k, d_v=d_v)
    pdl = overlapping(v.device)
    verify_replay[(batch * v_heads * triton.cdiv(d_v, config["ROWS"]),)](
        q,
        k,
        v,
        g,
        beta,
        state,
        kept_k,
        kept_v,
        kept_g,
        kept_beta,
        slots,
        kept,
        out,
        scale,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        q_len,
        capacity,
        v_heads,
        v_heads // k_heads,
        d_k,
        d_v,
        *chunks_of(d_k, state, width=128),
        normalise,
        **config,
        **pdl,
    )
    keep_after_fold[(batch * q_len,)](
        k,
        g,
        beta,
        kept_k,
        kept_g,
        kept_beta,
        slots,
        kept,
        *k.stride()[:3],
        q_len,
        capacity,
        k_heads,
        v_heads,
        d_k,
        triton.next_power_of_2(k_heads * d_k),
        triton.next_power_of_2(v_heads),
        **pdl,
    )
    return out


@portable(gdn_speculative.gdn_fold, constraints=[Dim("d_k") >= 1])
def gdn_fold(
    state: Tensor,
    kept_k: Tensor,
    kept_v: Tensor,
    kept_g: Tensor,
    kept_beta: Tensor,
    slots: Tensor,
    kept: Tensor,
    *,
    normalise: bool = True,
) -> None:
    batch = slots.shape[0]
    capacity, k_heads, d_k = kept_k.shape[1:]
    v_heads, d_v = kept_v.shape[2:]
    if batch == 0 or kept_v.numel() == 0 or state.numel() == 0:
        return
    config = FOLD.pick(state.device, batch=few_batches(batch), v_heads=v_heads, d_k=d_k, d_v=d_v)
    fold[(batch * v_heads * triton.cdiv(d_v, config["ROWS"]),)](
        state,
        kept_k,
        kept_v,
        kept_g,
        kept_beta,
        slots,
        kept,
        capacity,
        v_heads,
        v_heads // k_heads,
        d_k,
        d_v,
        *chunks_of(d_k, state),
        normalise,
        **config,
    )
