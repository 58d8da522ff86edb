"""A short causal convolution that goes on from each sequence's last inputs."""

import torch
from torch import Tensor

from tokenspeed_engine.models.qwen4_exp.step import Step
from tokenspeed_kernels.conv import causal_conv_prefill, causal_conv_update


class ShortConvolution:
    """Depthwise, followed by silu. weight: [channels, width], last tap on the current token."""

    def __init__(self, weight: Tensor, dilation: int) -> None:
        self.weight = weight
        self.dilation = dilation

    def __call__(self, x: Tensor, history: Tensor, step: Step) -> Tensor:
        """x: [T, channels], maybe strided; history: the layer's pool, advanced in place. Returns [T, channels]."""
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        n = step.decodes
        if n:
            causal_conv_update(
                x[:n, None],
                self.weight,
                history,
                step.decode_slots,
                dilation=self.dilation,
                activation="silu",
                out=y[:n, None],
            )
        if step.has_prefills:
            causal_conv_prefill(
                x[n:],
                self.weight,
                history,
                step.prefill_slots,
                step.prefill_cu_seqlens,
                step.prefill_fresh,
                dilation=self.dilation,
                activation="silu",
                out=y[n:],
            )
        return y
