from collections.abc import Iterator

import pytest

from tests.engine.server.running import RunningServer
from tokenspeed_engine.async_llm import AsyncLLM
from tokenspeed_engine.llm import EngineOptions
from tokenspeed_engine.server.options import ServerOptions


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """The embedded model in a context of 256 tokens, prefilled 32 at a time."""
    options = EngineOptions(max_batch=4, max_step_tokens=32, max_context=256)
    running = RunningServer(AsyncLLM(None, options), ServerOptions(max_body_bytes=100_000))
    yield running
    running.close()
