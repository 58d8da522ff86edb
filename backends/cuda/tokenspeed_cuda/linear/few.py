"""Projections of at most 16 tokens, as fast as the weight arrives: the idea is in `few.cu`.

How a row is shared out, over warps of a block and blocks of a cluster, depends on its length and on how many tiles of
16 rows there are: each warp keeps its part of x in registers beside weights on their way.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tokenspeed_cuda.code import Code
from tokenspeed_cuda.declare import tuned
from tokenspeed_kernels import linear_quantised as quantised
from tokenspeed_kernels.linear import linear as linear_op
from tokenspeed_registry.constraints import Alignment, Constraint, Dim, Flag

CODE = Code(__file__, "few.cu")
ARCHS = "sm_90a", "sm_100a", "sm_103a"
MOST_TOKENS, MOST_INPUTS = 16, 16384
MOST_OUTPUTS = 65536
"""Of bfloat16: a vocabulary's worth is as fast by a library."""
_AT_ONCE = {1: 132, 2: 66, 4: 30, 8: 15}
"""Clusters of a size that an H200 runs at once, one block a multiprocessor; what others run is as right."""
_TILES = 64
"""Most tiles that a cluster takes, whose sums lie in shared memory until the end."""


@dataclass(frozen=True)
class Format:
    """`number` and `piece` as in `weights.cuh`. `scales`: registers for the scales of a chunk on its way.

    `share`, `narrow_share`: how many chunks of 64 bytes of a row suit a warp, where outputs are many or few.
    """

    number: int
    piece: int
    scales: int
    share: int
    narrow_share: int


BF16, FP8, NVFP4 = Format(0, 8, 0, 2, 2), Format(1, 16, 1, 2, 4), Format(2, 32, 2, 1, 2)


@dataclass(frozen=True)
class Plan:
    """How a row is shared out, how many tiles a warp loads ahead and for how many blocks a multiprocessor has room."""

    warps: int
    cluster: int
    depth: int
    resident: int

    def clusters(self, tiles: int) -> int:
        """As many as run at once, or fewer if that takes no more tiles each; twice or more where each had too many."""
        most = self.resident * _AT_ONCE[self.cluster]
        waves = -(-tiles // (most * _TILES)) if self.cluster > 1 else 1
        return -(-tiles // -(-tiles // (most * waves)))

    def shared(self, tiles: int, octets: int) -> int:
        """Bytes: sums of the warps, twice, and of the blocks of the cluster, those of the tiles that are a block's."""
        own = -(-tiles // (self.clusters(tiles) * self.cluster)) if self.cluster > 1 else 0
        return 512 * octets * (2 * self.depth * self.warps + own * self.cluster)


@cache
def plan(form: Format, outputs: int, inputs: int, octets: int) -> Plan:
    """What was best on an H200, or like it.

    Short rows stay in one block. Longer ones are shared out as far as registers demand: a larger cluster reads x more
    seldom, but not as many of them run at once. Where outputs are few, four blocks share a row in any case.
    """
    chunks, tiles = -(-inputs // (4 * form.piece)), -(-outputs // 16)
    if tiles <= 2 * _AT_ONCE[4] and chunks >= 24:
        twice = octets == 2 and inputs >= 4096  # x is large, too: half as many clusters read it
        share, depth, resident = (form.share, 2, 1) if twice else (form.narrow_share, 1, 2)
        warps = -(-chunks // (4 * share))
        if _depth(form, octets, share, warps, resident) >= depth:
            return Plan(warps, 4, depth, resident)
    if chunks <= 24:
        share = -(-chunks // 8) if chunks % 10 else chunks // 10
        warps = -(-chunks // share)
        return Plan(warps, 1, min(max(_depth(form, octets, share, warps, 2), 1), 3), 2)
    for cluster in (2, 4, 8):
        warps = min(-(-chunks // (cluster * form.share)), 32)
        share = -(-chunks // (cluster * warps))
        depth = _depth(form, octets, share, warps, 1)
        if depth > 0:
            break
    return Plan(warps, cluster, min(max(depth, 1), 2), 1)


def _depth(form: Format, octets: int, share: int, warps: int, resident: int) -> int:
    """Tiles for which there are registers beside a warp's share of x."""
    room = min(65536 // (32 * warps * resident), 255) - 30 - octets * share * form.piece // 2
    return room // (share * (8 + form.scales))


def few(
    form: Format,
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
) -> Tensor:
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    if tokens and outputs:
        octets, tiles = -(-tokens // 8), -(-outputs // 16)
        how = plan(form, outputs, inputs, octets)
        entry = CODE.entry(
            "linear_few", x.device, FORMAT=form.number, IN=inputs, OCTETS=octets, WARPS=how.warps,
            CLUSTER=how.cluster, DEPTH=how.depth, RESIDENT=how.resident,
            SCALE_BYTES=4 if scale is None else scale.element_size(), OUT_BYTES=out.element_size(),
        )  # fmt: skip
        entry(
            how.clusters(tiles) * how.cluster, 32 * how.warps, x, weight, scale, global_scale, bias, out, tokens,
            x.stride(0), outputs, shared=how.shared(tiles, octets), cluster=how.cluster, pdl=True,
        )  # fmt: skip
    return out


def _limits(piece: int) -> tuple[Constraint, ...]:
    return (
        Dim("tokens") <= MOST_TOKENS,
        Dim("in_features").multiple_of(piece),
        Dim("in_features") <= MOST_INPUTS,
        Alignment("x") >= 16,
        Alignment("weight") >= 16,
    )


@tuned(
    quantised.linear_fp8_block, CODE, name="cuda.linear_fp8_block_few",
    archs=ARCHS, dtypes={"x": [torch.bfloat16]}, constraints=_limits(FP8.piece),
)  # fmt: skip
def linear_fp8_block(x: Tensor, weight: Tensor, scale: Tensor, *, out: Tensor | None = None) -> Tensor:
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device) if out is None else out
    return few(FP8, x, weight, scale, None, None, out)


@tuned(
    quantised.linear_nvfp4, CODE, name="cuda.linear_nvfp4_few",
    archs=ARCHS, dtypes={"x": [torch.bfloat16]}, constraints=(*_limits(NVFP4.piece), Alignment("scale") >= 2),
)  # fmt: skip
def linear_nvfp4(
    x: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor, *, out: Tensor | None = None
) -> Tensor:
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device) if out is None else out
    return few(NVFP4, x, weight, scale, global_scale, None, out)


@tuned(
    linear_op, CODE, name="cuda.linear_few",
    archs=ARCHS, dtypes={"x": [torch.bfloat16], "weight": [torch.bfloat16]},
    constraints=(
        *_limits(BF16.piece),
        Dim("out_features") <= MOST_OUTPUTS,
        Flag("dtype").in_(None, torch.bfloat16, torch.float32),
    ),
)  # fmt: skip
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty(x.shape[0], weight.shape[0], dtype=dtype or x.dtype, device=x.device) if out is None else out
    return few(BF16, x, weight, None, None, bias, out)
