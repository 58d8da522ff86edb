"""Experts with quantised weights and many tokens each: the idea is in `experts.cu`.

Pairs of a token and an expert come in the order of experts, as in the portable kernel, whose last step adds them up.
Columns of x, and of what is between the products, lie in the order in which the products take them.
"""

import torch
from torch import Tensor

from tokenspeed_cuda.code import Code
from tokenspeed_cuda.declare import tuned
from tokenspeed_kernels import moe_quantised
from tokenspeed_kernels.triton.moe_align import align
from tokenspeed_kernels.triton.moe_down import add_up
from tokenspeed_registry.constraints import Alignment, Constraint, Dim

PRODUCT, ORDER = Code(__file__, "experts.cu"), Code(__file__, "reorder.cu")
FP8, NVFP4 = 1, 2
"""Formats, as `weights.cuh` has them."""
_BLOCKS = 32, 64, 96, 128, 192
"""Pairs that a block may have."""

LIMITS: tuple[Constraint, ...] = (
    Dim("tokens") >= 3072,  # with fewer, tiles narrower than tokens' are the faster ones
    Dim("tokens") <= 131072,
    Dim("hidden").multiple_of(128),
    Dim("inter").multiple_of(128),
    Dim("hidden") <= 8192,
    Dim("top_k") <= 32,
    Alignment("x") >= 16,
    Alignment("gate_up") >= 16,
    Alignment("down") >= 16,
)


def pairs_a_block(pairs: int, experts: int) -> int:
    """Enough for nearly every expert where tokens spread evenly, since a second block reads its weights again."""
    wanted = 1.2 * pairs / experts
    return next((size for size in _BLOCKS if wanted <= size), _BLOCKS[-1])


def shared_bytes(pairs: int, inputs: int) -> int:
    """Of `experts_product`: stages of 128 bytes a pair with two barriers each, and what is said of the pairs, twice."""
    stages = min(6 if pairs > 128 else 8, inputs // 64)
    return stages * (128 * pairs + 16) + 16 * pairs


def experts(
    kind: int,
    x: Tensor,
    gate_up: tuple[Tensor, Tensor | None, Tensor | None],
    down: tuple[Tensor, Tensor | None, Tensor | None],
    weights: Tensor,
    ids: Tensor,
    first_expert: int,
    out: Tensor | None,
) -> Tensor:
    """`gate_up`, `down`: weights, their scales and global scales, as far as the format has them."""
    (tokens, hidden), top_k, count = x.shape, ids.shape[1], down[0].shape[0]
    inter = gate_up[0].shape[-2] // (1 if gate_up[0].dim() == 4 else 2)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    size = pairs_a_block(ids.numel(), count)
    blocks = align(ids, first_expert, count, size)
    reordered = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    order = ORDER.entry("reorder", x.device, FORMAT=kind, IN=hidden, TOP_K=top_k, EXPERTS=count)
    order(tokens, hidden // 8, x, ids, reordered, x.stride(0), first_expert)

    inner = torch.empty(ids.numel(), inter, dtype=x.dtype, device=x.device)
    parts = torch.empty(ids.numel(), hidden, dtype=x.dtype, device=x.device)
    for gated, rows, source, matrix, result in ((1, inter, reordered, gate_up, inner), (0, hidden, inner, down, parts)):
        scale = matrix[1]
        product = PRODUCT.entry(
            "experts_product", x.device, FORMAT=kind, GATED=gated, ROWS=rows, IN=source.shape[1], N=size, TOP_K=top_k,
            SCALE_BYTES=4 if scale is None else scale.element_size(),
        )  # fmt: skip
        product(
            _multiprocessors(x.device), 384, source, *matrix, weights, blocks.order, blocks.table, result,
            shared=shared_bytes(size, source.shape[1]),
        )  # fmt: skip
    add_up(parts, blocks, y)
    return y


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@tuned(
    moe_quantised.moe_experts_fp8_block, PRODUCT, ORDER, name="cuda.moe_experts_fp8_block_prefill",
    dtypes={"x": [torch.bfloat16]}, constraints=LIMITS,
)  # fmt: skip
def moe_experts_fp8_block(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    first_expert: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    return experts(
        FP8, x, (gate_up, gate_up_scale, None), (down, down_scale, None), weights, ids, first_expert, out
    )  # fmt: skip


@tuned(
    moe_quantised.moe_experts_nvfp4, PRODUCT, ORDER, name="cuda.moe_experts_nvfp4_prefill",
    dtypes={"x": [torch.bfloat16]},
    constraints=(*LIMITS, Alignment("gate_up_scale") >= 2, Alignment("down_scale") >= 2),
)  # fmt: skip
def moe_experts_nvfp4(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_global_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    down_global_scale: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    first_expert: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    return experts(
        NVFP4, x, (gate_up, gate_up_scale, gate_up_global_scale), (down, down_scale, down_global_scale),
        weights, ids, first_expert, out,
    )  # fmt: skip
