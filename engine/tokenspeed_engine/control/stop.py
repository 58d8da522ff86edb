"""Stop strings in a stream of text: found wherever they complete, and nothing of them let out before."""


class StopStrings:
    """Text in, text out, up to the first stop string.

    The result does not depend on how the text is cut into pieces: the stop string that completes first counts, and of
    those that complete at the same character the longest.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that may go out now, and whether a stop string ended it. After that, push no more."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start = min(found)
            return text[:start], True
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """What was held back as the possible start of a stop string; no text follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that is a beginning of stop, and not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
