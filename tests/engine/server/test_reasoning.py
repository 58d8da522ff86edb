"""Reasoning apart from the answer, however the text is cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_engine.server.reasoning import Piece, ReasoningParser, opens_reasoning

CASES = [
    # text, inside at the start, reasoning, content
    ("why\n</think>\n\nanswer", True, "why", "answer"),
    ("answer", False, "", "answer"),
    ("never closed", True, "never closed", ""),
    ("<think>\nwhy\n</think>\nanswer\n", False, "why", "answer\n"),
    ("one<think>two</think>answer", True, "onetwo", "answer"),
    ("why</think>one</think>two", True, "why", "onetwo"),
    ("why\n<tool_call>\n<function=f>", True, "why", "<tool_call>\n<function=f>"),
    ("a < b </thin", True, "a < b </thin", ""),
    ("\n\n</think>\n\nanswer", True, "", "answer"),
    ("x <tool_call> y", False, "", "x <tool_call> y"),
]


def parse(pieces: list[str], inside: bool) -> tuple[str, str]:
    parser = ReasoningParser(inside)
    found: list[Piece] = [each for piece in pieces for each in parser.push(piece)]
    found += parser.flush()
    assert all(each.text for each in found)
    return tuple("".join(each.text for each in found if each.kind == kind) for kind in ("reasoning", "content"))  # type: ignore[return-value]


@pytest.mark.parametrize(("text", "inside", "reasoning", "content"), CASES)
def test_a_text_in_one_piece(text: str, inside: bool, reasoning: str, content: str) -> None:
    assert parse([text], inside) == (reasoning, content)


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_cuts_change_nothing(case: tuple[str, bool, str, str], cuts: list[int]) -> None:
    text, inside, reasoning, content = case
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert parse(pieces, inside) == (reasoning, content)


def test_text_goes_out_as_soon_as_no_tag_can_follow() -> None:
    parser = ReasoningParser(True)
    assert parser.push("because") == [Piece("reasoning", "because")]
    assert parser.push(" a <") == [Piece("reasoning", " a ")]
    assert parser.push(" b") == [Piece("reasoning", "< b")]


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("<think>x</think> again <think>", True),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_the_prompt_says_where_an_answer_starts(prompt: str, opens: bool) -> None:
    assert opens_reasoning(prompt) is opens
