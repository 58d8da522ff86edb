"""What the engine needs to serve `qwen4_exp`, found by model type."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from tokenspeed_engine.models.families import ModelDescription
from tokenspeed_engine.models.qwen4_exp.config import parse_config
from tokenspeed_engine.models.qwen4_exp.weights import weight_plan


def describe(raw: Mapping[str, Any], subject: str) -> ModelDescription:
    """The model of a whole config.json, `qwen4_exp` or `qwen4_exp_text`. Raises ConfigError about `subject`."""
    config = parse_config(raw, subject)
    return ModelDescription("qwen4_exp", config, partial(weight_plan, config))
