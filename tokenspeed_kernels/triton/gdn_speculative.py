"""Speculative verify of the gated delta rule, on the tiles of `gdn_recurrent`.

`gdn_verify` is decode with more tokens. `gdn_verify_replay` brings a tile up to date in registers and goes on from
there, so that it writes a state only where it folds. There the new keys and gates go to rows of the buffers that
programs of other tiles still read: a second launch brings them, once all have read. All else the first one writes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import gdn_speculative
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.gdn_recurrent import (
    advance,
    along_rows,
    chunks_of,
    default_tile,
    few_batches,
    load_key,
    recurrent_steps,
    tile_space,
    wide_key,
)
from tokenspeed_kernels.triton.tuning import Tunable

VERIFY = Tunable("gdn_verify", tile_space, default_tile)
REPLAY = Tunable("gdn_verify_replay", tile_space, default_tile)
FOLD = Tunable("gdn_fold", tile_space, default_tile)


@portable(gdn_speculative.gdn_verify)
def gdn_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    initial_slots: Tensor,
    slots: Tensor,
    *,
    scale: float,
    normalise: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    batch, q_len, v_heads, d_v = v.shape
    k_heads, d_k = k.shape[2:]
    if out.numel() == 0:
        return out
    config = VERIFY.pick(v.device, batch=few_batches(batch), q_len=q_len, v_heads=v_heads, d_k=d_k, d_v=d_v)
    recurrent_steps[(batch * v_heads * triton.cdiv(d_v, config["ROWS"]),)](
        q,
        k,
        v,
        g,
        beta,
        state,
        initial_slots,
        slots,
        out,
        scale,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        q_len,
        v_heads,
        v_heads // k_heads,
        d_k,
        d_v,
        *chunks_of(d_k, state),
        normalise,
        **config,
    )
    return out


@triton.jit
def _replay(
    state,
    p_k,  # of the key head
    p_v,  # of the tile's rows of the value head
    p_g,
    p_beta,
    inside,
    count,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """The tile after `count` kept tokens, each asked for while the one before is worked on."""
    next_k = load_key(p_k, DK if count > 0 else 0, CHUNKS, CHUNK)
    next_v = tl.load(p_v, mask=inside & (count > 0), other=0.0)
    next_g = tl.load(p_g, mask=count > 0, other=0.0)
    next_beta = tl.load(p_beta, mask=count > 0, other=0.0)
    for i in range(count):
        k, v, g, beta = next_k, next_v, next_g, next_beta
        more = i + 1 < count
        p_k += K_HEADS * DK
        p_v += V_HEADS * DV
        p_g += V_HEADS
        p_beta += V_HEADS
        next_k = load_key(p_k, DK if more else 0, CHUNKS, CHUNK)
        next_v = tl.load(p_v, mask=inside & more, other=0.0)
        next_g = tl.load(p_g, mask=more, other=0.0)
        next_beta = tl.load(p_beta, mask=more, other=0.0)
        state = advance(state, wide_key(k, NORMALISE), v, g, beta)
    return state
