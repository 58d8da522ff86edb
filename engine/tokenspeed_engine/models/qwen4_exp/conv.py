"""A short causal convolution that goes on from each sequence's last inputs."""

import torch
from torch import Tensor

from tokenspeed_engine.execution.batch import Settling
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
        n = step.decode_tokens
        if n:
            causal_conv_update(
                step.by_row(x),
                self.weight,
                history,
                step.decode_slots,
                dropped=step.decode_dropped,
                dilation=self.dilation,
                activation="silu",
                out=step.by_row(y),
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

    def settle(self, history: Tensor, settling: Settling) -> None:
        """Drops what does not count of the histories, in place."""
        slots = settling.slots
        causal_conv_prefill(
            history.new_empty(0, history.shape[2]),
            self.weight,
            history,
            slots,
            slots.new_zeros(slots.shape[0] + 1),
            torch.zeros(slots.shape[0], dtype=torch.bool, device=slots.device),
            dropped=settling.dropped,
            dilation=self.dilation,
            activation="silu",
        )
