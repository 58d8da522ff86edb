"""`tokenspeed-engine bench`: benchmarks of a whole engine."""

import asyncio
import json
import logging
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tokenspeed_engine.bench.workload import Workload

app = typer.Typer(no_args_is_help=True, help=__doc__)


@app.callback()
def bench() -> None:
    """Benchmarks of a whole engine."""


@app.command()
def agentic(
    url: Annotated[str, typer.Option(help="Any server with OpenAI's API, as http://host:port/v1.")] = (
        "http://127.0.0.1:8000/v1"
    ),
    model: Annotated[str, typer.Option(help="Its name there; else the first that the server lists.")] = "",
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY")] = None,
    users: Annotated[int, typer.Option(help="Agents at work at once.")] = 1,
    sessions: Annotated[int | None, typer.Option(help="Agents in all; else one a user.")] = None,
    turns: Annotated[tuple[int, int], typer.Option(help="Least and most turns of a session.")] = (10, 15),
    first_tokens: Annotated[int, typer.Option(help="Tokens of the first message.")] = Workload.first_tokens,
    turn_tokens: Annotated[int, typer.Option(help="Tokens of each later message.")] = Workload.turn_tokens,
    output_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = Workload.output_tokens,
    scale: Annotated[int, typer.Option(min=1, help="Divides all token counts.")] = 1,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of full length; servers differ in this.")] = False,
    gpus: Annotated[int, typer.Option(min=1, help="That serve; figures a GPU are divided by it.")] = 1,
    seed: int = 0,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the figures and every turn as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Agents of many turns against a running server: a long first message, short ones after it, history resent."""
    try:
        import httpx2

        from tokenspeed_engine.bench import agents, client, page, summary
    except ModuleNotFoundError as error:
        if error.name not in ("httpx2", "matplotlib", "prometheus_client"):
            raise
        raise ValueError(f"bench agentic needs {error.name}: pip install 'tokenspeed-kernels[bench,server]'") from error
    workload = Workload(users, sessions or users, *turns, first_tokens, turn_tokens, output_tokens, seed).scaled(scale)
    endpoint = client.Endpoint(url.rstrip("/"), model, api_key, {"ignore_eos": True} if ignore_eos else {})
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line a request would break the progress bar
    with _progress(workload) as progress:
        task = progress.add_task("turns", total=sum(workload.session(n).turns for n in range(workload.sessions)))
        try:
            run = asyncio.run(agents.run(endpoint, workload, lambda turn: progress.advance(task)))
        except (httpx2.HTTPError, ValueError) as error:
            raise ValueError(f"{url}: {error}") from error
    found: dict[str, Any] = {
        "model": run.model,
        "url": url,
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["tokenspeed-engine", *sys.argv[1:]]),
        "workload": asdict(workload),
        "gpus": gpus,
        "figures": summary.summarise(run, gpus),
    }
    if html is not None:
        page.write_page(run, found, html)
    if out is not None:
        out.write_text(json.dumps(found | {"turns": [turn.to_json() for turn in run.turns]}, indent=1) + "\n")
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _show(found, page.lines(found["figures"]))
    errors = [turn.answer.error for turn in run.turns if turn.answer.error is not None]
    if errors:
        print(f"tokenspeed-engine: {len(errors)} turns failed, the first with: {errors[0]}", file=sys.stderr)
        raise typer.Exit(1)


def _progress(workload: Workload) -> Progress:
    columns = TextColumn(f"{workload.users} users"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _show(found: dict[str, Any], lines: list[tuple[str, str]]) -> None:
    table = Table("figure", "value", title=f"Agents on {found['model']}", title_justify="left")
    for name, value in lines:
        table.add_row(name, value)
    Console().print(table)
