"""From a request's body to what the engine takes: token ids and sampling parameters, one pair a choice."""

from tokenspeed_engine.async_llm import AsyncLLM
from tokenspeed_engine.control import SamplingParams
from tokenspeed_engine.server.errors import ApiError, context_exceeded
from tokenspeed_engine.server.schema import ChatRequest, CompletionRequest, GenerationRequest

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


async def chat_requests(engine: AsyncLLM, body: ChatRequest) -> list[EngineRequest]:
    """The n choices of /v1/chat/completions."""
    if taken := _TEMPLATE_ARGUMENTS & body.chat_template_kwargs.keys():
        names = ", ".join(sorted(taken))
        message = f"Invalid 'chat_template_kwargs': {names} cannot be set."
        raise ApiError(400, message, param="chat_template_kwargs", code="invalid_value")
    messages = [{"role": _role(message.role), "content": message.content} for message in body.messages]
    ids = await engine.encode_chat(messages, **body.chat_template_kwargs)
    _check_length(engine, ids, "messages")
    room = max(1, engine.max_request_tokens - len(ids))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _choices(body, ids, body.max_completion_tokens or body.max_tokens or room, logprobs)


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


def _role(role: str) -> str:
    """Templates know the developer by the older name."""
    return "system" if role == "developer" else role
