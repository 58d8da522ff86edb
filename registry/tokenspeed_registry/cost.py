"""What an op must do at least: floating-point operations and bytes moved, and the time that implies on a chip."""

from dataclasses import dataclass

import torch

from tokenspeed_registry.platform import Platform


@dataclass(frozen=True)
class Cost:
    """`flops` counts multiplies and adds apart; `nbytes` counts each input read once and each output written once.

    `rate`: the narrowest dtype that the op's products may be taken in, which says what matrix rate applies: that of
    the inputs where both are narrow, bfloat16 for all wider ones.
    """

    flops: float
    nbytes: float
    rate: torch.dtype = torch.bfloat16

    def seconds(self, platform: Platform) -> float:
        """The roofline floor on `platform`: the larger of the two times, 0.0 where the table has no rates for it."""
        bandwidth, rate = platform.limits.hbm_bandwidth, platform.limits.matrix_rate(self.rate)
        if not bandwidth or not rate:
            return 0.0
        return max(self.nbytes / bandwidth, self.flops / rate)
