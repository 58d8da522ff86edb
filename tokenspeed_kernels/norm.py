"""Root-mean-square normalisation, of rows, of groups within rows, and of a residual that gains a layer's output.

Source: Root Mean Square Layer Normalization (arXiv:1910.07467).
"""

from jaxtyping import Float
from torch import Tensor

from tokenspeed_registry import Cost, Signature, op, rounded_sum


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

    Returns the dtype of `x`. Models that round once more, before a plain weight (DeepSeek-V3's), differ by that
    rounding, which the op's tolerance covers. Raises `ArgumentError` for arguments that do not fit.

    Source: Root Mean Square Layer Normalization, equation 4.
    """
    return _normalised(x.double(), weight, eps, zero_centred)


def _add_tolerance(s: Signature, role: str) -> float:
    # The residual is one rounded sum. The norm sees that sum, or what it was before the rounding.
    return rounded_sum(
        s.dtype(role), terms=1 if role == "residual" else s["dim"], roundings=1 if role == "residual" else 2
    )


@op(
    family="norm",
    cases="tokenspeed_kernels.cases.norm:add_rms_norm",
    outputs=("normed",),
    output_dtypes={"normed": "x"},
    static=("dim",),
    mutates=("residual",),
    strided=("x", "residual"),
    same_dtype=(("x", "residual"),),
    cost=lambda s: Cost(flops=5 * s.numel("x"), nbytes=s.nbytes("x", "residual", "residual", "weight", "normed")),
    tolerance=_add_tolerance,
)
def add_rms_norm(
    x: Float[Tensor, "rows dim"],
    residual: Float[Tensor, "rows dim"],
    weight: Float[Tensor, "dim"],
    *,
    eps: float,
    zero_centred: bool,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "rows dim"]:
    """Adds `x` to `residual`, which is changed in place, and returns the `rms_norm` of the sum.

    `x`: what a layer computed. `residual`: the sum of all layers before; gains `x` in float32 with one rounding to its
    dtype, and this rounded sum is what is normed. Both may be strided between rows.
    `weight`, `eps`, `zero_centred`: as in `rms_norm`.

    Returns the dtype of `x`. Raises `ArgumentError` for arguments that do not fit.

    Source: Root Mean Square Layer Normalization, equation 4; the residual of a pre-norm Transformer (arXiv:2002.04745).
    """
    residual.copy_(residual.double() + x.double())
    return _normalised(residual.double(), weight, eps, zero_centred)


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
    return _normalised(x.double(), weight, eps, zero_centred)


def _normalised(x: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> Tensor:
    scale = weight.double() + (1.0 if zero_centred else 0.0)
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * scale
