"""Tool calls out of a stream of text, however it is cut."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_engine.server.tool_calls import Arguments, CallStart, Text, ToolCallParser

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "since": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def call(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


CASES: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    # text, what is said, calls
    ("only text < and <tool", "only text < and <tool", []),
    (call("search", query="a b", limit="3"), "", [("search", {"query": "a b", "limit": 3})]),
    ("I look.\n\n" + call("now"), "I look.", [("now", {})]),
    (call("now") + "\n" + call("search", query="x"), "", [("now", {}), ("search", {"query": "x"})]),
    (call("search", exact="true", tags='["a"]'), "", [("search", {"exact": True, "tags": ["a"]})]),
    (call("search", exact="True", since="None"), "", [("search", {"exact": True, "since": None})]),
    (call("search", query="12", limit="many"), "", [("search", {"query": "12", "limit": "many"})]),
    (call("search", query="\n two lines\n\n"), "", [("search", {"query": "\n two lines\n\n"})]),
    (call("search", unknown="5"), "", [("search", {"unknown": "5"})]),
    (call("other", key="5"), "", [("other", {"key": "5"})]),
    # a missing <tool_call>
    ("<function=search>\n<parameter=query>\nx\n</parameter>\n</function>", "", [("search", {"query": "x"})]),
    # a missing </parameter> before the next, and before the end
    (
        "<tool_call>\n<function=search>\n<parameter=query>\nx\n<parameter=limit>\n2\n</function>\n</tool_call>",
        "",
        [("search", {"query": "x", "limit": 2})],
    ),
    # names that nothing closes
    (
        "<tool_call>\n<function=search\n<parameter=query\nx\n</parameter>\n</function>\n</tool_call>",
        "",
        [("search", {"query": "x"})],
    ),
    # cut off in a value, in a name, before a name
    ("<tool_call>\n<function=search>\n<parameter=query>\nhal", "", [("search", {"query": "hal"})]),
    ("<tool_call>\n<function=search>\n<parameter=que", "", [("search", {})]),
    ("<tool_call>\n<function=sea", "<function=sea", []),
    # a missing </function>
    ("<tool_call>\n<function=now>\n</tool_call>\n" + call("now"), "", [("now", {}), ("now", {})]),
]


def parse(pieces: list[str]) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    parser = ToolCallParser(TOOLS)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.flush()
    said = "".join(event.text for event in events if isinstance(event, Text))
    names = [event.name for event in events if isinstance(event, CallStart)]
    assert [event.index for event in events if isinstance(event, CallStart)] == list(range(len(names)))
    assert parser.num_calls == len(names)
    arguments = [""] * len(names)
    for event in events:
        if isinstance(event, Arguments):
            arguments[event.index] += event.fragment
    return said, list(zip(names, map(json.loads, arguments), strict=True))


@pytest.mark.parametrize(("text", "said", "calls"), CASES)
def test_a_text_in_one_piece(text: str, said: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert parse([text]) == (said, calls)


@pytest.mark.parametrize(
    "value", ["NaN", "-Infinity", "[1e999]", '{"a": "\\ud83d"}', '{"\\ud83d": 1}', "[" * 100_000, "9" * 5000]
)
def test_what_no_json_can_hold_stays_text(value: str) -> None:
    _, calls = parse([call("search", tags=value)])
    assert calls == [("search", {"tags": value})]
    json.dumps(calls, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": None},
        {"properties": [1]},
        {"properties": {"x": None}},
        {"properties": {"x": {"type": 5}}},
        {"properties": {"x": {"type": None, "anyOf": None, "oneOf": 3}}},
        {"properties": {"x": {"type": [["integer"]]}}},
    ],
)
def test_a_schema_that_is_none_says_nothing(parameters: dict[str, Any]) -> None:
    parser = ToolCallParser([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert parser.push(call("f", x="1"))[1:] == [Arguments(0, '{"x": "1"'), Arguments(0, "}")]


def test_a_long_value_is_not_held_in_the_text_that_is_searched() -> None:
    parser = ToolCallParser(TOOLS)
    parser.push("<function=search><parameter=query>")
    for _ in range(100):
        assert parser.push("word < ") == []
        assert len(parser._text) < 20
    assert parser.push("</parameter>") == [Arguments(0, json.dumps({"query": "word < " * 100})[:-1])]


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 160), max_size=8))
def test_cuts_change_nothing(case: tuple[str, str, list[tuple[str, dict[str, Any]]]], cuts: list[int]) -> None:
    text, said, calls = case
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert parse([text[a:b] for a, b in itertools.pairwise(places)]) == (said, calls)


def test_a_call_is_told_as_soon_as_its_name_is_there() -> None:
    parser = ToolCallParser(TOOLS)
    assert parser.push("<tool_call>\n<function=search>") == [CallStart(0, "search")]
    assert parser.push("\n<parameter=limit>\n3\n</parameter>") == [Arguments(0, '{"limit": 3')]
    assert parser.push("\n</function>") == [Arguments(0, "}")]
