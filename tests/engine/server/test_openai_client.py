"""The `openai` client, unmodified, against the server; the tokens are `LLM`'s."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.engine.server.running import MODEL, PROMPT, RunningServer
from tokenspeed_engine import LLM, EngineOptions, Generation, SamplingParams

MESSAGES: Any = [{"role": "system", "content": "Complete."}, {"role": "user", "content": "def f(x):"}]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(None, EngineOptions(max_batch=4, max_step_tokens=32, max_context=256))


def wanted(llm: LLM, **params: Any) -> Generation:
    return llm.generate(PROMPT, SamplingParams(**{"temperature": 0, "max_new_tokens": 8} | params))[0]


def chat_ids(llm: LLM) -> list[int]:
    assert llm.tokenizer is not None
    return llm.tokenizer.encode(llm.tokenizer.render_chat(MESSAGES), add_special_tokens=False)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "tokenspeed"


def test_a_completion(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=8)
    expected = wanted(llm)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == expected.text
    assert expected.text.startswith("        self.items.append(item)")
    assert answer.choices[0].finish_reason == expected.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_a_streamed_completion_adds_up_to_the_whole_one(client: openai.OpenAI, llm: LLM) -> None:
    options: Any = {"include_usage": True}
    stream = client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=8, stream=True, stream_options=options, logprobs=2
    )
    chunks = list(stream)
    expected = wanted(llm, logprobs=2)
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    details = [chunk.choices[0].logprobs for chunk in chunks[:-1]]
    assert [value for part in details if part for value in part.token_logprobs or []] == pytest.approx(
        [entry.logprob for entry in expected.logprobs]
    )
    offsets = [offset for part in details if part for offset in part.text_offset or []]
    texts = [text for part in details if part for text in part.tokens or []]
    assert "".join(texts) == expected.text
    assert offsets == [len("".join(texts[:i])) for i in range(8)]


def test_logprobs_of_a_completion(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, temperature=1, seed=3, max_tokens=8, logprobs=1)
    entries = wanted(llm, temperature=1, seed=3, logprobs=1).logprobs
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs == pytest.approx([entry.logprob for entry in entries])
    assert found.top_logprobs is not None
    for text, entry, top in zip(found.tokens, entries, found.top_logprobs, strict=True):
        assert top[text] == pytest.approx(entry.logprob)
        assert len(top) == (1 if entry.token == entry.top[0][0] else 2)
        assert max(top.values()) == pytest.approx(entry.top[0][1])


def test_several_prompts_and_choices_come_in_order(client: openai.OpenAI, llm: LLM) -> None:
    def seeded(prompt: str, seed: int) -> str:
        return llm.generate(prompt, SamplingParams(temperature=1, seed=seed, max_new_tokens=4))[0].text

    prompts = [PROMPT, "import os\n"]
    answer = client.completions.create(model=MODEL, prompt=prompts, n=2, seed=7, temperature=1, max_tokens=4)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert texts == [seeded(prompt, seed) for prompt in prompts for seed in (7, 8)]
    assert len(set(texts)) == 4
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(llm.encode(prompt)) for prompt in prompts)

    ids = [llm.encode(prompt) for prompt in prompts]
    stream = client.completions.create(model=MODEL, prompt=ids, n=2, seed=7, temperature=1, max_tokens=4, stream=True)
    parts = ["", "", "", ""]
    for chunk in stream:
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == texts


def test_a_chat_is_the_templates_prompt_continued(client: openai.OpenAI, llm: LLM) -> None:
    expected = llm.generate(chat_ids(llm), SamplingParams(temperature=0, max_new_tokens=8, logprobs=2))[0]
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=8, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == expected.text
    assert choice.finish_reason == expected.finish_reason
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    for found, entry in zip(choice.logprobs.content, expected.logprobs, strict=True):
        assert found.logprob == pytest.approx(entry.logprob)
        assert [top.logprob for top in found.top_logprobs] == pytest.approx([value for _, value in entry.top])
        assert found.bytes is None or bytes(found.bytes).decode() == found.token
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(chat_ids(llm))


def test_a_chat_takes_text_parts_and_variables_of_the_template(client: openai.OpenAI, llm: LLM) -> None:
    assert llm.tokenizer is not None
    rendered = llm.tokenizer.render_chat([{"role": "system", "content": "ab"}], enable_thinking=False)
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        max_tokens=1,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(llm.tokenizer.encode(rendered, add_special_tokens=False))


def test_stop_strings_end_the_text_whole_and_streamed(client: openai.OpenAI, llm: LLM) -> None:
    text = wanted(llm).text
    stop = text[5:8]
    whole = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=8, stop=[stop, "zz"])
    assert whole.choices[0].text == text[: text.index(stop)]
    assert whole.choices[0].finish_reason == "stop"
    stream = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=8, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_a_stop_token_ends_the_stream_with_its_reason(client: openai.OpenAI, llm: LLM) -> None:
    expected = wanted(llm)
    last = expected.token_ids.index(expected.token_ids[2])
    stream = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        temperature=0,
        max_tokens=8,
        stream=True,
        extra_body={"stop_token_ids": [expected.token_ids[last]]},
    )
    chunks = list(stream)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert llm.tokenizer is not None
    assert text == llm.tokenizer.decode(expected.token_ids[:last])


def test_a_chat_without_a_limit_goes_on_to_the_contexts_end(client: openai.OpenAI, llm: LLM) -> None:
    text = "a = 1\n" * 40
    assert llm.tokenizer is not None
    num_prompt = len(llm.encode(text))
    room = 256 - num_prompt
    assert 0 < room < 100
    messages: Any = [{"role": "user", "content": text}]
    rendered = len(llm.tokenizer.encode(llm.tokenizer.render_chat(messages), add_special_tokens=False))
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 256 - rendered


def test_errors_are_the_clients_exceptions(client: openai.OpenAI, server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[5] * 300)
    assert long.value.code == "context_length_exceeded"
    assert long.value.param == "prompt"
    server.gate.failure = RuntimeError("device lost")
    try:
        with pytest.raises(openai.InternalServerError, match="device lost"):
            client.completions.create(model=MODEL, prompt="a")
        stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="device lost"):
            list(stream)
    finally:
        server.gate.failure = None
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=1).choices[0].finish_reason == "length"


def test_the_asynchronous_client_streams_many_chats_at_once(server: RunningServer, llm: LLM) -> None:
    prompt = chat_ids(llm)
    params = [SamplingParams(temperature=1, seed=seed, max_new_tokens=6) for seed in range(6)]
    expected = [llm.generate(prompt, each)[0].text for each in params]

    async def chat(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=1, seed=seed, max_tokens=6, stream=True
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(chat(client, seed) for seed in range(6)))

    assert asyncio.run(run()) == expected
