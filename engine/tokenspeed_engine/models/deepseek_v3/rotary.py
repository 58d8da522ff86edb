"""Rotary embedding of the position part of queries and keys, plain or stretched by YaRN.

Source: RoFormer (arXiv:2104.09864); YaRN (arXiv:2309.00071), section 3.2, "NTK-by-parts".
"""

import math
from typing import Literal

import torch
from torch import Tensor

from tokenspeed_engine.models.deepseek_v3.config import DeepseekV3Config, RopeParameters
from tokenspeed_kernels.rope import rope


class Rotary:
    """The model's one rotary embedding, shared by its layers."""

    def __init__(self, config: DeepseekV3Config, device: torch.device) -> None:
        self.inv_freq = rotary_frequencies(config.rope_parameters, config.qk_rope_head_dim).to(device)
        self.factor = config.rope_parameters.rotary_factor
        # Which dims the checkpoint's projections put into a pair. The caches keep rotated keys in the same order.
        self.style: Literal["neox", "interleaved"] = "interleaved" if config.rope_interleave else "neox"

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [T, heads, rope], rotated at Int64 positions [T]."""
        return rope(x, positions, self.inv_freq, style=self.style, factor=self.factor)


def rotary_frequencies(parameters: RopeParameters, dim: int) -> Tensor:
    """Radians a token of each pair of dims, Float32 [dim / 2] on the CPU."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    wavelengths = parameters.rope_theta**exponents
    if parameters.rope_type == "default":
        return 1.0 / wavelengths
    assert parameters.factor is not None  # checked with the configuration
    # Pairs that turn often within the original context stay as they are; slow ones are slowed by the factor.
    low, high = _blend_range(parameters, dim)
    slowed = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - slowed
    return 1.0 / (parameters.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _blend_range(parameters: RopeParameters, dim: int) -> tuple[float, float]:
    """The pair up to which frequencies stay, and the one from which on they are fully slowed."""

    def pair_of(rotations: float) -> float:
        """The pair, not a whole number, that makes so many rotations in the original context."""
        context = parameters.original_max_position_embeddings
        assert context is not None  # filled in with the configuration
        turns = context / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(parameters.rope_theta))

    low, high = pair_of(parameters.beta_fast), pair_of(parameters.beta_slow)
    if parameters.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high if high != low else high + 0.001
