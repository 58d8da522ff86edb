"""A run of agents as one HTML file: its figures, and four pictures. Needs matplotlib."""

import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from tokenspeed_engine.bench import summary
from tokenspeed_engine.bench.agents import Run, Turn

STYLE = {
    "svg.hashsalt": "tokenspeed",
    "font.size": 9,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
}
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #222; }}
h1 {{ font-size: 1.5em; margin-bottom: 0; }} svg {{ width: 100%; height: auto; }} .facts {{ color: #666; }}
table {{ border-collapse: collapse; }} td {{ padding: 3px 12px 3px 0; border-bottom: 1px solid #eee; }}
.n {{ text-align: right; font-variant-numeric: tabular-nums; }}
</style></head><body><h1>{title}</h1><p class="facts">{facts}</p>
<table>{rows}</table>
{pictures}
</body></html>
"""


def write_page(run: Run, found: Mapping[str, Any], path: Path) -> None:
    """`found` is the run's document, as the command prints it."""
    workload = found["workload"]
    facts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in workload.items())
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="n">{escape(value)}</td></tr>' for name, value in lines(found["figures"])
    )
    title = f"Agents on {found['model']}"
    path.write_text(
        PAGE.format(
            title=escape(title),
            facts=escape(f"{found['date']} · {facts} · {found['command']}"),
            rows=rows,
            pictures=pictures(run),
        )
    )


def lines(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures as text, a line each."""
    found = []
    for name, value in figures.items():
        label = name.replace("_", " ")
        if isinstance(value, Mapping):
            text = ", ".join(f"{part} {_milliseconds(seconds)}" for part, seconds in value.items())
        elif value is None:
            text = "not known"
        elif name == "cache_hit":
            text = f"{value:.1%}"
        else:
            text = f"{value:,.0f}" if abs(value) >= 1000 or isinstance(value, int) else f"{value:.2f}"
        found.append((label, text))
    return found


def pictures(run: Run) -> str:
    """First token by turn, tokens a second by turn, gaps between pieces, and tokens over time; one SVG."""
    done = [turn for turn in run.turns if turn.answer.error is None and turn.answer.arrivals]
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(11, 7), layout="constrained")
        (first, rate), (between, flow) = figure.subplots(2, 2)
        _by_turn(first, done, [(summary.ttft(turn) or 0.0) * 1e3 for turn in done], "time to first token, ms")
        if done:  # the first turn takes many times as long as the others; without any there is no logarithm
            first.set_yscale("log")
            first.autoscale(axis="y")
            _plain_logarithm(first.yaxis)
        rates = [turn for turn in done if summary.user_rate(turn) is not None]
        _by_turn(rate, rates, [summary.user_rate(turn) or 0.0 for turn in rates], "tokens a second of one user")
        _spread(between, [gap * 1e3 for turn in done for gap in summary.gaps(turn)])
        _over_time(flow, done)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _by_turn(axes: Axes, turns: Sequence[Turn], values: Sequence[float], label: str) -> None:
    axes.scatter([turn.turn + 1 for turn in turns], values, s=12, alpha=0.5, color="#1f77b4", edgecolor="none")
    numbers = sorted({turn.turn for turn in turns})
    medians = [
        summary.percentile([v for turn, v in zip(turns, values, strict=True) if turn.turn == number], 50) or 0.0
        for number in numbers
    ]
    axes.plot([number + 1 for number in numbers], medians, color="#d62728", lw=1.5, label="median")
    axes.set(xlabel="turn", ylabel=label, ylim=(0, max(values, default=1.0) * 1.08))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)


def _plain_logarithm(axis: Axis) -> None:
    """Plain numbers at 1, 2 and 5 of each decade."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _spread(axes: Axes, values: Sequence[float]) -> None:
    ordered = sorted(max(value, 1e-3) for value in values)
    axes.plot(ordered, [100 * (i + 1) / len(ordered) for i in range(len(ordered))], color="#1f77b4", lw=1.5)
    axes.set(xscale="log", xlabel="gap between pieces of an answer, ms", ylabel="% of gaps below", ylim=(0, 101))
    _plain_logarithm(axes.xaxis)


def _over_time(axes: Axes, turns: Sequence[Turn], bins: int = 60) -> None:
    """Tokens a second of all users; an answer's tokens are spread evenly over its pieces."""
    started = min((turn.answer.started for turn in turns), default=0.0)
    moments, weights = [], []
    for turn in turns:
        for at in turn.answer.arrivals:
            moments.append(at - started)
            weights.append(turn.answer.output_tokens / len(turn.answer.arrivals))
    width = max(max(moments, default=1.0), 1e-9) / bins
    axes.hist(
        moments,
        bins=[i * width for i in range(bins + 1)],
        weights=[weight / width for weight in weights],
        histtype="stepfilled",
        color="#1f77b4",
        alpha=0.6,
    )
    axes.set(xlabel="seconds into the run", ylabel="tokens a second, all users")


def _milliseconds(seconds: float | None) -> str:
    return "not known" if seconds is None else f"{seconds * 1e3:,.1f} ms"
