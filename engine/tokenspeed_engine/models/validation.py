"""From the fields of a config.json to a checked configuration, with every problem named by its field."""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tokenspeed_engine.checkpoint.errors import ConfigError

Config = TypeVar("Config", bound=BaseModel)


class FieldProblems(ValueError):
    """Raised by a configuration's own validator, since pydantic's messages cannot carry several problems."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(*problems)
        self.problems = problems


def validated(kind: type[Config], fields: Mapping[str, Any], subject: str, path: str = "") -> Config:
    """A `kind` of `fields`, which are those at `path` of a config.json, such as "text_config.".

    Raises ConfigError about `subject`, each problem beginning with the field to change.
    """
    try:
        # Through JSON, where pydantic's strict mode takes an array for a tuple and still no string for a number.
        return kind.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        raise ConfigError(subject, [f"{path}{problem}" for problem in _describe(error)]) from error


def refuse_quantisation(fields: Mapping[str, Any], subject: str) -> None:
    """Raises ConfigError about `subject` for the config.json of a quantised checkpoint."""
    quantisation = fields.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
        raise ConfigError(subject, [f"quantization_config: {method} weights are not supported"])


def _describe(error: ValidationError) -> list[str]:
    problems: list[str] = []
    for detail in error.errors():
        if detail["type"] == "value_error":
            problems += detail["ctx"]["error"].problems
        else:
            field = ".".join(str(part) for part in detail["loc"])
            problems.append(f"{field}: {detail['msg']}, got {detail['input']!r}")
    return problems
