"""The parts that every layer shares: zero-centred RMS norm, gated residual over streams, mixture of experts.

Everything is written to train: linears run under autocast, norms and softmax in float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import DemoConfig


class RMSNorm(nn.Module):
    """x · rsqrt(mean(x²) + eps) · (1 + weight) in float32, the mean taken over each of `groups` equal segments."""

    def __init__(self, size: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size], any float dtype; returns the same shape and dtype."""
        wide = torch.unflatten(x.float(), -1, (self.groups, -1))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        y: Tensor = (wide.flatten(-2) * (1.0 + self.weight.float())).to(x.dtype)
        return y


class DepthwiseConv(nn.Module):
    """Causal depthwise convolution over time; the last tap is the current token, missing history is zero."""

    def __init__(self, channels: int, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, kernel))
        self.dilation = dilation

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, time, channels] → same shape. Shifted products instead of conv1d: these fuse on a GPU."""
        kernel, time = self.weight.shape[-1], x.shape[1]
        padded = F.pad(x, (0, 0, (kernel - 1) * self.dilation, 0))
        taps = [self.weight[:, 0, i] * padded[:, i * self.dilation : i * self.dilation + time] for i in range(kernel)]
        return torch.stack(taps).sum(0)


class GatedResidual(nn.Module):
    """Mixes the residual streams into one layer input and says how strongly each stream takes the layer's output."""

    def __init__(self, config: DemoConfig, inject: bool = True) -> None:
        super().__init__()
        size, rank = config.stream_size, config.hc_lowrank
        self.streams = config.hc_count
        self.hc_norm = RMSNorm(size, config.rms_norm_eps, groups=config.hc_count)
        self.input_mix_weight_down = nn.Linear(size, rank, bias=False)
        self.input_mix_weight_up = nn.Linear(rank, size, bias=False)
        if inject:
            self.block_inject_weight = nn.Linear(size, config.hc_count, bias=False)

    def mix(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [..., streams · hidden] → (mixed input [..., hidden], normalised streams [..., streams · hidden])."""
        normed: Tensor = self.hc_norm(x)
        low = F.silu(self.input_mix_weight_down(normed) / self.streams)
        gate = torch.sigmoid(self.input_mix_weight_up(low).float())
        return torch.unflatten(gate * normed, -1, (self.streams, -1)).mean(-2), normed

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [..., streams · hidden] → (mixed input [..., hidden], injection weight of each stream [..., streams])."""
        mixed, normed = self.mix(x)
        return mixed, 2 * torch.sigmoid(self.block_inject_weight(normed).float() / self.streams)


def inject(x: Tensor, output: Tensor, weight: Tensor) -> Tensor:
    """x [..., streams · hidden] + weight [..., streams] ⊗ output [..., hidden], in float32."""
    return x + (weight.unsqueeze(-1) * output.float().unsqueeze(-2)).flatten(-2)


class MLP(nn.Module):
    """down(silu(gate x) ⊙ up x)."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Experts(nn.Module):
    """All experts' weights, gate rows before up rows: the fused checkpoint layout."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x: [..., hidden], weight: [..., experts], zero where an expert is not chosen → [..., hidden].

        Experts this small cost less as one dense layer over all of them than as a gather for each.
        """
        experts, double, _ = self.gate_up_proj.shape
        both = F.linear(x, self.gate_up_proj.flatten(0, 1))
        gate, up = torch.unflatten(both, -1, (experts, 2, double // 2)).unbind(-2)
        inner = F.silu(gate) * up * weight.unsqueeze(-1).to(gate.dtype)
        return F.linear(inner.flatten(-2), self.down_proj.transpose(0, 1).flatten(1))


class MoE(nn.Module):
    """Softmax router, renormalised top-k, and a shared expert behind its own sigmoid gate."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.shared_expert = MLP(config.hidden_size, config.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [batch, time, hidden] → (output, load-balance loss: 1 when all experts share the tokens equally)."""
        probability = torch.softmax(self.gate(x).float(), -1)
        top, index = probability.topk(self.top_k, -1)
        weight = torch.zeros_like(probability).scatter(-1, index, top / top.sum(-1, keepdim=True))
        share = (weight.detach() > 0).float().mean((0, 1)) / self.top_k
        balance = probability.shape[-1] * (share * probability.mean((0, 1))).sum()
        shared = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return self.experts(x, weight) + shared, balance
