"""Text comes out whole and once, and nothing of a stop string or behind it leaks."""

from collections.abc import Sequence
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from tokenspeed_engine.control import Detokenizer, RequestOutput, SamplingParams, Tokenizer, TokenLogprobs
from tokenspeed_engine.control.output import OutputStream
from tokenspeed_engine.control.request import Request
from tokenspeed_engine.control.stop import StopStrings

TEXTS = st.text(st.sampled_from("ab é€😀\ufffd"), max_size=12)
END = 256
UNTIL_END = SamplingParams(max_new_tokens=50, stop=("END",), logprobs=0)


class ByteTokenizer:
    """A token a byte, as byte-level tokenizers do; END has no text."""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token != END).decode("utf-8", errors="replace")


class ByteFallbackTokenizer:
    """As with a byte fallback: each byte of an unfinished character shows, a leading space does not."""

    def decode(self, ids: Sequence[int]) -> str:
        data = bytes(token for token in ids if token != END)
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            text = data[: error.start].decode() + "\ufffd" * (len(data) - error.start)
        return text.removeprefix(" ")


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), ByteFallbackTokenizer()])
def test_a_four_byte_character_comes_out_whole(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in "a😀 é".encode()]
    assert pieces == ["a", "", "", "", "😀", " ", "", "é"]
    assert detokenizer.flush() == ""


def test_a_character_cut_by_the_end_is_flushed_once() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    assert [detokenizer.push(token) for token in "a😀".encode()[:3]] == ["a", "", ""]
    assert (detokenizer.flush(), detokenizer.flush()) == ("\ufffd", "")


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([*range(0x5E, 0x64), 0x20, 0x80, 0x98, 0x9F, 0xC3, 0xE2, 0xF0, 0xFF, END]), max_size=20)
)
def test_pieces_add_up_to_the_whole_even_of_bytes_that_are_no_text(ids: list[int]) -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    pieces = [detokenizer.push(token) for token in ids]
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == ByteTokenizer().decode(ids)


@settings(deadline=None)
@given(st.lists(st.sampled_from([*(bytes([b]) for b in b" ab"), "é".encode(), "😀".encode(), None]), max_size=12))
def test_a_leading_space_is_dropped_only_where_the_text_begins(parts: list[bytes | None]) -> None:
    ids = [token for part in parts for token in (part if part is not None else [END])]
    text = b"".join(part for part in parts if part is not None).decode()
    detokenizer = Detokenizer(ByteFallbackTokenizer())
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == text.removeprefix(" ")


@settings(deadline=None)
@given(TEXTS, st.lists(st.integers(0, 40), max_size=8))
def test_tokens_may_end_anywhere_in_a_character(text: str, cuts: list[int]) -> None:
    data = text.encode()
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = [data[start:end] for start, end in pairwise(bounds)]

    class ChunkTokenizer:
        def decode(self, ids: Sequence[int]) -> str:
            return b"".join(chunks[token] for token in ids).decode(errors="replace")

    detokenizer = Detokenizer(ChunkTokenizer())
    out = ""
    for token, end in enumerate(bounds[1:]):
        out += detokenizer.push(token)
        assert out == data[:end].decode(errors="ignore").rstrip("\ufffd")
    assert out + detokenizer.flush() == text


def test_a_long_text_is_not_decoded_from_its_beginning_at_each_token() -> None:
    lengths = []

    class Counting(ByteTokenizer):
        def decode(self, ids: Sequence[int]) -> str:
            lengths.append(len(ids))
            return super().decode(ids)

    detokenizer = Detokenizer(Counting())
    for token in ("abc é 😀" * 50).encode():
        detokenizer.push(token)
    assert max(lengths) <= 8
    lengths.clear()
    for token in (*[END] * 50, ord("a"), *[END] * 50):
        detokenizer.push(token)
    assert max(lengths) <= 8, "a run of tokens without text is not kept either"
    fresh = Detokenizer(Counting())
    assert [fresh.push(token) for token in (*[END] * 50, *b" a")] == [*[""] * 50, " ", "a"]
    assert max(lengths) <= 8


@pytest.mark.parametrize("start", [(), (END,), (END, END), (ord(" "),), (ord(" "), END), (END, ord(" "), END)])
def test_tokens_without_text_change_nothing_of_what_follows(start: tuple[int, ...]) -> None:
    ids = [*start, *b" a", END, END, *b" b"]
    detokenizer = Detokenizer(ByteFallbackTokenizer())
    pieces = [detokenizer.push(token) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == ByteFallbackTokenizer().decode(ids)


@settings(deadline=None)
@given(
    text=TEXTS,
    cuts=st.lists(st.integers(0, 12), max_size=6),
    stops=st.lists(TEXTS.filter(bool).map(lambda text: text[:4]), min_size=1, max_size=3),
)
@example(text="xab", cuts=[], stops=["b", "ab"])
@example(text="abcd", cuts=[], stops=["abcd", "bc"])
@example(text="aab", cuts=[1, 2], stops=["ab"])
@example(text="abac", cuts=[1, 2, 3], stops=["abad", "ac"])
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(text: str, cuts: list[int], stops: list[str]) -> None:
    expected, stopped = text, False
    for end in range(len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            expected, stopped = text[: end - max(lengths)], True
            break

    matcher = StopStrings(tuple(stops))
    out, found = "", False
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in pairwise(bounds):
        piece, found = matcher.push(text[start:end])
        out += piece
        assert expected.startswith(out)
        if found:
            break
    if not found:
        out += matcher.flush()
    assert (out, found) == (expected, stopped)


def stream_of(params: SamplingParams) -> OutputStream:
    request = Request("r", 0, (1, 2, 3), params, seed=0, max_tokens=3 + params.max_new_tokens)
    return OutputStream(request, {END}, ByteTokenizer())


def push_all(stream: OutputStream, ids: Sequence[int], block: int) -> list[RequestOutput]:
    """Push ids in blocks of a step; the outputs until one has a finish reason."""
    outputs = []
    for start in range(0, len(ids), block):
        for token in ids[start : start + block]:
            reason = stream.push(token, TokenLogprobs(token, -1.0, ()))
            if reason is not None:
                break
        outputs.append(stream.take(reason))
        if reason is not None:
            break
    return outputs


@pytest.mark.parametrize("block", [1, 2, 3, 4, 5, 20])
@pytest.mark.parametrize("lead", [0, 1, 2, 3, 4])
@pytest.mark.parametrize(
    ("ids", "shown", "kept", "params"),
    [
        (b"END tail", "", 3, UNTIL_END),
        ("x😀END😀".encode(), "x", 8, SamplingParams(max_new_tokens=50, stop=("😀END",), logprobs=0)),
        (b"ENxENEND", "ENxEN", 8, UNTIL_END),
        ([*b"EN", END, *b"D!"], "EN", 3, UNTIL_END),
        (
            [*b"EN", 7, *b"D!"],
            "EN",
            3,
            SamplingParams(max_new_tokens=50, stop=("END",), stop_token_ids=(7,), logprobs=0),
        ),
    ],
)
def test_a_stop_in_any_position_of_a_block(
    ids: Sequence[int], shown: str, kept: int, params: SamplingParams, lead: int, block: int
) -> None:
    outputs = push_all(stream_of(params), [*b"." * lead, *ids], block)
    got = [token for output in outputs for token in output.token_ids]
    assert "".join(output.text for output in outputs) == "." * lead + shown
    assert got == [*b"." * lead, *ids[:kept]]
    assert [entry.token for output in outputs for entry in output.logprobs] == got
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].usage.completion_tokens == lead + kept


@pytest.mark.parametrize("block", [1, 2, 7])
def test_what_was_held_back_comes_out_at_the_length(block: int) -> None:
    outputs = push_all(stream_of(SamplingParams(max_new_tokens=5, stop=("ENDE",))), b"x.END more", block)
    assert "".join(output.text for output in outputs) == "x.END"
    assert outputs[-1].finish_reason == "length"
    assert outputs[-1].usage.completion_tokens == 5


def test_a_stop_string_that_the_last_flush_completes() -> None:
    outputs = push_all(stream_of(SamplingParams(max_new_tokens=3, stop=("b\ufffd",))), b"ab\xf0", 1)
    assert ("".join(output.text for output in outputs), outputs[-1].finish_reason) == ("a", "stop")


def test_what_was_held_back_comes_out_with_an_abort() -> None:
    stream = stream_of(UNTIL_END)
    assert [output.text for output in push_all(stream, b"xEN\xf0", 1)] == ["x", "", "", ""]
    assert stream.take("abort").text == "EN\ufffd"
