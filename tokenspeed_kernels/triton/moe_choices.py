"""How many pairs a block of the experts' products has, and how large tiles of their matrices are."""

import torch
from torch import Tensor

from tokenspeed_kernels.triton.device import bucket, platform_for
from tokenspeed_kernels.triton.moe_align import Aligned
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry.platform import Platform


def pairs_a_block(format: str, pairs: int, experts: int, device: torch.device) -> int:
    """Few more than an expert has, and no fewer than a matrix instruction takes on its narrow side.

    What widens weights has fewer registers left for sums.
    """
    least = 16 if platform_for(device).vendor == "amd" else 8
    mean = bucket(pairs) // bucket(experts)
    return least if mean <= 4 else min(max(mean, 16), 128 if format == "plain" else 64)


def dims(x: Tensor, hidden: int, inter: int, blocks: Aligned) -> dict[str, int]:
    """For what a product's tile is chosen."""
    return {
        "hidden": hidden,
        "inter": inter,
        "block_m": blocks.block_m if blocks.aligned else 1,
        "itemsize": x.element_size(),
    }


_Choice = tuple[int, ...]
"""BLOCK_N, BLOCK_K, num_warps, num_stages; of the gate and up projection also whether x is taken apart before."""


def _config(choice: _Choice) -> dict[str, int]:
    return dict(zip(("BLOCK_N", "BLOCK_K", "num_warps", "num_stages", "APART"), choice, strict=False))


def _tunable(name: str, one: list[_Choice], few: list[_Choice], some: list[_Choice], many: list[_Choice]) -> Tunable:
    """Choices, the best first, for single pairs, for blocks of up to 16 pairs, up to 32, and for larger ones."""

    def choices(dims: Dims) -> list[_Choice]:
        if dims["itemsize"] == 4:
            return [(32, 64, 4, 2, 1)[: len(one[0])]]
        most = dims["block_m"]
        return one if most == 1 else few if most <= 16 else some if most <= 32 else many

    def default(platform: Platform, dims: Dims) -> Config:
        best = _config(choices(dims)[0])
        if platform.vendor == "amd":  # its warps are twice as wide, and its copies take no deep pipeline
            best |= {"num_warps": max(best["num_warps"], 4), "num_stages": 2}
        elif platform.arch != "sm_90a" and dims["block_m"] >= 128:  # sums pass from tensor memory to registers at once
            best["num_warps"] = 8
        return best

    return Tunable(name, space=lambda dims: [_config(choice) for choice in choices(dims)], default=default)


UP = {
    "plain": _tunable(
        "moe_gate_up_plain",
        one=[(64, 128, 4, 4, 0), (32, 128, 4, 4, 0), (64, 128, 4, 3, 0)],
        few=[(64, 128, 4, 4, 0), (64, 128, 4, 3, 0), (128, 128, 4, 3, 0)],
        some=[(64, 128, 4, 4, 0), (128, 64, 4, 3, 0), (128, 128, 4, 3, 0)],
        many=[(256, 64, 8, 4, 0), (128, 64, 8, 3, 0), (128, 64, 4, 3, 0)],
    ),
    "fp8_block": _tunable(
        "moe_gate_up_fp8_block",
        one=[(64, 128, 4, 4, 0), (32, 128, 2, 4, 0), (64, 128, 4, 3, 0)],
        few=[(64, 128, 4, 4, 0), (64, 128, 4, 3, 0), (32, 128, 2, 4, 0), (128, 128, 4, 3, 0)],
        some=[(64, 128, 4, 4, 1), (128, 128, 4, 3, 1), (64, 128, 4, 4, 0)],
        many=[(128, 128, 8, 3, 1), (128, 128, 4, 3, 1)],
    ),
    "nvfp4": _tunable(
        "moe_gate_up_nvfp4",
        one=[(32, 256, 2, 3, 1), (32, 256, 2, 3, 0), (64, 256, 2, 3, 0)],
        few=[(64, 256, 2, 3, 1), (64, 256, 4, 3, 1), (32, 256, 2, 3, 1)],
        some=[(128, 128, 4, 3, 1), (64, 256, 4, 3, 1), (64, 256, 2, 3, 1)],
        many=[(128, 128, 4, 3, 1), (128, 128, 8, 3, 1)],
    ),
}
DOWN = {
    "plain": _tunable(
        "moe_down_plain",
        one=[(64, 128, 4, 3), (64, 64, 4, 4), (128, 128, 4, 3)],
        few=[(128, 128, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3)],
        some=[(64, 128, 4, 3), (128, 64, 4, 3), (128, 128, 4, 3)],
        many=[(128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3)],
    ),
    "fp8_block": _tunable(
        "moe_down_fp8_block",
        one=[(64, 128, 4, 3), (32, 128, 2, 4)],
        few=[(64, 128, 4, 3), (64, 128, 4, 4), (128, 128, 4, 3)],
        some=[(64, 128, 4, 3), (128, 128, 4, 3), (128, 128, 8, 3)],
        many=[(128, 64, 4, 4), (128, 128, 8, 3)],
    ),
    "nvfp4": _tunable(
        "moe_down_nvfp4",
        one=[(32, 128, 1, 3), (32, 128, 1, 4), (64, 128, 2, 3)],
        few=[(64, 128, 2, 3), (32, 128, 1, 3), (64, 128, 4, 3)],
        some=[(128, 128, 4, 3), (64, 128, 4, 3), (64, 128, 2, 3)],
        many=[(128, 128, 4, 3), (128, 64, 4, 3)],
    ),
}
