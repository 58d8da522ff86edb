"""The HTTP application: routes, and every error in OpenAI's shape."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from tokenspeed_engine.async_llm import AsyncLLM
from tokenspeed_engine.chat_template import ChatTemplateError
from tokenspeed_engine.control import RequestRefusedError
from tokenspeed_engine.engine_thread import EngineClosedError, EngineStepError
from tokenspeed_engine.server.errors import ApiError, as_api_error, invalid
from tokenspeed_engine.server.formats import ChatFormat, CompletionFormat
from tokenspeed_engine.server.metrics import Metrics
from tokenspeed_engine.server.prompts import chat_requests, completion_requests
from tokenspeed_engine.server.respond import GenerationResponse
from tokenspeed_engine.server.schema import ChatRequest, CompletionRequest, GenerationRequest

Body = TypeVar("Body", bound=GenerationRequest)


def create_app(engine: AsyncLLM, model: str, max_body_bytes: int = 32 * 1024**2) -> FastAPI:
    """An application that serves `engine` under the name `model` and closes it when it shuts down.

    A body of more than `max_body_bytes` is answered with 413.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close()

    app = FastAPI(title="tokenspeed-engine", lifespan=lifespan, openapi_url=None)
    metrics = Metrics(engine)
    created = int(time.time())
    _answer_errors(app, metrics)

    async def read(request: Request, kind: type[Body]) -> Body:
        body = _parse(await _read_bytes(request, max_body_bytes), kind)
        _check_model(body.model, model)
        return body

    @app.get("/health")
    async def health() -> Response:
        healthy = engine.healthy
        return JSONResponse({"status": "ok" if healthy else "failed"}, 200 if healthy else 503)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    def describe() -> dict[str, Any]:
        sizes = {"max_model_len": engine.max_context}
        return {"id": model, "object": "model", "created": created, "owned_by": "tokenspeed"} | sizes

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [describe()]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        _check_model(name, model)
        return JSONResponse(describe())

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read(request, CompletionRequest)
        started = time.perf_counter()
        format = CompletionFormat(model, engine.tokenizer, body.logprobs is not None, _include_usage(body))
        requests = await completion_requests(engine, body)
        return GenerationResponse(engine, metrics, requests, body.n, format, body.stream, started)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read(request, ChatRequest)
        started = time.perf_counter()
        format = ChatFormat(model, engine.tokenizer, body.logprobs, _include_usage(body))
        requests = await chat_requests(engine, body)
        return GenerationResponse(engine, metrics, requests, body.n, format, body.stream, started)

    return app


def _answer_errors(app: FastAPI, metrics: Metrics) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        problem = _of_route(request, error) if isinstance(error, HTTPException) else as_api_error(error)
        metrics.refused.labels(str(problem.status)).inc()
        # What the client sent may be part of the message, half a surrogate pair included: only ASCII escapes carry it.
        body, headers = json.dumps(problem.body()), getattr(error, "headers", None)
        return Response(body, problem.status, headers, "application/json")

    async def say_nothing(request: Request, error: Exception) -> Response:
        return Response(status_code=400)

    answered = (ApiError, RequestRefusedError, ChatTemplateError, EngineClosedError, EngineStepError, HTTPException)
    for kind in (*answered, Exception):
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
