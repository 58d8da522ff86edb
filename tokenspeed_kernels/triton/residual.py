"""Gated residual: one token by `residual_one`, few by `residual_few`, some hundred by `residual_many`, above by
`residual_library`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import residual
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.residual_few import FEW, mix_few
from tokenspeed_kernels.triton.residual_library import mix_library
from tokenspeed_kernels.triton.residual_many import MANY, mix_many
from tokenspeed_kernels.triton.residual_one import mix_one
from tokenspeed_kernels.triton.residual_parts import injected
from tokenspeed_registry import Dim

_LIMITS = [Dim("hidden") >= 1, Dim("rank") >= 1]


@triton.jit(do_not_specialize=["tokens"])
def _inject(
    x_ptr,  # [tokens, STREAMS, HIDDEN]
    y_ptr,  # [tokens, HIDDEN]
    inject_ptr,  # [tokens, STREAMS]
    tokens,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program a range of columns of some tokens: y is read once for all streams."""
    o_t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (o_t < tokens) & (o_c < HIDDEN)
    b_y = tl.load(y_ptr + o_t * HIDDEN + o_c, mask=inside, other=0.0)  # [TOKENS, BLOCK]
    for i_stream in tl.static_range(STREAMS):
        gate = tl.load(inject_ptr + o_t * STREAMS + i_stream, mask=o_t < tokens, other=0.0)
        p_x = x_ptr + (o_t * STREAMS + i_stream) * HIDDEN + o_c
        b_x = injected(tl.load(p_x, mask=inside, other=0.0), b_y, gate, True)
        tl.store(p_x, b_x.to(x_ptr.dtype.element_ty), mask=inside)


@portable(residual.residual_inject)
def residual_inject(x: Tensor, y: Tensor, inject: Tensor) -> None:
    tokens, streams, hidden = x.shape
    if x.numel():
        block = min(triton.next_power_of_2(hidden), 1024)
        rows = max(1, min(1024 // block, 16))
        grid = (triton.cdiv(tokens, rows), triton.cdiv(hidden, block))
        _inject[grid](x, y, inject, tokens, streams, hidden, rows, block, num_warps=4)


@portable(residual.residual_mix, constraints=_LIMITS)
def residual_mix(
    x: Tensor,
    norm_weight: Tensor,
    w_down: Tensor,
    w_up: Tensor,
    w_inject: Tensor,
    *,
    eps: float,
    down_scale: Tensor | None = None,
    up_scale: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    return _mix(x, None, norm_weight, w_down, w_up, w_inject, eps, (down_scale, up_scale), out)


@portable(residual.residual_inject_mix, constraints=_LIMITS)
def residual_inject_mix(
    x: Tensor,
    y: Tensor,
    inject: Tensor,
    norm_weight: Tensor,
    w_down: Tensor,
    w_up: Tensor,
    w_inject: Tensor,
    *,
    eps: float,
    down_scale: Tensor | None = None,
    up_scale: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    return _mix(x, (y, inject), norm_weight, w_down, w_up, w_inject, eps, (down_scale, up_scale), out)


def _mix(
    x: Tensor,
    injection: tuple[Tensor, Tensor] | None,
    norm_weight: Tensor,
    w_down: Tensor,
    w_up: Tensor,
    w_inject: Tensor,
    eps: float,
    scales: tuple[Tensor | None, Tensor | None],
    out: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    tokens, _, hidden = x.shape
    mixed, gates = out or (
        torch.empty(tokens, hidden, dtype=x.dtype, device=x.device),
        torch.empty(tokens, w_inject.shape[0], dtype=torch.float32, device=x.device),
    )
    if tokens:
        mix = mix_one if tokens == 1 else mix_few if tokens <= FEW else mix_many if tokens <= MANY else mix_library
        mix(x, injection, norm_weight, w_down, w_up, w_inject, eps, scales, mixed, gates)
    return mixed, gates
