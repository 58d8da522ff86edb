"""The control plane: which request runs what, and when. Deterministic plain Python without torch or a model."""

from tokenspeed_engine.control.config import ControlConfig
from tokenspeed_engine.control.core import EngineCore
from tokenspeed_engine.control.counters import Counters
from tokenspeed_engine.control.detokenise import Detokenizer, Tokenizer
from tokenspeed_engine.control.errors import ExecutorLostError, LeaseError, RequestRefusedError, StateReusedError
from tokenspeed_engine.control.lifecycle import FinishReason
from tokenspeed_engine.control.output import RequestOutput, Usage
from tokenspeed_engine.control.plan import (
    Accepted,
    CopyPage,
    CopySlot,
    Executor,
    Failed,
    Fetch,
    Offload,
    PendingStep,
    Row,
    RowResult,
    Sample,
    Settle,
    StepPlan,
    StepResult,
    TokenLogprobs,
    Transfer,
)
from tokenspeed_engine.control.sampling import MAX_LOGPROBS, SamplingParams

__all__ = [
    "MAX_LOGPROBS",
    "Accepted",
    "ControlConfig",
    "CopyPage",
    "CopySlot",
    "Counters",
    "Detokenizer",
    "EngineCore",
    "Executor",
    "ExecutorLostError",
    "Failed",
    "Fetch",
    "FinishReason",
    "LeaseError",
    "Offload",
    "PendingStep",
    "RequestOutput",
    "RequestRefusedError",
    "Row",
    "RowResult",
    "Sample",
    "SamplingParams",
    "Settle",
    "StateReusedError",
    "StepPlan",
    "StepResult",
    "TokenLogprobs",
    "Tokenizer",
    "Transfer",
    "Usage",
]
