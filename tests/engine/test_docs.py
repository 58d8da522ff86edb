"""The engine's pages say what is so: their Python runs, and options, fields, figures and metrics are the code's."""

import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer

from tokenspeed_engine.async_llm import AsyncLLM
from tokenspeed_engine.bench import summary
from tokenspeed_engine.bench.agents import Run
from tokenspeed_engine.bench.workload import Workload
from tokenspeed_engine.cli import app
from tokenspeed_engine.control import Counters
from tokenspeed_engine.engine_thread import EngineStats
from tokenspeed_engine.options import EngineOptions
from tokenspeed_engine.server.metrics import Metrics
from tokenspeed_engine.server.schema import ChatRequest, CompletionRequest

ROOT = Path(__file__).parents[2]
ENGINE, SERVER, AGENTIC = (ROOT / "docs" / f"{name}.md" for name in ("engine", "server", "agentic"))
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
COMMANDS: Any = typer.main.get_command(app)


def section(page: Path, title: str) -> str:
    """The text under a heading, down to the next one."""
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


def quoted(text: str) -> set[str]:
    """What stands in backticks."""
    return set(re.findall(r"`([^`\n]+)`", text))


def options(*path: str) -> set[str]:
    """The long options of a command."""
    command = COMMANDS
    for name in path:
        command = command.commands[name]
    return {
        name
        for parameter in command.params
        if parameter.param_type_name == "option"
        for name in (*parameter.opts, *parameter.secondary_opts)
    }


def test_the_python_of_the_engines_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = re.findall(r"^```python\n(.*?)^```$", ENGINE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(source, ENGINE.name, "exec"), {"__name__": "engine"})
    assert "completion_tokens=8" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    for line in re.findall(r"tokenspeed-engine ([a-z][^`\n#]*)", page.read_text()):
        words = line.split()
        path = words[:2] if words[0] == "bench" else words[:1]
        assert set(re.findall(r"(?<= )--[a-z-]+", f" {line}")) <= options(*path), f"{page.name}: {line}"


def test_all_options_of_the_server_are_described_and_no_others() -> None:
    described = {name for entry in quoted(section(SERVER, "Options")) for name in re.findall(r"--[a-z-]+", entry)}
    assert described == options("serve") - {"--help"}


def test_defaults_of_the_server_are_as_described() -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)` \| ([^|]*) \|", section(SERVER, "Options"), re.MULTILINE)
    defaults = {option.opts[0]: option.default for option in COMMANDS.commands["serve"].params}
    numbers = {name: text for name, text in rows if re.fullmatch(r"[\d.]+", text)}
    assert len(numbers) > 5
    for name, text in numbers.items():
        assert float(text) == defaults[name], name


def test_options_of_the_engine_exist() -> None:
    known = {field.name for field in fields(EngineOptions)}
    rows = re.findall(r"^\| ([^|]*) \|", section(ENGINE, "Sizes"), re.MULTILINE)
    named = {name for row in rows for name in quoted(row)}
    assert len(named) > 5
    assert named <= known
    assert set(re.findall(r"`(\w+)=", ENGINE.read_text())) <= known


def test_every_field_of_a_request_is_described() -> None:
    described = quoted(section(SERVER, "Fields"))
    own = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)
    assert own - {"model", "function_call"} <= {name for entry in described for name in re.findall(r"\w+", entry)}


def test_metrics_are_those_that_are_shown() -> None:
    idle = SimpleNamespace(stats=EngineStats(0, 0, 0, 0, 0, 0, Counters()))
    text = Metrics(cast(AsyncLLM, idle)).render().decode()
    shown = set(re.findall(r"^# TYPE tokenspeed_(\w+)", text, re.MULTILINE))
    rows = re.findall(r"^\| (`[^|]*) \|", section(SERVER, "Metrics"), re.MULTILINE)
    described = {name.partition("{")[0] for row in rows for name in quoted(row)}
    assert described == {name for name in shown if not name.endswith("_created")}


def test_figures_are_those_that_are_made() -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", section(AGENTIC, "The figures"), re.MULTILINE)
    described = {name for row in rows for name in quoted(row)}
    assert described == set(summary.summarise(Run(Workload(), "model", (), 1.0, None), gpus=1))


def test_sizes_of_the_workload_are_as_described() -> None:
    text = section(AGENTIC, "The workload")
    usual = Workload()
    assert f"between {usual.least_turns} and {usual.most_turns} turns" in text
    for count, option in (
        (usual.first_tokens, "first-tokens"),
        (usual.turn_tokens, "turn-tokens"),
        (usual.output_tokens, "output-tokens"),
    ):
        assert re.search(rf"{count:,}[\w\s]*\(`--{option}`\)", text), option
