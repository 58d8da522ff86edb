"""Which model families there are, and what each brings.

Imports no torch; the modules of a family load when a checkpoint asks for it, those that compute when it is built.
"""

import importlib
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tokenspeed_engine.checkpoint.errors import ConfigError
from tokenspeed_engine.checkpoint.plan import WeightPlan

if TYPE_CHECKING:
    import torch

    from tokenspeed_engine.checkpoint.load import Weights
    from tokenspeed_engine.execution.batch import Batch

_FAMILY_MODULES = {
    "deepseek_v3": "tokenspeed_engine.models.deepseek_v3.family",
    "kimi_k2": "tokenspeed_engine.models.deepseek_v3.family",
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


Caches = Any
"""What a model keeps of its sequences. Only the model looks inside, so families need not have anything in common."""


class CacheBytes(NamedTuple):
    """Memory that a model's caches take: for each page of tokens, and for each sequence's slot."""

    per_page: int
    per_slot: int


class Model(Protocol):
    """A model ready to run."""

    def forward(self, batch: "Batch", caches: Caches) -> "torch.Tensor":
        """Runs every token of `batch`; returns logits Float32 [R, vocab] after its R `sampled` tokens.

        `caches` come from the same model's `allocate_caches` and are changed in place, in the pages and slots of the
        batch alone. What the sequences had before is taken from there; a `fresh` row's slot counts as empty whatever
        it holds, and no page is read where nothing was written.
        """
        ...


class ModelDescription(Protocol):
    """A model as its config.json describes it."""

    @property
    def family(self) -> str: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def context_tokens(self) -> int:
        """Tokens before a row's first one that the model looks at, beside its caches."""
        ...

    @property
    def context_fill(self) -> int:
        """The id that stands for them before the start of a sequence."""
        ...

    def weight_plan(self, names: Collection[str]) -> WeightPlan:
        """What a checkpoint holds; `names` are those on disk, since classes that save it differ in their prefix."""
        ...

    def build(self, weights: "Weights") -> Model:
        """The model of loaded weights, on their device and in their dtype; `weights` may be dropped afterwards."""
        ...

    def cache_bytes(self, page_size: int, dtype: "torch.dtype") -> CacheBytes:
        """What `allocate_caches` will take. Raises ValueError for a page size that the model cannot use."""
        ...

    def allocate_caches(
        self, num_pages: int, page_size: int, num_slots: int, dtype: "torch.dtype", device: "torch.device"
    ) -> Caches:
        """Caches of any content, for `Model.forward` only. `dtype` is that of the weights.

        Raises ValueError for a page size that the model cannot use.
        """
        ...


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
