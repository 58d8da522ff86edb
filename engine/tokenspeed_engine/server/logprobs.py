"""Log-probabilities in the styles of OpenAI's two endpoints."""

from collections.abc import Sequence
from typing import Any

from tokenspeed_engine.control import TokenLogprobs
from tokenspeed_engine.tokenizer import Tokenizer

_LEAST = -9999.0
"""JSON has no −inf; this is what OpenAI's API shows for it."""


def chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion or of a part of it."""
    return {
        "content": [
            _entry(entry.token, entry.logprob, tokenizer)
            | {"top_logprobs": [_entry(token, logprob, tokenizer) for token, logprob in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(
    entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None, offset: int
) -> tuple[dict[str, Any], int]:
    """`choices[].logprobs` of a completion or of a part of it that begins at character `offset`; where it ends.

    As in OpenAI's API, the alternatives hold the chosen token even where it is not among the most probable ones.
    """
    texts = [_text(entry.token, tokenizer) for entry in entries]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    answer = {
        "tokens": texts,
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [_alternatives(entry, tokenizer) for entry in entries],
        "text_offset": offsets,
    }
    return answer, offset


def _alternatives(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, logprob in (*entry.top, (entry.token, entry.logprob)):
        found.setdefault(_text(token, tokenizer), _finite(logprob))
    return found


def _entry(token: int, logprob: float, tokenizer: Tokenizer | None) -> dict[str, Any]:
    text = _text(token, tokenizer)
    # A token may be a part of a character, which has no text of its own.
    whole = "\N{REPLACEMENT CHARACTER}" not in text
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if whole else None}


def _text(token: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return f"token_id:{token}"
    return tokenizer.decode([token], skip_special_tokens=False)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
