"""Dense projections and embedding rows."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from tokenspeed_registry import Cost, Indices, Signature, op, rounded_sum


def _linear_tolerance(s: Signature, role: str) -> float:
    # A dot product over the inputs; a library that adds the bias afterwards rounds once more.
    return rounded_sum(s.dtype(role), terms=s["in_features"], roundings=2 if s.given("bias") else 1)


@op(
    family="linear",
    cases="tokenspeed_kernels.cases.linear:linear",
    outputs=("projected",),
    output_dtypes={"projected": "dtype or x"},
    static=("out_features", "in_features"),
    strided=("x",),
    same_dtype=(("weight", "bias"),),
    where=("dtype is None or dtype.is_floating_point and dtype.itemsize in (2, 4)",),
    cost=lambda s: Cost(flops=2 * s["tokens"] * s.numel("weight"), nbytes=s.nbytes("x", "weight", "bias", "projected")),
    tolerance=_linear_tolerance,
)
def linear(
    x: Float[Tensor, "tokens in_features"],
    weight: Float[Tensor, "out_features in_features"],
    bias: Float[Tensor, "out_features"] | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "tokens out_features"]:
    """x · weightᵀ + bias, summed in float32.

    `x`: a row a token; may be strided between tokens. `weight`: a row an output feature, of the dtype of `x` or another
    (a router kept in float32): neither is rounded to that of the other. `bias`: a number an output feature, in the
    dtype of `weight`; None adds nothing. `dtype`: that of the result, bfloat16, float16 or float32, to which the sum is
    rounded once; None is that of `x`.

    Raises `ArgumentError` for arguments that do not fit, also for any other `dtype`.

    Source: `torch.nn.functional.linear`.
    """
    projected = x.double() @ weight.double().T
    return projected if bias is None else projected + bias.double()


@op(
    family="linear",
    cases="tokenspeed_kernels.cases.linear:embedding",
    outputs=("embedded",),
    output_dtypes={"embedded": "table"},
    static=("hidden",),
    where=("vocab > 0",),
    checks=(Indices("ids", below="vocab"),),
    cost=lambda s: Cost(flops=0, nbytes=s.nbytes("ids") + 2 * s.nbytes("embedded")),
    # A copy.
    tolerance=lambda s, role: 0.0,
)
def embedding(
    ids: Int64[Tensor, "tokens"],
    table: Float[Tensor, "vocab hidden"],
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "tokens hidden"]:
    """The table's row for each id, zeros for id -1.

    `ids`: token ids, 0-based and below `vocab`; -1 marks padding. `table`: the embedding matrix, a row an id.

    Returns the dtype of `table`. Raises `ArgumentError` for arguments that do not fit, `ContentError` for an id out of
    range where ids are checked (short CPU tensors, or debug mode).

    Source: `torch.nn.functional.embedding`.
    """
    embedded = table.new_zeros(ids.shape[0], table.shape[1])
    for token, row in enumerate(ids.tolist()):
        if row >= 0:
            embedded[token] = table[row]
    return embedded
