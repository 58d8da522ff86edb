"""The HTTP application: routes, and every error in OpenAI's shape."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from tokenspeed_engine.async_llm import AsyncLLM
from tokenspeed_engine.chat_template import ChatTemplateError
from tokenspeed_engine.control import RequestRefusedError
from tokenspeed_engine.engine_thread import EngineClosedError, EngineStepError
from tokenspeed_engine.server.answer import AnswerParser
from tokenspeed_engine.server.errors import ApiError, as_api_error, invalid
from tokenspeed_engine.server.formats import ChatFormat, CompletionFormat, Format
from tokenspeed_engine.server.load import Load
from tokenspeed_engine.server.metrics import Metrics
from tokenspeed_engine.server.options import ServerOptions
from tokenspeed_engine.server.prompts import EngineRequest, chat_requests, completion_requests
from tokenspeed_engine.server.reasoning import ReasoningParser
from tokenspeed_engine.server.respond import GenerationResponse
from tokenspeed_engine.server.schema import ChatRequest, CompletionRequest, GenerationRequest

Body = TypeVar("Body", bound=GenerationRequest)


def create_app(engine: AsyncLLM, model: str, options: ServerOptions | None = None) -> FastAPI:
    """An application that serves `engine` under the name `model` and closes it when it shuts down."""
    options = options or ServerOptions()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close()

    app = FastAPI(title="tokenspeed-engine", lifespan=lifespan, openapi_url=None)
    metrics = Metrics(engine)
    _answer_errors(app, metrics)

    @app.get("/health")
    async def health() -> Response:
        healthy = engine.healthy
        return JSONResponse({"status": "ok" if healthy else "failed"}, 200 if healthy else 503)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    app.include_router(_api(engine, model, options, metrics))
    return app


def _api(engine: AsyncLLM, model: str, options: ServerOptions, metrics: Metrics) -> APIRouter:
    """OpenAI's routes."""
    api = APIRouter(prefix="/v1", dependencies=[Depends(_key_check(options.api_key))])
    created = int(time.time())
    load = Load(options.max_requests)

    async def read(request: Request, kind: type[Body]) -> Body:
        body = _parse(await _read_bytes(request, options.max_body_bytes), kind)
        _check_model(body.model, model)
        load.check(body.n)  # before a long prompt is encoded for nothing
        return body

    def respond(
        body: GenerationRequest, requests: Sequence[EngineRequest], format: Format, started: float
    ) -> GenerationResponse:
        timeout = options.timeout if body.timeout is None else body.timeout
        return GenerationResponse(
            engine, metrics, requests, body.n, format, body.stream, started, load=load, timeout=timeout
        )

    def describe() -> dict[str, Any]:
        sizes = {"max_model_len": engine.max_context}
        return {"id": model, "object": "model", "created": created, "owned_by": "tokenspeed"} | sizes

    @api.get("/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [describe()]})

    @api.get("/models/{name:path}")
    async def one_model(name: str) -> Response:
        _check_model(name, model)
        return JSONResponse(describe())

    @api.post("/completions")
    async def completions(request: Request) -> Response:
        body = await read(request, CompletionRequest)
        started = time.perf_counter()
        format = CompletionFormat(model, engine.tokenizer, body.logprobs is not None, _include_usage(body))
        return respond(body, await completion_requests(engine, body), format, started)

    @api.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read(request, ChatRequest)
        started = time.perf_counter()
        requests, inside_reasoning = await chat_requests(engine, body)
        tools = [tool.model_dump() for tool in body.offered_tools] if options.tool_calls else []
        parsers = [
            AnswerParser(ReasoningParser(inside_reasoning) if options.reasoning else None, tools or None)
            for _ in requests
        ]
        format = ChatFormat(model, engine.tokenizer, body.logprobs, _include_usage(body), parsers)
        return respond(body, requests, format, started)

    return api


def _key_check(key: str | None) -> Callable[[Request], None]:
    def check(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if key is None:
            return
        # A header's bytes arrive as if they were Latin-1.
        matches = secrets.compare_digest(given.strip().encode("latin-1"), key.encode())
        if not matches or scheme.lower() != "bearer":
            message = "Incorrect API key provided." if given else "You didn't provide an API key."
            raise ApiError(401, message, code="invalid_api_key")

    return check


def _answer_errors(app: FastAPI, metrics: Metrics) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        problem = _of_route(request, error) if isinstance(error, HTTPException) else as_api_error(error)
        metrics.refused.labels(str(problem.status)).inc()
        # What the client sent may be part of the message, half a surrogate pair included: only ASCII escapes carry it.
        body, headers = json.dumps(problem.body()), getattr(error, "headers", None)
        return Response(body, problem.status, headers, "application/json")

    async def say_nothing(request: Request, error: Exception) -> Response:
        return Response(status_code=400)

    refusals = (ApiError, RequestRefusedError, ChatTemplateError, HTTPException)
    # Without a handler of its own an exception is answered as well, but counts as one of the server and is logged.
    for kind in (*refusals, EngineClosedError, EngineStepError, TimeoutError, Exception):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(ClientDisconnect, say_nothing)  # nobody is there to read it


def _of_route(request: Request, error: HTTPException) -> ApiError:
    if error.status_code == 405:
        return ApiError(405, f"Not allowed to {request.method} on {request.url.path}.", code="method_not_supported")
    if error.status_code == 404:
        return ApiError(404, f"Invalid URL ({request.method} {request.url.path})", code="unknown_url")
    return ApiError(error.status_code, str(error.detail))


async def _read_bytes(request: Request, limit: int) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise ApiError(413, f"The body of your request is larger than {limit} bytes.", code="request_too_large")
    return bytes(body)


def _parse(body: bytes, kind: type[Body]) -> Body:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"We could not parse the JSON body of your request: {error}.") from error
    if not isinstance(content, dict):
        raise ApiError(400, "We could not parse the JSON body of your request: expected an object.")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise invalid(error) from error


def _check_model(name: str, served: str) -> None:
    if name != served:
        message = f"The model '{name}' does not exist; this server serves '{served}'."
        raise ApiError(404, message, param="model", code="model_not_found")


def _include_usage(body: GenerationRequest) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage
