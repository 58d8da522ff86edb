"""Runs the workload: so many agents at once, each waiting for its answer before it goes on."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import httpx2

from tokenspeed_engine.bench.client import Answer, Endpoint, Message
from tokenspeed_engine.bench.served import Speculation, speculation
from tokenspeed_engine.bench.workload import Workload, words

MOST_PROBED = 2048


@dataclass(frozen=True, slots=True)
class Turn:
    """One answered, or failed, turn of a session."""

    session: int
    turn: int
    answer: Answer

    def to_json(self) -> dict[str, Any]:
        """Times are seconds since the request was sent; texts are left out."""
        found = asdict(self.answer)
        del found["text"], found["reasoning"], found["started"]
        found["arrivals"] = [at - self.answer.started for at in self.answer.arrivals]
        return {"session": self.session, "turn": self.turn, **found}


@dataclass(frozen=True, slots=True)
class Run:
    """What a run gave: its turns in order of their end, how long it took, and the server's own speculation counts."""

    workload: Workload
    model: str
    turns: tuple[Turn, ...]
    seconds: float
    speculation: Speculation | None


async def run(
    endpoint: Endpoint,
    workload: Workload,
    told: Callable[[Turn], None] = lambda turn: None,
    client: httpx2.AsyncClient | None = None,
) -> Run:
    """Runs every session; `told` hears of each turn as it ends. A session ends early at its first failed turn.

    `client` is one to use instead of the endpoint's own; it stays open. Raises `httpx2.HTTPError` or `ValueError` where
    the server cannot be reached or does not answer the probe.
    """
    if client is None:
        async with endpoint.client() as opened:
            return await run(endpoint, workload, told, opened)
    model = await endpoint.model_name(client)
    words_per_token = await _words_per_token(endpoint, client, model, workload)
    before = await speculation(endpoint, client)
    waiting = iter(range(workload.sessions))
    turns: list[Turn] = []

    async def agent() -> None:
        for number in waiting:
            session = workload.session(number)
            history: list[Message] = []
            for turn in range(session.turns):
                history.append({"role": "user", "content": session.message(turn, words_per_token)})
                answer = await endpoint.chat(client, model, history, workload.output_tokens)
                turns.append(Turn(number, turn, answer))
                told(turns[-1])
                if answer.error is not None:
                    break
                history.append(answer.message)

    started = time.perf_counter()
    await asyncio.gather(*(agent() for _ in range(workload.users)))
    seconds = time.perf_counter() - started
    after = await speculation(endpoint, client)
    return Run(workload, model, tuple(turns), seconds, None if before is None or after is None else after - before)


async def _words_per_token(endpoint: Endpoint, client: httpx2.AsyncClient, model: str, workload: Workload) -> float:
    """How many of the workload's words one token of this server holds, by a prompt of words and one of a single one."""
    probed = min(MOST_PROBED, max(workload.first_tokens // 4, 16))
    counts = []
    for number in (1, probed):
        text = words(random.Random(f"probe {workload.seed}"), number)
        answer = await endpoint.chat(client, model, [{"role": "user", "content": text}], 1)
        if answer.error is not None:
            raise ValueError(f"the server does not answer a probe of {number} words: {answer.error}")
        counts.append(answer.prompt_tokens)
    return (probed - 1) / max(counts[1] - counts[0], 1)
