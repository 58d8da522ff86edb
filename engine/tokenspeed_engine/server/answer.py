"""One chat answer as its text comes: reasoning, content and tool calls apart, as the fields of OpenAI's objects."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenspeed_engine.server.reasoning import ReasoningParser
from tokenspeed_engine.server.tool_calls import Arguments, CallStart, Text, ToolCallParser


class AnswerParser:
    """Takes the text of one choice.

    Args:
        reasoning: None leaves reasoning in the content.
        tools: the request's tools; None leaves tool calls in the content.
    """

    def __init__(self, reasoning: ReasoningParser | None, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self._reasoning = reasoning
        self._calls = None if tools is None else ToolCallParser(tools)

    def push(self, text: str, last: bool) -> dict[str, Any]:
        """The fields of the delta that the new text makes, none where it makes nothing yet; `last`: no text follows."""
        said = _Delta()
        pieces = [("content", text)] if self._reasoning is None else self._reasoning.push(text)
        if last and self._reasoning is not None:
            pieces = [*pieces, *self._reasoning.flush()]
        for kind, piece in pieces:
            if kind == "reasoning":
                said.reasoning += piece
            elif self._calls is None:
                said.content += piece
            else:
                said.take(self._calls.push(piece))
        if last and self._calls is not None:
            said.take(self._calls.flush())
        return said.fields()

    def finish_reason(self, reason: str | None) -> str | None:
        """`reason`, or "tool_calls" where the answer ended by itself with calls in it."""
        return "tool_calls" if reason == "stop" and self._calls is not None and self._calls.num_calls else reason


def message(deltas: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The whole message that deltas add up to."""
    whole: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            if name in delta:
                whole[name] = whole.get(name, "") + delta[name]
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    if calls:
        whole |= {"tool_calls": calls, "content": whole["content"] or None}
    return whole


class _Delta:
    """The fields of one delta while they are gathered."""

    def __init__(self) -> None:
        self.reasoning = ""
        self.content = ""
        self._calls: list[dict[str, Any]] = []

    def take(self, events: Iterable[Text | CallStart | Arguments]) -> None:
        for event in events:
            match event:
                case Text():
                    self.content += event.text
                case CallStart():
                    function = {"name": event.name, "arguments": ""}
                    call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
                    self._calls.append({"index": event.index} | call)
                case Arguments():
                    if not self._calls or self._calls[-1]["index"] != event.index:
                        self._calls.append({"index": event.index, "function": {"arguments": ""}})
                    self._calls[-1]["function"]["arguments"] += event.fragment

    def fields(self) -> dict[str, Any]:
        named = {"reasoning_content": self.reasoning, "content": self.content, "tool_calls": self._calls}
        return {name: value for name, value in named.items() if value}
