"""The portable public API: one module an op family."""

from tokenspeed_kernels.mla import merge_states

__all__ = ["merge_states"]
