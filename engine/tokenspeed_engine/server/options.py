"""What the operator of a server decides."""

from dataclasses import dataclass
from typing import Literal, get_args

ReasoningFormat = Literal["qwen3"]
ToolFormat = Literal["qwen3_coder"]


@dataclass(frozen=True)
class ServerOptions:
    """Limits and formats of one server.

    Args:
        max_body_bytes: a larger body is answered with 413.
        api_key: what /v1 asks for as a bearer token; None serves everyone.
        max_requests: requests in the server at once, each choice of n one of them; a request beyond is answered with
            503 and asked to come back. None takes all.
        timeout: seconds after which a request that names no time of its own is given up; None never.
        reasoning: the format in which answers hold reasoning, which then comes in a field of its own.
        tool_calls: the format in which answers call the tools of a request.

    Raises:
        ValueError: a field is out of range; the message begins with its name.
    """

    max_body_bytes: int = 32 * 1024**2
    api_key: str | None = None
    max_requests: int | None = None
    timeout: float | None = None
    reasoning: ReasoningFormat | None = None
    tool_calls: ToolFormat | None = "qwen3_coder"

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_requests", "timeout"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}: expected more than 0, got {value}")
        for name, known in (("reasoning", get_args(ReasoningFormat)), ("tool_calls", get_args(ToolFormat))):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ValueError(f"{name}: expected {' or '.join(known)}, got {value!r}")
        if self.api_key == "":
            raise ValueError("api_key: expected at least one character, got none")
