"""Block-sparse attention with an indexer: block keys, their scores, the best blocks, attention over those alone.

A block is `ratio` consecutive tokens of a sequence, counted from its start. The indexer pools the raw index keys of a
block into one block key; a query scores the complete blocks before it, keeps the best, and attends to all of their
tokens and to the tail, the tokens after the last complete block. What the ops share:

`cu_seqlens`: sequence s has the packed new tokens cu_seqlens[s] up to cu_seqlens[s+1], possibly none.
`seq_lens`: tokens of each sequence, counting the new ones, which are its last; 0 for a padding sequence.
`page_table`: each sequence's pages in order, −1 where it has none; what lies there is neither read nor written.
`block_cache`: the caller's pool of block keys. A page holds `blocks` of them: block b of sequence s lies at
`block_cache[page_table[s, b // blocks], b % blocks]`. It has the model's dtype or float8_e4m3fn, in either case without
a scale: block keys come from a norm, so they are of the size of 1, far from ±448, where float8_e4m3fn saturates; and a
common factor would not change which blocks are best.
`k_cache`, `v_cache`: the caller's paged pools of keys and values, in any dtype or float8_e4m3fn.
`k_scale`, `v_scale`: what the rows of those are multiplied by to give keys and values; None is 1. See `scaled_cache`.

Sources: Native Sparse Attention (arXiv:2502.11089) for attention to chosen blocks, DeepSeek-V3.2 (arXiv:2512.02556)
for the indexer with its ReLU scores; the Qwen3.8-Flash-Next model description in docs/models.md for this form.
"""

import torch
from jaxtyping import Float, Float8e4m3fn, Float32, Int32
from torch import Tensor

from tokenspeed_kernels.scaled_cache import loaded, stored
from tokenspeed_registry import Cost, Indices, Lengths, Offsets, Signature, op, rounded_sum

_PACKED = (Indices("page_table", below="pages"), Offsets("cu_seqlens", total="tokens"))


def _index_cache_write_cost(s: Signature) -> Cost:
    """Raw keys in, the newest of them to the ring, a block key for every `ratio` tokens out."""
    row, key = (s["dim"] * s.dtype(role).itemsize for role in ("ring", "block_cache"))
    newest = min(s["tokens"], s["seqs"] * s["ring_rows"])
    closed = s["tokens"] / s["ratio"]
    tables = s.nbytes("page_table", "slots", "cu_seqlens", "seq_lens", "weight", "inv_freq")
    return Cost(
        flops=s.numel("raw_k") + closed * 10 * s["dim"],
        nbytes=s.nbytes("raw_k") + newest * row + closed * key + tables,
    )


def _index_cache_write_tolerance(s: Signature, role: str) -> float:
    """The ring holds copies. A block key is a mean, a norm and a rotation (rounded cosines), each rounded.

    Rounded to another dtype at last, what was beside a tie may fall to its other side.
    """
    if role == "ring":
        return 0.0
    key = rounded_sum(s.dtype("raw_k"), terms=s["ratio"] + s["dim"], roundings=4)
    other = s.dtype("block_cache") != s.dtype("raw_k")
    return key + (torch.finfo(s.dtype("block_cache")).eps if other else 0.0)


@op(
    family="sparse",
    cases="tokenspeed_kernels.cases.sparse:index_cache_write",
    static=("dim", "half", "blocks", "ring_rows", "ratio"),
    mutates=("ring", "block_cache"),
    strided=("raw_k",),
    same_dtype=(("raw_k", "ring"),),
    where=("ratio >= 1", "ring_rows >= ratio", "2 * half <= dim"),
    checks=(*_PACKED, Indices("slots", below="slots"), Lengths("seq_lens", ("max_pages", "blocks", "ratio"))),
    cost=_index_cache_write_cost,
    tolerance=_index_cache_write_tolerance,
)
def index_cache_write(
    raw_k: Float[Tensor, "tokens dim"],
    ring: Float[Tensor, "slots ring_rows dim"],
    block_cache: Float[Tensor, "pages blocks dim"] | Float8e4m3fn[Tensor, "pages blocks dim"],
    page_table: Int32[Tensor, "seqs max_pages"],
    slots: Int32[Tensor, "seqs"],
    cu_seqlens: Int32[Tensor, "seqs+1"],
    seq_lens: Int32[Tensor, "seqs"],
    weight: Float[Tensor, "dim"],
    inv_freq: Float32[Tensor, "half"],
    *,
    ratio: int,
    eps: float,
    backend: str | None = None,
) -> None:
    """Remembers the raw index keys of new tokens, and writes the keys of the blocks which they complete.

    `cu_seqlens`, `seq_lens`, `page_table`, `block_cache`: see the module.
    `raw_k`: raw keys of the new tokens, neither normed nor rotated; may be strided between tokens.
    `ring`: the caller's pool of the last raw keys of each sequence: the token at position p goes to
    `ring[slot, p % ring_rows]`.
    `slots`: each sequence's slot of the ring, no two the same; −1 marks padding: nothing of it is read or written.
    `weight`: of the block keys' norm, stored centred at zero. `eps`: added to the mean of squares.
    `inv_freq`: radians a token of each pair of dims that rotates. `ratio`: tokens a block.

    Whenever p is the last position of a block, the block's raw keys, from this call or else from the ring as it was
    before the call, give its key, rounded to their dtype at each arrow and to that of `block_cache` at the end:

        mean (float32) → RMS norm with weight 1 + `weight` → `rope` at the position of the block's first token.

    The ring makes speculation reversible: a sequence may be continued from any earlier length, its block keys are then
    written anew. For that it must keep the raw keys of the open block while those of rejected tokens pass:
    `ring_rows >= ratio + n − 1` for verification of n tokens of which any number is accepted, one row less where at
    least one always is. Tokens at negative positions (a padding sequence of length 0) are ignored.

    Raises `ArgumentError` for arguments that do not fit, `ContentError` for offsets, pages, slots or lengths out of
    range where those are checked (short CPU tensors, or debug mode).

    Source: Qwen3.8-Flash-Next model description in docs/models.md, sparse selection.
    """
    dim, ring_rows, blocks = raw_k.shape[1], ring.shape[1], block_cache.shape[1]
    starts, lengths, table = cu_seqlens.tolist(), seq_lens.tolist(), page_table.tolist()
    for seq, slot in enumerate(slots.tolist()):
        if slot == -1:
            continue
        start, end = starts[seq], starts[seq + 1]
        first = lengths[seq] - (end - start)
        before = ring[slot].clone()
        for position in range(max(first, 0), lengths[seq]):
            ring[slot, position % ring_rows] = raw_k[start + position - first]
            block, last = divmod(position, ratio)
            if last != ratio - 1 or table[seq][block // blocks] == -1:
                continue
            mean = torch.zeros(dim, dtype=torch.float64)
            for p in range(block * ratio, position + 1):
                mean += (raw_k[start + p - first] if p >= first else before[p % ring_rows]).double() / ratio
            normed = mean / (mean.square().mean() + eps).sqrt() * (1 + weight.double())
            key = stored(_rotate(normed, block * ratio, inv_freq), None, block_cache.dtype)
            block_cache[table[seq][block // blocks], block % blocks] = key


@op(
    family="sparse",
    cases="tokenspeed_kernels.cases.sparse:index_scores",
    outputs=("scores",),
    static=("heads", "dim", "blocks", "ratio"),
    strided=("q",),
    where=("ratio >= 1",),
    checks=(*_PACKED, Lengths("seq_lens", ("max_pages", "blocks", "ratio"))),
    cost=lambda s: Cost(
        flops=s.numel("scores") * s["heads"] * (2 * s["dim"] + 2),
        nbytes=s.nbytes("q", "scores", "page_table", "cu_seqlens", "seq_lens")
        + min(s.numel("block_cache"), s["seqs"] * s["max_blocks"] * s["dim"]) * s.dtype("block_cache").itemsize,
    ),
    # Float32 throughout whatever the dtype of the keys: products of two bfloat16 are exact in it.
    tolerance=lambda s, role: rounded_sum(torch.float32, terms=s["heads"] * s["dim"]),
)
def index_scores(
    q: Float[Tensor, "tokens heads dim"],
    block_cache: Float[Tensor, "pages blocks dim"] | Float8e4m3fn[Tensor, "pages blocks dim"],
    page_table: Int32[Tensor, "seqs max_pages"],
    cu_seqlens: Int32[Tensor, "seqs+1"],
    seq_lens: Int32[Tensor, "seqs"],
    *,
    ratio: int,
    max_blocks: int,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float32[Tensor, "tokens max_blocks"]:
    """How much each new token wants each complete block before it: Σ_heads relu(q · block key) / √dim, in float32.

    `cu_seqlens`, `seq_lens`, `page_table`, `block_cache`: see the module.
    `q`: index queries of the new tokens, normed and rotated; may be strided but for the last dim.
    `ratio`: tokens a block. `max_blocks`: how many blocks to score; those past it are never chosen, so at least as many
    as the longest sequence has.

    The token at position p sees the blocks b < (p + 1) // ratio, its own too where it completes it. All other scores
    are −inf, also those of a block whose page is −1. Raises `ArgumentError` for arguments that do not fit,
    `ContentError` for offsets, pages or lengths out of range where those are checked (short CPU tensors, or debug
    mode).

    Source: DeepSeek-V3.2, equation 1, without weights of the heads.
    """
    blocks, dim = block_cache.shape[1:]
    table = page_table.tolist()
    scores = torch.full((q.shape[0], max_blocks), -torch.inf, dtype=torch.float64)
    for token, seq, position in _tokens(cu_seqlens, seq_lens):
        for block in range(min((position + 1) // ratio, max_blocks)):
            page = table[seq][block // blocks]
            if page != -1:
                dots = q[token].double() @ block_cache[page, block % blocks].double()
                scores[token, block] = dots.clamp_min(0.0).sum() / dim**0.5
    return scores


@op(
    family="sparse",
    cases="tokenspeed_kernels.cases.sparse:topk_blocks",
    outputs=("blocks",),
    static=("top_k",),
    where=("top_k >= 1",),
    cost=lambda s: Cost(flops=s.numel("scores"), nbytes=s.nbytes("scores", "blocks")),
    tolerance=lambda s, role: 0.0,  # a choice among given numbers, right or wrong
)
def topk_blocks(
    scores: Float32[Tensor, "tokens max_blocks"],
    *,
    top_k: int,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Int32[Tensor, "tokens top_k"]:
    """The blocks with the `top_k` highest scores of each token, in any order, each once.

    `scores`: as `index_scores` returns them, without NaN; −inf is never chosen. `top_k`: blocks a token, at least 1;
    where fewer are left, −1 fills the end of the row. Among equal scores any choice will do. Raises `ArgumentError` for
    arguments that do not fit.

    Source: DeepSeek-V3.2, equation 2, here of blocks.
    """
    blocks = torch.full((scores.shape[0], top_k), -1, dtype=torch.int32)
    for token, row in enumerate(scores.tolist()):
        visible = [block for block, score in enumerate(row) if score != -torch.inf]
        best = sorted(visible, key=lambda block: row[block], reverse=True)[:top_k]
        blocks[token, : len(best)] = torch.tensor(best, dtype=torch.int32)
    return blocks


def _sparse_attention_cost(s: Signature) -> Cost:
    """No cached row is read twice. Where nobody counted, every token attends to `top_k` blocks and a longest tail."""
    keys = min(s["top_k"] * s["ratio"] + s["ratio"] - 1, s["max_pages"] * s["page"])
    pairs = s.count("pairs", s["tokens"] * keys)
    rows = s.count("cached_tokens", min(pairs, s["seqs"] * s["max_pages"] * s["page"], s["pages"] * s["page"]))
    return Cost(
        flops=4 * pairs * s["heads"] * s["dim"],
        nbytes=s.nbytes("q", "attended", "lse", "blocks", "page_table", "cu_seqlens", "seq_lens", "k_scale", "v_scale")
        + 2 * rows * s["kv_heads"] * s["dim"] * s.dtype("k_cache").itemsize,
    )


@op(
    family="sparse",
    cases="tokenspeed_kernels.cases.sparse:sparse_attention",
    outputs=("attended", "lse"),
    output_dtypes={"attended": "q"},
    static=("heads", "kv_heads", "dim", "page", "ratio", "top_k"),
    strided=("q", "k_cache", "v_cache"),
    same_dtype=(("k_cache", "v_cache"),),
    where=("ratio >= 1", "page % ratio == 0", "heads % kv_heads == 0"),
    checks=(*_PACKED, Lengths("seq_lens", ("max_pages", "page"))),
    cost=_sparse_attention_cost,
    # A score carries the error of a dot product into the exponent; the output is a sum over the keys.
    tolerance=lambda s, role: rounded_sum(s.dtype(role), terms=s["dim"] + (s["top_k"] + 1) * s["ratio"]),
)
def sparse_attention(
    q: Float[Tensor, "tokens heads dim"],
    k_cache: Float[Tensor, "pages page kv_heads dim"] | Float8e4m3fn[Tensor, "pages page kv_heads dim"],
    v_cache: Float[Tensor, "pages page kv_heads dim"] | Float8e4m3fn[Tensor, "pages page kv_heads dim"],
    page_table: Int32[Tensor, "seqs max_pages"],
    blocks: Int32[Tensor, "tokens top_k"],
    cu_seqlens: Int32[Tensor, "seqs+1"],
    seq_lens: Int32[Tensor, "seqs"],
    *,
    ratio: int,
    scale: float,
    k_scale: Float32[Tensor, "1"] | None = None,
    v_scale: Float32[Tensor, "1"] | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Float[Tensor, "tokens heads dim"], Float32[Tensor, "tokens heads"]]:
    """Softmax attention of each new token over all tokens of its chosen blocks and over its tail.

    `cu_seqlens`, `seq_lens`, `page_table`: see the module; token p of a sequence lies on its page p // page at offset
    p % page, and is left out where that is −1.
    `q`: queries of the new tokens, rotated. Query head h reads key/value head h // (heads // kv_heads).
    `k_cache`, `v_cache`, `k_scale`, `v_scale`: see the module; rows of the new tokens are written already.
    `blocks`: the chosen blocks of each token, the same for all heads, each at most once, in any order. The token at
    position p attends to the tokens of those below m = (p + 1) // ratio; all other entries, such as the filling −1, are
    ignored. To the tail, the tokens ratio·m to p, it always attends.
    `ratio`: tokens a block; a page holds whole blocks. `scale`: scores are `scale` · q·k.

    Queries and caches may be strided but for their last dim. Returns the outputs, in the dtype of `q`, and the natural
    log of the sums of exponentials of the scores. A token that attends to nothing (a negative position, in a padding
    sequence of length 0) gives zeros and −inf. Raises `ArgumentError` for arguments that do not fit, `ContentError` for
    offsets, pages or lengths out of range where those are checked (short CPU tensors, or debug mode).

    Source: Native Sparse Attention, section 3.3.2.
    """
    page, kv_heads = k_cache.shape[1], k_cache.shape[2]
    table, chosen = page_table.tolist(), blocks.tolist()
    attended = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for token, seq, position in _tokens(cu_seqlens, seq_lens):
        if position < 0:
            continue
        complete = (position + 1) // ratio
        keys = [ratio * b + i for b in chosen[token] if 0 <= b < complete for i in range(ratio)]
        keys += range(ratio * complete, position + 1)
        places = [(table[seq][key // page], key % page) for key in keys]
        places = [place for place in places if place[0] != -1]
        if not places:
            continue
        k = loaded(torch.stack([k_cache[place] for place in places]), k_scale)
        v = loaded(torch.stack([v_cache[place] for place in places]), v_scale)
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // kv_heads)
            logits = scale * (k[:, kv_head] @ q[token, head].double())
            lse[token, head] = logits.logsumexp(dim=0)
            attended[token, head] = logits.softmax(dim=0) @ v[:, kv_head]
    return attended, lse


def _tokens(cu_seqlens: Tensor, seq_lens: Tensor) -> list[tuple[int, int, int]]:
    """Packed index, sequence and position of every token."""
    starts = cu_seqlens.tolist()
    return [
        (token, seq, length - starts[seq + 1] + token)
        for seq, length in enumerate(seq_lens.tolist())
        for token in range(starts[seq], starts[seq + 1])
    ]


def _rotate(x: Tensor, position: int, inv_freq: Tensor) -> Tensor:
    """RoPE in NeoX pairs. The angle is float32 by definition: at large positions its rounding is visible."""
    half = inv_freq.shape[0]
    angle = (position * inv_freq).double()
    a, b = x[:half], x[half : 2 * half]
    turned = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return torch.cat([*turned, x[2 * half :]])
