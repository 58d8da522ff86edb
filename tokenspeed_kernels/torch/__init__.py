"""Every op in plain torch: `backend="torch"`, on any device that torch runs on."""

from tokenspeed_registry import Plugin

_FAMILIES = (
    "attention",
    "conv",
    "gdn",
    "gdn_inputs",
    "linear",
    "linear_quantised",
    "mla",
    "mla_forms",
    "moe",
    "moe_quantised",
    "ngram",
    "norm",
    "residual",
    "rope",
    "sampling",
    "sparse",
)

plugin = Plugin(
    "torch",
    modules=tuple(f"tokenspeed_kernels.torch.{family}" for family in _FAMILIES),
    probe=lambda: None,
)
