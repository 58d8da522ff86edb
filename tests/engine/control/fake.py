"""A model whose next token is a hash of everything it has seen, behind an executor with physical pages and slots.

Attention is played by reading every token back from the pages, recurrence by a hash kept in the slot. A page, position,
slot or freshness that is off by anything changes the tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed_engine.control import (
    Accepted,
    ControlConfig,
    Failed,
    Row,
    RowResult,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenLogprobs,
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


def fold_all(tokens: Sequence[int]) -> int:
    state = 0
    for token in tokens:
        state = fold(state, token)
    return state


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
    tokens = list(prompt)
    for index in range(count):
        state = fold_all(tokens)
        tokens.append(choose(state, state, params, seed, index))
    return tokens[len(prompt) :]


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


class FakeExecutor:
    """Pages and slots start as garbage. Drafts, if any, are right more often than not."""

    def __init__(self, config: ControlConfig, num_drafts: int = 0) -> None:
        self.config = config
        self.num_drafts = num_drafts
        self.cells = {(page, offset): -7 for page in range(config.num_pages) for offset in range(config.page_size)}
        self.slots = [0xDEAD] * config.num_slots
        self.broken: set[str] = set()
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self._check(plan)
        return StepResult(tuple(self._run(row) for row in plan.rows))

    def _check(self, plan: StepPlan) -> None:
        pages = [page for row in plan.rows for page in row.pages]
        assert len(set(pages)) == len(pages)
        assert len({row.slot for row in plan.rows}) == len(plan.rows) <= self.config.max_batch
        assert 0 < sum(len(row.tokens) for row in plan.rows) <= self.config.max_step_tokens
        assert [row.decode for row in plan.rows] == [i < plan.num_decodes for i in range(len(plan.rows))]

    def _cell(self, row: Row, position: int) -> tuple[int, int]:
        return row.pages[position // self.config.page_size], position % self.config.page_size

    def _run(self, row: Row) -> RowResult:
        state = 0 if row.fresh else self.slots[row.slot]
        seen = 0
        for position in range(row.start):
            seen = fold(seen, self.cells[self._cell(row, position)])
        before = [
            self.cells[self._cell(row, p)] for p in range(max(0, row.start - self.config.context_tokens), row.start)
        ]
        assert list(row.context) == before
        for j, token in enumerate(row.tokens):
            self.cells[self._cell(row, row.start + j)] = token
        if row.request_id in self.broken:
            self.slots[row.slot] = 0xBAD
            return Failed("logits are not finite")

        tokens: list[int] = []
        for j, token in enumerate(row.tokens):
            seen, state = fold(seen, token), fold(state, token)
            last = j + 1 == len(row.tokens)
            if row.sample is not None and (row.decode or last):
                sample = row.sample
                tokens.append(choose(seen, state, sample.params, sample.seed, sample.index + len(tokens)))
                if not last and row.tokens[j + 1] != tokens[-1]:
                    break
        self.slots[row.slot] = state
        if row.sample is None:
            return Accepted()
        params = row.sample.params
        logprobs = () if params.logprobs is None else tuple(describe(token, params) for token in tokens)
        return Accepted(tuple(tokens), logprobs, self._draft(row, tokens, seen, state))

    def _draft(self, row: Row, tokens: Sequence[int], seen: int, state: int) -> tuple[int, ...]:
        assert row.sample is not None
        drafts: list[int] = []
        token = tokens[-1]
        for j in range(self.num_drafts):
            seen, state = fold(seen, token), fold(state, token)
            token = choose(seen, state, row.sample.params, row.sample.seed, row.sample.index + len(tokens) + j)
            if seen % 4 == 0:
                token = (token + 1) % VOCAB
            drafts.append(token)
        return tuple(drafts)
