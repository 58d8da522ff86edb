"""Prompts whose greedy continuations any order of summing agrees on."""

from collections.abc import Callable, Sequence

Prompts = Callable[[int], list[list[int]]]
Greedy = Callable[[Sequence[int], int], Sequence[int]]


def without_near_ties(prompts: Prompts, greedy: Greedy, count: int) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """For each of `prompts(seed)` the first seed at which the oracle's `greedy` sees no near-tie; with its tokens."""
    found, tokens = [], []
    for index in range(len(prompts(0))):
        for seed in range(20):
            prompt = prompts(seed)[index]
            try:
                tokens.append(tuple(greedy(prompt, count)))
            except RuntimeError:  # what the oracle raises at a near-tie
                continue
            found.append(prompt)
            break
    assert len(found) == len(prompts(0))
    return found, tokens
