"""Every op as a portable Triton kernel, one source for NVIDIA and AMD: `backend="triton"`.

One file a family, named as the family of its ops. What the families share:

`declare`: how a kernel of this backend is declared.
`device`: what a launch must know of the chip.
`tuning`: the compile-time choices of a kernel, tuned per device and kept on disk.
`offline`: compiles what a call would launch, for any arch, without that device.
"""

from pathlib import Path

from tokenspeed_kernels.triton.probe import unusable
from tokenspeed_registry import Plugin

_FAMILIES = (
    "gdn_recurrent",
    "gdn_speculative",
    "gdn_chunked",
    "gdn_inputs",
    "conv",
    "mla_decode",
    "mla_prefill",
    "mla_forms",
    "residual",
    "norm",
    "rope",
    "ngram",
    "ngram_block",
    "moe_route",
    "moe",
    "moe_quantised",
    "linear",
    "linear_quantised",
    "attention",
    "sparse",
    "sparse_attention",
    "sparse_select",
    "sampling",
)

plugin = Plugin(
    "triton",
    modules=tuple(f"tokenspeed_kernels.triton.{family}" for family in _FAMILIES),
    probe=unusable,
    evidence=Path(__file__).parent / "evidence",
    compile="tokenspeed_kernels.triton.ahead:compile_calls",
)
