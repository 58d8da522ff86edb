"""Who is let in first, and that nobody waits for ever."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.engine.control.driver import GREEDY, Engine
from tests.engine.control.fake import VOCAB, expected_tokens
from tokenspeed_engine.control import ControlConfig
from tokenspeed_engine.control.waiting import MAX_OVERTAKEN

CONFIG = ControlConfig(
    page_size=4,
    num_pages=128,
    num_slots=4,
    max_batch=4,
    max_step_tokens=8,
    max_context=256,
    prefix_cache=True,
    num_snapshots=8,
)
ONE_BY_ONE = replace(CONFIG, num_slots=1, max_batch=1)
SHORT = replace(GREEDY, max_new_tokens=2)
NEW = [11, 3, 7, 5] * 12


class Agent:
    """Takes turn after turn, each as soon as the one before is answered."""

    def __init__(self, engine: Engine, name: str, prompt: Sequence[int]) -> None:
        self.engine = engine
        self.name = name
        self.prompt = list(prompt)
        self.turns = 0
        self.act()

    @property
    def turn(self) -> str:
        return f"{self.name}{self.turns}"

    def act(self) -> None:
        """Begin the first turn, or the next one if the last is answered."""
        if self.turns:
            if not self.engine.is_over(self.turn):
                return
            self.prompt += [*self.engine.tokens(self.turn), self.turns % VOCAB]
        self.turns += 1
        self.engine.add(self.turn, self.prompt, SHORT)


def first_rows(engine: Engine) -> list[str]:
    """Requests in the order in which they first ran."""
    return list(dict.fromkeys(row.request_id for plan in engine.plans for row in plan.rows))


def next_turn(engine: Engine, prompt: Sequence[int]) -> list[int]:
    return [*prompt, *engine.ask("turn 1", prompt, SHORT), 1]


def test_a_next_turn_goes_before_older_new_requests() -> None:
    engine = Engine(ONE_BY_ONE)
    prompt = next_turn(engine, NEW[:9])
    for name in ("new a", "new b"):
        engine.add(name, [*name.encode()[-1:], 1, 2, 3, 4, 5, 6][1:], SHORT)
    engine.add("turn 2", prompt, SHORT)
    engine.finish()
    assert first_rows(engine) == ["turn 1", "turn 2", "new a", "new b"]
    assert engine.tokens("turn 2") == expected_tokens(prompt, SHORT, 0, 2)


def test_a_next_turn_is_not_held_up_by_a_long_prefill() -> None:
    engine = Engine(CONFIG)
    prompt = next_turn(engine, NEW[:9])
    engine.add("long", [1, *NEW])
    engine.step()
    engine.add("turn 2", prompt, SHORT)
    engine.step()
    assert [(row.request_id, len(row.tokens)) for row in engine.plans[-1].rows] == [("turn 2", 2), ("long", 6)]
    engine.finish()
    assert engine.tokens("long") == expected_tokens([1, *NEW], GREEDY, 0, 6)


def test_of_next_turns_the_older_goes_first() -> None:
    engine = Engine(ONE_BY_ONE)
    prompt = next_turn(engine, NEW[:9])
    for name in ("turn 2", "turn 2 again"):
        engine.add(name, prompt, SHORT)
    engine.finish()
    assert first_rows(engine) == ["turn 1", "turn 2", "turn 2 again"]


def test_one_whose_beginning_is_gone_keeps_its_place() -> None:
    engine = Engine(ONE_BY_ONE)
    prompt = next_turn(engine, NEW[:9])
    engine.add("new", [1, 2, 3], SHORT)
    engine.add("turn 2", prompt, SHORT)
    engine.core.scheduler.cache.clear()
    engine.finish()
    assert first_rows(engine) == ["turn 1", "new", "turn 2"]


def test_one_of_which_less_than_half_is_cached_keeps_its_place() -> None:
    engine = Engine(ONE_BY_ONE)
    prompt = next_turn(engine, NEW[:9])
    engine.add("new", [1, 2, 3], SHORT)
    engine.add("much more", [*prompt, *NEW[:10]], SHORT)
    engine.finish()
    assert first_rows(engine) == ["turn 1", "new", "much more"]
    assert engine.cached("much more") == 10


def test_nobody_is_overtaken_more_often_than_the_bound_while_waiting() -> None:
    engine = Engine(ONE_BY_ONE)
    agents = [Agent(engine, name, [i, *NEW[:9]]) for i, name in enumerate("abc")]
    engine.step()
    engine.add("new", [9, 9, 9], SHORT)
    for _ in range(400):
        engine.step()
        for agent in agents:
            agent.act()
        if "new" in first_rows(engine):
            break
    order = first_rows(engine)
    # The agents' first turns are older.
    assert order.index("new") == len(agents) + MAX_OVERTAKEN


@pytest.mark.parametrize("overlap", [False, True])
def test_nobody_is_overtaken_more_often_than_the_bound_in_its_prefill(overlap: bool) -> None:
    engine = Engine(replace(CONFIG, max_step_tokens=4, overlap=overlap), deferred=overlap)
    agents = [Agent(engine, name, [i, *NEW[:9]]) for i, name in enumerate("abc")]
    while any(agent.turns == 1 for agent in agents):
        engine.step()
        for agent in agents:
            agent.act()
    turns = sum(agent.turns for agent in agents)
    engine.add("new", NEW[:24])
    for _ in range(400):
        engine.step()
        if engine.outputs["new"]:
            break
        for agent in agents:
            agent.act()
    # Those that came before it count besides those that overtook it; none came in once it was overtaken so often.
    assert sum(agent.turns for agent in agents) <= turns + MAX_OVERTAKEN + len(agents)
    engine.finish()
    assert engine.tokens("new") == expected_tokens(NEW[:24], GREEDY, 0, 6)


def test_preempted_requests_keep_the_order_of_arrival() -> None:
    engine = Engine(replace(CONFIG, page_size=1, num_pages=24, max_step_tokens=32))
    params = replace(GREEDY, max_new_tokens=10)
    for i in range(4):
        engine.add(f"r{i}", [i, 1, 2, 3], params)
    engine.finish()
    assert engine.core.counters.preemptions > 0
    last_step = {row.request_id: number for number, plan in enumerate(engine.plans) for row in plan.rows}
    assert sorted(last_step, key=last_step.__getitem__) == ["r0", "r1", "r2", "r3"]
    for i in range(4):
        assert engine.tokens(f"r{i}") == expected_tokens([i, 1, 2, 3], params, 0, 10)
