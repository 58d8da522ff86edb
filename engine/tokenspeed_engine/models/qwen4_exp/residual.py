"""The gated residual: several streams a token, mixed before each sublayer and injected with its output after it."""

from torch import Tensor

from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_engine.models.linear import quantised_rows
from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig
from tokenspeed_kernels.residual import residual_inject, residual_inject_mix, residual_mix


class Mixer:
    """Weights of one mix. `injects`: a sublayer follows, whose output goes back into the streams."""

    def __init__(self, config: Qwen4ExpConfig, weights: Weights, prefix: str, injects: bool = True) -> None:
        self.eps = config.rms_norm_eps
        norm = weights[f"{prefix}hc_norm"]
        inject = weights[f"{prefix}block_inject_weight"] if injects else norm.new_empty(0, config.stream_width)
        down, up = weights[f"{prefix}input_mix_weight_down"], weights[f"{prefix}input_mix_weight_up"]
        self.down_scale: Tensor | None = None
        self.up_scale: Tensor | None = None
        if weights.quantise:
            (down, self.down_scale), (up, self.up_scale) = quantised_rows(down), quantised_rows(up)
        self.weights = (norm.view(config.hc_count, config.hidden_size), down, up, inject)


class Streams:
    """The residual streams of a step's tokens.

    A sublayer's output is not injected at once but together with the next mix, in one pass over the streams.
    """

    def __init__(self, x: Tensor) -> None:
        """x: [T, streams, hidden], which the object owns from now on."""
        self._x = x
        self._inject: Tensor | None = None  # gates of the sublayer that runs, or ran last
        self._output: Tensor | None = None  # its output, not yet in x

    @classmethod
    def of_embeddings(cls, embedded: Tensor, count: int) -> "Streams":
        """`count` streams that all start as `embedded` [T, hidden]."""
        return cls(embedded[:, None].repeat(1, count, 1))

    @property
    def count(self) -> int:
        """Tokens."""
        return self._x.shape[0]

    def mix(self, mixer: Mixer) -> Tensor:
        """The next sublayer's input [T, hidden]."""
        if self._output is None or self._inject is None:
            mixed, self._inject = residual_mix(
                self._x, *mixer.weights, eps=mixer.eps, down_scale=mixer.down_scale, up_scale=mixer.up_scale
            )
        else:
            mixed, self._inject = residual_inject_mix(
                self._x,
                self._output,
                self._inject,
                *mixer.weights,
                eps=mixer.eps,
                down_scale=mixer.down_scale,
                up_scale=mixer.up_scale,
            )
        self._output = None
        return mixed

    def add(self, output: Tensor) -> None:
        """Takes the output [T, hidden] of the sublayer whose input was mixed last."""
        self._output = output

    def settled(self) -> Tensor:
        """The streams [T, streams, hidden] with everything injected; the caller may change them in place."""
        if self._output is not None and self._inject is not None:
            residual_inject(self._x, self._output, self._inject)
            self._output = None
        return self._x

    def rows(self, index: Tensor) -> "Streams":
        """The streams of the tokens `index` Int64 [R]."""
        chosen = Streams(self._x.index_select(0, index))
        if self._output is not None and self._inject is not None:
            chosen._output = self._output.index_select(0, index)
            chosen._inject = self._inject.index_select(0, index)
        return chosen
