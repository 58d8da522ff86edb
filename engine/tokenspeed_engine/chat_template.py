"""Renders the Jinja chat templates of Hugging Face folders, with what transformers provides to them."""

import datetime
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """Messages that the model's chat template does not take."""


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks the assistant's tokens for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  the base class declares a plain set

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> Template:
    """A template from the text of a checkpoint, which is not trusted: it runs in Jinja's immutable sandbox.

    Raises jinja2.TemplateError for a syntax error.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def render(template: Template, variables: Mapping[str, Any]) -> str:
    """The template's text for `variables`. Raises ChatTemplateError with the template's own message or Jinja's."""
    try:
        return template.render(variables)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise ChatTemplateError(f"chat template: {error}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter: characters as they are, no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
