"""What a client can get wrong, and the answer's status, `param` and `code`; nothing of it reaches the engine."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from tests.engine.server.running import MODEL, RunningServer
from tokenspeed_engine.server.schema import ChatRequest

COMPLETION = {"model": MODEL, "prompt": "a", "max_tokens": 1}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def _chat_of(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


def _user(content: Any) -> dict[str, Any]:
    return _chat_of({"role": "user", "content": content})


Case = tuple[dict[str, Any], str, str, str]
"""What is changed in a good body; then param, code and a part of the message."""

COMPLETIONS: list[Case] = [
    ({"foo": 1}, "foo", "unknown_parameter", "Unknown parameter: 'foo'."),
    ({"prompt": 5}, "prompt", "invalid_type", "but got an integer instead"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_type", "array of integer arrays"),
    ({"prompt": []}, "prompt", "empty_array", "empty array"),
    ({"prompt": ""}, "prompt", "invalid_value", "at least one token"),
    ({"prompt": [5, 999_999]}, "prompt", "invalid_value", "999999"),
    ({"prompt": "\ud800"}, "prompt", "invalid_value", "surrogates"),
    ({"prompt": [5] * 257}, "prompt", "context_length_exceeded", "256 tokens. However, your prompt resulted in 257"),
    ({"temperature": "hot"}, "temperature", "invalid_type", "expected a decimal, but got a string"),
    ({"temperature": 2.5}, "temperature", "decimal_above_max_value", "<= 2, but got 2.5"),
    ({"temperature": -1}, "temperature", "integer_below_min_value", ">= 0, but got -1"),
    ({"temperature": float("nan")}, "temperature", "invalid_value", "finite"),
    ({"top_p": 1.5}, "top_p", "decimal_above_max_value", "<= 1"),
    ({"max_tokens": 0}, "max_tokens", "integer_below_min_value", ">= 1"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_type", "an integer"),
    ({"max_tokens": True}, "max_tokens", "invalid_type", "a boolean"),
    ({"n": 129}, "n", "integer_above_max_value", "<= 128"),
    ({"seed": "1"}, "seed", "invalid_type", "an integer"),
    ({"seed": 1 << 63}, "seed", "integer_above_max_value", "<= 9223372036854775807"),
    ({"stop": 5}, "stop", "invalid_type", "string or array of strings"),
    ({"stop": ["a", 5]}, "stop[1]", "invalid_type", "a string"),
    ({"stop": [""]}, "stop[0]", "empty_string", "empty string"),
    ({"stop": list("abcde")}, "stop", "array_above_max_length", "maximum length 4, but got 5"),
    ({"logprobs": 6}, "logprobs", "integer_above_max_value", "<= 5"),
    ({"stream": "yes"}, "stream", "invalid_type", "a boolean"),
    ({"stream_options": {}}, "stream_options", "unsupported_value", "only allowed when 'stream'"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter", "stream_options.x"),
    ({"stream": True, "stream_options": []}, "stream_options", "invalid_type", "an object"),
    ({"stream": True, "prompt": [5] * 257}, "prompt", "context_length_exceeded", "257"),
    ({"echo": True}, "echo", "unsupported_parameter", "'echo' is not supported"),
    ({"best_of": 2}, "best_of", "unsupported_parameter", "'best_of' is not supported"),
    ({"suffix": "b"}, "suffix", "unsupported_parameter", "'suffix' is not supported"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_parameter", "not supported"),
    ({"presence_penalty": 0.5}, "presence_penalty", "unsupported_parameter", "not supported"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter", "not supported"),
]

CHATS: list[Case] = [
    (_user(["text"]), "messages[0].content[0]", "invalid_value", "expected an object"),
    (_user([{"type": "text", "text": "a"}, IMAGE]), "messages[0].content[1]", "invalid_value", "takes text only"),
    (_user([{"type": "input_audio"}]), "messages[0].content[0]", "invalid_value", "input_audio input is not supported"),
    (_user(None), "messages[0].content", "invalid_type", "but got null"),
    (_user("a" * 4000), "messages", "context_length_exceeded", "maximum context length is 256 tokens"),
    (_user("\ud800"), "messages", "invalid_value", "surrogates"),
    (_chat_of(), "messages", "empty_array", "empty array"),
    (_chat_of("a"), "messages[0]", "invalid_type", "an object"),
    (_chat_of({"role": "user"}), "messages[0].content", "missing_required_parameter", "messages[0].content"),
    (_chat_of({"role": "robot", "content": "a"}), "messages[0].role", "invalid_value", "'system'"),
    (_chat_of({"role": "user", "content": "a", "x": 1}), "messages[0].x", "unknown_parameter", "messages[0].x"),
    (
        _chat_of({"role": "assistant", "content": "a", "tool_calls": [{}]}),
        "messages[0].tool_calls[0].id",
        "missing_required_parameter",
        "tool_calls[0].id",
    ),
    (
        _chat_of(
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[" * 9000}}]}
        ),
        "messages[0].tool_calls[0].function.arguments",
        "invalid_type",
        "holds a JSON object",
    ),
    (_chat_of({"role": "assistant", "content": None, "tool_calls": []}), "messages[0].content", "invalid_type", "null"),
    ({"timeout": 0}, "timeout", "invalid_value", "greater than 0"),
    ({"prompt": "a"}, "prompt", "unknown_parameter", "Unknown parameter"),
    ({"logprobs": 2}, "logprobs", "invalid_type", "a boolean"),
    ({"top_logprobs": 2}, "top_logprobs", "unsupported_value", "only allowed when 'logprobs'"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value", "<= 20"),
    ({"max_completion_tokens": 5}, "max_tokens", "unsupported_value", "at the same time"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter", "tools[0].function"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter", "not supported"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value", "messages cannot be set"),
]


def _check(answer: tuple[int, Any], status: int, param: str | None, code: str | None, says: str) -> None:
    assert answer[0] == status
    assert answer[1].keys() == {"error"}
    error = answer[1]["error"]
    assert says in error.pop("message")
    assert error == {"type": "invalid_request_error", "param": param, "code": code}


@pytest.mark.parametrize(("change", "param", "code", "says"), COMPLETIONS)
def test_completions(server: RunningServer, change: dict[str, Any], param: str, code: str, says: str) -> None:
    _check(server.post("/v1/completions", COMPLETION | change), 400, param, code, says)


@pytest.mark.parametrize(("change", "param", "code", "says"), CHATS)
def test_chats(server: RunningServer, change: dict[str, Any], param: str, code: str, says: str) -> None:
    _check(server.post("/v1/chat/completions", CHAT | change), 400, param, code, says)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b'"a"', b"[" * 50_000, b'{"seed": ' + b"1" * 5000 + b"}"], ids=lambda body: body[:8]
)
def test_bodies_that_are_no_json_object(server: RunningServer, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        _check(server.post(path, body), 400, None, None, "could not parse the JSON body")


def test_a_body_larger_than_the_limit(server: RunningServer) -> None:
    body = json.dumps(COMPLETION | {"prompt": "a" * 100_000}).encode()
    _check(server.post("/v1/completions", body), 413, None, "request_too_large", "100000 bytes")


@pytest.mark.parametrize(
    "change",
    [
        {"stop_token_ids": [""] * 1000},
        {"messages": [0] * 1000},
        {"tools": [0] * 1000},
        {f"unknown {i}": 0 for i in range(1000)},
        _chat_of({"role": "user", "content": "a"} | {f"unknown {i}": 0 for i in range(1000)}),
        _chat_of({"role": "assistant", "tool_calls": [0] * 1000}),
    ],
    ids=lambda change: next(iter(change)),
)
def test_of_many_problems_one_is_worked_out(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as found:
        ChatRequest.model_validate(CHAT | change)
    assert found.value.error_count() == 1


@pytest.mark.parametrize("field", ["model", "prompt"])
def test_a_missing_field(server: RunningServer, field: str) -> None:
    body = {name: value for name, value in COMPLETION.items() if name != field}
    _check(server.post("/v1/completions", body), 400, field, "missing_required_parameter", f"'{field}'")


@pytest.mark.parametrize("name", ["gpt-4", "", "\ud800"])
def test_an_unknown_model(server: RunningServer, name: str) -> None:
    body = COMPLETION | {"model": name}
    _check(server.post("/v1/completions", body), 404, "model", "model_not_found", f"serves '{MODEL}'")


def test_routes_that_are_not_there(server: RunningServer) -> None:
    status, text = server.get("/v1/nothing")
    _check((status, json.loads(text)), 404, None, "unknown_url", "Invalid URL (GET /v1/nothing)")
    status, text = server.get("/v1/completions")
    _check((status, json.loads(text)), 405, None, "method_not_supported", "Not allowed to GET")
    status, text = server.get("/v1/models/gpt-4")
    _check((status, json.loads(text)), 404, "model", "model_not_found", "gpt-4")


def test_fields_that_ask_for_nothing_are_taken(server: RunningServer) -> None:
    neutral: dict[str, Any] = {
        "user": "me",
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "n": None,
        "stop": None,
        "seed": None,
        "stream": None,
        "temperature": None,
        "top_p": None,
    }
    completion: dict[str, Any] = {"echo": False, "best_of": 1, "suffix": None, "logprobs": None}
    assert server.post("/v1/completions", COMPLETION | neutral | completion)[0] == 200
    chat: dict[str, Any] = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
        "metadata": {},
    }
    assert server.post("/v1/chat/completions", CHAT | neutral | chat)[0] == 200


def test_no_refused_request_left_anything_behind(server: RunningServer) -> None:
    plans = len(server.gate.plans)
    for change, *_ in COMPLETIONS:
        server.post("/v1/completions", COMPLETION | change)
    assert len(server.gate.plans) == plans
    assert server.is_free()
