"""Tokenizer and chat template of a model folder, and the tokens its generations stop at. Imports no torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jinja2 import TemplateError
from tokenizers import Tokenizer as FastTokenizer

from tokenspeed_engine.chat_template import ChatTemplateError, compile_template, render
from tokenspeed_engine.checkpoint.errors import CheckpointError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A tokenizer.json with the special tokens and chat templates beside it."""

    def __init__(
        self,
        fast: FastTokenizer,
        special_tokens: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
    ) -> None:
        """`templates` are Jinja sources by name; the one called "default" is the usual one."""
        self._fast = fast
        self._special_tokens = dict(special_tokens or {})
        self._templates = {name: compile_template(source) for name, source in (templates or {}).items()}

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """The tokenizer of a model folder, or None if it has none. Raises CheckpointError for a malformed one."""
        file = folder / "tokenizer.json"
        if not file.exists():
            return None
        try:
            fast = FastTokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(str(file), [f"cannot be read: {error}"]) from error
        config = _read_json(folder / "tokenizer_config.json")
        try:
            return cls(fast, _special_tokens(config), _templates(folder, config))
        except (TemplateError, UnicodeDecodeError) as error:
            raise CheckpointError(str(folder), [f"chat template: {error}"]) from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Text of a rendered chat already holds its special tokens: pass False for it."""
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that form no character become U+FFFD; ids outside the vocabulary are left out."""
        return str(self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`, as the model's chat template writes it; `variables` are passed to the template.

        Raises ChatTemplateError if there is no template or it refuses the messages.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ChatTemplateError("this model has no chat template")
        given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return render(self._templates[name], self._special_tokens | given | variables)


def read_stop_token_ids(folder: Path, config_eos: Sequence[int]) -> tuple[int, ...]:
    """Ids that end a generation: eos_token_id of generation_config.json, or `config_eos` where that says nothing.

    Raises CheckpointError for a malformed file.
    """
    file = folder / "generation_config.json"
    stop = _read_json(file).get("eos_token_id")
    if stop is None:
        return tuple(config_eos)
    ids = stop if isinstance(stop, list) else [stop]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise CheckpointError(str(file), [f"eos_token_id: expected token ids, got {stop!r}"])
    return tuple(ids)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template files, which newer versions of transformers write, else the config's entry: a source, or named ones."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")}
    sources = {name: file.read_text("utf-8") for name, file in files.items() if file.exists()}
    if "default" in sources:
        return sources
    stored = config.get("chat_template")
    if isinstance(stored, str):
        return {"default": stored} | sources
    if isinstance(stored, list):
        return {entry["name"]: entry["template"] for entry in stored if _is_named_template(entry)} | sources
    return sources


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)


def _read_json(file: Path) -> dict[str, Any]:
    """The object in `file`; empty if there is no such file."""
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise CheckpointError(str(file), [f"cannot be read: {error}"]) from error
    if not isinstance(content, dict):
        raise CheckpointError(str(file), ["not a JSON object"])
    return content
