"""Requests in, outputs out: refusals, ends, aborts in every state, failures that stay with their request."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.engine.control.fake import EOS, VOCAB, FakeExecutor, FakeTokenizer, Synchronous, expected_tokens
from tokenspeed_engine.control import (
    Accepted,
    ControlConfig,
    EngineCore,
    Executor,
    RequestOutput,
    RequestRefusedError,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from tokenspeed_engine.control.lifecycle import Finished

CONFIG = ControlConfig(page_size=2, num_pages=16, num_slots=3, max_batch=3, max_step_tokens=4, max_context=20)
PARAMS = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True)


def core_over(executor: Executor, config: ControlConfig = CONFIG) -> EngineCore:
    return EngineCore(config, executor, vocab_size=VOCAB, eos_token_ids={EOS}, tokenizer=FakeTokenizer())


def run(core: EngineCore) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(100):
        if not core.has_work:
            return outputs
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError("not finished after 100 steps")


def ids_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def is_free(core: EngineCore) -> bool:
    scheduler = core.scheduler
    return (scheduler.pages.num_free, scheduler.slots.num_free) == (CONFIG.num_pages, CONFIG.num_slots)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], PARAMS, "prompt: expected at least one token, got none"),
        ([1, VOCAB], PARAMS, r"prompt\[1\]: expected a token id from 0 to 15, got 16"),
        ([-1], PARAMS, r"prompt\[0\]: expected a token id from 0 to 15, got -1"),
        ([True], PARAMS, r"prompt\[0\]: expected a token id from 0 to 15, got True"),
        ([1] * 21, PARAMS, "prompt: 21 tokens are more than the context of 20 tokens"),
        ([1], replace(PARAMS, stop=("a",)), "stop: stop strings need a tokenizer, and this model has none"),
    ],
)
def test_a_refusal_names_the_field_and_leaves_the_engine_usable(
    prompt: list[int], params: SamplingParams, message: str
) -> None:
    core = EngineCore(CONFIG, FakeExecutor(CONFIG), vocab_size=VOCAB)
    with pytest.raises(RequestRefusedError, match=f"^{message}$"):
        core.add("bad", prompt, params)
    assert not core.has_work
    core.add("bad", [1], PARAMS)
    assert ids_of(run(core)["bad"]) == expected_tokens([1], PARAMS, 0, 4)


def test_an_id_is_in_use_until_its_last_output() -> None:
    core = core_over(FakeExecutor(CONFIG))
    core.add("a", [1], PARAMS)
    with pytest.raises(RequestRefusedError, match=r"^request_id: 'a' is in use$"):
        core.add("a", [2], PARAMS)
    core.abort("a")
    with pytest.raises(RequestRefusedError, match="in use"):
        core.add("a", [2], PARAMS)
    core.step()
    core.add("a", [2], PARAMS)
    assert ids_of(run(core)["a"]) == expected_tokens([2], PARAMS, 0, 4)


@pytest.mark.parametrize(("length", "count"), [(20, 0), (19, 1), (16, 4), (17, 3)])
def test_the_context_cuts_with_length(length: int, count: int) -> None:
    core = core_over(FakeExecutor(CONFIG))
    core.add("a", [1] * length, PARAMS)
    outputs = run(core)["a"]
    assert ids_of(outputs) == expected_tokens([1] * length, PARAMS, 0, count)
    assert outputs[-1].finish_reason == "length"
    assert (outputs[-1].usage.prompt_tokens, outputs[-1].usage.completion_tokens) == (length, count)


def test_without_a_tokenizer_ids_are_served_and_stop_ids_work() -> None:
    core = EngineCore(CONFIG, FakeExecutor(CONFIG), vocab_size=VOCAB)
    tokens = expected_tokens([1], PARAMS, 0, 4)
    core.add("a", [1], replace(PARAMS, stop_token_ids=(tokens[2],)))
    outputs = run(core)["a"]
    assert ids_of(outputs) == tokens[: tokens.index(tokens[2]) + 1]
    assert outputs[-1].finish_reason == "stop"
    assert {output.text for output in outputs} == {""}


class Scripted(Synchronous):
    """Yields given ids, whatever the plan."""

    def __init__(self, *blocks: tuple[int, ...]) -> None:
        self.blocks = list(blocks)

    def execute(self, plan: StepPlan) -> StepResult:
        (row,) = plan.rows
        if row.sample is None:
            return StepResult((Accepted(),))
        tokens = self.blocks.pop(0)
        return StepResult((Accepted(tokens, drafts=(1, 1, 1)),))


def test_the_end_of_sequence_ends_unless_ignored() -> None:
    for ignore, expected in [(False, [1, EOS]), (True, [1, EOS, 2])]:
        core = core_over(Scripted((1,), (EOS, 2)))
        core.add("a", [5], replace(PARAMS, max_new_tokens=3, ignore_eos=ignore))
        outputs = run(core)["a"]
        assert ids_of(outputs) == expected
        assert outputs[-1].finish_reason == ("length" if ignore else "stop")
        assert "".join(output.text for output in outputs) == ("ab" if ignore else "a")


def test_a_stop_inside_an_accepted_block_ends_and_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_over(Scripted((1,), (2, 1, 2)))
    finished: list[Finished] = []
    finish = core.scheduler.finish
    monkeypatch.setattr(core.scheduler, "finish", lambda *args: finished.append(finish(*args)))
    core.add("a", [5], replace(PARAMS, max_new_tokens=9, stop=("ba",)))
    outputs = run(core)["a"]
    assert ids_of(outputs) == [1, 2, 1]
    assert [(output.text, output.finish_reason) for output in outputs] == [("a", None), ("", "stop")]
    assert outputs[-1].usage.completion_tokens == 3
    # The block was committed whole before its text was made.
    assert [(end.reason, end.tokens.span(0, 99)) for end in finished] == [("stop", (5, 1, 2, 1, 2))]
    assert is_free(core)


STATES: dict[str, tuple[int, Callable[[EngineCore], bool]]] = {
    "waiting": (0, lambda core: core.scheduler.num_waiting == 1),
    "in the middle of prefill": (1, lambda core: core.scheduler.num_running == 1),
    "prefilled": (2, lambda core: core.scheduler.num_running == 1),
    "in the middle of decode": (4, lambda core: core.scheduler.num_running == 1),
    "before the last token": (5, lambda core: core.scheduler.num_running == 1),
}


@pytest.mark.parametrize(("steps", "check"), STATES.values(), ids=STATES.keys())
def test_an_abort_frees_at_once_between_steps(steps: int, check: Callable[[EngineCore], bool]) -> None:
    core = core_over(FakeExecutor(CONFIG))
    core.add("a", [1] * 6, replace(PARAMS, max_new_tokens=5))
    got = [token for _ in range(steps) for output in core.step() for token in output.token_ids]
    assert check(core)
    assert core.abort("a")
    assert is_free(core)
    (last,) = core.step()
    assert (last.finish_reason, last.token_ids) == ("abort", ())
    assert last.usage.completion_tokens == len(got) == max(0, steps - 1)
    assert not core.has_work
    assert not core.abort("a")


def test_an_abort_of_a_preempted_request() -> None:
    config = replace(CONFIG, num_pages=5)
    core = core_over(FakeExecutor(config), config)
    params = replace(PARAMS, max_new_tokens=6)
    core.add("old", [1, 2], params)
    core.add("young", [3, 4], params)
    while core.scheduler.num_waiting == 0 or core.scheduler.num_running == 2:
        core.step()
    assert core.abort("young")
    outputs = run(core)
    assert [output.finish_reason for output in outputs["young"]] == ["abort"]
    assert outputs["old"][-1].finish_reason == "length"
    assert core.scheduler.pages.num_free == 5


class Interfering(FakeExecutor):
    """Calls back in the middle of a step."""

    def __init__(self, during: Callable[[int], None]) -> None:
        super().__init__(CONFIG)
        self.during = during

    def execute(self, plan: StepPlan) -> StepResult:
        self.during(len(self.plans))
        return super().execute(plan)


@pytest.mark.parametrize("step", [0, 1, 3, 4])
def test_an_abort_during_a_step_frees_after_it(step: int) -> None:
    def during(number: int) -> None:
        if number == step:
            assert core.abort("a")
            assert core.abort("a")
            assert not is_free(core)

    core = core_over(Interfering(during))
    core.add("a", [1] * 6, PARAMS)
    outputs = [output for _ in range(step + 1) for output in core.step()]
    assert is_free(core)
    assert not core.has_work
    assert outputs[-1].finish_reason == "abort"
    assert ids_of(outputs) == expected_tokens([1] * 6, PARAMS, 0, max(0, step - 1))


def test_the_id_of_an_abort_during_a_step_can_come_again() -> None:
    def during(number: int) -> None:
        if number == 0:
            core.abort("a")

    core = core_over(Interfering(during))
    core.add("a", [1], PARAMS)
    core.step()
    core.add("a", [1], PARAMS)
    assert ids_of(run(core)["a"]) == expected_tokens([1], PARAMS, 0, 4)


def test_an_abort_during_a_step_of_one_that_waits() -> None:
    def during(number: int) -> None:
        if number == 0:
            core.add("late", [2], PARAMS)
            assert core.abort("late")

    core = core_over(Interfering(during))
    core.add("a", [1], PARAMS)
    outputs = run(core)
    assert [output.finish_reason for output in outputs["late"]] == ["abort"]
    assert ids_of(outputs["a"]) == expected_tokens([1], PARAMS, 0, 4)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_failed_row_ends_only_its_own_request(steps: int) -> None:
    executor = FakeExecutor(CONFIG)
    core = core_over(executor)
    prompts = {"a": [1], "b": [2] * 5, "c": [3]}
    for name, prompt in prompts.items():
        core.add(name, prompt, PARAMS)
    early = [output for _ in range(steps) for output in core.step()]
    executor.broken.add("b")
    outputs = run(core)
    assert outputs["b"][-1].finish_reason == "error"
    assert outputs["b"][-1].error == "logits are not finite"
    for name in ("a", "c"):
        got = [output for output in early if output.request_id == name] + outputs.get(name, [])
        assert ids_of(got) == expected_tokens(prompts[name], PARAMS, 0, 4)
    assert is_free(core)


class Answering(Synchronous):
    """Gives each row of a step the next of the given results."""

    def __init__(self, *results: Accepted) -> None:
        self.results = results

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(self.results)


@pytest.mark.parametrize(
    ("bad", "logprobs", "message"),
    [
        (Accepted(), None, "yielded 0 tokens for a row that can yield 1 to 1"),
        (Accepted((1, 2)), None, "yielded 2 tokens for a row that can yield 1 to 1"),
        (Accepted((-1,)), None, "negative token id"),
        (Accepted((1,), drafts=(-1,)), None, "negative token id"),
        (Accepted((1,)), 0, "0 log-probabilities that do not go with"),
        (Accepted((1,), (TokenLogprobs(2, -1.0, ()),)), 0, "1 log-probabilities that do not go with"),
        (Accepted((1,), (TokenLogprobs(1, -1.0, ()),)), None, "1 log-probabilities that do not go with"),
        (Accepted((1,), (TokenLogprobs(1, float("nan"), ()),)), 0, "not a number"),
    ],
)
def test_a_result_that_does_not_fit_its_row_ends_that_request(
    bad: Accepted, logprobs: int | None, message: str
) -> None:
    core = core_over(Answering(bad, Accepted((1,))))
    core.add("bad", [1, 1], replace(PARAMS, logprobs=logprobs))
    core.add("good", [1], replace(PARAMS, max_new_tokens=1))
    bad_output, good_output = core.step()
    assert bad_output.finish_reason == "error"
    assert message in (bad_output.error or "")
    assert good_output.finish_reason == "length"
    assert is_free(core)


def test_results_that_are_not_one_a_row_end_every_request_of_the_step() -> None:
    core = core_over(Answering(Accepted((1,))))
    core.add("a", [1], PARAMS)
    core.add("b", [1], PARAMS)
    assert {output.error for output in core.step()} == {"the executor returned 1 results for 2 rows"}
    assert is_free(core)
    assert not core.has_work


def test_an_executor_that_raises_ends_the_step_not_the_engine() -> None:
    def during(number: int) -> None:
        if number == 0 and not raised:
            raised.append(True)
            raise MemoryError("out of memory")

    raised: list[bool] = []
    core = core_over(Interfering(during))
    core.add("a", [1], PARAMS)
    (output,) = core.step()
    assert (output.finish_reason, output.error) == ("error", "MemoryError: out of memory")
    assert is_free(core)
    core.add("a", [1], PARAMS)
    assert ids_of(run(core)["a"]) == expected_tokens([1], PARAMS, 0, 4)


def test_an_interrupted_step_is_not_resumed() -> None:
    def during(number: int) -> None:
        if number == 2 and not raised:
            raised.append(True)
            raise KeyboardInterrupt

    raised: list[bool] = []
    core = core_over(Interfering(during))
    core.add("a", [1], PARAMS)
    core.step()
    core.step()
    with pytest.raises(KeyboardInterrupt):
        core.step()
    assert is_free(core)
    (output,) = core.step()
    assert (output.finish_reason, output.error) == ("error", "the step was interrupted")


def test_one_tokens_logprobs_a_token() -> None:
    core = core_over(FakeExecutor(CONFIG))
    core.add("a", [1], replace(PARAMS, logprobs=2))
    outputs = run(core)["a"]
    entries = [entry for output in outputs for entry in output.logprobs]
    assert [entry.token for entry in entries] == ids_of(outputs)
    assert {len(entry.top) for entry in entries} == {2}


def test_the_same_request_alone_and_in_a_batch() -> None:
    params = SamplingParams(temperature=0.7, seed=11, max_new_tokens=6, ignore_eos=True)
    alone = core_over(FakeExecutor(CONFIG))
    alone.add("a", [1, 2, 3], params)
    batch = core_over(FakeExecutor(CONFIG, num_drafts=2))
    for i in range(5):
        batch.add(f"r{i}", [1, 2, 3], params)
    expected = ids_of(run(alone)["a"])
    assert expected == expected_tokens([1, 2, 3], params, 11, 6)
    assert [ids_of(outputs) for outputs in run(batch).values()] == [expected] * 5
