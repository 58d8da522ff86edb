"""Gated residual: several residual streams a token, mixed into each sublayer's input and injected with its output.

What the ops share:

`x`: the raw streams of each token. `y`: the output of the sublayer for the same tokens.
`inject`: how much of `y` each stream takes, 0 to 2: the gates which the mix before that sublayer returned.
`norm_weight`: weight of each stream's norm, stored centred at zero.
`w_down`, `w_up`: projections of the flattened streams down to `rank` numbers and up again to the mixing gates, in the
dtype of `x` or both in float8_e4m3fn; `down_scale`, `up_scale`: what multiplies each row of them, 1 unless given.
`w_inject`: projection to the injection gates; of 0 rows for a mixer after which nothing is injected.
`eps`: added to the mean of squares of a stream, in its units.

Sources: Hyper-Connections (arXiv:2409.19606) for the idea; the Qwen3.8-Flash-Next reference implementation for this
form, in which the mix reads the normalised streams and the injection adds to the raw ones.
"""

import torch
from jaxtyping import Float, Float8e4m3fn, Float32
from torch import Tensor

from tokenspeed_registry import Cost, Signature, op, rounded_sum


def _mix_flops(s: Signature) -> float:
    """Three projections, and about eight operations a stream element for the norm and the gating."""
    return s["tokens"] * s["streams"] * s["hidden"] * (4 * s["rank"] + 2 * s["gates"] + 8)


def _mix_tolerance(s: Signature, role: str) -> float:
    # The normalised streams, both projections' outputs, the low-rank activation and the result round to the model's
    # dtype. All but the result pass a sum of many terms or a sigmoid, of slope 1/4 at most, or both, and together cost
    # the mixed output two roundings more, the float32 injection gates one.
    terms = s["streams"] * s["hidden"] + s["rank"]
    return rounded_sum(s.dtype("x"), terms, roundings=1 if role in ("inject", "next_inject") else 3)


_MIX_INPUTS = ("norm_weight", "w_down", "w_up", "w_inject", "down_scale", "up_scale")
_MIX_DTYPES = (("x", "norm_weight", "w_inject"), ("w_down", "w_up"))
_MIX_RELATIONS = (
    "streams >= 1",
    "gates in (0, streams)",
    "w_down.dtype == x.dtype or w_down.dtype.itemsize == 1",
)


@op(
    family="residual",
    cases="tokenspeed_kernels.cases.residual:residual_mix",
    outputs=("mixed", "inject"),
    output_dtypes={"mixed": "x"},
    static=("streams", "hidden", "rank", "gates"),
    same_dtype=_MIX_DTYPES,
    where=_MIX_RELATIONS,
    cost=lambda s: Cost(flops=_mix_flops(s), nbytes=s.nbytes("x", *_MIX_INPUTS, "mixed", "inject")),
    tolerance=_mix_tolerance,
)
def residual_mix(
    x: Float[Tensor, "tokens streams hidden"],
    norm_weight: Float[Tensor, "streams hidden"],
    w_down: Float[Tensor, "rank streams*hidden"] | Float8e4m3fn[Tensor, "rank streams*hidden"],
    w_up: Float[Tensor, "streams*hidden rank"] | Float8e4m3fn[Tensor, "streams*hidden rank"],
    w_inject: Float[Tensor, "gates streams*hidden"],
    *,
    eps: float,
    down_scale: Float32[Tensor, "rank"] | None = None,
    up_scale: Float32[Tensor, "streams*hidden"] | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Float[Tensor, "tokens hidden"], Float32[Tensor, "tokens gates"]]:
    """The input of a sublayer from the residual streams, and the gates with which its output will be injected.

    `x`, `norm_weight`, `w_down`, `w_up`, `w_inject`, `eps`: see the module. With
    n = x · rsqrt(mean(x²) + eps) · (1 + norm_weight), the mean taken over each stream by itself, and n flattened
    stream by stream for the projections:

        low    = silu(w_down n / streams)
        mixed  = mean over streams of sigmoid(w_up low) ⊙ n
        inject = 2 sigmoid(w_inject n / streams)

    Returns `mixed` in the dtype of `x` and `inject` in float32, to be handed to `residual_inject`; [tokens, 0] where
    `w_inject` has no rows. Raises `ArgumentError` for arguments that do not fit, also for a `w_inject` of any other
    number of rows than 0 or `streams`.

    Source: gated residual of the Qwen3.8-Flash-Next reference implementation.
    """
    tokens, streams, hidden = x.shape
    mixed = torch.zeros(tokens, hidden, dtype=torch.float64, device=x.device)
    inject = torch.zeros(tokens, w_inject.shape[0], dtype=torch.float64, device=x.device)
    for token in range(tokens):
        normalised = torch.stack(
            [_rms_norm(x[token, stream], norm_weight[stream], eps) for stream in range(streams)]
        )  # [streams hidden]
        flat = normalised.flatten()
        low = torch.nn.functional.silu(_scaled(w_down, down_scale) @ flat / streams)
        gate = torch.sigmoid(_scaled(w_up, up_scale) @ low).reshape(streams, hidden)
        mixed[token] = (gate * normalised).mean(dim=0)
        inject[token] = 2 * torch.sigmoid(w_inject.double() @ flat / streams)
    return mixed, inject


@op(
    family="residual",
    cases="tokenspeed_kernels.cases.residual:residual_inject",
    static=("streams", "hidden"),
    mutates=("x",),
    same_dtype=(("x", "y"),),
    cost=lambda s: Cost(flops=2 * s.numel("x"), nbytes=s.nbytes("x", "x", "y", "inject")),
    # One product and one sum in float32, one rounding.
    tolerance=lambda s, role: rounded_sum(s.dtype(role), terms=2),
)
def residual_inject(
    x: Float[Tensor, "tokens streams hidden"],
    y: Float[Tensor, "tokens hidden"],
    inject: Float32[Tensor, "tokens streams"],
    *,
    backend: str | None = None,
) -> None:
    """Adds a sublayer's output to every residual stream, in place: x[t, s] += inject[t, s] · y[t].

    `x`, `y`, `inject`: see the module; `x` and `y` are of one dtype. Product and sum are float32 and the sum is rounded
    once. Raises `ArgumentError` for arguments that do not fit.

    Source: gated residual of the Qwen3.8-Flash-Next reference implementation.
    """
    for stream in range(x.shape[1]):
        added = inject[:, stream, None].double() * y.double()
        x[:, stream] = (x[:, stream].double() + added).to(x.dtype)


@op(
    family="residual",
    cases="tokenspeed_kernels.cases.residual:residual_inject_mix",
    outputs=("mixed", "next_inject"),
    output_dtypes={"mixed": "x"},
    static=("streams", "hidden", "rank", "gates"),
    mutates=("x",),
    same_dtype=(("x", "y"), *_MIX_DTYPES),
    where=_MIX_RELATIONS,
    cost=lambda s: Cost(
        flops=2 * s.numel("x") + _mix_flops(s),
        nbytes=s.nbytes("x", "x", "y", "inject", *_MIX_INPUTS, "mixed", "next_inject"),
    ),
    # The streams as in residual_inject. The mix may read them before or after their rounding: one value more rounds.
    tolerance=lambda s, role: (
        rounded_sum(s.dtype("x"), terms=2)
        if role == "x"
        else _mix_tolerance(s, role) + rounded_sum(s.dtype("x"), terms=2)
    ),
)
def residual_inject_mix(
    x: Float[Tensor, "tokens streams hidden"],
    y: Float[Tensor, "tokens hidden"],
    inject: Float32[Tensor, "tokens streams"],
    norm_weight: Float[Tensor, "streams hidden"],
    w_down: Float[Tensor, "rank streams*hidden"] | Float8e4m3fn[Tensor, "rank streams*hidden"],
    w_up: Float[Tensor, "streams*hidden rank"] | Float8e4m3fn[Tensor, "streams*hidden rank"],
    w_inject: Float[Tensor, "gates streams*hidden"],
    *,
    eps: float,
    down_scale: Float32[Tensor, "rank"] | None = None,
    up_scale: Float32[Tensor, "streams*hidden"] | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Float[Tensor, "tokens hidden"], Float32[Tensor, "tokens gates"]]:
    """`residual_inject` of one sublayer, then `residual_mix` for the next, in one pass over the streams.

    `x`: the raw streams, updated in place. `y`, `inject`: output and gates of the sublayer that is done.
    `norm_weight`, `w_down`, `w_up`, `w_inject`, `eps`: those of the next one, as in `residual_mix`.

    Returns `mixed` and the gates of the next injection, as `residual_mix` does. Raises `ArgumentError` for arguments
    that do not fit, as `residual_mix` does.

    Source: gated residual of the Qwen3.8-Flash-Next reference implementation.
    """
    residual_inject.contract.reference(x, y, inject)
    result = residual_mix.contract.reference(
        x, norm_weight, w_down, w_up, w_inject, eps=eps, down_scale=down_scale, up_scale=up_scale
    )
    assert isinstance(result, tuple)
    return result


def _scaled(weight: Tensor, scale: Tensor | None) -> Tensor:
    return weight.double() if scale is None else weight.double() * scale.double()[:, None]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Of one stream [hidden], in float64; the weight is centred at zero."""
    values = x.double()
    return values * torch.rsqrt(values.square().mean() + eps) * (1 + weight.double())
