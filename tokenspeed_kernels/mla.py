"""Multi-head latent attention: decode on the paged latent cache, expanded prefill, cache write, merging of states.

Sources: DeepSeek-V2 (arXiv:2405.04434) for the latent cache and its absorbed form; FlashAttention-2 (arXiv:2307.08691)
for log-sum-exp merging.
"""

from jaxtyping import Float, Float32
from tokenspeed_registry import Cost, op, rounded_sum
from torch import Tensor


@op(
    family="mla",
    cases="tokenspeed_kernels.cases.mla:merge_states",
    outputs=("merged", "merged_lse"),
    output_dtypes={"merged": "out_a"},
    static=("dim",),
    same_dtype=(("out_a", "out_b"),),
    cost=lambda s: Cost(
        flops=5 * s.numel("merged"), nbytes=s.nbytes("out_a", "lse_a", "out_b", "lse_b", "merged", "merged_lse")
    ),
    # The weights are exponentials of differences of LSEs: such a difference d carries |d| roundings, here up to 16.
    tolerance=lambda s, role: rounded_sum(s.dtype(role), terms=2 * 16),
)
def merge_states(
    out_a: Float[Tensor, "tokens heads dim"],
    lse_a: Float32[Tensor, "tokens heads"],
    out_b: Float[Tensor, "tokens heads dim"],
    lse_b: Float32[Tensor, "tokens heads"],
    *,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Float[Tensor, "tokens heads dim"], Float32[Tensor, "tokens heads"]]:
    """Attention over two disjoint sets of keys, from the attention over each.

    `out_a`, `out_b`: normalised outputs. `lse_a`, `lse_b`: natural log of the sums of exponentials, −inf for a side
    without keys. Returns the merged outputs and their log-sum-exp. A side of −inf leaves the other bit-equal; two
    empty sides give zeros and −inf. Raises `ArgumentError` for arguments that do not fit.

    Source: FlashAttention-2, section 3.1.
    """
    a, b = lse_a.double(), lse_b.double()
    merged_lse = (a.exp() + b.exp()).log()
    weight_a = (a - merged_lse).exp().nan_to_num(0.0)[..., None]
    weight_b = (b - merged_lse).exp().nan_to_num(0.0)[..., None]
    return weight_a * out_a.double() + weight_b * out_b.double(), merged_lse
