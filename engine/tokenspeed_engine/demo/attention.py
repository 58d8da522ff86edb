"""Sparse attention and its indexer, trained by the loss that teaches the indexer which blocks attention uses.

Top-k selection passes no gradient. The indexer therefore learns from a loss of its own: the cross-entropy of its
softmaxed block scores against the attention mass of each block, summed over heads. Its input and target are detached,
so it follows attention and never steers it.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import DemoConfig
from .layers import RMSNorm

SCORE_FLOOR = 0.1


class Mode(NamedTuple):
    """How full-attention layers run: over the selected blocks or all tokens, and whether the indexer learns."""

    sparse: bool
    train_indexer: bool


class KeyValues(NamedTuple):
    """Keys and values [batch, kv heads, time, head_dim] of one pass, and its raw index keys [batch, time, d]."""

    key: Tensor
    value: Tensor
    index_key: Tensor


def rope_table(config: DemoConfig, time: int, device: torch.device) -> Tensor:
    """[2, time, rotary_dim / 2] float32: cosine and sine of position · theta^(−2i / rotary_dim)."""
    exponent = torch.arange(0, config.rotary_dim, 2, device=device, dtype=torch.float32) / config.rotary_dim
    angle = torch.arange(time, device=device, dtype=torch.float32)[:, None] * config.rope_theta**-exponent
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotates dims (i, i + rotary_dim / 2) of x [..., time, d]; the dims after rotary_dim pass through."""
    cos, sin = rope
    half = cos.shape[-1]
    a, b, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


class Indexer(nn.Module):
    """Scores blocks of consecutive tokens for each query."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.heads, self.dim = config.indexer_n_heads, config.indexer_head_dim
        self.ratio, self.keep = config.indexer_compress_ratio, config.indexer_budget // config.indexer_compress_ratio
        self.index_qk_proj = nn.Linear(config.hidden_size, (self.heads + 1) * self.dim, bias=False)
        self.q_layernorm = RMSNorm(self.dim, config.rms_norm_eps)
        self.k_layernorm = RMSNorm(self.dim, config.rms_norm_eps)

    def project(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """x: [batch, time, hidden] → rotated queries [batch, heads, time, d], raw keys [batch, time, d]."""
        q, k = torch.split(self.index_qk_proj(x).float(), [self.heads * self.dim, self.dim], -1)
        return rotate(self.q_layernorm(torch.unflatten(q, -1, (self.heads, -1))).transpose(1, 2), rope), k

    def similarity(self, q: Tensor, raw_key: Tensor, rope: Tensor) -> Tensor:
        """Scaled products [batch, heads, time, time // ratio] float32 of queries with the blocks' pooled keys."""
        blocks = raw_key.shape[1] // self.ratio
        pooled = torch.unflatten(raw_key[:, : blocks * self.ratio], 1, (blocks, self.ratio)).mean(2)
        key = rotate(self.k_layernorm(pooled), rope[:, : blocks * self.ratio : self.ratio])
        with torch.autocast(q.device.type, enabled=False):
            return q @ key.unsqueeze(1).mT / math.sqrt(self.dim)

    def scores(self, similarity: Tensor) -> Tensor:
        """Block scores [batch, time, blocks] float32; −inf where the block is not complete at the query."""
        complete = self.complete(similarity.shape[2], similarity.device)
        return torch.relu(similarity).sum(1).masked_fill(~complete, float("-inf"))

    def complete(self, time: int, device: torch.device) -> Tensor:
        """[time, blocks] bool: whether the query sees the whole block."""
        position = torch.arange(time, device=device)
        return (position[: time // self.ratio] + 1) * self.ratio <= position[:, None] + 1

    def chosen_blocks(self, scores: Tensor) -> Tensor:
        """[batch, time, blocks] bool: the best complete blocks within the budget."""
        best = scores.topk(min(self.keep, scores.shape[-1]), -1).indices
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, torch.ones_like(best, dtype=torch.bool))
        return chosen & (scores > float("-inf"))

    def token_mask(self, scores: Tensor, time: int) -> Tensor:
        """[batch, time, time] bool: tokens of the chosen blocks, and those after the last complete block."""
        position = torch.arange(time, device=scores.device)
        chosen = self.chosen_blocks(scores).repeat_interleave(self.ratio, -1)
        first_open = (position + 1) // self.ratio * self.ratio
        tail = (position >= first_open[:, None]) & (position <= position[:, None])
        return F.pad(chosen, (0, time - chosen.shape[-1])) | tail

    def block_mass(self, q: Tensor, k: Tensor) -> Tensor:
        """Dense attention mass [batch, time, blocks] of each complete block, averaged over heads, sums to ≤ 1."""
        time = q.shape[2]
        future = torch.ones(time, time, dtype=torch.bool, device=q.device).triu(1)
        attention = torch.softmax((q @ k.mT).float().masked_fill(future, float("-inf")) / math.sqrt(q.shape[-1]), -1)
        blocks = time // self.ratio
        mass = torch.unflatten(attention.mean(1)[..., : blocks * self.ratio], -1, (blocks, self.ratio)).sum(-1)
        return mass * self.complete(time, q.device)

    def loss(self, similarity: Tensor, scores: Tensor, mass: Tensor) -> Tensor:
        """KL divergence of softmaxed scores from the blocks' attention mass, over queries that see a whole block.

        A second term lifts blocks that all heads score zero: those pass no gradient, and which of several zeros top-k
        takes differs between implementations.
        """
        target = (mass / mass.sum(-1, keepdim=True).clamp_min(1e-6))[:, self.ratio - 1 :]
        log_score = torch.log_softmax(scores[:, self.ratio - 1 :], -1).masked_fill(target == 0, 0.0)
        divergence = (target * (target.clamp_min(1e-9).log() - log_score)).sum(-1).mean()
        floor = torch.relu(SCORE_FLOOR - similarity.amax(1)) * self.complete(mass.shape[1], mass.device)
        return divergence + floor.mean()


class Attention(nn.Module):
    """Grouped-query attention with head norms, partial rotary embedding, sigmoid output gate and block selection."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        self.config = config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim * 2, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.indexer = Indexer(config)

    def project(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x: [batch, time, hidden] → rotated q, rotated k, v [batch, heads, time, head_dim], gate logits of the output.

        Keys and values come repeated to the number of query heads.
        """
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, 2, self.head_dim)).unbind(-2)
        k, v = (p(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        q = rotate(self.q_norm(q.float()).transpose(1, 2), rope).to(v.dtype)
        k = rotate(self.k_norm(k.float()), rope).to(v.dtype)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        return q, k, v, gate.flatten(-2)

    def forward(
        self, x: Tensor, rope: Tensor, mode: Mode, past: tuple[KeyValues, ...] = ()
    ) -> tuple[Tensor, Tensor, KeyValues]:
        """x: [batch, time, hidden] → (output, indexer loss, this pass's keys and values).

        `past` holds earlier passes of a chained draft, oldest first: row r of this pass then sees its own key at
        position r, the passes before it at r−1, r−2, ..., and the first pass at all older positions.
        """
        time = x.shape[1]
        q, k, v, gate = self.project(x, rope)
        index_q, index_k = self.indexer.project(x.detach(), rope)
        loss, mask = x.new_zeros(()), None
        sparse = mode.sparse and not self.config.is_dense(time)
        if sparse or mode.train_indexer:
            similarity = self.indexer.similarity(index_q, past[0].index_key if past else index_k, rope)
            scores = self.indexer.scores(similarity)
            if sparse:
                mask = self.indexer.token_mask(scores.detach(), time).unsqueeze(1)
            if mode.train_indexer:
                with torch.no_grad():
                    mass = self.indexer.block_mass(q, k)
                loss = self.indexer.loss(similarity, scores, mass)
        current = KeyValues(k, v, index_k)
        if past:
            out = chained_attention(q, (*past, current), mask)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        out = out.transpose(1, 2).flatten(-2) * torch.sigmoid(gate)
        y: Tensor = self.o_proj(out)
        return y, loss, current


def chained_attention(q: Tensor, passes: tuple[KeyValues, ...], mask: Tensor | None) -> Tensor:
    """Attention of a draft pass whose last positions' keys come from later passes. q: [batch, heads, time, d]."""
    time = q.shape[2]
    position = torch.arange(time, device=q.device)
    distance = position[:, None] - position
    visible = distance >= 0 if mask is None else mask | (distance == 0)
    scores = (q @ passes[0].key.mT).float()
    recent = list(enumerate(reversed(passes[1:])))
    for back, item in recent:
        shifted = F.pad(item.key, (0, 0, back, 0))[:, :, :time]
        scores = torch.where(distance == back, (q * shifted).float().sum(-1, keepdim=True), scores)
    weight = torch.softmax(scores.masked_fill(~visible, float("-inf")) / math.sqrt(q.shape[-1]), -1)
    out = weight.masked_fill(distance < len(recent), 0.0).to(q.dtype) @ passes[0].value
    for back, item in recent:
        own = weight.masked_fill(distance != back, 0.0).sum(-1, keepdim=True).to(q.dtype)
        out = out + own * F.pad(item.value, (0, 0, back, 0))[:, :, :time]
    return out
