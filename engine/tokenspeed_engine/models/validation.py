"""From the fields of a config.json to a checked configuration, with every problem named by its field."""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tokenspeed_engine.checkpoint.errors import ConfigError
from tokenspeed_engine.models.layouts import BLOCK

Config = TypeVar("Config", bound=BaseModel)


MODELOPT_FORMATS = ("NVFP4", "MIXED_PRECISION")


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


def check_quantisation(fields: Mapping[str, Any], subject: str) -> None:
    """Raises ConfigError about `subject` for a config.json whose quantised weights cannot be read.

    What is served is told from the tensors' names and dtypes; this is about what those do not show.
    """
    found = fields.get("quantization_config")
    if not found:
        return
    method = found.get("quant_method") if isinstance(found, Mapping) else found
    problem = None
    if method == "fp8":
        if found.get("weight_block_size") != [BLOCK, BLOCK]:
            problem = f"weight_block_size: expected [128, 128], got {found.get('weight_block_size')!r}"
    elif method in ("modelopt", "modelopt_fp4"):
        if found.get("quant_algo") not in MODELOPT_FORMATS:
            problem = f"quant_algo: expected {' or '.join(MODELOPT_FORMATS)}, got {found.get('quant_algo')!r}"
    else:
        problem = f"quant_method: {method!r} weights are not supported (supported: fp8, modelopt)"
    if problem is not None:
        raise ConfigError(subject, [f"quantization_config.{problem}"])


def _describe(error: ValidationError) -> list[str]:
    problems: list[str] = []
    for detail in error.errors():
        if detail["type"] == "value_error":
            problems += detail["ctx"]["error"].problems
        else:
            field = ".".join(str(part) for part in detail["loc"])
            problems.append(f"{field}: {detail['msg']}, got {detail['input']!r}")
    return problems
