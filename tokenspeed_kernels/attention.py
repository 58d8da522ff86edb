"""Dense attention with grouped query heads over a paged cache of keys and values.

`k_cache`, `v_cache`: the caller's pools of pages for one layer, shared by all sequences. A page has room for `page`
tokens; key and value of a token lie at the same place of their pools. They may be float8_e4m3fn beside any dtype of the
model.
`k_scale`, `v_scale`: what the rows of each cache are multiplied by to give keys and values; None is 1. See
`scaled_cache`.
`page_table`: each sequence's pages in order. Token p, counted from 0, lies on page `page_table[s, p // page]` at offset
p % page. Entries past a sequence's last page are -1 and not read; before it there is no -1.

Sources: PagedAttention (arXiv:2309.06180) for the cache; GQA (arXiv:2305.13245) for the grouping of heads.
"""

from itertools import pairwise

import torch
from jaxtyping import Float, Float8e4m3fn, Float32, Int32, Int64
from torch import Tensor

from tokenspeed_kernels.checks import LongestRun
from tokenspeed_kernels.scaled_cache import loaded, store_tolerance, stored
from tokenspeed_registry import Cost, Indices, Lengths, Offsets, Signature, op, rounded_sum


@op(
    family="attention",
    cases="tokenspeed_kernels.cases.attention:kv_cache_write",
    static=("page", "kv_heads", "dim"),
    mutates=("k_cache", "v_cache"),
    strided=("k", "v", "k_cache", "v_cache"),
    same_dtype=(("k", "v"), ("k_cache", "v_cache")),
    checks=(Indices("slot_mapping", below="pages*page"),),
    cost=lambda s: Cost(
        flops=0,
        nbytes=s.nbytes("k", "v", "slot_mapping", "k_scale", "v_scale")
        + 2 * s.numel("k") * s.dtype("k_cache").itemsize,
    ),
    tolerance=lambda s, role: store_tolerance(s, role, role.replace("cache", "scale")),
)
def kv_cache_write(
    k: Float[Tensor, "tokens kv_heads dim"],
    v: Float[Tensor, "tokens kv_heads dim"],
    slot_mapping: Int64[Tensor, "tokens"],
    k_cache: Float[Tensor, "pages page kv_heads dim"] | Float8e4m3fn[Tensor, "pages page kv_heads dim"],
    v_cache: Float[Tensor, "pages page kv_heads dim"] | Float8e4m3fn[Tensor, "pages page kv_heads dim"],
    *,
    k_scale: Float32[Tensor, "1"] | None = None,
    v_scale: Float32[Tensor, "1"] | None = None,
    backend: str | None = None,
) -> None:
    """Stores the keys and values of new tokens in the paged caches, which are changed in place.

    `k`, `v`: keys, rotated already, and values of the new tokens, of any sequences in any order.
    `slot_mapping`: where each goes: page id · page + offset in the page, no slot twice; -1: the token is not stored.
    `k_cache`, `v_cache`: the pools, see the module; nothing but the slots named is touched.
    `k_scale`, `v_scale`: what keys and values are divided by before their one rounding to the dtype of the caches, see
    the module.

    A number beyond ±448 · scale is stored as ±448 in a float8_e4m3fn cache; NaN stays NaN. Tokens and caches may be
    strided but for their last dim. Raises `ArgumentError` for arguments that do not fit, `ContentError` for a slot out
    of range where slots are checked (short CPU tensors, or debug mode).

    Source: PagedAttention, section 4.1.
    """
    page = k_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            k_cache[slot // page, slot % page] = stored(k[token], k_scale, k_cache.dtype)
            v_cache[slot // page, slot % page] = stored(v[token], v_scale, v_cache.dtype)


def _paged_attention_cost(s: Signature) -> Cost:
    # Lengths lie on the device: where nobody counted, every sequence has all its pages full and every query sees them.
    longest = s["max_pages"] * s["page"]
    cached, pairs = s.count("cached_tokens", s["seqs"] * longest), s.count("pairs", s["tokens"] * longest)
    cache_row = s["kv_heads"] * s["dim"] * s.dtype("k_cache").itemsize
    moved = s.nbytes("q", "page_table", "cu_seqlens_q", "seq_lens", "k_scale", "v_scale", "attended", "lse")
    return Cost(flops=4 * pairs * s["heads"] * s["dim"], nbytes=moved + 2 * cached * cache_row)


@op(
    family="attention",
    cases="tokenspeed_kernels.cases.attention:paged_attention",
    outputs=("attended", "lse"),
    output_dtypes={"attended": "q"},
    static=("heads", "kv_heads", "dim", "page"),
    strided=("q", "k_cache", "v_cache"),
    same_dtype=(("k_cache", "v_cache"),),
    where=("heads % kv_heads == 0",),
    checks=(
        Indices("page_table", below="pages"),
        Offsets("cu_seqlens_q", total="tokens"),
        LongestRun("cu_seqlens_q", bound="max_q_len"),
        Lengths("seq_lens", capacity=("max_pages", "page")),
    ),
    cost=_paged_attention_cost,
    # A score is a sum of `dim` products, up to some units large, whose absolute error becomes a relative one of its
    # weight. Kernels round the weights to the dtype of the values for the matrix units, and then the sum.
    tolerance=lambda s, role: rounded_sum(s.dtype(role), terms=4 * s["dim"], roundings=2),
)
def paged_attention(
    q: Float[Tensor, "tokens heads dim"],
    k_cache: Float[Tensor, "pages page kv_heads dim"] | Float8e4m3fn[Tensor, "pages page kv_heads dim"],
    v_cache: Float[Tensor, "pages page kv_heads dim"] | Float8e4m3fn[Tensor, "pages page kv_heads dim"],
    page_table: Int32[Tensor, "seqs max_pages"],
    cu_seqlens_q: Int32[Tensor, "seqs+1"],
    seq_lens: Int32[Tensor, "seqs"],
    *,
    scale: float,
    max_q_len: int,
    k_scale: Float32[Tensor, "1"] | None = None,
    v_scale: Float32[Tensor, "1"] | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Float[Tensor, "tokens heads dim"], Float32[Tensor, "tokens heads"]]:
    """Causal softmax attention of each sequence's last tokens over all its cached tokens.

    `q`: queries of the new tokens, rotated, sequence after sequence. Head h uses key/value head
    h // (heads // kv_heads).
    `k_cache`, `v_cache`, `page_table`: the paged cache, see the module. Slots past a sequence's end may hold anything,
    NaN included.
    `cu_seqlens_q`: sequence s has the queries `cu_seqlens_q[s]` up to `cu_seqlens_q[s+1]`, possibly none.
    `seq_lens`: tokens of each sequence in the cache, counting those of the queries, which are written before. Query i
    of n sees the first seq_len − n + i + 1 of them. 0 for a padding sequence.
    `scale`: scores are `scale` · q·k; dim^−½ in most models. `k_scale`, `v_scale`: see the module.
    `max_q_len`: at least the longest run of queries, known to the host for planning the launch; results do not depend
    on it.

    Queries and caches may be strided but for their last dim. Returns the normalised outputs, in the dtype of `q`, and
    the natural log of the sums of exponentials of the scores. A query that sees nothing gives zeros and −inf. Raises
    `ArgumentError` for arguments that do not fit, `ContentError` for bad pages, offsets or lengths, or a run above
    `max_q_len`, where those are checked (short CPU tensors, or debug mode).

    Source: PagedAttention, section 4.1; FlashAttention-2 (arXiv:2307.08691) for the log-sum-exp.
    """
    page, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = q.shape[1] // kv_heads
    attended = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for sequence, (start, end) in enumerate(pairwise(cu_seqlens_q.tolist())):
        length = int(seq_lens[sequence])
        pages = page_table[sequence, : -(-length // page)].long()
        k, v = (
            loaded(cache[pages].flatten(0, 1)[:length], of) for cache, of in ((k_cache, k_scale), (v_cache, v_scale))
        )
        for token in range(start, end):
            visible = length - end + token + 1
            if visible <= 0:
                continue
            for kv_head in range(kv_heads):
                keys, values = k[:visible, kv_head], v[:visible, kv_head]
                heads = slice(kv_head * group, (kv_head + 1) * group)
                scores = scale * q[token, heads].double() @ keys.T
                lse[token, heads] = scores.logsumexp(dim=-1)
                attended[token, heads] = scores.softmax(dim=-1) @ values
    return attended, lse
