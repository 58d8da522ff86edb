"""Errors in OpenAI's shape: {"error": {message, type, param, code}}."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tokenspeed_engine.chat_template import ChatTemplateError
from tokenspeed_engine.control import RequestRefusedError
from tokenspeed_engine.engine_thread import EngineClosedError, EngineStepError

_EXPECTED = {
    "string": "a string",
    "int": "an integer",
    "float": "a decimal",
    "bool": "a boolean",
    "list": "an array",
    "dict": "an object",
    "model": "an object",
    "model_attributes": "an object",
}
_FIELDS_OF_PARAMS = {"max_new_tokens": "max_tokens"}


class ApiError(Exception):
    """What a request is answered with instead of a completion.

    `status`: HTTP status; `param`: the field at fault; `code`: OpenAI's name of the error; `headers`: of the answer.
    """

    headers: Mapping[str, str] | None = None

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def server_error(status: int, message: str) -> ApiError:
    """A failure that is not the client's."""
    return ApiError(status, message, type="server_error")


def context_exceeded(limit: int, num_tokens: int, param: str) -> ApiError:
    """An input of `num_tokens` tokens for a context of `limit`."""
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens. However, your {param} resulted in {num_tokens} "
        f"tokens. Please reduce the length of the {param}.",
        param=param,
        code="context_length_exceeded",
    )


def as_api_error(error: Exception) -> ApiError:
    """The answer to whatever the engine raised."""
    match error:
        case ApiError():
            return error
        case RequestRefusedError():
            return refused(error)
        case ChatTemplateError():
            return ApiError(400, str(error), param="messages", code="invalid_value")
        case EngineClosedError():
            return server_error(503, f"The server cannot answer: {error}.")
        case TimeoutError():
            return ApiError(504, "The request was given up at its timeout.", type="server_error", code="timeout")
        case EngineStepError():
            return server_error(500, f"The engine failed: {error}.")
        case _:
            return server_error(500, "The server had an error while processing your request.")


def refused(error: RequestRefusedError) -> ApiError:
    """What the engine would not take in; its message begins with the field's name."""
    match = re.match(r"(\w+)(\[[^:]*)?: ", str(error))
    param = match[1] if match else None
    return ApiError(400, str(error), param=_FIELDS_OF_PARAMS.get(param or "", param), code="invalid_value")


def invalid(error: ValidationError) -> ApiError:
    """The first problem of a body that does not fit its schema."""
    first = error.errors(include_url=False)[0]
    # A validator of the whole body names its field by the error's type.
    param = _path(first["loc"]) or first["type"]
    if first["type"] == "content_part":
        param += f"[{first['ctx']['index']}]"
    message, code = _explain(first, param)
    return ApiError(400, message, param=param, code=code)


def _path(location: tuple[int | str, ...]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(parts).removeprefix(".")


def _explain(first: ErrorDetails, param: str) -> tuple[str, str]:
    """Message and code for a problem that pydantic found."""
    kind, value, context = first["type"], first["input"], first.get("ctx", {})
    if kind == "missing":
        return f"Missing required parameter: '{param}'.", "missing_required_parameter"
    if kind == "extra_forbidden":
        return f"Unknown parameter: '{param}'.", "unknown_parameter"
    if kind == "literal_error":
        return f"Invalid value: {_show(value)}. Supported values are: {context['expected']}.", "invalid_value"
    if kind == "unsupported_parameter":
        return f"Unsupported parameter: '{param}' is not supported by this server with this value.", kind
    if kind == "content_part":
        return f"Invalid '{param}': {first['msg']}.", "invalid_value"
    if kind == param:
        return first["msg"], "unsupported_value"
    if kind == "union":
        return f"Invalid type for '{param}': {first['msg']}, but got {_name(value)} instead.", "invalid_type"
    if (expected := _EXPECTED.get(kind.removesuffix("_type").removesuffix("_from_float"))) is not None:
        return f"Invalid type for '{param}': expected {expected}, but got {_name(value)} instead.", "invalid_type"
    return _explain_range(kind, value, context, param) or (f"Invalid '{param}': {first['msg']}.", "invalid_value")


def _explain_range(kind: str, value: Any, context: Mapping[str, Any], param: str) -> tuple[str, str] | None:
    number = "integer" if isinstance(value, int) else "decimal"
    if kind == "less_than_equal":
        text = f"{number} above maximum value. Expected a value <= {context['le']}, but got {_show(value)} instead."
        return f"Invalid '{param}': {text}", f"{number}_above_max_value"
    if kind == "greater_than_equal":
        text = f"{number} below minimum value. Expected a value >= {context['ge']}, but got {_show(value)} instead."
        return f"Invalid '{param}': {text}", f"{number}_below_min_value"
    if kind == "too_long":
        text = f"array too long. Expected an array with maximum length {context['max_length']}, but got {len(value)}."
        return f"Invalid '{param}': {text}", "array_above_max_length"
    if kind in ("too_short", "string_too_short"):
        what = "array" if kind == "too_short" else "string"
        return f"Invalid '{param}': empty {what}. Expected at least {context['min_length']}.", f"empty_{what}"
    return None


def _show(value: Any) -> str:
    """A value as far as a message has room for it."""
    text = f"'{value}'" if isinstance(value, str) else str(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _name(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a decimal"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"
