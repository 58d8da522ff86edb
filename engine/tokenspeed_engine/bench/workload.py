"""The agent's workload: many turns, a long first message, short ones after it, and answers that join the history.

Its sizes in tokens are those of the published agent benchmarks: 10 to 15 turns, 50,000 tokens first, 800 a turn after
that, at most 500 out.
"""

import random
from dataclasses import dataclass, fields

_TEXT = (
    "add all and append args as assert await break call case check class close code copy count data decode def "
    "del dict done else encode end error even except exit false field file find first float for format from get "
    "given group hash head help if import in index init insert int is item join key last left len line list load "
    "lock loop main make map match max min mode name new next node none not number open or order page parse part "
    "pass path point pool pop print push query queue raise range rank read reduce reset result return right row "
    "run save scale seed self send set shape size skip slot sort split stack start state step stop store str sum "
    "swap table tail take task test text time token top total tree true try type unit update use value wait walk "
    "while width with word work write yield zero"
)
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True)
class Workload:
    """What the agents of a run do.

    Args:
        users: agents at work at once; each starts its next session when one ends.
        sessions: agents in all.
        least_turns, most_turns: turns of a session, evenly drawn.
        first_tokens: of the first message.
        turn_tokens: of every later message.
        output_tokens: most that an answer may have.
        seed: of everything drawn. Sessions differ from their first word on, so they share no prefix.

    Raises:
        ValueError: a size is below 1, or least_turns above most_turns; the message begins with the field's name.
    """

    users: int = 1
    sessions: int = 1
    least_turns: int = 10
    most_turns: int = 15
    first_tokens: int = 50_000
    turn_tokens: int = 800
    output_tokens: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "seed" and getattr(self, field.name) < 1:
                raise ValueError(f"{field.name}: expected at least 1, got {getattr(self, field.name)}")
        if self.least_turns > self.most_turns:
            raise ValueError(f"least_turns: expected at most most_turns ({self.most_turns}), got {self.least_turns}")

    def scaled(self, divisor: int) -> "Workload":
        """The same with all token counts divided, each at least 1."""
        first, turn, output = (
            max(1, size // divisor) for size in (self.first_tokens, self.turn_tokens, self.output_tokens)
        )
        return Workload(self.users, self.sessions, self.least_turns, self.most_turns, first, turn, output, self.seed)

    def session(self, number: int) -> "Session":
        """Session number `number`, from 0; the same at every call."""
        draw = random.Random(f"{self.seed}:{number}")
        turns = draw.randint(self.least_turns, self.most_turns)
        return Session(number, turns, self, draw)


class Session:
    """One agent: its messages in order, made of common words."""

    def __init__(self, number: int, turns: int, workload: Workload, draw: random.Random) -> None:
        self.number = number
        self.turns = turns
        self._workload = workload
        self._draw = draw

    def message(self, turn: int, words_per_token: float) -> str:
        """What the agent sends at `turn`, from 0. Turns are to be asked for in order."""
        tokens = self._workload.turn_tokens if turn else self._workload.first_tokens
        return words(self._draw, max(1, round(tokens * words_per_token)))


def words(draw: random.Random, count: int) -> str:
    """`count` words in lines of twelve."""
    chosen = draw.choices(WORDS, k=count)
    return "\n".join(" ".join(chosen[start : start + 12]) for start in range(0, count, 12))
