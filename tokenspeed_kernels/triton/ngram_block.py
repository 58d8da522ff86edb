"""The n-gram block of a layer: the gate reads streams and keys once, the injection is elementwise.

A program of the gate keeps the norm weights of one stream and walks over tokens. Norms need no pass of their own: of
each row the sums of x², k², v² and of x · k under both norms' weights are taken together, and all that follows is a
factor to the row of the value.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import ngram_block
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.device import compute_units, platform_for

_LEAST_SCORE = 1e-6
_TOKENS = 4
"""Tokens of a program of the gate where there are many."""
_ELEMENTS = 2048
"""Elements that a program of the injection takes."""


@triton.jit
def _load_row(pointer, o_d, DIM: tl.constexpr):
    return tl.load(pointer + o_d, mask=o_d < DIM, other=0.0).to(tl.float32)  # [BLOCK]


@triton.jit(do_not_specialize=["tokens", "per_program"])
def _ngram_gate(
    x_ptr,  # [tokens, STREAMS, DIM]
    key_ptr,  # [tokens, STREAMS, DIM]
    value_ptr,  # [tokens, DIM]
    norm_key_ptr,  # [STREAMS, DIM]
    norm_query_ptr,  # [STREAMS, DIM]
    norm_conv_ptr,  # [STREAMS, DIM]
    gated_ptr,  # [tokens, STREAMS, DIM]
    conv_ptr,  # [tokens, STREAMS, DIM]
    tokens,
    per_program,
    eps,
    LEAST: tl.constexpr,
    STREAMS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Programs of one token, which share its value, follow each other.
    i_block, i_stream = tl.program_id(0) // STREAMS, tl.program_id(0) % STREAMS
    o_d = tl.arange(0, BLOCK)
    w_key = 1.0 + _load_row(norm_key_ptr + i_stream * DIM, o_d, DIM)
    w_score = w_key * (1.0 + _load_row(norm_query_ptr + i_stream * DIM, o_d, DIM))
    w_conv = 1.0 + _load_row(norm_conv_ptr + i_stream * DIM, o_d, DIM)
    first = i_block.to(tl.int64) * per_program
    for i_token in tl.range(first, tl.minimum(first + per_program, tokens), num_stages=STAGES):
        i_row = (i_token * STREAMS + i_stream) * DIM
        x = _load_row(x_ptr + i_row, o_d, DIM)
        key = _load_row(key_ptr + i_row, o_d, DIM)
        value = _load_row(value_ptr + i_token * DIM, o_d, DIM)
        x_size = tl.sqrt(tl.sum(x * x) / DIM + eps)
        key_size = tl.sqrt(tl.sum(key * key) / DIM + eps)
        score = tl.sum(x * key * w_score) / (x_size * key_size) / tl.sqrt(DIM * 1.0)
        root = tl.sqrt(tl.maximum(tl.abs(score), LEAST))
        root = tl.where(score > 0, root, tl.where(score < 0, -root, score))
        gate = tl.sigmoid(root)
        conv_factor = gate / tl.sqrt(gate * gate * (tl.sum(value * value) / DIM) + eps)
        gated = gate * value
        conv_input = conv_factor * value * w_conv
        tl.store(gated_ptr + i_row + o_d, gated.to(gated_ptr.dtype.element_ty), mask=o_d < DIM)
        tl.store(conv_ptr + i_row + o_d, conv_input.to(conv_ptr.dtype.element_ty), mask=o_d < DIM)


@triton.jit
def _ngram_inject(x_ptr, gated_ptr, conv_ptr, size, BLOCK: tl.constexpr):
    o_e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o_e < size
    x = tl.load(x_ptr + o_e, mask=inside).to(tl.float32)
    gated = tl.load(gated_ptr + o_e, mask=inside).to(tl.float32)
    conv = tl.load(conv_ptr + o_e, mask=inside).to(tl.float32)
    tl.store(x_ptr + o_e, (x + gated + conv).to(x_ptr.dtype.element_ty), mask=inside)


@portable(ngram_block.ngram_gate)
def ngram_gate(
    x: Tensor,
    key: Tensor,
    value: Tensor,
    norm_key: Tensor,
    norm_query: Tensor,
    norm_conv: Tensor,
    *,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    gated, conv_input = (torch.empty_like(x), torch.empty_like(x)) if out is None else out
    tokens, streams, hidden = x.shape
    if x.numel():
        block = triton.next_power_of_2(hidden)
        platform = platform_for(x.device)
        # Once the device is full, a program takes more tokens for its weights and fetches the next one ahead.
        many = tokens * streams > 32 * compute_units(x.device)
        per_program = _TOKENS if many else 1
        lanes = (platform.limits.warp_size or 32) * (32 if many else 16)
        warps = min(max(block // lanes, 1), 8)
        _ngram_gate[(triton.cdiv(tokens, per_program) * streams,)](
            x, key, value, norm_key, norm_query, norm_conv, gated, conv_input, tokens, per_program, eps,
            _LEAST_SCORE, streams, hidden, block, 2 if many and platform.vendor == "nvidia" else 1, num_warps=warps,
        )  # fmt: skip
    return gated, conv_input


@portable(ngram_block.ngram_inject)
def ngram_inject(x: Tensor, gated: Tensor, conv: Tensor) -> None:
    if x.numel():
        _ngram_inject[(triton.cdiv(x.numel(), _ELEMENTS),)](x, gated, conv, x.numel(), _ELEMENTS, num_warps=4)
