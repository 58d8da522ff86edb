"""Streams as servers send them: fields, line ends and texts of every kind."""

import asyncio
import json

import httpx2
import pytest

from tokenspeed_engine.bench.client import Answer, Endpoint

TEXT = "a\u2028b\u0085c\x0cd\r\ne é"


def chunk(choices: object, **fields: object) -> str:
    return json.dumps({"choices": choices, **fields}, ensure_ascii=False)


DELTAS = [chunk([{"delta": {"content": part}}]) for part in (TEXT, "", "end")]
USAGE = chunk([], usage={"prompt_tokens": 7, "completion_tokens": 3})


def answer(body: str) -> Answer:
    async def ask() -> Answer:
        transport = httpx2.MockTransport(lambda request: httpx2.Response(200, content=body.encode()))
        async with httpx2.AsyncClient(transport=transport) as client:
            return await Endpoint("http://server/v1", "m").chat(client, "m", [], 5)

    return asyncio.run(ask())


@pytest.mark.parametrize("field", ["data: ", "data:"])
@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
def test_only_line_ends_end_a_line(field: str, end: str) -> None:
    lines = [": a comment", "event: x", *(f"{field}{data}" for data in (*DELTAS, USAGE, "[DONE]"))]
    found = answer("".join(line + end for line in lines))
    assert (found.error, found.text) == (None, TEXT + "end")
    assert (found.prompt_tokens, found.output_tokens, len(found.arrivals)) == (7, 3, 2)


@pytest.mark.parametrize("data", ["{", chunk(None), chunk([{}]), '{"error": {"message": "x"}}'])
def test_what_is_no_chunk_fails_the_turn_alone(data: str) -> None:
    assert answer(f"data: {data}\n\n").error is not None


def test_a_stream_without_usage_is_a_failed_turn() -> None:
    assert answer(f"data: {DELTAS[0]}\n\ndata: [DONE]\n\n").error is not None
