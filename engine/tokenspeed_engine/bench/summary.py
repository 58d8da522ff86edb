"""From the turns of a run to its figures."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokenspeed_engine.bench.agents import Run, Turn


def summarise(run: Run, gpus: int) -> dict[str, Any]:
    """The figures of a run, by name; None where there is nothing to take one from.

    Seconds are seconds. `user_tokens_per_second`: (tokens − 1) / (last piece − first piece) of a turn, its median over
    turns; with the wait for the first token in `user_tokens_per_second_with_ttft`. Tokens a minute are those of the
    whole run over its whole time and `gpus`: generated ones, and all with the prompts', reused or not. `gap`: between
    pieces of one answer, which hold one or several tokens. `cache_hit` leaves each session's first turn out.
    """
    done = [turn for turn in run.turns if turn.answer.error is None]
    later = [turn for turn in done if turn.turn > 0]
    minutes = run.seconds / 60
    output = sum(turn.answer.output_tokens for turn in done)
    prompt = sum(turn.answer.prompt_tokens for turn in done)
    return {
        "turns": len(done),
        "failed_turns": len(run.turns) - len(done),
        "seconds": run.seconds,
        "user_tokens_per_second": percentile(map_known(user_rate, done), 50),
        "user_tokens_per_second_with_ttft": percentile(map_known(whole_rate, done), 50),
        "output_tokens_per_minute_per_gpu": output / minutes / gpus,
        "total_tokens_per_minute_per_gpu": (output + prompt) / minutes / gpus,
        "ttft_first_turn": percentiles(map_known(ttft, [turn for turn in done if turn.turn == 0])),
        "ttft_later_turns": percentiles(map_known(ttft, later)),
        "gap": percentiles([gap for turn in done for gap in gaps(turn)]),
        "cache_hit": cache_hit(later),
        "tokens_per_verify_step": None if run.speculation is None else run.speculation.tokens_per_step,
    }


def ttft(turn: Turn) -> float | None:
    """Seconds from sending the request to the first piece of text."""
    answer = turn.answer
    return answer.arrivals[0] - answer.started if answer.arrivals else None


def gaps(turn: Turn) -> list[float]:
    """Seconds between pieces of text."""
    times = turn.answer.arrivals
    return [following - earlier for earlier, following in itertools.pairwise(times)]


def user_rate(turn: Turn) -> float | None:
    """Tokens a second that one user sees, from the first piece on."""
    answer = turn.answer
    if len(answer.arrivals) < 2 or answer.output_tokens < 2:
        return None
    return (answer.output_tokens - 1) / max(answer.arrivals[-1] - answer.arrivals[0], 1e-9)


def whole_rate(turn: Turn) -> float | None:
    """Tokens a second of the whole turn, the wait for the first included."""
    answer = turn.answer
    return answer.output_tokens / (answer.arrivals[-1] - answer.started) if answer.arrivals else None


def cache_hit(turns: Sequence[Turn]) -> float | None:
    """Share of the prompts' tokens that came from a cache, or None where the server does not say."""
    if not turns or any(turn.answer.cached_tokens is None for turn in turns):
        return None
    cached = sum(turn.answer.cached_tokens or 0 for turn in turns)
    return cached / sum(turn.answer.prompt_tokens for turn in turns)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """P50, P99 and the largest."""
    return {
        "p50": percentile(values, 50),
        "p99": percentile(values, 99),
        "max": max(values, default=None),
    }


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that so many percent do not exceed (nearest rank); None of nothing."""
    ordered = sorted(values)
    return ordered[max(math.ceil(percent / 100 * len(ordered)), 1) - 1] if ordered else None


def map_known(function: Callable[[Turn], float | None], turns: Iterable[Turn]) -> list[float]:
    """What `function` gives for those turns of which it knows something."""
    return [value for turn in turns if (value := function(turn)) is not None]
