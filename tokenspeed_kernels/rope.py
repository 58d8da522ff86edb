"""Rotary position embedding of query and key heads.

Source: RoFormer (arXiv:2104.09864).
"""

from typing import Literal

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from tokenspeed_registry import Cost, op, rounded_sum


@op(
    family="rope",
    cases="tokenspeed_kernels.cases.rope:rope",
    outputs=("rotated",),
    output_dtypes={"rotated": "x"},
    static=("heads", "dim", "half"),
    strided=("x",),
    where=("2 * half <= dim",),
    cost=lambda s: Cost(
        flops=6 * s["tokens"] * s["heads"] * s["half"], nbytes=s.nbytes("x", "positions", "inv_freq", "rotated")
    ),
    # Two products and their difference; beside the result, the cosine and sine were rounded to its dtype.
    tolerance=lambda s, role: rounded_sum(s.dtype(role), terms=2, roundings=2),
)
def rope(
    x: Float[Tensor, "tokens heads dim"],
    positions: Int64[Tensor, "tokens"],
    inv_freq: Float32[Tensor, "half"],
    *,
    style: Literal["neox", "interleaved"] = "neox",
    factor: float = 1.0,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "tokens heads dim"]:
    """Rotates pairs among the first 2·half dims of every head by position · inv_freq; the other dims are copied.

    `x`: queries or keys; may be strided but for the last dim. `positions`: 0-based position of each token.
    `inv_freq`: radians a token, one a pair. How they come about is the model's affair: plain RoPE has θ^(−i / half) for
    pair i, YaRN blends these with the same divided by its scaling factor.
    `style`: pair i is dims (i, i + half) in "neox" style and dims (2i, 2i + 1) in "interleaved" style, where a rotated
    pair stays in its place. Implementations that move the first of all pairs before the second ones give q·k the same
    value, as long as they do so to both; cached keys of the two must not be mixed.
    `factor`: multiplies cosine and sine (YaRN's attention factor; 1 for plain RoPE). YaRN's other factor, that of the
    softmax, is no part of this op.

    The angle is a float32 product; cosine and sine, times `factor`, are rounded to x's dtype, in which models store
    them; the rotation itself is in float32 with one rounding. Returns the dtype of `x`. Raises `ArgumentError` for
    arguments that do not fit.

    Source: RoFormer, section 3.2.2; YaRN (arXiv:2309.00071) for `factor`.
    """
    half = inv_freq.shape[0]
    angle = (positions.to(torch.float32)[:, None] * inv_freq).double()
    cos = (angle.cos() * factor).to(x.dtype).double()[:, None, :]
    sin = (angle.sin() * factor).to(x.dtype).double()[:, None, :]
    rotated = x.double().clone()
    if style == "neox":
        first, second = slice(0, half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = x[..., first].double(), x[..., second].double()
    rotated[..., first] = a * cos - b * sin
    rotated[..., second] = a * sin + b * cos
    return rotated
