"""The n-gram block of a layer: how the embedding that `ngram` looks up enters the residual streams, gated.

Sources: the Qwen3.8-Flash-Next reference implementation; Engram (arXiv:2601.07372) for the gated use inside a layer.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tokenspeed_registry import Cost, op, rounded_sum


@op(
    family="ngram",
    cases="tokenspeed_kernels.cases.ngram:ngram_gate",
    outputs=("gated", "conv_input"),
    output_dtypes={"gated": "x", "conv_input": "x"},
    static=("streams", "hidden"),
    same_dtype=(("x", "key", "value", "norm_key", "norm_query", "norm_conv"),),
    cost=lambda s: Cost(
        flops=20 * s.numel("x"),
        nbytes=s.nbytes("x", "key", "value", "norm_key", "norm_query", "norm_conv", "gated", "conv_input"),
    ),
    # The score is a float32 sum; its error passes a square root and a sigmoid, of slope below 1 together from a score
    # of 0.05 on. The gated value rounds once, and may do so before it is normalised and rounds again.
    tolerance=lambda s, role: rounded_sum(s.dtype(role), terms=s["hidden"]),
)
def ngram_gate(
    x: Float[Tensor, "tokens streams hidden"],
    key: Float[Tensor, "tokens streams hidden"],
    value: Float[Tensor, "tokens hidden"],
    norm_key: Float[Tensor, "streams hidden"],
    norm_query: Float[Tensor, "streams hidden"],
    norm_conv: Float[Tensor, "streams hidden"],
    *,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Float[Tensor, "tokens streams hidden"], Float[Tensor, "tokens streams hidden"]]:
    """How much of an n-gram's value each residual stream takes, by the likeness of stream and key.

    With norm(x; w) = x · rsqrt(mean(x²) + eps) · (1 + w) over each stream by itself, in float32:

        a          = sum(norm(key; norm_key) · norm(x; norm_query)) / √hidden
        gated      = sigmoid(sign(a) · √max(|a|, 1e-6)) · value, where sign(0) = 0
        conv_input = norm(gated; norm_conv)

    `x`: the raw residual streams. `key`, `value`: projections of the n-gram embedding, without norm; all streams share
    a value. `norm_key`, `norm_query`, `norm_conv`: norm weights, stored centred at zero. `eps`: added to mean squares.
    `conv_input` goes through the causal convolution of dilation `order`, whose output `ngram_inject` adds together
    with `gated`. Raises `ArgumentError` for arguments that do not fit.

    Source: n-gram layer of the Qwen3.8-Flash-Next reference implementation.
    """
    tokens, streams, hidden = x.shape
    gated = torch.zeros(tokens, streams, hidden, dtype=torch.float64, device=x.device)
    conv_input = torch.zeros_like(gated)
    for token in range(tokens):
        for stream in range(streams):
            query = _rms_norm(x[token, stream], norm_query[stream], eps)
            score = (_rms_norm(key[token, stream], norm_key[stream], eps) * query).sum() / hidden**0.5
            score = score.sign() * score.abs().clamp_min(1e-6).sqrt()
            gated[token, stream] = score.sigmoid() * value[token].double()
            conv_input[token, stream] = _rms_norm(gated[token, stream], norm_conv[stream], eps)
    return gated, conv_input


@op(
    family="ngram",
    cases="tokenspeed_kernels.cases.ngram:ngram_inject",
    static=("streams", "hidden"),
    mutates=("x",),
    same_dtype=(("x", "gated", "conv"),),
    cost=lambda s: Cost(flops=2 * s.numel("x"), nbytes=s.nbytes("x", "x", "gated", "conv")),
    # Two sums in float32, one rounding.
    tolerance=lambda s, role: rounded_sum(s.dtype(role), terms=2),
)
def ngram_inject(
    x: Float[Tensor, "tokens streams hidden"],
    gated: Float[Tensor, "tokens streams hidden"],
    conv: Float[Tensor, "tokens streams hidden"],
    *,
    backend: str | None = None,
) -> None:
    """Adds an n-gram layer's gated value and its convolution to the residual streams, in place: x += gated + conv.

    `x`: the raw residual streams. `gated`: from `ngram_gate`. `conv`: the convolution of its `conv_input`. The sums
    are float32 and round once. Raises `ArgumentError` for arguments that do not fit.

    Source: n-gram layer of the Qwen3.8-Flash-Next reference implementation.
    """
    x.copy_(x.double() + gated.double() + conv.double())


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Of one stream [hidden], in float64; the weight is centred at zero."""
    values = x.double()
    return values * torch.rsqrt(values.square().mean() + eps) * (1 + weight.double())
