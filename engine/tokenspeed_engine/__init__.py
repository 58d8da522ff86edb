"""A minimal engine on the kernel registry: `LLM(folder).generate(prompts, SamplingParams(...))`.

Importing the package imports no torch, so that the control plane can be used and tested without it.
"""

from typing import TYPE_CHECKING, Any

from tokenspeed_engine.control import SamplingParams

if TYPE_CHECKING:
    from tokenspeed_engine.llm import LLM, EngineOptions, Generation

__all__ = ["LLM", "EngineOptions", "Generation", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tokenspeed_engine import llm

    return getattr(llm, name)
