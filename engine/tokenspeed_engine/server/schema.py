"""Bodies of requests: OpenAI's fields, strictly typed, and an unknown field is an error.

A field that OpenAI's API has and this server does not is accepted where it asks for nothing (null, or what leaving it
out means), so that clients which send all their defaults work; any other value is refused by name.
"""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_COMPLETION_LOGPROBS = 5
MAX_CHAT_LOGPROBS = 20


def _neutral(*values: Any) -> AfterValidator:
    """Takes null and `values`, which ask for nothing."""

    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(other) and value == other for other in values):
            raise PydanticCustomError("unsupported_parameter", "not supported by this server")
        return value

    return AfterValidator(check)


def _as_stops(value: Any) -> Any:
    if value is None:
        return []
    if not isinstance(value, (str, list)):
        raise PydanticCustomError("union", "expected one of a string or array of strings")
    return [value] if isinstance(value, str) else value


def _or(default: Any) -> BeforeValidator:
    """Null means the default, as in OpenAI's API."""
    return BeforeValidator(lambda value: default if value is None else value)


Ignored = Any
"""Taken and without effect here: accounting, storage and caching of OpenAI's own service."""
NotSupported = Annotated[Any, _neutral()]
Stops = Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_stops), Field(max_length=MAX_STOPS)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_problem_is_enough(cls, fields: Any) -> Any:
        """An error for each of a million unknown fields would take a gigabyte."""
        if not isinstance(fields, dict) or len(fields) <= len(cls.model_fields):
            return fields
        unknown = next(name for name in fields if name not in cls.model_fields)
        return {name: value for name, value in fields.items() if name in cls.model_fields or name == unknown}


class StreamOptions(Strict):
    include_usage: Annotated[bool, _or(False)] = False
    include_obfuscation: Annotated[Any, _neutral(False)] = None


class GenerationRequest(Strict):
    """What both endpoints take. `top_k`, `stop_token_ids`, `ignore_eos` and `timeout` are this server's own.

    `timeout`: seconds from the request's arrival after which it is given up.
    """

    model: str
    stream: Annotated[bool, _or(False)] = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, _or(1), Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, _or(1.0), Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, _or(1.0), Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, _or(0), Field(ge=0)] = 0
    seed: Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: Stops = []
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], FailFast(), _or([])] = []
    ignore_eos: Annotated[bool, _or(False)] = False
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    frequency_penalty: Annotated[float | None, _neutral(0.0)] = None
    presence_penalty: Annotated[float | None, _neutral(0.0)] = None
    logit_bias: Annotated[Any, _neutral({})] = None
    user: Ignored = None

    @model_validator(mode="after")
    def _stream_options_go_with_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "stream_options", "The 'stream_options' parameter is only allowed when 'stream' is enabled."
            )
        return self


def _as_prompts(value: Any) -> Any:
    """Whatever form a prompt has, a list of prompts: texts, or lists of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return [value]
    if isinstance(value, list) and all(
        isinstance(each, str) or (isinstance(each, list) and all(type(token) is int for token in each))
        for each in value
    ):
        return value
    raise PydanticCustomError(
        "union", "expected one of a string, array of strings, array of integers, or array of integer arrays"
    )


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: Annotated[list[Any], BeforeValidator(_as_prompts), Field(min_length=1, max_length=MAX_CHOICES)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    echo: Annotated[Any, _neutral(False)] = None
    best_of: Annotated[Any, _neutral(1)] = None
    suffix: Annotated[Any, _neutral("")] = None


def _as_text(value: Any) -> Any:
    """Content as text: parts of type text are joined, and a part of any other type is refused with its place."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("union", "expected one of a string or array of objects")
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and kind in ("text", "refusal") and isinstance(part.get(kind), str):
            texts.append(part[kind])
        elif isinstance(kind, str) and kind not in ("text", "refusal"):
            problem = f"{kind[:100]} input is not supported, this server takes text only"
            raise PydanticCustomError("content_part", "{problem}", {"index": i, "problem": problem})
        else:
            problem = "expected an object such as {'type': 'text', 'text': '...'}"
            raise PydanticCustomError("content_part", "{problem}", {"index": i, "problem": problem})
    return "".join(texts)


def _as_arguments(value: Any) -> Any:
    """Arguments of a call as clients send them back, a string of JSON; it must hold an object."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise PydanticCustomError("union", "expected a string that holds a JSON object")
    return found


class CalledFunction(Strict):
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_as_arguments)]


class ToolCall(Strict):
    """A call in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Ignored = None

    @property
    def arguments(self) -> dict[str, Any]:
        return self.function.arguments


class Message(Strict):
    """One message; `reasoning_content` of an earlier answer may be sent back with it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_as_text)]
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], FailFast(), _or([])] = []
    tool_call_id: str | None = None
    refusal: Ignored = None
    function_call: NotSupported = None
    audio: NotSupported = None
    annotations: Ignored = None

    @model_validator(mode="before")
    @classmethod
    def _calls_need_no_content(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("role") == "assistant" and fields.get("tool_calls"):
            return fields | {"content": fields.get("content") or ""}
        return fields


class Function(Strict):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[Any, _neutral(False)] = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions. `chat_template_kwargs` is this server's own: variables of the template."""

    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[bool, _or(False)] = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_CHAT_LOGPROBS)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], _or({})] = {}
    tools: Annotated[list[Tool], FailFast(), _or([])] = []
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Annotated[Any, _neutral(True, False)] = None
    functions: Annotated[Any, _neutral([])] = None
    function_call: Annotated[Any, _neutral("none", "auto")] = None
    response_format: Annotated[Any, _neutral({"type": "text"})] = None
    modalities: Annotated[Any, _neutral(["text"])] = None
    audio: NotSupported = None
    prediction: NotSupported = None
    reasoning_effort: NotSupported = None
    verbosity: NotSupported = None
    web_search_options: NotSupported = None
    moderation: NotSupported = None
    store: Annotated[Any, _neutral(False)] = None
    metadata: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError(
                "top_logprobs", "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled."
            )
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise PydanticCustomError(
                "max_tokens", "'max_tokens' and 'max_completion_tokens' cannot be set at the same time."
            )
        return self
