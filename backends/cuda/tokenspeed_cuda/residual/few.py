"""Gated residual of few tokens on Hopper: one kernel, one exchange between its blocks, see few.cu."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenspeed_cuda.code import Code
from tokenspeed_cuda.counters import counters
from tokenspeed_cuda.declare import tuned
from tokenspeed_kernels import residual
from tokenspeed_registry import Alignment, Dim

CODE = Code(__file__, "few.cu")
FEW = 8
STREAMS, HIDDEN, RANK = 4, 2560, 320
BLOCKS, SLICES = 128, 8
DTYPES = {"x": [torch.bfloat16], "w_down": [torch.bfloat16, torch.float8_e4m3fn]}
LIMITS = [Dim("tokens") <= FEW, Dim("streams").in_(STREAMS), Dim("hidden").in_(HIDDEN), Dim("rank").in_(RANK)]
WEIGHTS = [Alignment(role) >= 16 for role in ("norm_weight", "w_down", "w_up", "w_inject", "down_scale", "up_scale")]


@tuned(
    residual.residual_inject_mix,
    CODE,
    name="cuda.residual_inject_mix_few",
    dtypes=DTYPES,
    constraints=[*LIMITS, Alignment("x") >= 16, Alignment("y") >= 16, *WEIGHTS],
)
def residual_inject_mix_few(
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
    return _mix(x, (y, inject), (norm_weight, w_down, w_up, w_inject, down_scale, up_scale), eps, out)


@tuned(
    residual.residual_mix,
    CODE,
    name="cuda.residual_mix_few",
    dtypes=DTYPES,
    constraints=[*LIMITS, Alignment("x") >= 16, *WEIGHTS],
)
def residual_mix_few(
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
    return _mix(x, (None, None), (norm_weight, w_down, w_up, w_inject, down_scale, up_scale), eps, out)


def _mix(
    x: Tensor,
    injection: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
    eps: float,
    out: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    tokens = x.shape[0]
    _, w_down, _, w_inject, _, _ = weights
    assert w_down is not None
    assert w_inject is not None
    gate_count = w_inject.shape[0]
    mixed, gates = out or (
        torch.empty(tokens, HIDDEN, dtype=x.dtype, device=x.device),
        torch.empty(tokens, gate_count, dtype=torch.float32, device=x.device),
    )
    if tokens:
        weight_bytes = w_down.element_size()
        shared = _shared_bytes(weight_bytes)
        entry = CODE.entry(
            "inject_mix",
            x.device,
            HIDDEN=HIDDEN,
            RANK=RANK,
            GATES=gate_count,
            WEIGHT_BYTES=weight_bytes,
            INJECTED=int(injection[0] is not None),
            SHARED=shared,
        )
        buffer = -(-FEW * SLICES * (RANK // 2 + 1 + gate_count) // BLOCKS) * BLOCKS
        state = counters(x.device, 4 + 2 * buffer, owner="residual few")
        threads = HIDDEN // 8 + 32
        entry(BLOCKS, threads, x, *injection, *weights, mixed, gates, state, tokens, eps, shared=shared, pdl=True)
    return mixed, gates


def _shared_bytes(weight_bytes: int) -> int:
    """What few.cu lays out in shared memory."""
    warps, ranks = HIDDEN // 256, RANK * SLICES // BLOCKS

    def rows(columns: int, count: int) -> int:
        stride = columns * weight_bytes
        if weight_bytes == 1 and stride % 128 == 0:
            stride += 64
        return 2 * (count // 2 * stride + 32 * weight_bytes)

    weights = rows(HIDDEN // 2, ranks) + rows(RANK, STREAMS * HIDDEN // BLOCKS)
    sums = warps * FEW * (ranks * 4 + 8) + FEW * STREAMS * 4
    slices = HIDDEN * 2 + (RANK * 4 if weight_bytes == 1 else 0)
    return weights + sums + slices + 8 * (1 + ranks // 2 + warps)
