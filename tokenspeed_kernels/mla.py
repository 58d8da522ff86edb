"""Multi-head latent attention: decode on the paged latent cache, expanded prefill, cache write, merging of states.

`kv_cache`: the caller's pool of pages for one layer, shared by all sequences. A page has room for `page` tokens; the
row of a token is its normed latent followed by its rotated key, which all heads share. It may be float8_e4m3fn beside
any dtype of the model.
`kv_scale`: what the rows of the cache are multiplied by to give latent and key; None is 1. See `scaled_cache`.

Sources: DeepSeek-V2 (arXiv:2405.04434) for the latent cache and its absorbed form; FlashAttention-2 (arXiv:2307.08691)
for log-sum-exp merging.
"""

from itertools import pairwise

import torch
from jaxtyping import Float, Float8e4m3fn, Float32, Int32, Int64
from torch import Tensor

from tokenspeed_kernels.scaled_cache import loaded, store_tolerance, stored
from tokenspeed_registry import Cost, Indices, Lengths, Offsets, Signature, op, rounded_sum


def _attention_tolerance(s: Signature, role: str) -> float:
    # A score is a sum of `qk` products, up to some units large, whose absolute error becomes a relative one of its
    # weight. Kernels round the weights to the dtype of the values for the matrix units, and then the sum.
    return rounded_sum(s.dtype(role), terms=4 * s["qk"], roundings=2)


def _decode_cost(s: Signature) -> Cost:
    # Lengths lie on the device: where nobody counted, every sequence has all its pages full.
    keys = s.count("cached_tokens", s["batch"] * s["max_pages"] * s["page"])
    moved = s.nbytes("q", "page_table", "seq_lens", "kv_scale", "attended", "lse")
    flops = 2 * keys * s["q_len"] * s["heads"] * (s["qk"] + s["latent"])
    return Cost(flops=flops, nbytes=moved + keys * s["qk"] * s.dtype("kv_cache").itemsize)


@op(
    family="mla",
    cases="tokenspeed_kernels.cases.mla:mla_decode",
    outputs=("attended", "lse"),
    output_dtypes={"attended": "q"},
    static=("q_len", "heads", "qk", "page", "latent"),
    strided=("kv_cache",),
    where=("0 < latent <= qk",),
    checks=(Indices("page_table", below="pages"), Lengths("seq_lens", capacity=("max_pages", "page"))),
    cost=_decode_cost,
    tolerance=_attention_tolerance,
)
def mla_decode(
    q: Float[Tensor, "batch q_len heads qk"],
    kv_cache: Float[Tensor, "pages page qk"] | Float8e4m3fn[Tensor, "pages page qk"],
    page_table: Int32[Tensor, "batch max_pages"],
    seq_lens: Int32[Tensor, "batch"],
    *,
    latent: int,
    scale: float,
    kv_scale: Float32[Tensor, "1"] | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Float[Tensor, "batch q_len heads latent"], Float32[Tensor, "batch q_len heads"]]:
    """Causal attention of each sequence's last `q_len` tokens over its latent cache, in the absorbed form.

    `q`: absorbed queries, W_Kᵀ·q_nope followed by the rotated part.
    `kv_cache`: the paged cache, see the module. All heads share a token's row, which is key and value at once: the
    score is `scale` · q·row over all `qk` numbers, the value is the row's first `latent`. Pages may be strided in the
    cache, and rows in a page. Rows past a sequence's end may hold anything, NaN included.
    `page_table`: each sequence's pages in order. Token p, counted from 0, lies on page `page_table[b, p // page]` at
    offset p % page. Entries past a sequence's last page are -1 and not read; before it there is no -1.
    `seq_lens`: cached tokens of each sequence with the `q_len` new ones, which are written before; query i sees the
    first seq_len − q_len + i + 1 rows. 0 for a padding sequence.
    `latent`: width of the value, 1 to qk.
    `scale`: that of the expanded form, (nope + rope)^−½ · corrections, not qk^−½. `kv_scale`: see the module.

    Returns the attended latents, in the dtype of `q`, and the natural log of the sums of exponentials of the scores. A
    query that sees nothing (every query of a padding sequence) gives zeros and −inf. Raises `ArgumentError` for
    arguments that do not fit, `ContentError` for bad pages or lengths where those are checked (short CPU tensors, or
    debug mode).

    Source: DeepSeek-V2, section 2.1 and appendix C; absorption as in the DeepSeek-V3 reference implementation.
    """
    batch, q_len, heads, _ = q.shape
    page = kv_cache.shape[1]
    attended = torch.zeros(batch, q_len, heads, latent, dtype=torch.float64)
    lse = torch.full((batch, q_len, heads), -torch.inf, dtype=torch.float64)
    for sequence in range(batch):
        length = int(seq_lens[sequence])
        pages = page_table[sequence, : -(-length // page)].long()
        rows = loaded(kv_cache[pages].flatten(0, 1)[:length], kv_scale)
        for query in range(q_len):
            visible = length - q_len + query + 1
            if visible <= 0:
                continue
            scores = scale * q[sequence, query].double() @ rows[:visible].T
            lse[sequence, query] = scores.logsumexp(dim=-1)
            attended[sequence, query] = scores.softmax(dim=-1) @ rows[:visible, :latent]
    return attended, lse


def _prefill_cost(s: Signature) -> Cost:
    # Offsets lie on the device: one sequence, and every query sees every key but for half of its own causal square.
    pairs = s["tokens"] * s["kv_tokens"]
    pairs -= min(s["tokens"], s["kv_tokens"]) * s["tokens"] // 2 if s.flag("causal") else 0
    moved = s.nbytes("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "attended", "lse")
    return Cost(flops=2 * pairs * s["heads"] * (s["qk"] + s["v_dim"]), nbytes=moved)


@op(
    family="mla",
    cases="tokenspeed_kernels.cases.mla:mla_prefill",
    outputs=("attended", "lse"),
    output_dtypes={"attended": "q"},
    static=("heads", "qk", "v_dim"),
    strided=("q", "k", "v"),
    same_dtype=(("q", "k", "v"),),
    checks=(Offsets("cu_seqlens_q", total="tokens"), Offsets("cu_seqlens_k", total="kv_tokens")),
    cost=_prefill_cost,
    tolerance=_attention_tolerance,
)
def mla_prefill(
    q: Float[Tensor, "tokens heads qk"],
    k: Float[Tensor, "kv_tokens heads qk"],
    v: Float[Tensor, "kv_tokens heads v_dim"],
    cu_seqlens_q: Int32[Tensor, "seqs+1"],
    cu_seqlens_k: Int32[Tensor, "seqs+1"],
    *,
    scale: float,
    causal: bool = True,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Float[Tensor, "tokens heads v_dim"], Float32[Tensor, "tokens heads"]]:
    """Attention of packed queries over packed keys and values in the expanded form, where every head has its own.

    `q`: queries, sequence after sequence. `k`, `v`: keys and values of each sequence in the same order; values may be
    of another width than keys. All three may be strided but for their last dim.
    `cu_seqlens_q`, `cu_seqlens_k`: sequence s has the queries `cu_seqlens_q[s]` up to `cu_seqlens_q[s+1]` and the keys
    `cu_seqlens_k[s]` up to `cu_seqlens_k[s+1]`, possibly none.
    `scale`: scores are `scale` · q·k; (nope + rope)^−½ · corrections in the models.
    `causal`: true: the queries are the sequence's last tokens, so that query i of n sees the first keys − n + i + 1
    keys. False: every query sees all of them, as it does of a cached prefix.

    Returns the normalised outputs, in the dtype of `q`, and the natural log of the sums of exponentials of the scores,
    from which `merge_states` joins chunks of keys. A query that sees nothing gives zeros and −inf. Raises
    `ArgumentError` for arguments that do not fit, `ContentError` for bad offsets where those are checked (short CPU
    tensors, or debug mode).

    Source: DeepSeek-V2, section 2.1; FlashAttention-2 for the log-sum-exp.
    """
    tokens, heads, _ = q.shape
    attended = torch.zeros(tokens, heads, v.shape[2], dtype=torch.float64)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64)
    spans = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for (q_start, q_end), (k_start, k_end) in spans:
        for token in range(q_start, q_end):
            seen = slice(k_start, k_end - q_end + token + 1 if causal else k_end)
            if seen.stop <= seen.start:
                continue
            for head in range(heads):
                scores = scale * k[seen, head].double() @ q[token, head].double()
                lse[token, head] = scores.logsumexp(dim=0)
                attended[token, head] = scores.softmax(dim=0) @ v[seen, head].double()
    return attended, lse


def _cache_write_cost(s: Signature) -> Cost:
    stored_bytes = s["tokens"] * s["qk"] * s.dtype("kv_cache").itemsize
    return Cost(flops=0, nbytes=s.nbytes("latent", "k_rope", "slot_mapping", "kv_scale") + stored_bytes)


@op(
    family="mla",
    cases="tokenspeed_kernels.cases.mla:mla_cache_write",
    static=("page", "qk", "latent"),
    mutates=("kv_cache",),
    strided=("latent", "k_rope", "kv_cache"),
    same_dtype=(("latent", "k_rope"),),
    where=("qk == latent + rope",),
    checks=(Indices("slot_mapping", below="pages*page"),),
    cost=_cache_write_cost,
    tolerance=lambda s, role: store_tolerance(s, "kv_cache", "kv_scale"),
)
def mla_cache_write(
    latent: Float[Tensor, "tokens latent"],
    k_rope: Float[Tensor, "tokens rope"],
    slot_mapping: Int64[Tensor, "tokens"],
    kv_cache: Float[Tensor, "pages page qk"] | Float8e4m3fn[Tensor, "pages page qk"],
    *,
    kv_scale: Float32[Tensor, "1"] | None = None,
    backend: str | None = None,
) -> None:
    """Stores the latents and the rotated keys of new tokens side by side in the cache, which is changed in place.

    `latent`: latents of the new tokens, normed already, of any sequences in any order. `k_rope`: their rotated keys.
    `slot_mapping`: where each goes: page id · page + offset in the page, no slot twice; -1: the token is not stored.
    `kv_cache`: the pool, see the module; nothing but the slots named is touched.
    `kv_scale`: what the rows are divided by before their one rounding to the dtype of the cache, see the module.

    A number beyond ±448 · `kv_scale` is stored as ±448 in a float8_e4m3fn cache; NaN stays NaN. `latent`, `k_rope` and
    the cache may be strided but for their last dim. Raises `ArgumentError` for arguments that do not fit, also for a
    cache row not as wide as both together; `ContentError` for a slot out of range where slots are checked (short CPU
    tensors, or debug mode).

    Source: DeepSeek-V2, section 2.1.3.
    """
    page = kv_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            row = torch.cat((latent[token], k_rope[token]))
            kv_cache[slot // page, slot % page] = stored(row, kv_scale, kv_cache.dtype)


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

    `out_a`, `out_b`: normalised outputs, those of an empty side finite. `lse_a`, `lse_b`: natural log of the sums of
    exponentials, −inf for a side without keys.

    Returns the merged outputs and their log-sum-exp. A side of −inf leaves the other bit-equal; two empty sides give
    zeros and −inf. Raises `ArgumentError` for arguments that do not fit.

    Source: FlashAttention-2, section 3.1.
    """
    a, b = lse_a.double(), lse_b.double()
    merged_lse = (a.exp() + b.exp()).log()
    weight_a = (a - merged_lse).exp().nan_to_num(0.0)[..., None]
    weight_b = (b - merged_lse).exp().nan_to_num(0.0)[..., None]
    return weight_a * out_a.double() + weight_b * out_b.double(), merged_lse
