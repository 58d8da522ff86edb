"""Which model families there are, and what each brings.

Imports no torch; the modules of a family load when a checkpoint asks for it, those that compute when it is built.
"""

import importlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from tokenspeed_engine.checkpoint.errors import ConfigError
from tokenspeed_engine.checkpoint.plan import WeightPlan
from tokenspeed_engine.parallel.ranks import Ranks

if TYPE_CHECKING:
    import torch

    from tokenspeed_engine.checkpoint.load import Weights
    from tokenspeed_engine.execution.batch import Batch, Settling

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


Verify = Literal["replay", "states"]
"""How the delta rule takes drafts back: accepted tokens are kept and replayed, or a state is stored for each token."""


@dataclass(frozen=True)
class CacheSizes:
    """What caches are made for.

    Args:
        page_size: tokens a page holds.
        num_pages: pages that plans name.
        num_slots: slots that plans name, those of snapshots too.
        num_rows: rows that run at once.
        num_drafts: drafts that a row tries at most.
        verify: how they are taken back.
        draft_head: whether the model's draft head runs, which has pages of its own kind.
    """

    page_size: int
    num_pages: int
    num_slots: int
    num_rows: int
    num_drafts: int = 0
    verify: Verify = "replay"
    draft_head: bool = False

    @property
    def replay_capacity(self) -> int:
        """Tokens kept of a slot: two rows of drafts, so that its state is written at every second step at most."""
        return 2 * (1 + self.num_drafts)


class CacheBytes(NamedTuple):
    """Memory that a model's caches take.

    For each page and each slot that plans name, for each row that runs at once beside them, and for each snapshot in
    host memory.
    """

    per_page: int
    per_slot: int
    per_row: int
    per_snapshot: int


def scratch_pages(num_drafts: int, page_size: int) -> int:
    """Pages a row may need for tokens that its draft head guesses past its own pages."""
    return -(-num_drafts // page_size)


class Caches(Protocol):
    """What a model keeps of its sequences. Beyond these two only the model looks inside."""

    @property
    def slot_pools(self) -> "Sequence[torch.Tensor]":
        """[layers, slots or more, ...] each: all that a settled slot is made of."""
        ...

    @property
    def page_pools(self) -> "Sequence[torch.Tensor]":
        """[layers, pages or more, ...] each: all that a page is made of."""
        ...


class Forward(NamedTuple):
    """logits: Float32 [R, vocab], after the batch's R sampled tokens.

    hidden: what a draft head takes, of all T tokens from the model itself and of the sampled ones from the head; None
    from a model without one.
    """

    logits: "torch.Tensor"
    hidden: "torch.Tensor | None"


class DraftHead(Protocol):
    """Guesses a token after the next one."""

    def __call__(self, hidden: "torch.Tensor", batch: "Batch", caches: Any) -> Forward:
        """Runs the T tokens of `batch`, whose `ids` are the tokens after them; `hidden` [T, ...] is theirs.

        The head's own caches advance as the model's do, and nothing of them needs to be taken back.
        """
        ...


class Model(Protocol):
    """A model ready to run."""

    @property
    def draft_head(self) -> DraftHead | None: ...

    def forward(self, batch: "Batch", caches: Any) -> Forward:
        """Runs every token of `batch`.

        `caches` come from the same model's `allocate_caches` and are changed in place, in the pages and slots of the
        batch alone. What the sequences had before is taken from there; a `fresh` row's slot counts as empty whatever
        it holds, and no page is read where nothing was written.
        """
        ...

    def settle(self, settling: "Settling", caches: Any) -> None:
        """Brings the states of slots into plain form, in place."""
        ...


class ModelDescription(Protocol):
    """A model as its config.json describes it, or one rank's share of it."""

    @property
    def family(self) -> str: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def ranks(self) -> Ranks:
        """Those that share the model. All but `config` is about this one's part: its weights and its caches."""
        ...

    def on(self, ranks: Ranks) -> "ModelDescription":
        """The same model, shared. Raises ValueError for one that cannot be cut so, which names the limits."""
        ...

    @property
    def context_tokens(self) -> int:
        """Tokens before a row's first one that the model looks at, beside its caches."""
        ...

    @property
    def context_fill(self) -> int:
        """The id that stands for them before the start of a sequence."""
        ...

    @property
    def has_state(self) -> bool:
        """Whether the model keeps anything by slot."""
        ...

    @property
    def table_names(self) -> tuple[str, ...]:
        """Large tables of which a token reads little, so that they may lie in host memory; by names of targets."""
        ...

    @property
    def has_draft_head(self) -> bool:
        """Whether checkpoints of this configuration come with a draft head that the engine serves."""
        ...

    @property
    def path_lengths(self) -> tuple[int, ...]:
        """Lengths up to which the longest sequence of a step lets the model compute in another way."""
        ...

    def weight_plan(self, names: Collection[str], draft_head: bool = False) -> WeightPlan:
        """What a checkpoint holds; `names` are those on disk, since classes that save it differ in their prefix.

        With `draft_head` the plan has the weights of that too.
        """
        ...

    def build(self, weights: "Weights") -> Model:
        """The model of loaded weights, on their device and in their dtype; `weights` may be dropped afterwards.

        It has a draft head if they have one.
        """
        ...

    def cache_bytes(self, sizes: CacheSizes, dtype: "torch.dtype") -> CacheBytes:
        """What `allocate_caches` will take, whatever the three counts of `sizes` are.

        Raises ValueError for a page size that the model cannot use.
        """
        ...

    def allocate_caches(self, sizes: CacheSizes, dtype: "torch.dtype", device: "torch.device") -> Any:
        """`Caches` of any content, for the model only. `dtype` is that of the weights.

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
