"""What an op must do at least: floating-point operations and bytes moved, and the time that implies on a chip."""

from dataclasses import dataclass

from tokenspeed_registry.platform import Platform


@dataclass(frozen=True)
class Cost:
    """`flops` counts multiplies and adds apart; `nbytes` counts each input read once and each output written once."""

    flops: float
    nbytes: float

    def seconds(self, platform: Platform) -> float:
        """The roofline floor on `platform`: the larger of the two times, 0.0 where the table has no rates for it."""
        limits = platform.limits
        if not limits.hbm_bandwidth or not limits.bf16_rate:
            return 0.0
        return max(self.nbytes / limits.hbm_bandwidth, self.flops / limits.bf16_rate)
