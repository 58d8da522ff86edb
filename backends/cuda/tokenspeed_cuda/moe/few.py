"""Experts of at most 32 tokens with quantised weights, as fast as those arrive: the idea is in `few.cu`."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tokenspeed_cuda.code import Code
from tokenspeed_cuda.counters import counters
from tokenspeed_cuda.declare import tuned
from tokenspeed_kernels import moe_quantised
from tokenspeed_registry.constraints import Alignment, Constraint, Dim

CODE = Code(__file__, "few.cu")
FP8, NVFP4 = 1, 2
MOST_TOKENS, WARPS, TEAMS, ROWS = 32, 20, 2, 32


@dataclass(frozen=True)
class Plan:
    """How the queue is filled, and how the second half adds up.

    `depth`: tiles of a warp on their way in the first half. `items`: experts in a stage of the second half. `octets`:
    how many times 8 tokens there are. `staged`: for how many tokens the second half has its inputs in shared memory.
    """

    depth: int
    items: int
    octets: int
    staged: int


@dataclass(frozen=True)
class Dims:
    format: int
    hidden: int
    inter: int
    experts: int
    top_k: int

    def shared(self, plan: Plan) -> int:
        """Bytes, a few more than `Shared` of few.cu has."""
        rows, threads = MOST_TOKENS * self.top_k, 32 * WARPS
        lists = 6 * -(-self.experts // threads) * threads + (12 + 13) * rows + 4 * WARPS
        partial = 512 * WARPS * max(2, plan.octets)
        chunks, back = self._row(self.hidden) // 640, self._row(self.inter) // 320
        chunk, rest = (1024 + 128, 0) if self.format == NVFP4 else (1024, 64)
        queue = WARPS * max(plan.depth * (chunks * chunk + rest), plan.items * (back * chunk + rest))
        return lists + partial + queue + max(plan.staged * self.top_k, 1) * (self.inter + 32) * 2 + 512

    def _row(self, inputs: int) -> int:
        return inputs if self.format == FP8 else inputs // 2


def plan_of(format: int, tokens: int) -> Plan:
    """Measured; deeper queues are no faster."""
    octets = 1 if tokens <= 8 else 2 if tokens <= 16 else 4
    if format == NVFP4:
        return Plan(2, items=2, octets=octets, staged=1 if tokens <= 1 else 4 if tokens <= 4 else 0)
    if tokens <= 1:
        return Plan(1, items=2, octets=1, staged=1)
    return Plan(1 if tokens <= 8 else 2, items=1, octets=octets, staged=0)


@cache
def _multiprocessors(device: torch.device) -> int:
    """As many blocks as run at once, one each."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def sum_of_experts(
    d: Dims,
    plan: Plan,
    x: Tensor,
    gate_up: tuple[Tensor, Tensor, Tensor | None],
    down: tuple[Tensor, Tensor, Tensor | None],
    weights: Tensor,
    ids: Tensor,
    first_expert: int,
    out: Tensor | None,
    blocks: int = 0,
) -> Tensor:
    tokens, blocks = x.shape[0], blocks or _multiprocessors(x.device)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if tokens == 0:
        return y
    inner = torch.empty(tokens * d.top_k, d.inter, dtype=x.dtype, device=x.device)
    parts = torch.empty(blocks * TEAMS * 2 * 8 * plan.octets * ROWS, dtype=torch.float32, device=x.device)
    dims = {"HIDDEN": d.hidden, "INTER": d.inter, "EXPERTS": d.experts, "TOP_K": d.top_k, "FORMAT": d.format}
    choices = {"DEPTH": plan.depth, "ITEMS": plan.items, "OCTETS": plan.octets}
    entry = CODE.entry("moe_few", x.device, **dims, **choices, STAGED=plan.staged)
    entry(
        blocks, 32 * WARPS, x, *gate_up, *down, weights, ids, inner, parts, counters(x.device), y, tokens, x.stride(0),
        first_expert, shared=d.shared(plan), pdl=True,
    )  # fmt: skip
    return y


def _limits(most_tokens: int) -> list[Constraint]:
    dims = [Dim("tokens") <= most_tokens, Dim("hidden").in_(2560), Dim("inter").in_(640)]
    sizes = [Dim("experts") <= 640, Dim("top_k") <= 10]  # of lists in shared memory
    return dims + sizes + [Alignment(role) >= 16 for role in ("x", "gate_up", "down")]


@tuned(
    moe_quantised.moe_experts_nvfp4,
    CODE,
    name="cuda.moe_experts_nvfp4_few",
    dtypes={"x": [torch.bfloat16]},
    # With more tokens widening takes longer than in the portable kernel.
    constraints=[*_limits(8), Alignment("gate_up_scale") >= 16, Alignment("down_scale") >= 8],
)
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
    d = Dims(NVFP4, x.shape[1], gate_up.shape[2], gate_up.shape[0], ids.shape[1])
    matrices = (gate_up, gate_up_scale, gate_up_global_scale), (down, down_scale, down_global_scale)
    return sum_of_experts(d, plan_of(NVFP4, x.shape[0]), x, *matrices, weights, ids, first_expert, out)


@tuned(
    moe_quantised.moe_experts_fp8_block,
    CODE,
    name="cuda.moe_experts_fp8_block_few",
    dtypes={"x": [torch.bfloat16], "gate_up_scale": [torch.float32], "down_scale": [torch.float32]},
    constraints=_limits(MOST_TOKENS),
)
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
    d = Dims(FP8, x.shape[1], gate_up.shape[2], gate_up.shape[0], ids.shape[1])
    matrices = (gate_up, gate_up_scale, None), (down, down_scale, None)
    return sum_of_experts(d, plan_of(FP8, x.shape[0]), x, *matrices, weights, ids, first_expert, out)
