"""n-gram embeddings: hashes of the last tokens, and the rows of a large table that they name.

`ids`: token ids of all sequences, packed. −1 is padding: its rows are −1, its embedding is zero, and what follows it
sees it as `eos`.
`context`: the order − 1 ids before each sequence's first one, oldest first, `eos` where there are none.
`cu_seqlens`: sequence s has ids[cu_seqlens[s] : cu_seqlens[s + 1]], possibly none.
`multipliers`: the hash's factors: [0] of the token, [i] of its i-th predecessor.
`moduli`, `offsets`: how many table rows each head hashes into, at least 1, and the first of them.
`eos`: the id that ends a text. Once a predecessor is `eos`, all older ones count as it; an `eos` token itself still
sees its own predecessors.
`table`: the rows of all heads, possibly above 2^31 elements, on the device or in pinned host memory. `scale`: one
factor for all of it or one a row; None is 1. `first_row`: where `table` is one shard of a larger one, the row that it
begins with; rows of other shards give zeros, so that shards' results add up. None: it is the whole table.
`dtype`: that of the embedding: bfloat16, float16 or float32.

Sources: the Qwen3.8-Flash-Next reference implementation; hashed n-gram tables go back to fastText
(arXiv:1607.04606), their gated use inside a layer to Engram (arXiv:2601.07372).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float8e4m3fn, Float32, Int32, Int64
from torch import Tensor

from tokenspeed_registry import ContentError, Cost, Indices, Offsets, Signature, op, rounded_sum


@dataclass(frozen=True)
class Positive:
    """A content check: all values are at least 1, as a divisor of hashes must be."""

    argument: str
    needs: tuple[str, ...] = ()

    def verify(self, op: str, values: Tensor, dims: Mapping[str, int]) -> None:
        if wrong := [value for value in values.tolist() if value < 1]:
            raise ContentError(op, self.argument, "values of at least 1", str(wrong[0]))


@dataclass(frozen=True)
class WholeTableRows:
    """A content check: −1 or rows of the table, where that is the whole table; a shard is handed rows of others too."""

    argument: str
    needs: tuple[str, ...] = ("table_rows", "first_row")

    def verify(self, op: str, values: Tensor, dims: Mapping[str, int]) -> None:
        if dims["first_row"] is None:
            Indices(self.argument, below="table_rows").verify(op, values, dims)


_HASH_RELATIONS = ("order >= 2", "history == order-1", "heads % (order-1) == 0")
_SCALE_RELATION = "scale is None or scales in (1, table_rows)"
# float8 is a storage format: sums of it elsewhere in the model would lose everything.
_DTYPE_RELATION = "dtype.is_floating_point and dtype.itemsize in (2, 4)"


def _hash_flops(s: Signature) -> float:
    return s["tokens"] * (2 * s["order"] + 2 * s["heads"])


def _lookup_bytes(s: Signature) -> float:
    """Only the rows looked up are read of the table, and of scales one a row."""
    rows = s["tokens"] * s["heads"]
    scales = (1 if s["scales"] == 1 else rows) if s.given("scale") else 0
    return rows * s["dim"] * s.dtype("table").itemsize + 4 * scales + s.nbytes("embedding")


def _lookup_tolerance(s: Signature, role: str) -> float:
    # A copy is exact; else one product in float32 and one rounding.
    if not s.given("scale") and s.dtype("table") == s.dtype(role):
        return 0.0
    return rounded_sum(s.dtype(role), terms=1)


@op(
    family="ngram",
    cases="tokenspeed_kernels.cases.ngram:ngram_hash",
    outputs=("rows",),
    static=("order", "heads"),
    where=_HASH_RELATIONS,
    checks=(Offsets("cu_seqlens", total="tokens"), Positive("moduli")),
    cost=lambda s: Cost(
        flops=_hash_flops(s),
        nbytes=s.nbytes("ids", "context", "cu_seqlens", "multipliers", "moduli", "offsets", "rows"),
    ),
    tolerance=lambda s, role: 0.0,  # integers
)
def ngram_hash(
    ids: Int64[Tensor, "tokens"],
    context: Int64[Tensor, "seqs history"],
    cu_seqlens: Int32[Tensor, "seqs+1"],
    multipliers: Int64[Tensor, "order"],
    moduli: Int64[Tensor, "heads"],
    offsets: Int64[Tensor, "heads"],
    *,
    eos: int,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Int64[Tensor, "tokens heads"]:
    """The table rows of every token's n-grams, for all n from 2 to `order`.

    `ids`, `context`, `cu_seqlens`, `multipliers`, `moduli`, `offsets`, `eos`: see the module.
    With t0 the token and t1, t2, ... its predecessors, the hash of the n-gram is the exclusive or of
    t_i · multipliers[i] for i < n, on wrapping signed 64-bit integers. Head j looks at n-grams of
    n = 2 + j // (heads / (order − 1)) tokens: its row is (hash mod moduli[j]) + offsets[j], the modulo floored, so
    never negative.

    Returns the rows, int64, as a table past 2^31 rows needs. Raises `ArgumentError` for arguments that do not fit,
    `ContentError` for bad `cu_seqlens` or a modulus below 1 where those are checked (short CPU tensors, or debug mode).

    Source: n-gram embedding of the Qwen3.8-Flash-Next reference implementation.
    """
    order, heads = multipliers.shape[0], moduli.shape[0]
    factors, divisors, starts = multipliers.tolist(), moduli.tolist(), offsets.tolist()
    bounds = cu_seqlens.tolist()
    rows = torch.full((ids.shape[0], heads), -1, dtype=torch.int64)
    for sequence, before in enumerate(context.tolist()):
        text = before + ids[bounds[sequence] : bounds[sequence + 1]].tolist()
        for position in range(order - 1, len(text)):
            if text[position] == -1:
                continue
            window = _window(text, position, order, eos)
            token = bounds[sequence] + position - (order - 1)
            for head in range(heads):
                value = 0
                for i in range(2 + head // (heads // (order - 1))):
                    value ^= _wrap(window[i] * factors[i])
                rows[token, head] = value % divisors[head] + starts[head]
    return rows.to(ids.device)


def _window(text: list[int], position: int, order: int, eos: int) -> list[int]:
    """The token at `position` and its order − 1 predecessors, newest first."""
    window = [text[position]]
    for back in range(1, order):
        ended = back > 1 and window[-1] == eos
        previous = text[position - back]
        window.append(eos if ended or previous == -1 else previous)
    return window


def _wrap(value: int) -> int:
    """`value` mod 2^64 as a signed 64-bit integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


@op(
    family="ngram",
    cases="tokenspeed_kernels.cases.ngram:ngram_lookup",
    outputs=("embedding",),
    output_dtypes={"embedding": "dtype"},
    static=("heads", "dim"),
    where=("table_rows >= 1", _SCALE_RELATION, _DTYPE_RELATION),
    placeable=("table", "scale"),
    checks=(WholeTableRows("rows"),),
    cost=lambda s: Cost(flops=s.numel("embedding"), nbytes=s.nbytes("rows") + _lookup_bytes(s)),
    tolerance=_lookup_tolerance,
)
def ngram_lookup(
    rows: Int64[Tensor, "tokens heads"],
    table: Float[Tensor, "table_rows dim"] | Float8e4m3fn[Tensor, "table_rows dim"],
    scale: Float32[Tensor, "scales"] | None,
    *,
    dtype: torch.dtype,
    first_row: int | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "tokens heads*dim"]:
    """The table rows of each token, one behind the other: embedding[t, j·dim : (j+1)·dim] = table[rows[t, j]] · scale.

    `rows`: what `ngram_hash` returns; −1 gives zeros. `table`, `scale`, `dtype`, `first_row`: see the module. The
    product is float32 and rounds once. Raises `ArgumentError` for arguments that do not fit, `ContentError` for a row
    outside a whole table where rows are checked (short CPU tensors, or debug mode).

    Source: n-gram embedding of the Qwen3.8-Flash-Next reference implementation; its float8 checkpoints for the scales.
    """
    embedding = torch.zeros(*rows.shape, table.shape[1], dtype=torch.float64, device=rows.device)
    start = first_row or 0
    for token, row_of_head in enumerate(rows.tolist()):
        for head, global_row in enumerate(row_of_head):
            row = global_row - start
            if global_row == -1 or not 0 <= row < table.shape[0]:
                continue
            embedding[token, head] = table[row].double()
            if scale is not None:
                embedding[token, head] *= scale[row if scale.shape[0] > 1 else 0].double()
    return embedding.flatten(1)


@op(
    family="ngram",
    cases="tokenspeed_kernels.cases.ngram:ngram_embed",
    outputs=("embedding",),
    output_dtypes={"embedding": "dtype"},
    static=("order", "heads", "dim"),
    where=(*_HASH_RELATIONS, "table_rows >= 1", _SCALE_RELATION, _DTYPE_RELATION),
    placeable=("table", "scale"),
    checks=(Offsets("cu_seqlens", total="tokens"), Positive("moduli"), WholeTableRows("offsets")),
    cost=lambda s: Cost(
        flops=_hash_flops(s) + s.numel("embedding"),
        nbytes=s.nbytes("ids", "context", "cu_seqlens", "multipliers", "moduli", "offsets") + _lookup_bytes(s),
    ),
    tolerance=_lookup_tolerance,
)
def ngram_embed(
    ids: Int64[Tensor, "tokens"],
    context: Int64[Tensor, "seqs history"],
    cu_seqlens: Int32[Tensor, "seqs+1"],
    multipliers: Int64[Tensor, "order"],
    moduli: Int64[Tensor, "heads"],
    offsets: Int64[Tensor, "heads"],
    table: Float[Tensor, "table_rows dim"] | Float8e4m3fn[Tensor, "table_rows dim"],
    scale: Float32[Tensor, "scales"] | None,
    *,
    eos: int,
    dtype: torch.dtype,
    first_row: int | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "tokens heads*dim"]:
    """`ngram_hash`, then `ngram_lookup` of its rows, which are never stored.

    All arguments: see the module. moduli[j] + offsets[j] must not exceed the table's rows, which is not checked. Raises
    `ArgumentError` for arguments that do not fit, `ContentError` for bad `cu_seqlens`, `offsets` outside the table
    or a modulus below 1 where those are checked (short CPU tensors, or debug mode).

    Source: n-gram embedding of the Qwen3.8-Flash-Next reference implementation.
    """
    rows = ngram_hash.contract.reference(ids, context, cu_seqlens, multipliers, moduli, offsets, eos=eos)
    embedding = ngram_lookup.contract.reference(rows, table, scale, dtype=dtype, first_row=first_row)
    assert isinstance(embedding, Tensor)
    return embedding
