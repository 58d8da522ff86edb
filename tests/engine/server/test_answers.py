"""Reasoning and tool calls through the `openai` client, whole and streamed, and histories that hold them."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.engine.server.running import MODEL
from tests.engine.server.scripted import ScriptedServer, scripted_server
from tokenspeed_engine.server.options import ServerOptions

ASK: Any = [{"role": "user", "content": "Weather in Kiel?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a place.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["place"],
            },
        },
    }
]
CALLS = (
    "I look it up.\n</think>\n\nOne moment.\n<tool_call>\n<function=weather>\n<parameter=place>\nKiel\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=weather>\n"
    "<parameter=place>\nBremen\n</parameter>\n</function>\n</tool_call>"
)
WANTED = [("weather", {"place": "Kiel", "days": 3}), ("weather", {"place": "Bremen"})]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server(ServerOptions(reasoning="qwen3")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_whole_answer_has_reasoning_content_and_calls_apart(server: ScriptedServer, client: openai.OpenAI) -> None:
    server.says(CALLS)
    choice = client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "One moment."
    assert choice.message.model_extra == {"reasoning_content": "I look it up."}
    calls = choice.message.tool_calls or []
    assert [
        (call.function.name, json.loads(call.function.arguments)) for call in calls if call.type == "function"
    ] == WANTED
    assert len({call.id for call in calls}) == 2


def test_a_stream_adds_up_to_the_whole_answer(server: ScriptedServer, client: openai.OpenAI) -> None:
    server.says(CALLS)
    reasoning, content, finish = "", "", []
    calls: dict[int, dict[str, str]] = {}
    for chunk in client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS, stream=True):
        delta = chunk.choices[0].delta
        reasoning += (delta.model_extra or {}).get("reasoning_content", "")
        content += delta.content or ""
        for part in delta.tool_calls or []:
            call = calls.setdefault(part.index, {"name": "", "arguments": ""})
            assert part.function is not None
            call["name"] += part.function.name or ""
            call["arguments"] += part.function.arguments or ""
        finish.append(chunk.choices[0].finish_reason)
    assert (reasoning, content) == ("I look it up.", "One moment.")
    assert [(call["name"], json.loads(call["arguments"])) for _, call in sorted(calls.items())] == WANTED
    assert finish == [None] * (len(finish) - 1) + ["tool_calls"]


def test_without_tools_a_call_is_text(server: ScriptedServer, client: openai.OpenAI) -> None:
    server.says("</think>\n\n<tool_call>x</tool_call>")
    for refused in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        options: Any = refused
        choice = client.chat.completions.create(model=MODEL, messages=ASK, **options).choices[0]
        assert choice.message.content == "<tool_call>x</tool_call>"
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"


def test_an_answer_that_the_length_ends_says_so(server: ScriptedServer, client: openai.OpenAI) -> None:
    server.says(CALLS)
    choice = client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS, max_tokens=3).choices[0]
    assert choice.finish_reason == "length"


def test_a_history_with_calls_and_their_answers_is_taken(server: ScriptedServer, client: openai.OpenAI) -> None:
    server.says("</think>\n\nRain.")
    call: Any = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Kiel"}'}}
    history: Any = [
        *ASK,
        {"role": "assistant", "content": None, "reasoning_content": "I look it up.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    choice = client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS).choices[0]
    assert choice.message.content == "Rain."
    call["function"]["arguments"] = "[1]"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
    assert refused.value.param == "messages[1].tool_calls[0].function.arguments"
    silent: Any = [{"role": "user"}]
    with pytest.raises(openai.BadRequestError, match="content"):
        client.chat.completions.create(model=MODEL, messages=silent)


def test_a_demand_for_calls_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required")
    assert refused.value.param == "tool_choice"
