"""Two thousand requests of agents that share a beginning, leave, and come back: the pools end as they began."""

import random
from dataclasses import replace

import pytest

from tests.engine.control.driver import GREEDY, Engine
from tests.engine.control.fake import VOCAB, expected_answer
from tests.engine.control.owners import check_owners
from tokenspeed_engine.control import ControlConfig, SamplingParams

CONFIG = ControlConfig(
    page_size=4,
    num_pages=36,
    num_slots=6,
    max_batch=6,
    max_step_tokens=24,
    max_context=96,
    context_tokens=2,
    prefix_cache=True,
    state_interval=12,
    num_snapshots=6,
    num_host_snapshots=8,
    overlap=True,
)
SYSTEM = [(5 * i + 3) % VOCAB for i in range(14)]


@pytest.mark.parametrize("has_state", [True, False])
def test_after_two_thousand_requests_everything_is_free(has_state: bool) -> None:
    draw = random.Random(7)
    engine = Engine(replace(CONFIG, has_state=has_state), num_drafts=3, deferred=True)
    prompts = {agent: [*SYSTEM, agent, 1] for agent in range(VOCAB)}
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    live: dict[int, str] = {}
    while len(asked) < 1000 or live:
        for agent in draw.sample(sorted(prompts), 3):
            if agent in live or len(asked) == 1000:
                continue
            if len(prompts[agent]) > 60:
                prompts[agent] = [*SYSTEM, agent, 2, len(asked) % VOCAB]
            stop = draw.choice([(), ("ab",), ("😀", "c")])
            params = replace(GREEDY, max_new_tokens=draw.randint(1, 12), stop=stop)
            live[agent] = name = f"r{len(asked)}"
            asked[name] = prompts[agent], params
            engine.add(name, *asked[name])
        for output in engine.core.step():
            engine.outputs[output.request_id].append(output)
        if live and draw.random() < 0.1:
            engine.core.abort(live[draw.choice(sorted(live))])
        for agent, name in list(live.items()):
            if engine.is_over(name):
                prompts[agent] = [*prompts[agent], *engine.tokens(name), len(asked) % VOCAB]
                del live[agent]
    engine.finish()
    check_owners(engine.core.scheduler)
    counters = engine.core.counters
    assert counters.preemptions > 0
    assert counters.cached_tokens_device + counters.cached_tokens_host > counters.prompt_tokens // 3
    engine.core.scheduler.cache.clear()
    assert engine.core.scheduler.pages.num_unused == CONFIG.num_pages
    assert engine.core.scheduler.slots.num_unused == CONFIG.pool_slots

    reasons = {engine.last(name).finish_reason for name in asked}
    assert reasons == {"stop", "length", "abort"}
    for name, (prompt, params) in asked.items():
        if engine.last(name).finish_reason != "abort":
            answer = expected_answer(prompt, params, 0, CONFIG.max_context)
            assert (engine.tokens(name), engine.text(name)) == (answer.token_ids, answer.text)
