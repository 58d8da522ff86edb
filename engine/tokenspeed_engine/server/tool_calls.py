"""Tool calls in a stream of text: the format `qwen3_coder`.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Models leave parts of it out, so a missing `<tool_call>`, `</parameter>` or `>` after a name is taken as meant. The
result does not depend on how the text is cut into pieces.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME_END = re.compile(r">|\n|(?=<)")


@dataclass(frozen=True, slots=True)
class Text:
    """New text that belongs to no call; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; `index` counts a message's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of a call's arguments; all parts together are one JSON object."""

    index: int
    fragment: str


Event = Text | CallStart | Arguments


class ToolCallParser:
    """Takes an answer's text, reasoning left out, and gives back text and calls.

    Args:
        tools: the request's tools, as OpenAI's API has them; their schemas say which values are not strings.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._text = ""
        self._state: Callable[[], bool] = self._content
        self._events: list[Event] = []
        self._calls = 0
        self._name = ""
        self._key = ""
        self._value_parts: list[str] = []
        self._num_arguments = 0

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        return self._calls

    def push(self, text: str) -> list[Event]:
        """What is new."""
        self._text += text
        while self._state():
            pass
        return self._take()

    def flush(self) -> list[Event]:
        """The rest; no text follows. A call that was cut off keeps the arguments that it has, the last one as it is."""
        if self._state in (self._content, self._function_name):
            self._say(self._text)
        else:
            if self._state == self._value:
                self._argument(self._text)
            self._end_call()
        self._text = ""
        self._state = self._content
        return self._take()

    # Each state takes what it can off the head of the text and returns whether to go on: False where it waits for more.

    def _content(self) -> bool:
        found = self._first(_CALL, _FUNCTION, _CALL_END)
        if found is None:
            keep = _kept(self._text, (_CALL, _FUNCTION, _CALL_END))
            self._say(self._text[: len(self._text) - keep])
            self._text = self._text[len(self._text) - keep :]
            return False
        at, tag = found
        self._say(self._text[:at].rstrip())
        self._drop(at + (len(tag) if tag != _FUNCTION else 0))
        if tag == _FUNCTION:
            self._state = self._function_name
        return True

    def _function_name(self) -> bool:
        name = self._take_name(_FUNCTION)
        if name is None:
            return False
        self._name, self._num_arguments = name, 0
        self._events.append(CallStart(self._calls, name))
        self._calls += 1
        self._state = self._parameters
        return True

    def _parameters(self) -> bool:
        tags = (_PARAMETER, _FUNCTION_END, _CALL_END, _FUNCTION)
        found = self._first(*tags)
        if found is None:
            self._drop(len(self._text) - _begun(self._text, tags))
            return False
        at, tag = found
        if tag == _PARAMETER:
            self._drop(at)
            self._state = self._parameter_name
            return True
        self._drop(at + (len(tag) if tag != _FUNCTION else 0))
        self._end_call()
        self._state = self._content
        return True

    def _parameter_name(self) -> bool:
        name = self._take_name(_PARAMETER)
        if name is None:
            return False
        self._key = name
        self._state = self._value
        return True

    def _value(self) -> bool:
        tags = (_PARAMETER_END, _PARAMETER, _FUNCTION_END)
        found = self._first(*tags)
        if found is None:
            # What is known to be value is put aside: a search of all of it for each token would be quadratic.
            known = len(self._text) - _begun(self._text, tags)
            self._value_parts.append(self._text[:known])
            self._drop(known)
            return False
        at, tag = found
        self._argument(self._text[:at])
        self._drop(at + (len(tag) if tag == _PARAMETER_END else 0))
        self._state = self._parameters
        return True

    def _take_name(self, tag: str) -> str | None:
        """The name after the tag at the head, both taken off; None where its end has not come."""
        end = _NAME_END.search(self._text, len(tag))
        if end is None:
            return None
        name = self._text[len(tag) : end.start()].strip()
        self._drop(end.end() - (end.group() == "\n"))
        return name

    def _argument(self, text: str) -> None:
        """The value that ends with `text`."""
        text = "".join([*self._value_parts, text]).removeprefix("\n").removesuffix("\n")
        self._value_parts.clear()
        properties = self._schemas.get(self._name, {}).get("properties")
        value = _typed(text, properties.get(self._key) if isinstance(properties, Mapping) else None)
        pair = f"{json.dumps(self._key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        self._arguments(("{" if self._num_arguments == 0 else ", ") + pair)
        self._num_arguments += 1

    def _end_call(self) -> None:
        self._arguments("}" if self._num_arguments else "{}")

    def _arguments(self, fragment: str) -> None:
        self._events.append(Arguments(self._calls - 1, fragment))

    def _say(self, text: str) -> None:
        if self._calls:  # what stands between and after calls is layout, unless it is more than that
            text = text if text.strip() else ""
        if text:
            self._events.append(Text(text))

    def _first(self, *tags: str) -> tuple[int, str] | None:
        return min(((at, tag) for tag in tags if (at := self._text.find(tag)) >= 0), default=None)

    def _drop(self, count: int) -> None:
        self._text = self._text[count:]

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def _kept(text: str, tags: Sequence[str]) -> int:
    """Characters at the end that may belong to a tag, and the white space before them."""
    before = text[: len(text) - _begun(text, tags)]
    return len(text) - len(before.rstrip())


def _begun(text: str, tags: Sequence[str]) -> int:
    """Characters at the end that may be the beginning of a tag."""
    return max((n for tag in tags for n in range(1, len(tag)) if text.endswith(tag[:n])), default=0)


def _typed(text: str, schema: Any) -> Any:
    """The value that the schema makes of a text: a string stays as it is, anything else is JSON where it can be."""
    kinds = _kinds(schema)
    if not kinds or kinds == {"string"}:
        return text
    try:
        value = _strict_json(text.strip())
    except (ValueError, RecursionError):
        spelled = {"True": True, "False": False, "None": None}
        return spelled.get(text.strip(), text)
    if "string" in kinds and not (value is None and "null" in kinds):
        return text
    return value


def _strict_json(text: str) -> Any:
    """The value of a text. Raises ValueError also for what Python reads and JSON cannot say: NaN, half a character."""
    value = json.loads(text)
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    return value


def _kinds(schema: Any) -> set[str]:
    """The JSON types that a schema allows, by name; none where it does not say, or is no schema."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    found = {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}
    for choices in (schema.get("anyOf"), schema.get("oneOf")):
        for choice in choices if isinstance(choices, list) else ():
            found |= _kinds(choice)
    return found
