"""From a request's body to what the engine takes: token ids and sampling parameters, one pair a choice."""

from typing import Any

from tokenspeed_engine.async_llm import AsyncLLM
from tokenspeed_engine.control import SamplingParams
from tokenspeed_engine.server.errors import ApiError, context_exceeded
from tokenspeed_engine.server.reasoning import opens_reasoning
from tokenspeed_engine.server.schema import ChatRequest, CompletionRequest, GenerationRequest, Message

EngineRequest = tuple[list[int], SamplingParams]
DEFAULT_COMPLETION_TOKENS = 16
"""What /v1/completions generates unless told, as OpenAI's does. A chat goes on to the context's end."""

_TEMPLATE_ARGUMENTS = {"self", "messages", "tools", "add_generation_prompt"}


async def completion_requests(engine: AsyncLLM, body: CompletionRequest) -> list[EngineRequest]:
    """The choices of /v1/completions: n for the first prompt, n for the second and so on."""
    requests = []
    for prompt in body.prompt:
        ids = await engine.encode(prompt)
        _check_length(engine, ids, "prompt")
        requests += _choices(body, ids, body.max_tokens or DEFAULT_COMPLETION_TOKENS, body.logprobs)
    return requests


async def chat_requests(engine: AsyncLLM, body: ChatRequest) -> tuple[list[EngineRequest], bool]:
    """The n choices of /v1/chat/completions, and whether their answers start inside of reasoning."""
    if taken := _TEMPLATE_ARGUMENTS & body.chat_template_kwargs.keys():
        names = ", ".join(sorted(taken))
        message = f"Invalid 'chat_template_kwargs': {names} cannot be set."
        raise ApiError(400, message, param="chat_template_kwargs", code="invalid_value")
    messages = [_as_template_takes(message) for message in body.messages]
    tools = [tool.model_dump(exclude_none=True) for tool in body.offered_tools] or None
    text = engine.render_chat(messages, tools, **body.chat_template_kwargs)
    ids = await engine.encode_rendered(text)
    _check_length(engine, ids, "messages")
    room = max(1, engine.max_request_tokens - len(ids))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    requests = _choices(body, ids, body.max_completion_tokens or body.max_tokens or room, logprobs)
    return requests, opens_reasoning(text)


def _choices(body: GenerationRequest, ids: list[int], max_tokens: int, logprobs: int | None) -> list[EngineRequest]:
    return [
        (
            ids,
            SamplingParams(
                temperature=body.temperature,
                top_k=body.top_k,
                top_p=body.top_p,
                seed=_seed(body.seed, choice),
                max_new_tokens=max_tokens,
                stop=tuple(body.stop),
                stop_token_ids=tuple(body.stop_token_ids),
                ignore_eos=body.ignore_eos,
                logprobs=logprobs,
            ),
        )
        for choice in range(body.n)
    ]


def _seed(seed: int | None, choice: int) -> int | None:
    """A seed a choice, so that n choices differ; the first one's is the request's own."""
    return None if seed is None else (seed + choice + (1 << 63)) % (1 << 64) - (1 << 63)


def _check_length(engine: AsyncLLM, ids: list[int], param: str) -> None:
    if len(ids) > engine.max_request_tokens:
        raise context_exceeded(engine.max_request_tokens, len(ids), param)


def _as_template_takes(message: Message) -> dict[str, Any]:
    """Templates know the developer by the older name, and want the arguments of calls as objects."""
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    found["content"] = message.content
    if message.reasoning_content:
        found["reasoning_content"] = message.reasoning_content
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return found
