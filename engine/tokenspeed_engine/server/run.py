"""Loads a model and serves it until a signal comes."""

from pathlib import Path

import uvicorn

from tokenspeed_engine.async_llm import AsyncLLM
from tokenspeed_engine.llm import EngineOptions
from tokenspeed_engine.server.app import create_app
from tokenspeed_engine.server.options import ServerOptions

EMBEDDED_NAME = "tokenspeed-demo"
"""What the embedded model is served as; another one as its folder is called."""


def serve(
    model: Path | None,
    options: EngineOptions,
    host: str,
    port: int,
    served_name: str | None,
    drain_seconds: int,
    server: ServerOptions,
) -> None:
    """Serves a model folder, or the embedded model, on `host`:`port`; blocks.

    At SIGTERM or SIGINT no new connection is taken, and requests have `drain_seconds` to finish; what is left then is
    aborted. Raises as `LLM` for a model that cannot be served.
    """
    name = served_name or (EMBEDDED_NAME if model is None else model.resolve().name)
    app = create_app(AsyncLLM(model, options), name, server)
    uvicorn.run(app, host=host, port=port, timeout_graceful_shutdown=drain_seconds, log_level="info")
