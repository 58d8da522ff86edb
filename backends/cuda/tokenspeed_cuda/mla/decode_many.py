"""MLA decode for many query rows (heads x new tokens), where the matrix units set the time.

A block has 64 query rows of a sequence, a pair of blocks loads its keys together. The keys of all sequences are cut
into equal shares, one for each pair, on the device and from the lengths as they are. Blocks that share a sequence leave
parts in float32, wait for each other, and add them in their order. See `decode_many.cu`.
"""

import torch
from torch import Tensor

from tokenspeed_cuda.code import Code
from tokenspeed_cuda.counters import counters
from tokenspeed_cuda.declare import tuned
from tokenspeed_cuda.tensor_map import tensor_map
from tokenspeed_kernels import mla
from tokenspeed_kernels.triton.device import compute_units
from tokenspeed_registry import Alignment, Dim

CODE = Code(__file__, "decode_many.cu")

ROWS, LATENT, QK = 64, 512, 576
PAIR = 2  # blocks of a cluster
SHARED = 3 * ROWS * QK * 2 + ROWS * 64 * 2 + 4 * (4 * ROWS + 2 * 4) + 8 * 27


@tuned(
    mla.mla_decode,
    CODE,
    name="cuda.mla_decode_many",
    dtypes={"q": [torch.bfloat16], "kv_cache": [torch.bfloat16]},
    constraints=[
        Dim("qk").in_(QK),
        Dim("latent").in_(LATENT),
        Dim("page").multiple_of(ROWS),
        Dim("q_len") <= 8,
        Dim("heads") >= 16,
        Alignment("q") >= 16,
        Alignment("kv_cache") >= 16,
    ],
)
def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    latent: int,
    scale: float,
    kv_scale: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    batch, q_len, heads, _ = q.shape
    attended, lse = out or (
        torch.empty(batch, q_len, heads, latent, dtype=q.dtype, device=q.device),
        torch.empty(batch, q_len, heads, dtype=torch.float32, device=q.device),
    )
    if attended.numel() == 0:
        return attended, lse
    rows, pairs = q_len * heads, compute_units(q.device) // PAIR
    # Each block has room for two parts: of a sequence that began before its share, and of one that ends after it.
    parts = torch.empty(pairs * 2 * PAIR, ROWS * LATENT, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(pairs * 2 * PAIR, ROWS, dtype=torch.float32, device=q.device)
    queries = tensor_map(q.view(batch, rows, QK), (1, ROWS, 64))
    cache = tensor_map(kv_cache, (1, ROWS, 64)) if kv_cache.shape[0] else queries  # an empty one is not read
    CODE.entry("attend", q.device, PAGE=kv_cache.shape[1])(
        pairs * PAIR, 384,
        queries, cache, page_table, seq_lens, kv_scale, attended, lse, parts, part_lse, counters(q.device, 4 * pairs),
        batch, q_len, heads, page_table.shape[1], scale,
        shared=SHARED, cluster=PAIR, pdl=True,
    )  # fmt: skip
    return attended, lse
