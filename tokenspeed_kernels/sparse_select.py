"""The indexer's choice in one step: scoring and selection of blocks, without the scores in between.

Over a long prompt the scores of all tokens are the largest tensor of a sparse layer: 4 B · tokens · blocks, 2 GiB for a
chunk of 8,192 tokens at 262,144. A kernel of this op keeps a running choice instead.
"""

import torch
from jaxtyping import Float, Float8e4m3fn, Int32
from torch import Tensor

from tokenspeed_kernels.sparse import index_scores, topk_blocks
from tokenspeed_registry import Cost, Indices, Lengths, Offsets, op, rounded_sum


@op(
    family="sparse",
    cases="tokenspeed_kernels.cases.sparse_select:select_blocks",
    outputs=("blocks",),
    static=("heads", "dim", "blocks", "ratio", "top_k"),
    strided=("q",),
    where=("ratio >= 1", "top_k >= 1", "max_blocks >= 0"),
    checks=(
        Indices("page_table", below="pages"),
        Offsets("cu_seqlens", total="tokens"),
        Lengths("seq_lens", ("max_pages", "blocks", "ratio")),
    ),
    cost=lambda s: Cost(
        flops=s["tokens"] * s["max_blocks"] * s["heads"] * (2 * s["dim"] + 2),
        nbytes=s.nbytes("q", "page_table", "cu_seqlens", "seq_lens")
        + s["tokens"] * s["top_k"] * torch.int32.itemsize
        + min(s.numel("block_cache"), s["seqs"] * s["max_blocks"] * s["dim"]) * s.dtype("block_cache").itemsize,
    ),
    # How far the score of a chosen block may be below that of one left out: both scores are float32 sums.
    tolerance=lambda s, role: 2 * rounded_sum(torch.float32, terms=s["heads"] * s["dim"]),
)
def select_blocks(
    q: Float[Tensor, "tokens heads dim"],
    block_cache: Float[Tensor, "pages blocks dim"] | Float8e4m3fn[Tensor, "pages blocks dim"],
    page_table: Int32[Tensor, "seqs max_pages"],
    cu_seqlens: Int32[Tensor, "seqs+1"],
    seq_lens: Int32[Tensor, "seqs"],
    *,
    ratio: int,
    top_k: int,
    max_blocks: int,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Int32[Tensor, "tokens top_k"]:
    """The `top_k` blocks that each new token wants most: `topk_blocks` of its `index_scores`.

    `q`: index queries of the new tokens, normed and rotated; may be strided but for the last dim.
    `block_cache`: the caller's pool of block keys, in the model's dtype or float8_e4m3fn without a scale. A page holds
    `blocks` of them: block b of sequence s lies at `block_cache[page_table[s, b // blocks], b % blocks]`.
    `page_table`: each sequence's pages in order, −1 where it has none; blocks there are never chosen.
    `cu_seqlens`: sequence s has the packed new tokens cu_seqlens[s] up to cu_seqlens[s+1], possibly none.
    `seq_lens`: tokens of each sequence, counting the new ones, which are its last; 0 for a padding sequence.
    `ratio`: tokens a block. `top_k`: blocks a token, at least 1. `max_blocks`: how many blocks to look at; those past
    it are never chosen, so at least as many as the longest sequence has.

    The token at position p chooses among the blocks b < (p + 1) // ratio by Σ_heads relu(q · block key), in float32.
    Returns each choice in any order, each block once; where there are fewer, −1 fills the end of the row. Among equal
    scores any choice will do, but it must not depend on the other sequences. Raises `ArgumentError` for arguments that
    do not fit, `ContentError` for offsets, pages or lengths out of range where those are checked (short CPU tensors, or
    debug mode).

    Source: DeepSeek-V3.2 (arXiv:2512.02556), equations 1 and 2, here of blocks and without weights of the heads.
    """
    scores = index_scores.contract.reference(
        q, block_cache, page_table, cu_seqlens, seq_lens, ratio=ratio, max_blocks=max_blocks
    )
    blocks = topk_blocks.contract.reference(scores, top_k=top_k)
    assert isinstance(blocks, Tensor)
    return blocks
