"""A running request's share of a step."""

from tokenspeed_engine.control.lifecycle import Decoding, Prefilling, Running
from tokenspeed_engine.control.plan import Row, Sample


def decode_row(state: Decoding, drafts: tuple[int, ...], context_tokens: int) -> Row:
    """The last token and drafts to verify."""
    last = state.tokens.span(state.computed, state.computed + 1)
    return _row(state, (*last, *drafts), context_tokens)


def prefill_row(state: Prefilling, count: int, context_tokens: int) -> Row:
    """The next count known tokens."""
    return _row(state, state.tokens.span(state.computed, state.computed + count), context_tokens)


def _row(state: Running, tokens: tuple[int, ...], context_tokens: int) -> Row:
    request, start = state.request, state.computed
    end = start + len(tokens)
    following = state.tokens.span(end, end + 1)
    sample = None if following else Sample(request.params, request.seed, state.tokens.num_generated)
    return Row(
        request_id=request.id,
        tokens=tokens,
        start=start,
        pages=state.pages.pages,
        slot=state.slot.slot,
        fresh=start == 0,
        context=state.tokens.span(start - context_tokens, start),
        sample=sample,
        decode=isinstance(state, Decoding),
        following=following[0] if following else None,
    )
