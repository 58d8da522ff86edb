"""Experts in the dtype of the tokens (see `moe_experts`), and the gated products: a program a tile of elements."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import moe
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.moe_experts import sum_of_experts
from tokenspeed_kernels.triton.moe_products import Matrices


@triton.jit(do_not_specialize=["rows"])
def _silu_mul(gate_up_ptr, y_ptr, rows, stride, WIDTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    TILES: tl.constexpr = (WIDTH + BC - 1) // BC
    o_r = (tl.program_id(0) // TILES).to(tl.int64) * BR + tl.arange(0, BR)
    o_c = tl.program_id(0) % TILES * BC + tl.arange(0, BC)
    inside = (o_r < rows)[:, None] & (o_c < WIDTH)[None, :]
    p_gate = gate_up_ptr + o_r[:, None] * stride + o_c[None, :]
    b_gate = tl.load(p_gate, mask=inside, other=0.0).to(tl.float32)  # [BR, BC]
    b_up = tl.load(p_gate + WIDTH, mask=inside, other=0.0).to(tl.float32)
    b_y = b_gate / (1.0 + tl.exp(-b_gate)) * b_up
    tl.store(y_ptr + o_r[:, None] * WIDTH + o_c[None, :], b_y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _sigmoid_mul(
    x_ptr,
    gate_ptr,
    y_ptr,
    rows,
    x_stride,
    gate_stride,
    WIDTH: tl.constexpr,
    ONE_GATE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    TILES: tl.constexpr = (WIDTH + BC - 1) // BC
    o_r = (tl.program_id(0) // TILES).to(tl.int64) * BR + tl.arange(0, BR)
    o_c = tl.program_id(0) % TILES * BC + tl.arange(0, BC)
    inside = (o_r < rows)[:, None] & (o_c < WIDTH)[None, :]
    b_x = tl.load(x_ptr + o_r[:, None] * x_stride + o_c[None, :], mask=inside, other=0.0).to(tl.float32)  # [BR, BC]
    if ONE_GATE:
        b_gate = tl.load(gate_ptr + o_r * gate_stride, mask=o_r < rows, other=0.0).to(tl.float32)[:, None]
    else:
        b_gate = tl.load(gate_ptr + o_r[:, None] * gate_stride + o_c[None, :], mask=inside, other=0.0).to(tl.float32)
    b_y = b_x / (1.0 + tl.exp(-b_gate))
    tl.store(y_ptr + o_r[:, None] * WIDTH + o_c[None, :], b_y.to(y_ptr.dtype.element_ty), mask=inside)


def _tile(rows: int, width: int) -> tuple[int, int, int]:
    """Rows and columns of a tile of 1,024 elements, and how many tiles there are."""
    columns = min(triton.next_power_of_2(width), 1024)
    high = 1024 // columns
    return high, columns, triton.cdiv(rows, high) * triton.cdiv(width, columns)


@portable(moe.silu_mul)
def silu_mul(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device) if out is None else out
    if y.numel():
        high, columns, tiles = _tile(rows, width)
        _silu_mul[(tiles,)](gate_up, y, rows, gate_up.stride(0), width, high, columns)
    return y


@portable(moe.sigmoid_mul)
def sigmoid_mul(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    rows, width = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if y.numel():
        high, columns, tiles = _tile(rows, width)
        one_gate = gate.shape[1] == 1
        _sigmoid_mul[(tiles,)](x, gate, y, rows, x.stride(0), gate.stride(0), width, one_gate, high, columns)
    return y


@portable(moe.moe_experts)
def moe_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    first_expert: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    experts, _, inter = down.shape
    matrices = Matrices("plain", experts, inter, gate_up, gate_up, gate_up, down, down, down)
    return sum_of_experts(x, weights, ids, first_expert, matrices, out)
