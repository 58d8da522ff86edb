"""The training text: the Python standard library that the running interpreter came with. Nothing is downloaded.

Text is split into library code, its tests, and a few chats made from library functions ("here is the beginning", "here
is the rest"), so that the chat template leads somewhere. One file in 32 is held out.
"""

import ast
import hashlib
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .config import END_THINK_ID, EOS_ID, IM_END_ID, IM_START_ID, THINK_ID

HELD_OUT_EVERY = 32
# Character tables and generated text: large, and not what anyone would like to see completed.
_SKIPPED = ("site-packages", "encodings", "pydoc_data", "lib2to3/tests/data", "test/cjkencodings")
_MAX_BYTES = 320_000


class Source(NamedTuple):
    """One file: path below the library's root, and its text."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        return hashlib.sha256(self.path.encode()).digest()[0] % HELD_OUT_EVERY == 0

    @property
    def is_test(self) -> bool:
        return any("test" in part for part in Path(self.path).parts)


def read_sources(root: Path | None = None) -> list[Source]:
    """All usable files below `root` (default: the standard library), in an order that only their paths decide."""
    root = root or Path(sysconfig.get_path("stdlib"))
    sources = []
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if any(part in name for part in _SKIPPED) or not 0 < path.stat().st_size < _MAX_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if sum(c.isdigit() or not c.isascii() for c in text) < 0.15 * len(text):
            sources.append(Source(name, text))
    return sorted(sources, key=lambda source: hashlib.sha256(source.path.encode()).hexdigest())


def function_halves(source: Source) -> Iterator[tuple[str, str, str]]:
    """(name, first lines, remaining lines) of the file's functions of 6 to 40 lines, dedented."""
    try:
        tree = ast.parse(source.text)
    except (SyntaxError, ValueError):
        return
    lines = source.text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno and 6 <= node.end_lineno - node.lineno <= 40:
            body = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).split("\n")
            cut = max(2, len(body) // 3)
            yield node.name, "\n".join(body[:cut]), "\n".join(body[cut:])


def chat_ids(tokenizer: Tokenizer, name: str, head: str, rest: str, thinking: bool) -> list[int]:
    """One exchange in the form that the chat template renders, ending in EOS."""

    def text(value: str) -> list[int]:
        ids: list[int] = tokenizer.encode(value, add_special_tokens=False).ids
        return ids

    thought = f"The user wants the rest of `{name}`." if thinking else ""
    return [
        *(IM_START_ID, *text("user\n" + head), IM_END_ID, *text("\n")),
        *(IM_START_ID, *text("assistant\n"), THINK_ID, *text("\n" + thought + "\n"), END_THINK_ID),
        *(*text("\n\n" + rest), IM_END_ID, *text("\n"), EOS_ID),
    ]


def build(tokenizer: Tokenizer, sources: list[Source], seed: int = 0) -> dict[str, NDArray[np.uint16]]:
    """Token streams `library`, `tests`, `chat`, `held_out` (files end in EOS), and the bytes a held-out token spans."""
    chance = random.Random(seed)
    streams: dict[str, list[int]] = {"library": [], "tests": [], "chat": [], "held_out": []}
    held_out_bytes = 0
    for source in sources:
        ids = [*tokenizer.encode(source.text, add_special_tokens=False).ids, EOS_ID]
        if source.held_out:
            streams["held_out"] += ids
            held_out_bytes += len(source.text.encode())
            continue
        streams["tests" if source.is_test else "library"] += ids
        if not source.is_test:
            for name, head, rest in function_halves(source):
                if chance.random() < 0.25:
                    streams["chat"] += chat_ids(tokenizer, name, head, rest, thinking=chance.random() < 0.5)
    arrays = {name: np.array(ids, dtype=np.uint16) for name, ids in streams.items()}
    # In hundredths, so that one dtype serves the whole file.
    arrays["held_out_bytes_per_100_tokens"] = np.array(
        [round(100 * held_out_bytes / max(1, len(streams["held_out"])))], dtype=np.uint16
    )
    return arrays
