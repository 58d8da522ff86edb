"""A core over the fake model, driven step by step."""

from collections.abc import Iterable
from dataclasses import replace

from tests.engine.control.fake import EOS, VOCAB, FakeExecutor, FakeTokenizer
from tests.engine.control.owners import check_owners
from tokenspeed_engine.control import ControlConfig, EngineCore, RequestOutput, SamplingParams, StepPlan, Transfer

GREEDY = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
CACHED = ControlConfig(
    page_size=16,
    num_pages=64,
    num_slots=2,
    max_batch=2,
    max_step_tokens=64,
    max_context=256,
    prefix_cache=True,
    state_interval=48,
    num_snapshots=8,
)
STATELESS = replace(CACHED, has_state=False, state_interval=0)
SMALL = replace(CACHED, page_size=4, state_interval=0, num_slots=1, max_batch=1, num_snapshots=1)
LONG = [(7 * i + i // 16) % VOCAB for i in range(200)]


class Engine:
    """Outputs by request, and what can be asked of them. Every step ends with a look at who owns what."""

    def __init__(self, config: ControlConfig, num_drafts: int = 0, *, deferred: bool = False) -> None:
        self.config = config
        self.executor = FakeExecutor(config, num_drafts, deferred=deferred)
        self.core = EngineCore(config, self.executor, vocab_size=VOCAB, eos_token_ids={EOS}, tokenizer=FakeTokenizer())
        self.outputs: dict[str, list[RequestOutput]] = {}

    @property
    def plans(self) -> list[StepPlan]:
        return self.executor.plans

    @property
    def transfers(self) -> list[Transfer]:
        return [transfer for plan in self.plans for transfer in plan.transfers]

    def add(self, name: str, prompt: Iterable[int], params: SamplingParams = GREEDY) -> None:
        self.core.add(name, list(prompt), params)
        self.outputs[name] = []

    def step(self) -> None:
        for output in self.core.step():
            self.outputs[output.request_id].append(output)
        check_owners(self.core.scheduler)

    def finish(self, most_steps: int = 400) -> None:
        """Run until nothing is left, and see that everything is free then."""
        for _ in range(most_steps):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work
        self.check_free()

    def ask(self, name: str, prompt: Iterable[int], params: SamplingParams = GREEDY) -> list[int]:
        """Add one request, finish all, and return its tokens."""
        self.add(name, prompt, params)
        self.finish()
        return self.tokens(name)

    def ask_beside(self, name: str, prompt: Iterable[int], params: SamplingParams = GREEDY) -> list[int]:
        """As `ask`, but leave others running."""
        self.add(name, prompt, params)
        while not self.is_over(name):
            self.step()
        return self.tokens(name)

    def check_free(self) -> None:
        scheduler, config = self.core.scheduler, self.config
        assert (scheduler.pages.num_free, scheduler.slots.num_free) == (config.num_pages, config.pool_slots)

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]

    def text(self, name: str) -> str:
        return "".join(output.text for output in self.outputs[name])

    def is_over(self, name: str) -> bool:
        return bool(self.outputs[name]) and self.last(name).finish_reason is not None

    def last(self, name: str) -> RequestOutput:
        return self.outputs[name][-1]

    def cached(self, name: str) -> int:
        return self.last(name).usage.cached_tokens
