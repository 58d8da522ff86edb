"""Results as pictures, SVG: a roofline of all calls, and time against bytes for each op. Needs matplotlib."""

import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import Bbox

from tokenspeed_kernels.benchmark.rows import Row, fastest

STYLE = {
    "svg.hashsalt": "tokenspeed",
    "font.size": 9,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
}
OURS = ("#1f77b4", "#2ca02c", "#17becf", "#9467bd")
THEIRS = ("#d62728", "#ff7f0e", "#8c564b", "#e377c2", "#bcbd22")
GOOD, FAIR, POOR, EAGER, SLOWER = "#2ca02c", "#e8a200", "#d62728", "#4c78a8", "#c4c4c4"
COLUMNS = 3


def roofline(rows: Sequence[Row], ceilings: Mapping[str, Any]) -> str:
    """Every timed call: its FLOPs a byte against what it achieved; the lines are what this device does at best."""
    timed = [row for row in rows if row.us and row.flops and row.nbytes]
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(11, 6.2), layout="constrained")
        axes = figure.subplots()
        intensity = [row.flops / row.nbytes for row in timed] or [1.0]
        low, high = min([*intensity, 1.0]) / 3, max([*intensity, 1000.0]) * 3
        bandwidth = ceilings["copy_bytes_per_second"] / 1e12
        for name, rate in ceilings["matrix"].items():
            knee = rate / 1e12 / bandwidth
            axes.plot([low, knee, high], [low * bandwidth, rate / 1e12, rate / 1e12], color="#444444", lw=1.4, zorder=1)
            axes.annotate(f"{name} product {rate / 1e12:.0f} TFLOP/s", (high, rate / 1e12), (-4, 3),
                          textcoords="offset points", ha="right", color="#444444")  # fmt: skip
        best = fastest(timed)
        for row in timed:
            leads = row in best
            size, tint = (30, colour(row)) if leads else (14, SLOWER)
            axes.scatter(*_place(row), s=size, color=tint, edgecolor="white", lw=0.5, zorder=2 + leads)
        axes.set(xscale="log", yscale="log", xlim=(low, high))
        axes.set(xlabel="FLOPs a byte that must move", ylabel="achieved TFLOP/s")
        top = max([*ceilings["matrix"].values()]) / 1e12
        least = min((_place(row)[1] for row in timed), default=top)
        axes.set_ylim(min(least, top / 1e3) / 2, top * 2.5)
        _along(axes, low, bandwidth)
        axes.legend(handles=_verdicts(), loc="upper left", frameon=False)
        _label_ops(figure, axes, best)
        return _svg(figure)


def sweeps(rows: Sequence[Row]) -> str:
    """Microseconds against bytes that must move, a panel an op (and model, where sizes were swept)."""
    timed = [row for row in rows if row.us and row.nbytes]
    panels: dict[str, list[Row]] = {}
    for row in timed:
        panels.setdefault(f"{row.op}\n{row.model}" if row.shape != row.model else row.op, []).append(row)
    ours = _tints(sorted({_short(row) for row in timed}), OURS)
    theirs = _tints(sorted({name for row in timed for name in row.peers}), THEIRS)
    lines = max(-(-len(panels) // COLUMNS), 1)
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(11, 0.6 + 2.7 * lines), layout="constrained")
        grid = figure.subplots(lines, COLUMNS, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for axes, (title, members) in zip(grid.flat, sorted(panels.items()), strict=False):
            _panel(axes, title, members, ours, theirs)
        handles = [Line2D([], [], color="black", ls="--", lw=1, label="floor")]
        handles += [Line2D([], [], color=tint, marker="o", ms=4, lw=1.6, label=name) for name, tint in ours.items()]
        handles += [Line2D([], [], color=tint, marker="x", ms=5, lw=1, label=name) for name, tint in theirs.items()]
        figure.legend(handles=handles, loc="outside upper left", ncols=8, frameon=False)
        return _svg(figure)


def colour(row: Row) -> str:
    """Green within 70% of its ceiling, red below 40% or behind a peer; grey where it ran eagerly."""
    if (row.behind or 0) > 1:
        return POOR
    if not row.graph:
        return EAGER
    share = row.of_ceiling or 0
    return GOOD if share >= 0.7 else FAIR if share >= 0.4 else POOR


def _place(row: Row) -> tuple[float, float]:
    """In the roofline."""
    return row.flops / row.nbytes, row.flops / (row.us or 1) / 1e6


def _panel(axes: Axes, title: str, rows: Sequence[Row], ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    times: dict[tuple[str, str], dict[float, float]] = {}
    for row in rows:
        if row.floor_us is not None:
            times.setdefault(("floor", ""), {})[row.nbytes] = row.floor_us
        times.setdefault(("ours", _short(row)), {})[row.nbytes] = row.us or math.nan
        for name, us in row.peers.items():
            times.setdefault(("theirs", name), {})[row.nbytes] = us
    # A line joins sizes of one call, not different calls.
    thin = float(any(row.shape != row.model for row in rows))
    styles: dict[str, dict[str, Any]] = {
        "floor": {"ls": "--", "lw": thin, "marker": "_", "ms": 8},
        "theirs": {"lw": thin, "marker": "x", "ms": 5},
        "ours": {"lw": 1.6 * thin, "marker": "o", "ms": 4},
    }
    for kind, tints in (("floor", {"": "black"}), ("theirs", theirs), ("ours", ours)):
        for name, tint in tints.items():
            points = sorted(times.get((kind, name), {}).items())
            axes.plot([x for x, _ in points], [y for _, y in points], color=tint, **styles[kind])
    axes.set(xscale="log", yscale="log", ylabel="µs")
    axes.set_title(title, fontsize=9, loc="left")
    for axis, text in ((axes.xaxis, _bytes), (axes.yaxis, _plain)):
        axis.set_major_locator(FixedLocator(_ticks(*axis.get_view_interval())))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(text))


def _label_ops(figure: Figure, axes: Axes, rows: Sequence[Row]) -> None:
    """One label an op, at the call farthest from its ceiling, where it covers neither a label nor a point."""
    worst: dict[str, Row] = {}
    for row in rows:
        if row.op not in worst or (row.of_ceiling or 0) < (worst[row.op].of_ceiling or 0):
            worst[row.op] = row
    figure.draw_without_rendering()
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    frame = axes.get_window_extent(renderer)
    taken = [legend.get_window_extent(renderer) for legend in [axes.get_legend()] if legend is not None]
    taken += [text.get_window_extent(renderer) for text in axes.texts]
    taken += [Bbox.from_bounds(x - 3, y - 3, 6, 6) for x, y in axes.transData.transform([*map(_place, rows)])]
    for row in sorted(worst.values(), key=_place):
        for offset in _offsets():
            label = _label(axes, row, _place(row), offset)
            box = label.get_window_extent(renderer).padded(1.5)
            inside = frame.x0 < box.x0 and box.x1 < frame.x1 and frame.y0 < box.y0 and box.y1 < frame.y1
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            label.remove()


def _label(axes: Axes, row: Row, point: tuple[float, float], offset: tuple[float, float]) -> Annotation:
    far = abs(offset[0]) + abs(offset[1]) > 16
    arrow = {"arrowstyle": "-", "color": "#999999", "lw": 0.6, "shrinkA": 0, "shrinkB": 3} if far else None
    return axes.annotate(
        row.op, point, offset, textcoords="offset points", fontsize=7.5, color="#222222", va="center",
        ha="left" if offset[0] >= 0 else "right", arrowprops=arrow, zorder=4,
    )  # fmt: skip


def _offsets() -> Iterable[tuple[float, float]]:
    """Beside the point, then farther and farther away."""
    for distance in (6, 14, 24, 36, 50, 66, 84, 104):
        for x, y in ((1, 0), (1, -0.7), (1, 0.7), (-1, 0), (-1, -0.7), (-1, 0.7), (0.1, 1), (0.1, -1)):
            yield x * distance, y * distance


def _along(axes: Axes, low: float, bandwidth: float) -> None:
    """Names the slope of the roof, beside it."""
    start = low * 2
    text = f"copy {bandwidth:.2f} TB/s" if bandwidth >= 0.1 else f"copy {bandwidth * 1e3:.0f} GB/s"
    axes.annotate(text, (start, start * bandwidth), (0, 7), textcoords="offset points", color="#444444",
                  rotation=45, rotation_mode="anchor", transform_rotates_text=True)  # fmt: skip


def _verdicts() -> list[Line2D]:
    names = {
        GOOD: "70% of its ceiling or more",
        FAIR: "40% or more",
        POOR: "less, or a peer is faster",
        EAGER: "timed eagerly",
        SLOWER: "another kernel is faster at this shape",
    }
    return [Line2D([], [], ls="", marker="o", color=tint, label=name) for tint, name in names.items()]


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers between the two."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        ticks = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(ticks) >= 3:
            return ticks[:: -(-len(ticks) // 6)]
    return ticks


def _short(row: Row) -> str:
    """The kernel's name without its op's: `triton`, `torch_host`."""
    return row.kernel.replace(f".{row.op}", "")


def _tints(names: Sequence[str], tints: Sequence[str]) -> dict[str, str]:
    """A colour for each name; plain torch, which is what others must beat, is grey."""
    coloured = dict(zip([name for name in names if name != "torch"], itertools.cycle(tints), strict=False))
    return {name: coloured.get(name, SLOWER) for name in names}


def _bytes(value: float, _: object) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} B"


def _plain(value: float, _: object) -> str:
    return f"{value:g}"


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
