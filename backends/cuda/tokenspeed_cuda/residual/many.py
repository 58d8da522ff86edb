"""Gated residual of many tokens on Hopper: a pass for n and the injection gates, W_down n by the library, activation,
and all that follows in one kernel.
"""

import torch
from torch import Tensor

from tokenspeed_cuda.code import Code
from tokenspeed_cuda.declare import tuned
from tokenspeed_cuda.residual.few import HIDDEN, RANK, STREAMS
from tokenspeed_cuda.tensor_map import tensor_map
from tokenspeed_kernels import residual
from tokenspeed_kernels.triton.device import compute_units
from tokenspeed_kernels.triton.residual_many import MANY
from tokenspeed_registry import Alignment, Dim, Given
from tokenspeed_registry.constraints import Constraint

PREPARE = Code(__file__, "many_prepare.cu")
ACTIVATE = Code(__file__, "many_activate.cu")
UP = Code(__file__, "many_up.cu")
PREPARE_WARPS = 8
COLUMNS, TILE, RING = 64, 64, 4
DTYPES = {"x": [torch.bfloat16], "w_down": [torch.bfloat16]}


def _limits(*roles: str) -> list[Constraint]:
    return [
        Dim("tokens") >= MANY + 1,
        Dim("streams").in_(STREAMS),
        Dim("hidden").in_(HIDDEN),
        Dim("rank").in_(RANK),
        Given("up_scale").in_(False),
        *(Alignment(role) >= 16 for role in roles),
    ]


@tuned(
    residual.residual_inject_mix,
    PREPARE,
    ACTIVATE,
    UP,
    name="cuda.residual_inject_mix_many",
    dtypes=DTYPES,
    constraints=_limits("x", "y", "norm_weight", "w_up", "w_inject"),
)
def residual_inject_mix_many(
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
    return _mix(x, (y, inject), norm_weight, (w_down, w_up, w_inject), eps, down_scale, out)


@tuned(
    residual.residual_mix,
    PREPARE,
    ACTIVATE,
    UP,
    name="cuda.residual_mix_many",
    dtypes=DTYPES,
    constraints=_limits("x", "norm_weight", "w_up", "w_inject"),
)
def residual_mix_many(
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
    return _mix(x, (None, None), norm_weight, (w_down, w_up, w_inject), eps, down_scale, out)


def _mix(
    x: Tensor,
    injection: tuple[Tensor | None, Tensor | None],
    norm_weight: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    eps: float,
    down_scale: Tensor | None,
    out: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    tokens, streams, hidden = x.shape
    w_down, w_up, w_inject = weights
    rank, gate_count = w_down.shape[0], w_inject.shape[0]
    mixed, gates = out or (
        torch.empty(tokens, hidden, dtype=x.dtype, device=x.device),
        torch.empty(tokens, gate_count, dtype=torch.float32, device=x.device),
    )
    normed = torch.empty_like(x)
    products = torch.empty(tokens, streams, gate_count, dtype=torch.float32, device=x.device)
    units = compute_units(x.device)
    entry = PREPARE.entry("prepare", x.device, HIDDEN=hidden, GATES=gate_count, INJECTED=int(injection[0] is not None))
    blocks = streams * min(-(-tokens // PREPARE_WARPS), 2 * units // streams)
    entry(
        blocks, 32 * PREPARE_WARPS, x, *injection, norm_weight, w_inject, normed, products, tokens, eps,
        shared=(1 + gate_count) * hidden * 2, pdl=True,
    )  # fmt: skip

    low_products = torch.mm(normed.view(tokens, streams * hidden), w_down.t())
    low = torch.empty_like(low_products)
    threads = -(-low.numel() // 8)
    ACTIVATE.entry("activate", x.device, RANK=rank)(
        -(-threads // 256), 256, low_products, down_scale, low, tokens, pdl=True
    )

    rows = w_up.view(streams * hidden // 32, 32 * rank)
    up_map = tensor_map(
        rows.as_strided((rows.shape[0], 4, 4, 2, rank), (32 * rank, 2 * rank, 8 * rank, rank, 1)), (1, 4, 4, 2, 64)
    )
    column_tiles = hidden // COLUMNS
    groups = min(max(units // column_tiles, 1), -(-tokens // (2 * TILE)))
    UP.entry("gate_up", x.device, HIDDEN=hidden, RANK=rank, GATES=gate_count)(
        (column_tiles, groups), 256, tensor_map(low, (TILE, 64)), up_map, normed, products, mixed, gates, tokens,
        shared=2 * rank * STREAMS * COLUMNS + 2 * RING * TILE * 128 + 8 * (1 + 2 * RING), pdl=True,
    )  # fmt: skip
    return mixed, gates
