"""Per-layer embedding: hashed n-gram rows, gated by each residual stream, then a dilated short convolution."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenspeed_engine.splitmix64 import GAMMA, splitmix64

from .config import EOS_ID, DemoConfig
from .layers import DepthwiseConv, RMSNorm


def hash_multipliers(config: DemoConfig, ple_index: int) -> list[int]:
    """Odd multiplier of each position of an n-gram, current token first; token id · multiplier stays below 2⁶³."""
    half = max(1, ((1 << 63) - 1) // config.vocab_size // 2)
    seed = config.seed + 10007 * ple_index
    return [2 * (splitmix64(seed + GAMMA * (i + 1)) % half) + 1 for i in range(config.ngram_size)]


def table_sizes(config: DemoConfig, ple_index: int) -> list[int]:
    """Rows of each hash head: distinct primes from `ngram_vocab_size_base` on, continued from layer to layer."""
    heads = (config.ngram_size - 1) * config.heads_per_ngram
    primes: list[int] = []
    candidate = config.ngram_vocab_size_base
    while len(primes) < heads * (ple_index + 1):
        if all(candidate % d for d in range(2, math.isqrt(candidate) + 1)):
            primes.append(candidate)
        candidate += 1
    return primes[heads * ple_index :]


class NGramEmbedding(nn.Module):
    """Rows of one table, chosen by hashes of the current token with its one, two, ... predecessors."""

    layer_multipliers: Tensor
    ngram_heads_vocab_sizes: Tensor
    ngram_heads_offsets: Tensor

    def __init__(self, config: DemoConfig, ple_index: int) -> None:
        super().__init__()
        self.ngram_size, self.heads = config.ngram_size, config.heads_per_ngram
        sizes = torch.tensor(table_sizes(config, ple_index))
        self.register_buffer("layer_multipliers", torch.tensor(hash_multipliers(config, ple_index)))
        self.register_buffer("ngram_heads_vocab_sizes", sizes)
        self.register_buffer("ngram_heads_offsets", sizes.cumsum(0) - sizes)
        divisor = config.make_ngram_vocab_size_divisible_by
        rows = -(-int(sizes.sum()) // divisor) * divisor
        self.ngram_embedding = nn.Embedding(rows, config.ple_embed_dim // sizes.numel())

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [batch, time] int64 → [batch, time, ple_embed_dim]. An EOS hides every older token, not itself."""
        mixed = ids * self.layer_multipliers[0]
        hidden = torch.zeros_like(ids, dtype=torch.bool)
        rows = []
        for distance in range(1, self.ngram_size):
            token = F.pad(ids, (distance, 0), value=EOS_ID)[:, : ids.shape[1]].masked_fill(hidden, EOS_ID)
            hidden = hidden | (token == EOS_ID)
            mixed = mixed ^ (token * self.layer_multipliers[distance])
            heads = slice((distance - 1) * self.heads, distance * self.heads)
            rows.append(mixed.unsqueeze(-1) % self.ngram_heads_vocab_sizes[heads] + self.ngram_heads_offsets[heads])
        embedded: Tensor = self.ngram_embedding(torch.cat(rows, -1))
        return embedded.flatten(-2)


class PerLayerEmbedding(nn.Module):
    """What the n-gram embedding adds to every residual stream."""

    def __init__(self, config: DemoConfig, ple_index: int) -> None:
        super().__init__()
        size, streams, eps = config.stream_size, config.hc_count, config.rms_norm_eps
        self.streams, self.hidden = streams, config.hidden_size
        self.ple_embedding = NGramEmbedding(config, ple_index)
        self.key_proj = nn.Linear(config.ple_embed_dim, size, bias=False)
        self.value_proj = nn.Linear(config.ple_embed_dim, config.hidden_size, bias=False)
        self.norm_key = RMSNorm(size, eps, streams)
        self.norm_query = RMSNorm(size, eps, streams)
        self.norm_conv = RMSNorm(size, eps, streams)
        self.conv1d = DepthwiseConv(size, config.ple_conv_kernel_size, dilation=config.ngram_size)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """x: [batch, time, streams · hidden], ids: [batch, time] int64 → what is added to x."""
        embedded = self.ple_embedding(ids)
        key = self.norm_key(self.key_proj(embedded).float())
        agreement = torch.unflatten(key * self.norm_query(x), -1, (self.streams, -1)).sum(-1) / math.sqrt(self.hidden)
        gate = torch.sigmoid(agreement.abs().clamp_min(1e-6).sqrt() * agreement.sign())
        value = (gate.unsqueeze(-1) * self.value_proj(embedded).float().unsqueeze(-2)).flatten(-2)
        y: Tensor = value + F.silu(self.conv1d(self.norm_conv(value)))
        return y
