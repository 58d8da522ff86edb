"""How checkpoints store projections: in the model's dtype, in block-scaled FP8, and of experts in NVFP4."""

from collections.abc import Iterator, Sequence

from tokenspeed_engine.checkpoint.plan import (
    BYTE_DTYPES,
    FP8_DTYPES,
    Layout,
    Parameter,
    Piece,
    Target,
    concatenated,
)

BLOCK = 128
"""Rows and columns that share a scale in FP8."""
GROUP = 16
"""Columns of a row that share a scale in NVFP4."""


def projection(name: str, parts: Sequence[str], out_features: int, in_features: int) -> Parameter:
    """A matrix, or several of one shape stacked by rows. `parts`: their names on disk, without `.weight`.

    A quantised one has `.scale` beside its tensor. Stacked ones have an FP8 layout where their rows end at a block.
    """
    shape, blocks = (out_features, in_features), (-(-out_features // BLOCK), -(-in_features // BLOCK))
    stacked = (len(parts) * out_features, in_features)
    pieces = concatenated((f"{part}.weight", shape) for part in parts)
    plain = Layout("whole" if len(parts) == 1 else "stacked", (Target(name, stacked, pieces),))
    if len(parts) > 1 and out_features % BLOCK:
        return Parameter(name, (plain,))
    scales = concatenated((f"{part}.weight_scale_inv", blocks) for part in parts)
    elements = Target(name, stacked, pieces, "float8_e4m3fn", FP8_DTYPES)
    scale = Target(f"{name}.scale", (len(parts) * blocks[0], blocks[1]), scales, "float32")
    return Parameter(name, (plain, Layout("fp8", (elements, scale))))


def expert_matrices(
    name: str, stem: str, experts: int, parts: Sequence[str], out_features: int, in_features: int
) -> Parameter:
    """One kind of projection of all experts, or the gate and up projections together.

    Args:
        name: of the parameter, and of its tensor [experts, (2,) out, in]; a quantised one has `.scale` beside it, in
            NVFP4 also `.global_scale`.
        stem: names on disk before the expert's number: `{stem}{expert}.{part}_proj.weight`, or `{stem}{name's last
            part}` for all experts in one.
        parts: ("gate", "up") or ("down",).
    """
    return Parameter(name, tuple(_layouts(name, stem, experts, parts, out_features, in_features)))


def _layouts(
    name: str, stem: str, experts: int, parts: Sequence[str], out_features: int, in_features: int
) -> Iterator[Layout]:
    def pieces(suffix: str, *shape: int) -> tuple[Piece, ...]:
        """One tensor an expert and part."""
        names = (f"{stem}{expert}.{part}_proj.{suffix}" for expert in range(experts) for part in parts)
        return concatenated((each, shape) for each in names)

    together = (experts, len(parts)) if len(parts) > 1 else (experts,)
    plain = (experts, len(parts) * out_features, in_features)
    fused = Piece(f"{stem}{name.rpartition('.')[2]}", plain)
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
