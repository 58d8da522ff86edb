"""One token of each sequence under the gated delta rule: the idea is in `recurrent.cu`."""

from ctypes import c_int64

import torch
from torch import Tensor

from tokenspeed_cuda.code import Code
from tokenspeed_cuda.declare import tuned
from tokenspeed_kernels import gdn
from tokenspeed_registry import Alignment, Dim

CODE = Code(__file__, "recurrent.cu")
_ROWS = 8
"""Of a state, a block."""


@tuned(
    gdn.gdn_decode,
    CODE,
    archs=("sm_90a", "sm_100a", "sm_103a"),
    dtypes={"q": [torch.bfloat16], "state": [torch.float32]},
    constraints=[
        Dim("d_k").in_(128),
        Dim("d_v").multiple_of(_ROWS),
        *(Alignment(role) >= 8 for role in ("q", "k")),
        Alignment("state") >= 16,
    ],
)
def gdn_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    *,
    scale: float,
    normalise: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    batch, v_heads, d_v = v.shape
    if out.numel():
        entry = CODE.entry(
            "gdn_decode",
            v.device,
            V_HEADS=v_heads,
            GROUP=v_heads // k.shape[1],
            D_V=d_v,
            NORMALISE=int(normalise),
        )
        strides = [c_int64(x.stride(dim)) for x in (q, k, v) for dim in (0, 1)]
        tensors = q, k, v, g, beta, state, slots, out
        entry(batch * v_heads * d_v // _ROWS, 32, *tensors, scale, state.shape[0], *strides, pdl=True)
    return out
