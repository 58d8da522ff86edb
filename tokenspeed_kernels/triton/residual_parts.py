"""What the forms of the gated residual share: the injection, the last step of the gates, dims."""

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels.triton.device import bucket


@triton.jit
def injected(x, y, gate, INJECTED: tl.constexpr):
    """The streams after the injection, rounded to their dtype, in float32."""
    if INJECTED:
        x = (x.to(tl.float32) + gate * y.to(tl.float32)).to(x.dtype)
    return x.to(tl.float32)


@triton.jit
def store_gates(
    products_ptr,  # [tokens, STREAMS, GATES]
    gates_ptr,  # [tokens, GATES]
    o_t,
    tokens,
    STREAMS: tl.constexpr,
    GATES: tl.constexpr,
    GATE_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The injection gates of the tokens `o_t`, from W n of each stream."""
    o_g = tl.arange(0, GATE_BLOCK)
    mask = (o_t < tokens)[:, None] & (o_g < GATES)[None, :]
    total = tl.zeros((TOKENS, GATE_BLOCK), tl.float32)
    for i_stream in tl.static_range(STREAMS):
        p_p = products_ptr + (o_t[:, None] * STREAMS + i_stream) * GATES + o_g[None, :]
        total += tl.load(p_p, mask=mask, other=0.0)
    tl.store(gates_ptr + o_t[:, None] * GATES + o_g[None, :], 2.0 * tl.sigmoid(total / STREAMS), mask=mask)


def dims_of(x: Tensor, rank: int, weight: Tensor) -> dict[str, int]:
    """What the compile-time choices depend on."""
    return {
        "tokens": bucket(x.shape[0]),
        "hidden": x.shape[2],
        "rank": rank,
        "itemsize": x.element_size(),
        "weight": weight.element_size(),
    }


def halves(rank: int) -> tuple[int, int]:
    """`rank` as two powers of two that matrix products take, the second one 0 where the first is enough."""
    first = max(bucket(rank + 1) // 2, 16)
    rest = 0 if rank <= first else max(bucket(rank - first), 16)
    return first, rest
