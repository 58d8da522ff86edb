"""The agentic benchmark, whole, against a server of the embedded model at a fiftieth of the real size."""

import asyncio
import json
from collections.abc import Iterator

import pytest

from tests.engine.server.running import MODEL, RunningServer
from tokenspeed_engine.async_llm import AsyncLLM
from tokenspeed_engine.bench import agents
from tokenspeed_engine.bench.client import Endpoint
from tokenspeed_engine.bench.summary import summarise
from tokenspeed_engine.bench.workload import Workload
from tokenspeed_engine.llm import EngineOptions
from tokenspeed_engine.server.options import ServerOptions

OPTIONS = EngineOptions(
    max_batch=2,
    max_context=2048,
    num_drafts=3,
    prefix_cache=True,
    state_interval=64,
    num_snapshots=16,
)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer(AsyncLLM(None, OPTIONS), ServerOptions(reasoning="qwen3"))
    yield running
    running.close()


def test_agents_reuse_their_history_and_accept_drafts(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = Workload(users=2, sessions=2).scaled(50)
    told: list[agents.Turn] = []
    run = asyncio.run(agents.run(Endpoint(f"{server.url}/v1", ""), workload, told.append))
    figures = summarise(run, gpus=1)
    with capsys.disabled():
        print("\nagentic 1:50 on the embedded model:", json.dumps(figures, default=str))
    assert run.model == MODEL
    assert [turn.answer.error for turn in run.turns] == [None] * len(told)
    assert len(told) == sum(workload.session(number).turns for number in range(2))
    first = [turn.answer.prompt_tokens for turn in run.turns if turn.turn == 0]
    assert all(0.8 < count / workload.first_tokens < 1.25 for count in first), "as long as was asked for"
    assert figures["cache_hit"] >= 0.9
    assert figures["tokens_per_verify_step"] > 1.5
