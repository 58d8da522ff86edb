"""Which model families there are, and what each brings.

Imports no torch; the modules of a family load when a checkpoint asks for it.
"""

import importlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenspeed_engine.checkpoint.errors import ConfigError
from tokenspeed_engine.checkpoint.plan import WeightPlan

_FAMILY_MODULES = {
    "qwen4_exp": "tokenspeed_engine.models.qwen4_exp.family",
    "qwen4_exp_text": "tokenspeed_engine.models.qwen4_exp.family",
}
"""The model_type of a config.json, and the module whose `describe(config_json)` serves it."""


class ModelConfig(Protocol):
    """What the engine asks of any model's configuration."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str | None:
        """The dtype the checkpoint says it is in, such as "bfloat16"."""
        ...


@dataclass(frozen=True)
class ModelDescription:
    """A model as its config.json describes it.

    `weight_plan` takes the tensor names of the checkpoint, since their prefix differs between the classes that save it.
    """

    family: str
    config: ModelConfig
    weight_plan: Callable[[Collection[str]], WeightPlan]


def read_model(folder: Path) -> ModelDescription:
    """Reads `folder`/config.json.

    Raises ConfigError when it cannot be read, names no known model type, or holds values the engine cannot serve.
    """
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(str(file), [f"cannot be read: {error}"]) from error
    if not isinstance(raw, dict):
        raise ConfigError(str(file), ["not a JSON object"])
    return describe_model(raw, str(file))


def describe_model(raw: Mapping[str, Any], subject: str = "config.json") -> ModelDescription:
    """As `read_model`, from the content of a config.json; `subject` names it in errors."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILY_MODULES:
        supported = ", ".join(sorted(_FAMILY_MODULES))
        raise ConfigError(subject, [f"model_type: {model_type!r} is not supported (supported: {supported})"])
    describe: Callable[[Mapping[str, Any], str], ModelDescription]
    describe = importlib.import_module(_FAMILY_MODULES[model_type]).describe
    return describe(raw, subject)
