"""`AsyncLLM`: the tokens are `LLM`'s, whoever streams beside, and leaving frees."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.engine.server.running import PROMPT, wait_until
from tokenspeed_engine import LLM, EngineOptions, SamplingParams
from tokenspeed_engine.async_llm import AsyncLLM
from tokenspeed_engine.chat_template import ChatTemplateError
from tokenspeed_engine.control import RequestOutput, RequestRefusedError
from tokenspeed_engine.engine_thread import EngineClosedError

OPTIONS = EngineOptions(max_batch=4, max_step_tokens=32, max_context=256)
GREEDY = SamplingParams(temperature=0, max_new_tokens=6)


async def _join(outputs: AsyncIterator[RequestOutput]) -> tuple[int, ...]:
    return tuple([token async for output in outputs for token in output.token_ids])


def _is_free(llm: AsyncLLM) -> bool:
    stats = llm.stats
    return (stats.num_free_pages, stats.num_free_slots) == (stats.num_pages, stats.num_slots)


def test_streams_beside_each_other_have_the_tokens_of_llm() -> None:
    prompts = [PROMPT, "def f(x):\n", "import os\n"]
    wanted = [generation.token_ids for generation in LLM(None, OPTIONS).generate(prompts, GREEDY)]

    async def run() -> list[tuple[int, ...]]:
        async with AsyncLLM(None, OPTIONS) as llm:
            return await asyncio.gather(*(_join(llm.stream(prompt, GREEDY)) for prompt in prompts))

    assert asyncio.run(run()) == wanted


def test_leaving_cancelling_and_refusing_free_everything() -> None:
    long = SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)

    async def run() -> None:
        async with AsyncLLM(None, OPTIONS) as llm:
            stream = llm.stream(PROMPT, long)
            await anext(aiter(stream))
            await stream.aclose()  # type: ignore[attr-defined]
            await asyncio.to_thread(wait_until, lambda: _is_free(llm))

            tasks = [asyncio.create_task(_join(llm.stream(PROMPT, long))) for _ in range(6)]
            await asyncio.to_thread(wait_until, lambda: llm.stats.num_running == 4 and llm.stats.num_waiting == 2)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(wait_until, lambda: _is_free(llm) and llm.stats.num_waiting == 0)

            with pytest.raises(RequestRefusedError, match="context"):
                await _join(llm.stream([5] * 300, long))
            with pytest.raises(RequestRefusedError, match="surrogates"):
                llm.render_chat([{"role": "user", "content": "\ud800"}])
            with pytest.raises(ChatTemplateError):
                llm.render_chat([{"role": "user"}])
            assert _is_free(llm)

    asyncio.run(run())


def test_a_closed_engine_ends_streams_and_takes_none() -> None:
    async def run() -> None:
        llm = AsyncLLM(None, OPTIONS)
        stream = aiter(llm.stream(PROMPT, SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)))
        await anext(stream)
        await llm.close()
        with pytest.raises(EngineClosedError):
            async for _ in stream:
                pass
        with pytest.raises(EngineClosedError):
            await _join(llm.stream(PROMPT, GREEDY))

    asyncio.run(run())


def test_a_closed_event_loop_ends_its_requests() -> None:
    llm = AsyncLLM(None, OPTIONS)
    group = []

    async def leave() -> None:
        ids = await llm.encode(PROMPT)
        group.append(llm.submit([(ids, SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True))]))
        await group[0].__aenter__()

    asyncio.run(leave())
    wait_until(lambda: _is_free(llm))
    assert llm.healthy
    asyncio.run(llm.close())
