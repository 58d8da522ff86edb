"""How commands print: a table for people, JSON for scripts."""

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_rows(rows: list[dict[str, Any]], title: str, as_json: bool) -> None:
    if as_json:
        print_json(rows)
    else:
        print_table(title, rows)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def print_table(title: str, rows: Any) -> None:
    table = Table(title=title, title_justify="left")
    for column in rows[0] if rows else []:
        table.add_column(column)
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    # Piped output keeps whole lines; a terminal wraps cells to its own width.
    Console(width=None if sys.stdout.isatty() else 240).print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
