"""Prefill of the gated delta rule on Hopper: the idea is in `prefill.cu`.

Whole sequences for many of them, a block a sequence and value head; segments of one long sequence where heads are few.
What is left out the portable kernel does faster: one sequence of 48 heads (its blocks are half as many as there are
multiprocessors), and numbers of sequences whose blocks leave many multiprocessors idle at the end.
"""

import torch
from torch import Tensor

from tokenspeed_cuda.code import Code
from tokenspeed_cuda.declare import tuned
from tokenspeed_cuda.tensor_map import TensorMap, tensor_map
from tokenspeed_kernels import gdn
from tokenspeed_registry.constraints import Alignment, Dim, Flag

CODE = Code(__file__, "prefill.cu")
SEGMENTS = 5
"""So that two halves of 12 heads are 120 blocks, of the 132 that an H100 or H200 runs at once."""
_DTYPES = {"q": [torch.bfloat16], "state": [torch.float32]}
_LIMITS = (
    Dim("d_k").in_(128),
    Dim("d_v").in_(128),
    Flag("normalise").in_(True),
    *(Alignment(name) >= 16 for name in ("q", "k", "v", "g", "beta", "state")),
)


@tuned(
    gdn.gdn_prefill,
    CODE,
    name="cuda.gdn_prefill_many",
    dtypes=_DTYPES,
    constraints=[*_LIMITS, Dim("v_heads").in_(48), Dim("seqs").in_(8, 16, 24, 32)],
)
def gdn_prefill_many(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    fresh: Tensor,
    *,
    scale: float,
    normalise: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    walks = slots.shape[0] * v.shape[1]
    maps = _maps(q, k, v, g, beta)
    _launch((2, 1, 0), walks, maps, (k.shape[1], v.shape[1]), state, slots, cu_seqlens, fresh, out, None, scale)
    return out


@tuned(
    gdn.gdn_prefill,
    CODE,
    name="cuda.gdn_prefill_cut",
    dtypes=_DTYPES,
    constraints=[*_LIMITS, Dim("v_heads").in_(12), Dim("seqs").in_(1), Dim("tokens") >= 8192],
)
def gdn_prefill_cut(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    fresh: Tensor,
    *,
    scale: float,
    normalise: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    seqs, v_heads = slots.shape[0], v.shape[1]
    walks = seqs * v_heads
    maps, heads = _maps(q, k, v, g, beta), (k.shape[1], v_heads)
    found = torch.empty(seqs, SEGMENTS - 1, v_heads, 2, 128, 128, dtype=torch.float32, device=v.device)
    blocks = walks * 2 * (SEGMENTS - 1)
    _launch((2, 1, 1), blocks, maps, heads, state, slots, cu_seqlens, fresh, out, found, scale)
    blocks = walks * 2 * SEGMENTS
    _launch((1, 2, 2), blocks, maps, heads, state, slots, cu_seqlens, fresh, out, found, scale)
    return out


def _maps(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> list[TensorMap]:
    if v.shape[0] == 0:
        return [TensorMap(bytes(128))] * 5  # not used then
    return [*(tensor_map(x, (64, 1, 64)) for x in (q, k, v)), *(tensor_map(x, (64, 4), swizzle=0) for x in (g, beta))]


def _launch(
    form: tuple[int, int, int],
    blocks: int,
    maps: list[TensorMap],
    heads: tuple[int, int],
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    fresh: Tensor,
    out: Tensor,
    found: Tensor | None,
    scale: float,
) -> None:
    """`form`: consuming and producing warpgroups, and which pass. `heads`: of keys and of values."""
    consumers, producers, step = form
    macros = {"CONSUMERS": consumers, "PRODUCERS": producers, "PASS": step}
    entry = CODE.entry("gdn_prefill", out.device, K_HEADS=heads[0], V_HEADS=heads[1], **macros)
    threads, shared = 128 * (consumers + producers), shared_bytes(consumers, step == 2)
    entry(blocks, threads, *maps, state, slots, cu_seqlens, fresh, out, found, SEGMENTS, scale, shared=shared)


def shared_bytes(consumers: int, jumps: bool) -> int:
    """What prefill_stage.cuh lays out, and room to align it."""
    stages = 3 * ((6 + consumers) * 8192 + 3 * 1024)
    behind = 4 * 16 * 80 + consumers * 8192 + 1024
    return stages + behind + jumps * (2 * 128 * 128 + 1024) + 1024
