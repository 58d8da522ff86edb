"""Results as one HTML file that needs nothing else: what matters in a line, two figures, all rows, losses first."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from tokenspeed_kernels.benchmark import figures
from tokenspeed_kernels.benchmark.rows import Row, fastest, losses_first, peers_with_versions, write_whole

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1180px; padding: 0 1em; color: #222; }}
h1 {{ font-size: 1.5em; margin-bottom: 0; }} h2 {{ font-size: 1.15em; margin-top: 2em; }}
svg {{ width: 100%; height: auto; }} .facts {{ color: #666; }} .summary {{ font-size: 1.15em; }}
table {{ border-collapse: collapse; width: 100%; font-size: 13px; }}
th {{ position: sticky; top: 0; background: #fff; border-bottom: 2px solid #222; text-align: left; }}
td, th {{ padding: 3px 8px; }} td {{ border-bottom: 1px solid #eee; vertical-align: top; }}
.n {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }}
.lost {{ background: #fdecea; }} .error {{ background: #f9d0cc; }} .note {{ color: #666; font-size: 12px; }}
.bar {{ display: inline-block; height: 8px; margin-right: 6px; }}
</style></head><body>
<h1>{title}</h1><p class="facts">{facts}</p><p class="summary">{summary}</p>{notes}
<h2>Against this device's ceilings</h2>
<p class="note">Each point is a kernel at a shape; an op's name stands at its call farthest from its ceiling.</p>
{roofline}
<h2>All calls, losses first</h2>
<table><thead><tr><th>op</th><th>kernel</th><th>shape</th><th class="n">µs</th><th class="n">spread</th>
<th class="n">GB/s</th><th class="n">TFLOP/s</th><th>of ceiling</th><th>fastest peer</th>
<th class="n">time / peer's</th></tr></thead><tbody>
{rows}
</tbody></table>
<h2>Time against bytes</h2>
<p class="note">Across: bytes that a call must move. Dashed: the floor by the measured ceilings. Crosses: peers.</p>
{sweeps}
</body></html>
"""


def write_report(results: Mapping[str, Any], path: Path) -> None:
    """From the document of a run."""
    write_whole(path, page(results))


def page(results: Mapping[str, Any]) -> str:
    rows = losses_first(Row.from_json(row) for row in results["rows"])
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    facts = [results["date"], f"commit {results['commit']}" if results["commit"] else "", versions]
    facts += [f"peers: {peers}" if (peers := peers_with_versions(results)) else "", results["command"]]
    notes = "".join(f"<li>{escape(note)}</li>" for note in results["notes"])
    return PAGE.format(
        title=escape(f"Kernels on {results['device']}"),
        facts=escape(" · ".join(filter(None, facts))),
        summary=escape(summary(rows)),
        notes=f'<ul class="note">{notes}</ul>' if notes else "",
        roofline=figures.roofline(rows, results["ceilings"]),
        sweeps=figures.sweeps(rows),
        rows="\n".join(_row(row) for row in rows),
    )


def summary(rows: list[Row]) -> str:
    """What is wrong, in a line; no mean that could hide it."""
    best = fastest(rows)
    compared = [row for row in best if row.behind is not None]
    lost = [row for row in compared if (row.behind or 0) > 1]
    slow = [row for row in best if row.of_ceiling is not None and row.of_ceiling < 0.5]
    errors = sum(row.error is not None for row in rows)
    parts = [f"{len(lost)} of {len(compared)} behind a peer"] if compared else ["none compared with a peer"]
    parts += [f"{len(slow)} below half of their ceiling"]
    return f"{len(rows)} rows, {errors} with an error. Of {len(best)} calls, by our fastest kernel: {', '.join(parts)}."


def _row(row: Row) -> str:
    peer = row.fastest_peer
    kind = "error" if row.error else "lost" if (row.behind or 0) > 1 else ""
    remarks = [*([row.error] if row.error else []), *row.notes]
    shape = escape(row.shape) + "".join(f'<div class="note">{escape(remark)}</div>' for remark in remarks)
    cells = [
        ("", escape(row.op)),
        ("", escape(row.kernel)),
        ("", shape),
        ("n", _number(row.us)),
        ("n", "" if row.spread is None else f"{row.spread:.1%}"),
        ("n", "" if row.gbs is None else f"{row.gbs:,.0f}"),
        ("n", _number(row.tflops)),
        ("", _bar(row)),
        ("", "" if peer is None else f"{escape(peer[0])} {_number(peer[1])}"),
        ("n", "" if row.behind is None else f"{row.behind:.2f}"),
    ]
    inner = "".join(f'<td class="{style}">{text}</td>' if style else f"<td>{text}</td>" for style, text in cells)
    return f'<tr class="{kind}" title="{escape(row.command)}">{inner}</tr>'


def _bar(row: Row) -> str:
    if row.of_ceiling is None:
        return ""
    width = round(60 * min(row.of_ceiling, 1.0))
    return f'<span class="bar" style="width:{width}px;background:{figures.colour(row)}"></span>{row.of_ceiling:.0%}'


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
