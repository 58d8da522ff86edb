"""What of the configuration the registry reads while it runs; `configuration` has the schema and the sources."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Settings:
    """`kernels` maps an op (or "*") to an explicit choice of backend or kernel; `disabled` names plugins.

    The fields are those of `Configuration`, which cannot stand here: importing pydantic costs more than the rest.
    """

    debug: bool = False
    self_check: bool = True
    cache: Path = Path.home() / ".cache" / "tokenspeed_kernels"
    arch: str | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)
    disabled: frozenset[str] = frozenset()


def read_settings(environment: Mapping[str, str] = os.environ, flags: Mapping[str, Any] | None = None) -> Settings:
    """The settings in force. Raises `TokenspeedError` for values that cannot be used."""
    from tokenspeed_registry.configuration import resolve  # pydantic: not before the first dispatch

    chosen = resolve(environment, flags).configuration
    return Settings(chosen.debug, chosen.self_check, chosen.cache, chosen.arch, chosen.kernels, chosen.plugins.disabled)
