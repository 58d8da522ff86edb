"""Gated DeltaNet, differentiable and chunked so that a GPU has large products to do.

Within a chunk the delta rule is a unit lower-triangular system. Between chunks the state follows an affine recurrence
whose matrices are computed for all chunks at once, so that the sequential part is one small product a chunk.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import DemoConfig
from .layers import DepthwiseConv

CHUNK = 32


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)⁻¹ for strictly lower-triangular A [..., n, n] with n a power of two, by merging diagonal blocks."""

    @staticmethod
    def forward(a: Tensor) -> Tensor:
        size = a.shape[-1]
        index = torch.arange(size, device=a.device)
        inverse = torch.eye(size, dtype=a.dtype, device=a.device).expand_as(a)
        block = 1
        while block < size:
            row, column = index[:, None] // block, index[None, :] // block
            below = a * ((row == column + 1) & (row % 2 == 1))
            inverse = inverse - (below if block == 1 else inverse @ below @ inverse)
            block *= 2
        return inverse

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        transposed = ctx.saved_tensors[0].mT
        return torch.tril(-(transposed @ grad @ transposed), -1)


def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """S ← e^g S;  S ← S + k βᵀ(v − Sᵀk);  o = Sᵀq, from a zero state.

    q, k: [batch, time, heads, d_k] float32, normalised; v: [batch, time, heads, d_v]; log_decay (≤ 0) and beta:
    [batch, time, heads]. Returns [batch, time, heads, d_v].
    """
    batch, time, heads, _ = q.shape
    padding = -time % CHUNK

    def chunked(x: Tensor) -> Tensor:  # [batch, time, heads, ...] → [batch · heads, chunks, CHUNK, ...]
        x = F.pad(x.transpose(1, 2), (0, 0) * (x.dim() - 3) + (0, padding))
        return x.reshape(batch * heads, -1, CHUNK, *x.shape[3:])

    q, k, v, gate, beta = (chunked(x) for x in (q, k, v, log_decay, beta))
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    total = gate.unsqueeze(-2).masked_fill(future, 0.0).sum(-1)  # a cumulative sum that fuses
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(future, float("-inf")).exp()
    beta = beta.unsqueeze(-1)
    inverse: Tensor = UnitLowerInverse.apply((beta * (k @ k.mT) * decay).tril(-1))  # type: ignore[no-untyped-call]
    written = inverse @ (beta * v)
    read = inverse @ (beta * total.exp().unsqueeze(-1) * k)
    last = total[..., -1:]
    key_to_end = ((last - total).exp().unsqueeze(-1) * k).mT
    transition = last.exp().unsqueeze(-1) * torch.eye(k.shape[-1], device=k.device) - key_to_end @ read
    addition = key_to_end @ written

    state = torch.zeros_like(addition[:, 0])
    states = []
    for step_transition, step_addition in zip(transition.unbind(1), addition.unbind(1), strict=True):
        states.append(state)
        state = torch.baddbmm(step_addition, step_transition, state)
    before = torch.stack(states, 1)
    out = (total.exp().unsqueeze(-1) * q) @ before + ((q @ k.mT) * decay) @ (written - read @ before)
    return out.reshape(batch, heads, -1, v.shape[-1])[:, :, :time].transpose(1, 2)


class OutputNorm(nn.Module):
    """RMS norm with a ones-centred weight, then a sigmoid gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x * torch.sigmoid(gate.float())


class GatedDeltaNet(nn.Module):
    """The linear-attention mixer: short convolution, gated delta rule, gated output norm."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.key_heads, self.value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.sizes = [keys, keys, values]
        self.in_proj_qkv = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.in_proj_z = nn.Linear(hidden, values, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.value_heads, bias=False)
        self.conv1d = DepthwiseConv(sum(self.sizes), config.linear_conv_kernel_dim)
        self.A_log = nn.Parameter(torch.zeros(self.value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(self.value_heads))
        self.norm = OutputNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, time, hidden] → same shape."""
        qkv = F.silu(self.conv1d(self.in_proj_qkv(x).float()))
        gate, b, a = self.in_proj_z(x), self.in_proj_b(x).float(), self.in_proj_a(x).float()
        with torch.autocast(x.device.type, enabled=False):
            q, k, v = torch.split(qkv, self.sizes, -1)
            q, k = (torch.unflatten(t, -1, (self.key_heads, self.key_dim)) for t in (q, k))
            q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
            repeats = self.value_heads // self.key_heads
            q, k = (t.repeat_interleave(repeats, dim=2) for t in (q * self.key_dim**-0.5, k))
            v = torch.unflatten(v, -1, (self.value_heads, self.value_dim))
            # logaddexp(x, 0) is softplus, whose own backward breaks under torch.compile on strided gradients.
            log_decay = -self.A_log.exp() * torch.logaddexp(a + self.dt_bias, torch.zeros_like(a))
            out = chunk_gated_delta_rule(q, k, v, log_decay, torch.sigmoid(b))
        out = self.norm(out, torch.unflatten(gate, -1, (self.value_heads, self.value_dim)))
        y: Tensor = self.out_proj(out.flatten(-2))
        return y
