"""Root-mean-square normalisation, of rows and of groups within rows.

Source: Root Mean Square Layer Normalization (arXiv:1910.07467).
"""

from jaxtyping import Float
from torch import Tensor

from tokenspeed_registry import Cost, op, rounded_sum


@op(
    family="norm",
    cases="tokenspeed_kernels.cases.norm:rms_norm",
    outputs=("normed",),
    output_dtypes={"normed": "x"},
    static=("dim",),
    strided=("x",),
    cost=lambda s: Cost(flops=4 * s.numel("x"), nbytes=s.nbytes("x", "weight", "normed")),
    # Every element carries the error of its row's mean, a float32 sum of `dim` squares.
    tolerance=lambda s, role: rounded_sum(s.dtype(role), terms=s["dim"]),
)
def rms_norm(
    x: Float[Tensor, "rows dim"],
    weight: Float[Tensor, "dim"],
    *,
    eps: float,
    zero_centred: bool,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "rows dim"]:
    """x / √(mean(x²) + eps) · w over each row, in float32 with one rounding at the end.

    `x`: may be strided between rows. `weight`: w itself, or w − 1 where it is stored `zero_centred`, so that the op
    adds 1; its dtype may differ from x's. `eps`: added to the mean of squares, in its units.

    Returns the dtype of `x`. Raises `ArgumentError` for arguments that do not fit.

    Source: Root Mean Square Layer Normalization, equation 4.
    """
    wide = x.double()
    scale = weight.double() + (1.0 if zero_centred else 0.0)
    return wide / (wide.square().mean(dim=-1, keepdim=True) + eps).sqrt() * scale


@op(
    family="norm",
    cases="tokenspeed_kernels.cases.norm:grouped_rms_norm",
    outputs=("normed",),
    output_dtypes={"normed": "x"},
    static=("groups", "dim"),
    strided=("x",),
    cost=lambda s: Cost(flops=4 * s.numel("x"), nbytes=s.nbytes("x", "weight", "normed")),
    # As `rms_norm`: the mean is one of `dim` squares.
    tolerance=lambda s, role: rounded_sum(s.dtype(role), terms=s["dim"]),
)
def grouped_rms_norm(
    x: Float[Tensor, "rows groups dim"],
    weight: Float[Tensor, "groups dim"],
    *,
    eps: float,
    zero_centred: bool,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "rows groups dim"]:
    """`rms_norm` of each group of each row on its own, with weights of its own per group.

    `x`: may be strided but for its last dim: head slices of a fused projection are. `weight`, `zero_centred`: w of
    every group, or w − 1 where it is stored `zero_centred`; its dtype may differ from x's. `eps`: added to the mean of
    squares of a group.

    In float32 with one rounding at the end. Returns the dtype of `x`. Raises `ArgumentError` for arguments that do not
    fit.

    Source: the streams' norm of gated residuals, Qwen3.8-Flash-Next model description in docs/models.md.
    """
    wide = x.double()
    scale = weight.double() + (1.0 if zero_centred else 0.0)
    return wide / (wide.square().mean(dim=-1, keepdim=True) + eps).sqrt() * scale
