"""Routing: a program takes a token, holds its experts in registers, and takes the best one `top_k` times.

A value and its place are one 64-bit key: the bits of the float32, made to compare as integers do, above the inverted
place. A maximum of keys is then the best expert, among equals that of the lowest id, whatever order it is taken in.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import moe
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.device import bucket

_GONE = tl.constexpr(-(1 << 63))


@triton.jit
def _keys(values, places):
    """int64 keys of float32 values, of any shape, and their places, 0 to 2^31-1."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # + 0.0: -0 and 0 are equal
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - places).to(tl.int64)


@triton.jit
def _place(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _value(key):
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _route(
    logits_ptr,  # [tokens, EXPERTS]
    weights_ptr,  # [tokens, TOP_K]
    chosen_ptr,  # [tokens, TOP_K]
    logits_stride,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_e, o_k = tl.arange(0, BE), tl.arange(0, BK)
    inside = o_e < EXPERTS
    b_logits = tl.load(logits_ptr + i_token * logits_stride + o_e, mask=inside, other=0.0).to(tl.float32)  # [BE]
    b_keys = tl.where(inside, _keys(b_logits, o_e), _GONE)
    b_best = tl.full([BK], -float("inf"), tl.float32)
    b_chosen = tl.zeros([BK], tl.int32)
    for k in range(TOP_K):
        best = tl.max(b_keys, axis=0)
        b_keys = tl.where(b_keys == best, _GONE, b_keys)
        b_best = tl.where(o_k == k, _value(best), b_best)
        b_chosen = tl.where(o_k == k, _place(best), b_chosen)
    top = tl.max(b_best, axis=0)
    b_weights = tl.exp(b_best - top)
    total = tl.sum(b_weights, axis=0)
    if not RENORMALISE:
        total = tl.sum(tl.where(inside, tl.exp(b_logits - top), 0.0), axis=0)
    p_out = i_token * TOP_K + o_k
    tl.store(weights_ptr + p_out, b_weights / total, mask=o_k < TOP_K)
    tl.store(chosen_ptr + p_out, b_chosen, mask=o_k < TOP_K)


@triton.jit
def _route_grouped(
    logits_ptr,  # [tokens, GROUPS * SIZE]
    bias_ptr,  # [GROUPS * SIZE]
    weights_ptr,  # [tokens, TOP_K]
    chosen_ptr,  # [tokens, TOP_K]
    logits_stride,
    scaling,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BG: tl.constexpr,
    BS: tl.constexpr,
    BK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_g, o_s, o_k = tl.arange(0, BG), tl.arange(0, BS), tl.arange(0, BK)
    inside = (o_g < GROUPS)[:, None] & (o_s < SIZE)[None, :]
    o_e = o_g[:, None] * SIZE + o_s[None, :]
    p_logits = logits_ptr + i_token * logits_stride
    b_scores = tl.sigmoid(tl.load(p_logits + o_e, mask=inside, other=0.0))  # [BG, BS]
    b_choices = b_scores + tl.load(bias_ptr + o_e, mask=inside, other=0.0)
    b_keys = tl.where(inside, _keys(b_choices, o_e), _GONE)
    if TOP_GROUPS < GROUPS:
        b_first = tl.max(b_keys, axis=1)
        b_second = tl.max(tl.where(b_keys == b_first[:, None], _GONE, b_keys), axis=1)
        b_worth = tl.where(o_g < GROUPS, _keys(_value(b_first) + _value(b_second), o_g), _GONE)  # [BG]
        b_kept = o_g < 0
        for _ in range(TOP_GROUPS):
            best = tl.max(b_worth, axis=0)
            b_kept = b_kept | (b_worth == best)
            b_worth = tl.where(b_worth == best, _GONE, b_worth)
        b_keys = tl.where(b_kept[:, None], b_keys, _GONE)
    b_chosen = tl.zeros([BK], tl.int32)
    for k in range(TOP_K):
        best = tl.max(tl.max(b_keys, axis=1), axis=0)
        b_keys = tl.where(b_keys == best, _GONE, b_keys)
        b_chosen = tl.where(o_k == k, _place(best), b_chosen)
    b_weights = tl.sigmoid(tl.load(p_logits + b_chosen, mask=o_k < TOP_K, other=0.0))
    if RENORMALISE:
        b_weights = b_weights / (tl.sum(tl.where(o_k < TOP_K, b_weights, 0.0), axis=0) + 1e-20)
    p_out = i_token * TOP_K + o_k
    tl.store(weights_ptr + p_out, b_weights * scaling, mask=o_k < TOP_K)
    tl.store(chosen_ptr + p_out, b_chosen, mask=o_k < TOP_K)


def _outputs(logits: Tensor, top_k: int, out: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    if out is not None:
        return out
    shape = logits.shape[0], top_k
    return (
        torch.empty(shape, dtype=torch.float32, device=logits.device),
        torch.empty(shape, dtype=torch.int32, device=logits.device),
    )


@portable(moe.moe_route)
def moe_route(
    logits: Tensor, *, top_k: int, renormalise: bool = True, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    weights, chosen = _outputs(logits, top_k, out)
    tokens, experts = logits.shape
    if tokens:
        blocks = triton.next_power_of_2(experts), triton.next_power_of_2(top_k)
        _route[(tokens,)](
            logits, weights, chosen, logits.stride(0), experts, top_k, renormalise, *blocks, num_warps=_warps(experts)
        )
    return weights, chosen


@portable(moe.moe_route_grouped)
def moe_route_grouped(
    logits: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    groups: int = 1,
    top_groups: int = 1,
    renormalise: bool = True,
    scaling: float = 1.0,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    weights, chosen = _outputs(logits, top_k, out)
    tokens, experts = logits.shape
    size = experts // groups
    if tokens:
        _route_grouped[(tokens,)](
            logits,
            bias,
            weights,
            chosen,
            logits.stride(0),
            float(scaling),
            groups,
            size,
            top_groups,
            top_k,
            renormalise,
            *(triton.next_power_of_2(width) for width in (groups, size, top_k)),
            num_warps=_warps(experts),
        )
    return weights, chosen


def _warps(experts: int) -> int:
    """16 experts a thread: `top_k` rounds in a row of few shuffles each, and no barrier."""
    return min(max(bucket(experts) // 512, 1), 8)
