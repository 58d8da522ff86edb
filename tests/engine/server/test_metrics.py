"""/health, /metrics, and the exact bytes of a stream."""

import json
import threading
import time
from functools import partial

import pytest

from tests.engine.server.running import MODEL, PROMPT, RunningServer, wait_until
from tokenspeed_engine.control import FinishReason, RequestOutput, Usage
from tokenspeed_engine.server.metrics import Metrics

COUNTERS = {
    'tokenspeed_requests_total{outcome="length"}': 3.0,
    "tokenspeed_generated_tokens_total": 12.0,
    "tokenspeed_time_to_first_token_seconds_count": 3.0,
    "tokenspeed_inter_token_seconds_count": 9.0,
    'tokenspeed_refused_requests_total{status="404"}': 1.0,
}


def test_health(server: RunningServer) -> None:
    assert server.get("/health") == (200, '{"status":"ok"}')


def test_counters_grow_by_what_was_served(server: RunningServer) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
    server.post("/v1/completions", body | {"model": "other"})
    before = {name: server.metric(name) for name in COUNTERS}
    num_prompt = server.metric("tokenspeed_prompt_tokens_total")
    status, answer = server.post("/v1/completions", body | {"n": 2})
    assert status == 200
    server.events("/v1/completions", body | {"stream": True})
    server.post("/v1/completions", body | {"model": "other"})
    assert {name: server.metric(name) - value for name, value in before.items()} == COUNTERS
    assert server.metric("tokenspeed_prompt_tokens_total") - num_prompt == 2 * answer["usage"]["prompt_tokens"]
    first = server.metric('tokenspeed_time_to_first_token_seconds_bucket{le="60.0"}')
    assert first == server.metric("tokenspeed_time_to_first_token_seconds_count")


def test_gauges_show_what_a_running_request_holds(server: RunningServer) -> None:
    wait_until(server.is_free)
    assert server.metric("tokenspeed_num_free_pages") == server.metric("tokenspeed_num_pages") == 64
    assert server.metric("tokenspeed_num_free_slots") == server.metric("tokenspeed_num_slots") == 4
    with server.gate.held():
        body = {"model": MODEL, "prompt": [5] * 40, "max_tokens": 1}
        asking = threading.Thread(target=server.post, args=("/v1/completions", body))
        asking.start()
        server.gate.wait_for_step()
        server.gate.step()
        server.gate.wait_for_step()
        assert server.metric("tokenspeed_num_running") == 1
        assert server.metric("tokenspeed_num_free_pages") == 61
        assert server.metric("tokenspeed_num_free_slots") == 3
    asking.join()
    wait_until(server.is_free)


def test_the_engines_totals_are_shown(server: RunningServer) -> None:
    names = {
        "steps_total": "steps",
        "draft_steps_total": "draft_steps",
        "drafts_proposed_total": "drafts_proposed",
        "drafts_accepted_total": "drafts_accepted",
        "preemptions_total": "preemptions",
        "snapshots_saved_total": "snapshots_saved",
        "snapshots_offloaded_total": "snapshots_offloaded",
        'cached_tokens_total{state="device"}': "cached_tokens_device",
        'cached_tokens_total{state="host"}': "cached_tokens_host",
    }
    steps = server.metric("tokenspeed_steps_total")
    server.post("/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True})
    wait_until(server.is_free)
    assert server.metric("tokenspeed_steps_total") > steps
    for name, field in names.items():
        assert server.metric(f"tokenspeed_{name}") == getattr(server.engine.stats.counters, field), name


def test_a_stream_is_events_and_then_done(server: RunningServer) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True}
    *chunks, done = server.events("/v1/chat/completions", body | {"ignore_eos": True})
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert {chunk["object"] for chunk in parsed} == {"chat.completion.chunk"}
    assert parsed[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert parsed[-1]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in chunk for chunk in parsed)


def test_tokens_that_come_together_share_the_time(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(server.engine)
    tracker = metrics.track(1, num_prompt_tokens=5, started=10.0)
    steps: list[tuple[float, int, FinishReason | None]] = [(12.0, 2, None), (12.6, 3, None), (12.8, 1, "length")]
    for now, count, finish in steps:
        monkeypatch.setattr(time, "perf_counter", partial(float, now))
        tracker.observe(0, _output(count, finish))
    tracker.end("abort")
    samples = dict(line.rsplit(" ", 1) for line in metrics.render().decode().splitlines() if line[0] != "#")
    assert float(samples["tokenspeed_time_to_first_token_seconds_sum"]) == 2.0
    assert float(samples["tokenspeed_inter_token_seconds_count"]) == 4
    assert float(samples["tokenspeed_inter_token_seconds_sum"]) == pytest.approx(0.8)
    assert float(samples['tokenspeed_inter_token_seconds_bucket{le="0.25"}']) == 4
    assert float(samples['tokenspeed_requests_total{outcome="length"}']) == 1
    assert float(samples['tokenspeed_requests_total{outcome="abort"}']) == 0


def _output(count: int, finish: FinishReason | None) -> RequestOutput:
    return RequestOutput("0", (7,) * count, "", (), finish, None, Usage(5, count))
