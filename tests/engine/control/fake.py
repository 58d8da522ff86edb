"""A model whose next token is a hash of everything it has seen, behind an executor with physical pages and slots.

Recurrence is played by a hash of all tokens, kept in the slot after each token of the last row, as a device keeps what
it may have to take back. A place in a page holds the hash as it was after its token, and attention is played by reading
all of them back. So a page, position, slot, length or freshness that is off by anything changes the tokens, also where
other tokens stood before the same one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed_engine.control import (
    Accepted,
    ControlConfig,
    CopyPage,
    CopySlot,
    Failed,
    Fetch,
    Offload,
    PendingStep,
    Row,
    RowResult,
    Sample,
    SamplingParams,
    Settle,
    StepPlan,
    StepResult,
    TokenLogprobs,
    Transfer,
)

EOS = 0
PIECES = (
    *(b"", b"a", b"b", b"ab", b"ba", b" c", b"aba"),
    *(b"\xc3", b"\xa9", b"\xf0", b"\x9f", b"\xf0\x9f\x98", b"\x98", b"\x80", b"a\xf0\x9f", b"\x98\x80b"),
)
VOCAB = len(PIECES)
_MASK = (1 << 64) - 1


class FakeTokenizer:
    """Byte pieces, several of them parts of a character; the end of sequence has no text."""

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(PIECES[token] for token in ids).decode("utf-8", errors="replace")


def fold(state: int, value: int) -> int:
    state = (state ^ (value + 1)) * 0x9E3779B97F4A7C15 & _MASK
    return state ^ (state >> 29)


def choose(seen: int, state: int, params: SamplingParams, seed: int, index: int) -> int:
    """The token the model takes: of what the pages and the slot say, and of the randomness where it samples."""
    value = fold(seen, state)
    if params.temperature > 0:
        value = fold(fold(value, seed), index)
    return (value >> 20) % VOCAB


def describe(token: int, params: SamplingParams) -> TokenLogprobs:
    top = tuple((other, -float(rank)) for rank, other in enumerate(range(params.logprobs or 0)))
    return TokenLogprobs(token, -float(token), top)


def expected_tokens(prompt: Sequence[int], params: SamplingParams, seed: int, count: int) -> list[int]:
    """The first count tokens, one after the other with no cache at all."""
    state = seen = 0
    for token in prompt:
        state = fold(state, token)
        seen = fold(seen, state)
    tokens: list[int] = []
    for index in range(count):
        tokens.append(choose(seen, state, params, seed, index))
        state = fold(state, tokens[-1])
        seen = fold(seen, state)
    return tokens


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    text: str
    finish_reason: str


def expected_answer(prompt: Sequence[int], params: SamplingParams, seed: int, max_context: int) -> Answer:
    """What a request answers, decided on the whole text anew after each token."""
    limit = min(params.max_new_tokens, max_context - len(prompt))
    ids: list[int] = []
    decode = FakeTokenizer().decode
    for token in expected_tokens(prompt, params, seed, limit):
        ids.append(token)
        if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
            return Answer(ids, _cut(decode(ids[:-1]), params.stop)[0], "stop")
        text = decode(ids)
        text, stopped = _cut(text if len(ids) == limit else text.rstrip("\ufffd"), params.stop)
        if stopped:
            return Answer(ids, text, "stop")
    return Answer(ids, decode(ids), "length")


def _cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@dataclass(frozen=True)
class Done:
    """A step that was over when it was handed in."""

    step: StepResult

    def result(self) -> StepResult:
        return self.step


class Synchronous:
    """An executor that runs a step while it is handed in."""

    def submit(self, plan: StepPlan) -> PendingStep:
        return Done(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        raise NotImplementedError


@dataclass(frozen=True)
class Slot:
    """States after start, start + 1, .. tokens; only one where the slot is settled."""

    start: int
    states: tuple[int, ...]

    def at(self, length: int) -> int:
        """The state after length tokens; not the one from before the last row."""
        index = length - self.start
        assert min(1, len(self.states) - 1) <= index < len(self.states)
        return self.states[index]


class Deferred:
    """A step that runs only when its result is asked for."""

    def __init__(self, executor: "FakeExecutor", plan: StepPlan) -> None:
        self._executor = executor
        self._plan = plan

    def result(self) -> StepResult:
        assert self._executor.running is self
        self._executor.running = None
        return self._executor.execute(self._plan)


class FakeExecutor(Synchronous):
    """Pages and slots start as garbage. Drafts, if any, are right more often than not.

    `deferred`: steps run when their results are asked for, as if on a slow device.
    """

    def __init__(self, config: ControlConfig, num_drafts: int = 0, *, deferred: bool = False) -> None:
        self.config = config
        self.num_drafts = num_drafts
        self.deferred = deferred
        self.running: Deferred | None = None
        size = config.page_size
        # Token and state after it.
        self.cells = {(page, offset): (-7, -9) for page in range(config.num_pages) for offset in range(size)}
        self.slots = [Slot(-99, (0xDEAD,))] * config.pool_slots
        self.hosts = [Slot(-99, (0xDEAD,))] * config.num_host_snapshots
        self.broken: set[str] = set()
        self.plans: list[StepPlan] = []
        self._following: dict[str, tuple[int, int | None]] = {}

    def submit(self, plan: StepPlan) -> PendingStep:
        assert self.running is None
        if not self.deferred:
            return super().submit(plan)
        self.running = Deferred(self, plan)
        return self.running

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self._check(plan)
        for transfer in plan.transfers:
            self._move(transfer)
        return StepResult(tuple(self._run(row) for row in plan.rows))

    def _check(self, plan: StepPlan) -> None:
        size = self.config.page_size
        for row in plan.rows:
            written = row.pages[row.start // size :]
            others = [page for other in plan.rows if other is not row for page in other.pages]
            assert not set(written) & set(others)
            assert len(set(row.pages)) == len(row.pages)
        assert len({row.slot for row in plan.rows}) == len(plan.rows) <= self.config.max_batch
        assert 0 < sum(len(row.tokens) for row in plan.rows) <= self.config.max_step_tokens
        assert [row.decode for row in plan.rows] == [i < plan.num_decodes for i in range(len(plan.rows))]
        if not self.config.has_state:
            assert all(isinstance(transfer, CopyPage) for transfer in plan.transfers)

    def _move(self, transfer: Transfer) -> None:
        match transfer:
            case Settle(slot, length):
                self.slots[slot] = Slot(length, (self.slots[slot].at(length),))
            case CopySlot(source, target):
                self.slots[target] = self._settled(source)
            case CopyPage(source, target):
                for offset in range(self.config.page_size):
                    self.cells[target, offset] = self.cells[source, offset]
            case Offload(slot, host):
                self.hosts[host] = self._settled(slot)
            case Fetch(host, slot):
                self.slots[slot] = self.hosts[host]

    def _settled(self, slot: int) -> Slot:
        assert len(self.slots[slot].states) == 1
        return self.slots[slot]

    def _cell(self, row: Row, position: int) -> tuple[int, int]:
        return row.pages[position // self.config.page_size], position % self.config.page_size

    def _state(self, row: Row) -> int:
        """Before the row's first token."""
        if row.fresh:
            assert row.start == 0
            return 0
        if self.config.has_state:
            return self.slots[row.slot].at(row.start)
        return self.cells[self._cell(row, row.start - 1)][1]

    def _check_row(self, row: Row) -> None:
        first = max(0, row.start - self.config.context_tokens)
        assert list(row.context) == [self.cells[self._cell(row, p)][0] for p in range(first, row.start)]
        assert (row.following is None) == (row.sample is not None)
        end, following = self._following.get(row.request_id, (-1, None))
        assert following in (None, row.tokens[0]) or end != row.start
        self._following[row.request_id] = row.start + len(row.tokens), row.following

    def _run(self, row: Row) -> RowResult:
        self._check_row(row)
        states = [self._state(row)]
        for j, token in enumerate(row.tokens):
            states.append(fold(states[-1], token))
            self.cells[self._cell(row, row.start + j)] = token, states[-1]
        self.slots[row.slot] = Slot(row.start, tuple(states))
        if row.request_id in self.broken:
            self.slots[row.slot] = Slot(-99, (0xBAD,))
            return Failed("logits are not finite")
        if row.sample is None:
            return Accepted()

        seen = 0
        for position in range(row.start):
            seen = fold(seen, self.cells[self._cell(row, position)][1])
        tokens: list[int] = []
        sample, params = row.sample, row.sample.params
        for j, state in enumerate(states[1:]):
            seen = fold(seen, state)
            last = j + 1 == len(row.tokens)
            if row.decode or last:
                tokens.append(choose(seen, state, params, sample.seed, sample.index + len(tokens)))
                if not last and row.tokens[j + 1] != tokens[-1]:
                    break
        logprobs = () if params.logprobs is None else tuple(describe(token, params) for token in tokens)
        return Accepted(tuple(tokens), logprobs, self._draft(sample, tokens, seen, state))

    def _draft(self, sample: Sample, tokens: Sequence[int], seen: int, state: int) -> tuple[int, ...]:
        drafts: list[int] = []
        token = tokens[-1]
        for j in range(self.num_drafts):
            state = fold(state, token)
            seen = fold(seen, state)
            token = choose(seen, state, sample.params, sample.seed, sample.index + len(tokens) + j)
            if seen % 4 == 0:
                token = (token + 1) % VOCAB
            drafts.append(token)
        return tuple(drafts)
