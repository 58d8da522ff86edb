"""What the user set for the process: environment variables, and one optional TOML file for choices of kernels.

TOKENSPEED_KERNELS_DEBUG=1          check the content of index tensors on devices too (synchronises)
TOKENSPEED_KERNELS_CONFIG=FILE      TOML: [kernels] op = "backend or kernel name"; [plugins] disabled = [...]
TOKENSPEED_KERNELS_CACHE=DIR        where evidence and compiled kernels are kept
TOKENSPEED_KERNELS_SELF_CHECK=0     use kernels that never ran on this arch without checking them first
TOKENSPEED_KERNELS_ARCH=ARCH        take the accelerator for this arch
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenspeed_registry.errors import TokenspeedError


@dataclass
class Settings:
    """`kernels` maps an op (or "*") to an explicit choice of backend or kernel; `disabled` names plugins."""

    debug: bool = False
    self_check: bool = True
    cache: Path = Path.home() / ".cache" / "tokenspeed_kernels"
    kernels: Mapping[str, str] = field(default_factory=dict)
    disabled: frozenset[str] = frozenset()


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings that the environment asks for. Raises `TokenspeedError` for a config file that cannot be used."""
    prefix = "TOKENSPEED_KERNELS_"
    settings = Settings(
        debug=environment.get(f"{prefix}DEBUG", "0") not in ("", "0"),
        self_check=environment.get(f"{prefix}SELF_CHECK", "1") not in ("", "0"),
    )
    if cache := environment.get(f"{prefix}CACHE"):
        settings.cache = Path(cache)
    if name := environment.get(f"{prefix}CONFIG"):
        settings.kernels, settings.disabled = _read_config(Path(name))
    return settings


def _read_config(path: Path) -> tuple[Mapping[str, str], frozenset[str]]:
    try:
        config = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TokenspeedError(f"config file {path}: {error}") from error
    unknown = set(config) - {"kernels", "plugins"}
    if unknown:
        raise TokenspeedError(f"config file {path}: unknown tables {sorted(unknown)}; known: kernels, plugins")
    kernels = config.get("kernels", {})
    plugins = config.get("plugins", {})
    if not isinstance(plugins, dict) or set(plugins) - {"disabled"}:
        raise TokenspeedError(f"config file {path}: [plugins] knows `disabled` alone")
    disabled = plugins.get("disabled", [])
    if not isinstance(kernels, dict) or not all(isinstance(choice, str) for choice in kernels.values()):
        raise TokenspeedError(f"config file {path}: [kernels] maps op names to backend or kernel names")
    if not isinstance(disabled, list) or not all(isinstance(name, str) for name in disabled):
        raise TokenspeedError(f"config file {path}: [plugins] disabled is a list of names")
    return kernels, frozenset(disabled)
