"""`tokenspeed-engine`: generate from a model folder, serve it, or show the small model that ships with the engine.

Exit codes: 0 done; 1 the request failed; 2 bad usage or a folder that cannot be served (one line on stderr).
"""

import json
import logging
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, cast

import typer
from rich.console import Console
from rich.table import Table

from tokenspeed_engine.bench import commands as bench
from tokenspeed_engine.checkpoint.dummy import Format
from tokenspeed_engine.checkpoint.errors import CheckpointError
from tokenspeed_engine.control import RequestRefusedError, SamplingParams
from tokenspeed_engine.llm import LLM, EngineOptions
from tokenspeed_engine.models.families import Verify
from tokenspeed_engine.options import LoadFormat
from tokenspeed_registry import Call, TokenspeedError, trace

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
app.add_typer(bench.app, name="bench")
DEMO_PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
DEMO_TOKENS = 96
DEMO_DRAFTS = 3


@app.command()
def generate(
    model: Annotated[Path | None, typer.Option(help="A Hugging Face folder; the embedded model unless given.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids instead, as 1,2,3.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token.")] = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")] = None,
    ignore_eos: bool = False,
    logprobs: Annotated[int | None, typer.Option(help="List this many alternatives to each token.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Continue one prompt."""
    if (prompt is None) == (prompt_ids is None):
        _refuse("give exactly one of --prompt and --prompt-ids")
    params = SamplingParams(
        temperature, top_k, top_p, seed, max_new_tokens, tuple(stop or ()), (), ignore_eos, logprobs
    )
    llm = LLM(model, EngineOptions(dtype=dtype))
    with trace(timed=True) as calls:
        (result,) = llm.generate(prompt if prompt is not None else _parse_ids(prompt_ids or ""), params)
    if as_json:
        answer = {
            "token_ids": result.token_ids,
            "text": result.text if llm.tokenizer is not None else None,
            "finish_reason": result.finish_reason,
            "logprobs": [_logprob(entry) for entry in result.logprobs] if logprobs is not None else None,
            "kernels": _served(calls),
            "usage": {
                "prompt_tokens": result.usage.prompt_tokens,
                "completion_tokens": result.usage.completion_tokens,
                "total_tokens": result.usage.prompt_tokens + result.usage.completion_tokens,
            },
        }
        print(json.dumps(answer, indent=1))
    else:
        print(result.text if llm.tokenizer is not None else ",".join(map(str, result.token_ids)))
    if result.error is not None:
        print(f"tokenspeed-engine: {result.error}", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def demo(
    prompt: Annotated[str, typer.Option(help="Python to complete.")] = DEMO_PROMPT,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = DEMO_TOKENS,
) -> None:
    """Complete a piece of Python with the embedded model, and show which kernel served each op."""
    started = time.perf_counter()
    llm = LLM(None, EngineOptions(num_drafts=DEMO_DRAFTS))
    print(f"loaded in {time.perf_counter() - started:.1f} s\n\n{prompt}", end="")
    started = time.perf_counter()
    count = 0
    with trace(timed=True) as calls:
        for output in llm.stream(prompt, SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens)):
            print(output.text, end="", flush=True)
            count += len(output.token_ids)
    seconds = time.perf_counter() - started
    print(f"\n\n{count} tokens in {seconds:.1f} s, {count / seconds:.0f} tokens/s")
    counters = llm.core.counters
    if counters.draft_steps:
        each = 1 + counters.drafts_accepted / counters.draft_steps
        print(f"{DEMO_DRAFTS} drafts a step, {each:.2f} tokens accepted a step\n")
    table = Table("op", "kernel", "calls", "milliseconds", "share", title="What served them", title_justify="left")
    served = _served(calls)
    total = sum(row["seconds"] for row in served)
    for row in served:
        milliseconds, share = f"{row['seconds'] * 1e3:.1f}", f"{row['seconds'] / total:.0%}"
        table.add_row(row["op"], row["kernel"], str(row["calls"]), milliseconds, share)
    Console().print(table)


@app.command()
def serve(
    model: Annotated[Path | None, typer.Option(help="A Hugging Face folder; the embedded model unless given.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="Name in the API; else the folder's.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    max_batch: Annotated[int, typer.Option(help="Requests that run at once.")] = EngineOptions.max_batch,
    max_step_tokens: Annotated[int, typer.Option(help="Tokens one step runs.")] = EngineOptions.max_step_tokens,
    max_context: Annotated[int | None, typer.Option(help="Tokens of one request; else the model's limit.")] = None,
    page_size: Annotated[int, typer.Option(help="Tokens of a page of the cache.")] = EngineOptions.page_size,
    cache_gib: Annotated[float, typer.Option(help="Memory for pages and slots, GiB.")] = (
        EngineOptions.cache_bytes / 1024**3
    ),
    num_drafts: Annotated[int, typer.Option(help="Tokens guessed ahead by the model's draft head.")] = 0,
    verify: Annotated[str, typer.Option(help="How wrong guesses are taken back: replay or states.")] = "replay",
    prefix_cache: Annotated[bool, typer.Option(help="Reuse what earlier requests computed.")] = True,
    state_interval: Annotated[int, typer.Option(help="Tokens between snapshots of a prompt's state.")] = 1024,
    num_snapshots: Annotated[int | None, typer.Option(help="Snapshots kept; else two a request.")] = None,
    num_host_snapshots: Annotated[int, typer.Option(help="Further ones in host memory.")] = 0,
    host_tables: Annotated[bool, typer.Option(help="Keep n-gram tables in host memory.")] = False,
    load_format: Annotated[str, typer.Option(help="auto, or dummy for random weights.")] = "auto",
    dummy_format: Annotated[str, typer.Option(help="Of dummy experts: model, fp8 or nvfp4.")] = "model",
    quantise: Annotated[str | None, typer.Option(help="fp8: keep other projections in FP8.")] = None,
    ranks: Annotated[int, typer.Option(help="Devices that share the model.")] = 1,
    drain_seconds: Annotated[int, typer.Option(min=0, help="Time to finish requests after SIGTERM.")] = 30,
    api_key: Annotated[str | None, typer.Option(envvar="TOKENSPEED_API_KEY", help="Asked for by /v1.")] = None,
    max_requests: Annotated[int | None, typer.Option(help="Requests at once; those beyond get 503.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds until a request is given up.")] = None,
    reasoning_parser: Annotated[str | None, typer.Option(help="qwen3: reasoning in its own field.")] = None,
    tool_call_parser: Annotated[str, typer.Option(help="Format of tool calls, or none.")] = "qwen3_coder",
) -> None:
    """Serve OpenAI's HTTP API: /v1/models, /v1/completions, /v1/chat/completions; /health and /metrics."""
    try:
        from tokenspeed_engine.server import options as server
        from tokenspeed_engine.server import run
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "starlette", "uvicorn", "prometheus_client"):
            raise
        _refuse(f"serve needs {error.name}: pip install 'tokenspeed-kernels[server]'")
    options = EngineOptions(
        dtype=dtype,
        page_size=page_size,
        max_batch=max_batch,
        max_step_tokens=max_step_tokens,
        max_context=max_context,
        cache_bytes=round(cache_gib * 1024**3),
        num_drafts=num_drafts,
        verify=cast(Verify, verify),
        prefix_cache=prefix_cache,
        state_interval=state_interval,
        num_snapshots=num_snapshots,
        num_host_snapshots=num_host_snapshots,
        host_tables=host_tables,
        load_format=cast(LoadFormat, load_format),
        dummy_format=cast(Format, dummy_format),
        quantise=cast(Literal["fp8"] | None, quantise),
        ranks=ranks,
    )
    served = server.ServerOptions(
        api_key=api_key,
        max_requests=max_requests,
        timeout=timeout,
        reasoning=cast(server.ReasoningFormat | None, reasoning_parser),
        tool_calls=None if tool_call_parser == "none" else cast(server.ToolFormat, tool_call_parser),
    )
    run.serve(model, options, host, port, served_model_name, drain_seconds, served)


def main() -> None:
    """Entry point. What a user can get wrong ends in one line (a folder with several problems: a line each)."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    try:
        app()
    except (CheckpointError, RequestRefusedError, TokenspeedError, ValueError) as error:
        _refuse(str(error))


def _refuse(message: str) -> NoReturn:
    print(f"tokenspeed-engine: {message}", file=sys.stderr)
    sys.exit(2)


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--prompt-ids: expected ids such as 1,2,3, got {text!r}") from None


def _served(calls: Iterable[Call]) -> list[dict[str, Any]]:
    """Calls by op and kernel, the costliest first."""
    totals: dict[tuple[str, str], tuple[int, float]] = {}
    for call in calls:
        count, seconds = totals.get((call.op, call.kernel), (0, 0.0))
        totals[call.op, call.kernel] = (count + 1, seconds + (call.seconds or 0.0))
    rows = [{"op": o, "kernel": k, "calls": count, "seconds": s} for (o, k), (count, s) in totals.items()]
    return sorted(rows, key=lambda row: -float(str(row["seconds"])))


def _logprob(entry: Any) -> dict[str, Any]:
    top = [{"token_id": token, "logprob": value} for token, value in entry.top]
    return {"token_id": entry.token, "logprob": entry.logprob, "top": top}
