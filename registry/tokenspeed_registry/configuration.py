"""The one configuration of the toolkit: its schema, and where each value in force came from.

A value comes from a command-line flag, else from an environment variable `TOKENSPEED_KERNELS_<FIELD>`, else from the
TOML file that `TOKENSPEED_KERNELS_CONFIG` names, else it is the default:

    debug = false               # check the content of index tensors on devices too (synchronises)
    self_check = true           # a kernel that never ran on this arch must pass conformance before it serves
    cache = "~/.cache/tokenspeed_kernels"     # evidence and compiled kernels
    arch = "sm_90a"             # take the accelerator for this arch (read at the first dispatch, as all of it)
    [kernels]                   # explicit choices; "*" is every op
    mla_decode = "triton"
    [plugins]
    disabled = ["cuda"]

This module imports pydantic, so nothing imports it before the first dispatch.
"""

import difflib
import os
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tokenspeed_registry.errors import TokenspeedError

PREFIX = "TOKENSPEED_KERNELS_"
FILE = f"{PREFIX}CONFIG"


class PluginChoices(BaseModel):
    """`disabled`: names of plugins that are not loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    disabled: frozenset[str] = frozenset()


class Configuration(BaseModel):
    """Everything a user can set; see the module for what each field means."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    debug: bool = False
    self_check: bool = True
    cache: Annotated[Path, BeforeValidator(lambda value: Path(value).expanduser())] = Field(
        default_factory=lambda: Path.home() / ".cache" / "tokenspeed_kernels"
    )
    arch: str | None = None
    kernels: dict[str, str] = Field(default_factory=dict)
    plugins: PluginChoices = PluginChoices()


@dataclass(frozen=True)
class Resolved:
    """A configuration and the origin of each of its fields: `default`, `file PATH`, `environment NAME` or `flag`."""

    configuration: Configuration
    origins: Mapping[str, str]


def resolve(environment: Mapping[str, str] = os.environ, flags: Mapping[str, Any] | None = None) -> Resolved:
    """The configuration in force. Warns of variables that nobody reads, with the nearest name.

    Raises `TokenspeedError` that names the file or variable and the field, for values that cannot be used.
    """
    values: dict[str, Any] = {}
    origins = dict.fromkeys(Configuration.model_fields, "default")
    if name := environment.get(FILE):
        from_file = _read(Path(name))
        _validate(from_file, f"config file {name}")
        values |= from_file
        origins |= dict.fromkeys(from_file, f"file {name}")
    scalars = {f"{PREFIX}{field.upper()}": field for field in ("debug", "self_check", "cache", "arch")}
    for variable, field in scalars.items():
        if text := environment.get(variable):
            _validate({field: text}, f"environment variable {variable}")
            values[field], origins[field] = text, f"environment {variable}"
    _warn_of_unknown(environment, {*scalars, FILE})
    for field, value in (flags or {}).items():
        values[field], origins[field] = value, "flag"
    return Resolved(_validate(values, "flags"), origins)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TokenspeedError(f"config file {path}: {error}") from error


def _validate(values: Mapping[str, Any], source: str) -> Configuration:
    try:
        return Configuration.model_validate(values)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}, got {problem['input']!r}"
            if problem["type"] != "extra_forbidden"
            else f"unknown field {'.'.join(map(str, problem['loc']))}; known: {', '.join(Configuration.model_fields)}"
            for problem in error.errors()
        ]
        raise TokenspeedError(f"{source}: {'; '.join(problems)}") from None


def _warn_of_unknown(environment: Mapping[str, str], known: set[str]) -> None:
    for name in environment:
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
            warnings.warn(f"environment variable {name} is not read; {hint}", RuntimeWarning, stacklevel=4)
