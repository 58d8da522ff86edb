"""How checkpoints store parameters: in the model's dtype, in block-scaled FP8, and experts also in NVFP4.

Where ranks share a model, a parameter is cut by rows or columns, and experts are dealt out. Whoever holds a part reads
that alone, and checks the whole.
"""

from collections.abc import Iterable, Iterator, Sequence

from tokenspeed_engine.checkpoint.plan import (
    BYTE_DTYPES,
    FP8_DTYPES,
    NOTHING,
    Layout,
    Parameter,
    Part,
    Piece,
    Target,
    TargetDtype,
    concatenated,
    placed,
)

BLOCK = 128
"""Rows and columns that share a scale in FP8."""
GROUP = 16
"""Columns of a row that share a scale in NVFP4."""


def scaled(part: range, by: int, start: int = 0) -> range:
    """The elements of some heads, say, `by` each, where those of all begin at `start`."""
    return range(start + part.start * by, start + part.stop * by)


def single(
    name: str,
    source: str,
    shape: tuple[int, ...],
    *,
    rows: Sequence[range] = (),
    columns: range | None = None,
    on_disk: tuple[int, ...] | None = None,
    dtype: TargetDtype = "model",
) -> Parameter:
    """A parameter that is the one tensor `source` on disk, there with shape `on_disk` where that differs.

    rows, columns: what of `shape` is taken along its first two dims, in this order; unless given all.
    """
    stored = on_disk or shape
    whole: Sequence[range | None] = (None,)
    pieces = placed((source, stored, _part(stored, each, columns)) for each in rows or whole)
    taken = (sum(map(len, rows)) if rows else shape[0], *shape[1:])
    if columns is not None:
        taken = (taken[0], len(columns), *shape[2:])
    return Parameter(name, (Layout("whole", (Target(name, taken, pieces, dtype),)),))


def stacked(name: str, sources: Sequence[str], shape: tuple[int, int], rows: range) -> Parameter:
    """Matrices of one shape, the rows `rows` of each, one below the other."""
    pieces = concatenated(((source, shape) for source in sources), _part(shape, rows, None))
    return Parameter(name, (Layout("stacked", (Target(name, (len(sources) * len(rows), shape[1]), pieces),)),))


def projection(
    name: str,
    parts: Sequence[str],
    out_features: int,
    in_features: int,
    *,
    rows: range | None = None,
    columns: range | None = None,
) -> Parameter:
    """A matrix, or several of one shape stacked by rows. `parts`: their names on disk, without `.weight`.

    A quantised one has `.scale` beside its tensor. Stacked ones have an FP8 layout where their rows end at a block.
    rows, columns: what is taken of each; unless given all. An FP8 block is not cut but refused.
    """
    rows, columns = rows or range(out_features), columns or range(in_features)
    shape = (out_features, in_features)
    taken = (len(parts) * len(rows), len(columns))
    part = _part(shape, rows, columns)
    pieces = concatenated(((f"{part_name}.weight", shape) for part_name in parts), part)
    plain = Layout("whole" if len(parts) == 1 else "stacked", (Target(name, taken, pieces),))
    if len(parts) > 1 and out_features % BLOCK:
        return Parameter(name, (plain,))
    blocks = (-(-out_features // BLOCK), -(-in_features // BLOCK))
    own_rows, own_columns = _blocks(rows), _blocks(columns)
    scales = concatenated(
        ((f"{part_name}.weight_scale_inv", blocks) for part_name in parts), _part(blocks, own_rows, own_columns)
    )
    elements = Target(name, taken, pieces, "float8_e4m3fn", FP8_DTYPES)
    scale = Target(f"{name}.scale", (len(parts) * len(own_rows), len(own_columns)), scales, "float32")
    cut = [
        f"{dim} {own.start} to {own.stop} of {count}"
        for dim, own, count in (("rows", rows, out_features), ("columns", columns, in_features))
        if own.start % BLOCK or (own.stop % BLOCK and own.stop < count)
    ]
    refused = f"ranks: a rank's share, {' and '.join(cut)}, cuts FP8 blocks of {BLOCK}" if cut else None
    return Parameter(name, (plain, Layout("fp8", (elements, scale), refused)))


def expert_matrices(
    name: str,
    stem: str,
    experts: int,
    parts: Sequence[str],
    out_features: int,
    in_features: int,
    own: range | None = None,
) -> Parameter:
    """One kind of projection of all experts, or the gate and up projections together.

    Args:
        name: of the parameter, and of its tensor [experts, (2,) out, in]; a quantised one has `.scale` beside it, in
            NVFP4 also `.global_scale`.
        stem: names on disk before the expert's number: `{stem}{expert}.{part}_proj.weight`, or `{stem}{name's last
            part}` for all experts in one.
        parts: ("gate", "up") or ("down",).
        own: the experts that are taken; unless given all.
    """
    return Parameter(
        name, tuple(_layouts(name, stem, experts, parts, out_features, in_features, own or range(experts)))
    )


def _layouts(
    name: str, stem: str, experts: int, parts: Sequence[str], out_features: int, in_features: int, own: range
) -> Iterator[Layout]:
    def pieces(suffix: str, *shape: int) -> tuple[Piece, ...]:
        """One tensor an expert and part."""
        return placed(
            (f"{stem}{expert}.{part}_proj.{suffix}", shape, None if expert in own else NOTHING)
            for expert in range(experts)
            for part in parts
        )

    together = (len(own), len(parts)) if len(parts) > 1 else (len(own),)
    stored = (experts, len(parts) * out_features, in_features)
    plain = (len(own), *stored[1:])
    fused = Piece(f"{stem}{name.rpartition('.')[2]}", stored, part=_part(stored, own, None))
    yield Layout("fused", (Target(name, plain, (fused,)),))
    yield Layout("per expert", (Target(name, plain, pieces("weight", out_features, in_features)),))

    shape = (out_features, in_features)
    blocks = (-(-out_features // BLOCK), -(-in_features // BLOCK))
    yield Layout(
        "fp8 per expert",
        (
            Target(name, (*together, *shape), pieces("weight", *shape), "float8_e4m3fn", FP8_DTYPES),
            Target(f"{name}.scale", (*together, *blocks), pieces("weight_scale_inv", *blocks), "float32"),
        ),
    )

    if in_features % GROUP == 0:
        codes, groups = (out_features, in_features // 2), (out_features, in_features // GROUP)
        yield Layout(
            "nvfp4 per expert",
            (
                Target(name, (*together, *codes), pieces("weight", *codes), "uint8", BYTE_DTYPES),
                Target(
                    f"{name}.scale",
                    (*together, *groups),
                    pieces("weight_scale", *groups),
                    "float8_e4m3fn",
                    FP8_DTYPES,
                ),
                Target(f"{name}.global_scale", together, pieces("weight_scale_2"), "float32"),
            ),
        )


def row_shards(shards: Iterable[tuple[str, tuple[int, int]]], own: range) -> tuple[Piece, ...]:
    """Pieces of a table that lies on disk in shards of rows, (name, shape) each: its rows `own`."""

    def parts() -> Iterator[tuple[str, tuple[int, int], Part]]:
        start = 0
        for name, shape in shards:
            rows = range(max(own.start - start, 0), min(own.stop - start, shape[0]))
            yield name, shape, _part(shape, rows, None) if rows else NOTHING
            start += shape[0]

    return placed(parts())


def _part(shape: tuple[int, ...], rows: range | None, columns: range | None) -> Part:
    """The part of a tensor that has these rows and columns; None where that is all of it."""
    taken = tuple(map(range, shape))
    if rows is not None:
        taken = (rows, *taken[1:])
    if columns is not None:
        taken = (taken[0], columns, *taken[2:])
    return None if taken == tuple(map(range, shape)) else taken


def _blocks(part: range) -> range:
    """The FP8 blocks that a part lies in."""
    return range(part.start // BLOCK, -(-part.stop // BLOCK))
