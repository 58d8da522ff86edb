"""Between the two forms of multi-head latent attention: what a layer needs around `mla_decode` and `mla_prefill`.

The up-projection of keys and values (`kv_b_proj`, [heads·(nope + v_dim), latent]) holds for each head the `nope` rows
of W_K and then the `v_dim` rows of W_V: k_nope = W_K·c and v = W_V·c of a latent c. The absorbed form applies W_Kᵀ to
the query and W_V to the attended latent instead, so that attention runs on the cached rows themselves. The expanded
form of a cached prefix reads those rows back to expand them.

Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1 and appendix C.
"""

from itertools import pairwise

import torch
from jaxtyping import Float, Float8e4m3fn, Float32, Int32
from torch import Tensor

from tokenspeed_kernels.checks import LongestRun
from tokenspeed_kernels.scaled_cache import loaded
from tokenspeed_registry import Cost, Indices, Lengths, Offsets, Signature, op, rounded_sum


@op(
    family="mla",
    cases="tokenspeed_kernels.cases.mla_forms:mla_absorb_query",
    outputs=("q",),
    output_dtypes={"q": "q_nope"},
    static=("heads", "nope", "rope", "latent"),
    strided=("q_nope", "q_rope", "w_k"),
    same_dtype=(("q_nope", "q_rope", "w_k"),),
    cost=lambda s: Cost(flops=2 * s.numel("q_nope") * s["latent"], nbytes=s.nbytes("q_nope", "q_rope", "w_k", "q")),
    tolerance=lambda s, role: rounded_sum(s.dtype(role), terms=s["nope"]),
)
def mla_absorb_query(
    q_nope: Float[Tensor, "tokens heads nope"],
    q_rope: Float[Tensor, "tokens heads rope"],
    w_k: Float[Tensor, "heads nope latent"],
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "tokens heads latent+rope"]:
    """Queries of the absorbed form: W_Kᵀ·q_nope of each head, followed by its rotated part.

    `q_nope`: the part of the queries without position. `q_rope`: the other part, rotated already.
    `w_k`: each head's rows of the up-projection that give its key, see the module.

    All may be strided but for their last dim: the two parts are slices of one projection, and W_K of one weight. The
    sum is in float32 with one rounding to the dtype of the arguments, which is that of the result; the rotated part is
    copied. Raises `ArgumentError` for arguments that do not fit.

    Source: see the module; absorption as in the DeepSeek-V3 reference implementation.
    """
    heads = [torch.cat((q_nope[:, h].double() @ w.double(), q_rope[:, h].double()), dim=-1) for h, w in enumerate(w_k)]
    empty = torch.zeros(q_nope.shape[0], 0, w_k.shape[2] + q_rope.shape[2], dtype=torch.float64)
    return torch.stack(heads, dim=1) if heads else empty


@op(
    family="mla",
    cases="tokenspeed_kernels.cases.mla_forms:mla_value_up",
    outputs=("values",),
    output_dtypes={"values": "latent_out"},
    static=("heads", "latent", "v_dim"),
    strided=("latent_out", "w_v"),
    same_dtype=(("latent_out", "w_v"),),
    cost=lambda s: Cost(flops=2 * s.numel("latent_out") * s["v_dim"], nbytes=s.nbytes("latent_out", "w_v", "values")),
    tolerance=lambda s, role: rounded_sum(s.dtype(role), terms=s["latent"]),
)
def mla_value_up(
    latent_out: Float[Tensor, "tokens heads latent"],
    w_v: Float[Tensor, "heads v_dim latent"],
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "tokens heads v_dim"]:
    """Values of the absorbed form: W_V of each head times the latent that it attended to.

    `latent_out`: what `mla_decode` returns, its sequences and queries flattened to tokens.
    `w_v`: each head's rows of the up-projection that give its value, see the module.

    Both may be strided but for their last dim. The sum is in float32 with one rounding to the dtype of the arguments,
    which is that of the result. Raises `ArgumentError` for arguments that do not fit.

    Source: see the module; absorption as in the DeepSeek-V3 reference implementation.
    """
    tokens, heads, _ = latent_out.shape
    values = torch.zeros(tokens, heads, w_v.shape[1], dtype=torch.float64)
    for head in range(heads):
        values[:, head] = latent_out[:, head].double() @ w_v[head].double().T
    return values


def _cache_read_tolerance(s: Signature, role: str) -> float:
    # A copy, where every number of the cache is one of the result's dtype; else a rounding, of a product maybe.
    exact = s.dtype("kv_cache") in (s.dtype(role), torch.float8_e4m3fn) and not s.given("kv_scale")
    return 0.0 if exact else rounded_sum(s.dtype(role), terms=1)


@op(
    family="mla",
    cases="tokenspeed_kernels.cases.mla_forms:mla_cache_read",
    outputs=("cached",),
    output_dtypes={"cached": "dtype"},
    static=("page", "qk"),
    strided=("kv_cache",),
    checks=(
        Indices("page_table", below="pages"),
        Offsets("cu_seqlens", total="rows"),
        LongestRun("cu_seqlens", bound="max_pages*page"),
        Lengths("first", capacity=("max_pages", "page")),
    ),
    cost=lambda s: Cost(
        flops=0,
        nbytes=s.nbytes("page_table", "cu_seqlens", "first", "kv_scale", "cached")
        + s["rows"] * s["qk"] * s.dtype("kv_cache").itemsize,
    ),
    tolerance=_cache_read_tolerance,
)
def mla_cache_read(
    kv_cache: Float[Tensor, "pages page qk"] | Float8e4m3fn[Tensor, "pages page qk"],
    page_table: Int32[Tensor, "seqs max_pages"],
    cu_seqlens: Int32[Tensor, "seqs+1"],
    first: Int32[Tensor, "seqs"] | None = None,
    *,
    rows: int,
    dtype: torch.dtype,
    kv_scale: Float32[Tensor, "1"] | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "rows qk"]:
    """Cached rows of several sequences, packed one sequence after the other, for the expanded form of a prefix.

    `kv_cache`: the paged cache, see `mla_decode`; pages may be strided, and rows in a page.
    `page_table`: each sequence's pages in order: its token p lies on page `page_table[s, p // page]` at offset
    p % page. The row of a token whose page is −1 is zero.
    `cu_seqlens`: offsets of the result, not of any queries: sequence s has its rows `cu_seqlens[s]` up to
    `cu_seqlens[s+1]`, possibly none.
    `first`: the position of each sequence's first row; None is 0 for all. A long prefix is read in parts by it.
    `rows`: `cu_seqlens[-1]`, which the host must know to allocate the result. `dtype`: that of the result.
    `kv_scale`: what the rows are multiplied by, in float32 before the one rounding; None is 1.

    Returns latent and rotated key side by side, as they were written. Raises `ArgumentError` for arguments that do not
    fit, `ContentError` for bad pages, offsets or positions where those are checked (short CPU tensors, or debug mode).

    Source: chunked prefill over a cached prefix as in the DeepSeek-V3 reference implementation's expanded form.
    """
    page, qk = kv_cache.shape[1:]
    cached = torch.zeros(rows, qk, dtype=torch.float64)
    for sequence, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        before = 0 if first is None else int(first[sequence])
        for row in range(start, end):
            index, offset = divmod(before + row - start, page)
            entry = int(page_table[sequence, index])
            if entry != -1:
                cached[row] = loaded(kv_cache[entry, offset], kv_scale)
    return cached
