"""MLA prefill on Hopper: tiles of keys stream through shared memory past blocks of queries, see prefill.cu."""

import math

import torch
from torch import Tensor

from tokenspeed_cuda.code import Code
from tokenspeed_cuda.counters import counters
from tokenspeed_cuda.declare import tuned
from tokenspeed_cuda.tensor_map import TensorMap, tensor_map
from tokenspeed_kernels import mla
from tokenspeed_kernels.triton.device import compute_units
from tokenspeed_registry import Alignment, Dim

CODE = Code(__file__, "prefill.cu")
QUERIES, KEYS, CONSUMERS = 128, 128, 2
QK, V_DIM = 192, 128
THREADS = 128 * (CONSUMERS + 1)
SHARED = 2 * (QUERIES * QK + 2 * KEYS * (QK + V_DIM)) + 512 + 1024  # barriers; alignment
TOGETHER = 96 << 20, 16  # bytes of keys and values of a sequence, and heads, that blocks work on at a time


@tuned(
    mla.mla_prefill,
    CODE,
    name="cuda.mla_prefill",
    dtypes={"q": [torch.bfloat16], "k": [torch.bfloat16], "v": [torch.bfloat16]},
    constraints=[
        Dim("qk").in_(QK),
        Dim("v_dim").in_(V_DIM),
        Dim("heads") >= 1,
        Alignment("q") >= 16,
        Alignment("k") >= 16,
        Alignment("v") >= 16,
    ],
)
def mla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    scale: float,
    causal: bool = True,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q.shape
    kv_tokens, seqs = k.shape[0], cu_seqlens_q.shape[0] - 1
    attended, lse = out or (
        torch.empty(tokens, heads, V_DIM, dtype=q.dtype, device=q.device),
        torch.empty(tokens, heads, dtype=torch.float32, device=q.device),
    )
    if tokens == 0:
        return attended, lse
    if kv_tokens == 0:
        k = v = q  # no map of nothing can be made; they are not read
    units, blocks = compute_units(q.device), -(-tokens // QUERIES) * heads  # blocks: a few more if sequences are many
    most = min(max(TOGETHER[0] * seqs // (k.shape[0] * (QK + V_DIM) * 2), 1), TOGETHER[1])
    groups = -(-heads // most)
    # A scale of 0 would make NaN of the scores of hidden keys, which are infinite.
    log2_scale = math.copysign(max(abs(scale), 1e-30), scale) * math.log2(math.e)
    entry = CODE.entry("prefill", q.device, CAUSAL=int(causal), NEGATIVE=int(log2_scale < 0))
    entry(
        min(blocks + seqs * heads, units), THREADS, _rows(q, 64), _rows(k, KEYS), _rows(v, KEYS),
        cu_seqlens_q, cu_seqlens_k, attended, lse, counters(q.device), seqs, heads, -(-heads // groups),
        kv_tokens, causal and blocks <= units, log2_scale, shared=SHARED, pdl=True,
    )  # fmt: skip
    return attended, lse


def _rows(x: Tensor, rows: int) -> TensorMap:
    """Boxes of 64 numbers of one head from `rows` tokens."""
    tokens, heads, width = x.shape
    # A dim of one element may have any stride, also one that maps cannot have.
    by_token, by_head = (x.stride(dim) if x.shape[dim] > 1 else width for dim in (0, 1))
    return tensor_map(x.as_strided((heads, tokens, width), (by_head, by_token, 1)), (1, rows, 64))
