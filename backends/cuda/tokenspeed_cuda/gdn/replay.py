"""Verifies drafted tokens of the gated delta rule after a replay of those kept before: the idea is in `replay.cu`."""

from ctypes import c_int64

import torch
from torch import Tensor

from tokenspeed_cuda.code import Code
from tokenspeed_cuda.counters import counters
from tokenspeed_cuda.declare import tuned
from tokenspeed_kernels import gdn_speculative
from tokenspeed_registry import Alignment, Dim

CODE = Code(__file__, "replay.cu")
_FORMS = {1: (1, True, 1), 2: (4, True, 1), 4: (2, False, 3), 16: (4, False, 3)}
_MANY = 4, False, 4
"""By the largest batch: groups of 32 rows a block, whether threads of their own prepare what rows share, and how many
blocks a multiprocessor has room for. One sequence is spread over the chip for its latency; many keep loads in flight.
"""


@tuned(
    gdn_speculative.gdn_verify_replay,
    CODE,
    archs=("sm_90a", "sm_100a", "sm_103a"),
    dtypes={"q": [torch.bfloat16], "state": [torch.float32]},
    constraints=[
        Dim("d_k").in_(128),
        Dim("d_v").in_(128),
        Dim("q_len") >= 1,
        Dim("q_len") <= 4,
        Dim("capacity") <= 8,
        *(Alignment(role) >= 16 for role in ("q", "k", "v", "kept_k", "kept_v", "state")),
    ],
)
def gdn_verify_replay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    kept_k: Tensor,
    kept_v: Tensor,
    kept_g: Tensor,
    kept_beta: Tensor,
    slots: Tensor,
    kept: Tensor,
    *,
    scale: float,
    normalise: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    batch, q_len, v_heads, d_v = v.shape
    capacity, k_heads = kept_k.shape[1:3]
    if out.numel():
        groups, apart, blocks = next((form for most, form in _FORMS.items() if batch <= most), _MANY)
        entry = CODE.entry(
            "gdn_verify_replay",
            v.device,
            V_HEADS=v_heads,
            GROUP=v_heads // k_heads,
            Q_LEN=q_len,
            CAPACITY=capacity,
            NORMALISE=int(normalise),
            GROUPS=groups,
            APART=int(apart),
            BLOCKS=blocks,
        )
        strides = [c_int64(x.stride(dim)) for x in (q, k, v) for dim in (0, 1, 2)]
        tensors = q, k, v, g, beta, state, kept_k, kept_v, kept_g, kept_beta, slots, kept, out
        arrivals = counters(v.device, 1 << (batch * k_heads - 1).bit_length())
        grid, block = batch * v_heads * d_v // (32 * groups), 256 if apart else 128
        entry(grid, block, *tensors, arrivals, scale, state.shape[0], *strides, pdl=True)
    return out
