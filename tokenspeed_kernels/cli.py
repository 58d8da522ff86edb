"""`tokenspeed-kernels`: what is here, what would serve a call and why, and whether it is right.

Every command prints a table, or JSON with `--json`. Exit codes: 0 all well; 1 a check failed; 2 bad usage, such as
an unknown op, backend or arch (one line on stderr).
"""

import sys
from dataclasses import replace
from typing import Annotated

import torch
import typer

import tokenspeed_kernels  # noqa: F401  declares the ops
from tokenspeed_kernels.benchmark.commands import bench, tune
from tokenspeed_kernels.choose import Backend, Ops, chosen_kernels
from tokenspeed_kernels.compile_command import compile_kernels
from tokenspeed_kernels.config_commands import cache_app, choose_config, show_config
from tokenspeed_kernels.facts import versions
from tokenspeed_kernels.new_backend import new_backend
from tokenspeed_kernels.printing import Json, print_json, print_rows, print_table
from tokenspeed_kernels.verify_command import verify
from tokenspeed_kernels.warmup_command import warmup
from tokenspeed_registry import Contract, TokenspeedError, UnknownNameError, known_platform, present_platform
from tokenspeed_registry.cases import case_set
from tokenspeed_registry.platform import PLATFORMS
from tokenspeed_registry.registry import default_registry
from tokenspeed_registry.signature import Flag, Signature
from tokenspeed_registry.validation import check_partial

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this machine is, which versions are installed, and how each plugin fares."""
    platform = present_platform()
    facts = {
        "vendor": platform.vendor,
        "arch": platform.arch,
        "device": platform.device,
        "features": sorted(platform.features),
    }
    plugins = [{"name": s.name, "usable": s.usable, "reason": s.reason} for s in default_registry.plugins()]
    if as_json:
        return print_json({"platform": facts, "versions": versions(), "plugins": plugins})
    print_table("platform", [facts])
    print_table("versions", [{"package": name, "version": found} for name, found in versions().items()])
    return print_table("plugins", plugins)


@app.command()
def ops(as_json: Json = False) -> None:
    """All ops, their families, and the kernels that serve them."""
    rows = [
        {"op": name, "family": contract.family, "kernels": [kernel.name for kernel in default_registry.kernels(name)]}
        for name, contract in default_registry.contracts.items()
    ]
    print_rows(rows, "ops", as_json)


@app.command()
def kernels(op: Ops = None, backend: Backend = None, as_json: Json = False) -> None:
    """All kernels with their declared limits and what is known of them, arch by arch."""
    rows = [
        {
            "kernel": kernel.name,
            "op": kernel.op,
            "backend": kernel.backend,
            "priority": int(kernel.priority),
            "requires": kernel.requires.describe(),
            "constraints": [constraint.needs() for constraint in kernel.constraints],
            "evidence": {
                arch: known
                for arch in PLATFORMS
                if (known := default_registry.evidence.describe(kernel, arch)) != "none"
            },
        }
        for kernel in chosen_kernels(op, backend)
    ]
    print_rows(rows, "kernels", as_json)


@app.command()
def explain(
    op: str,
    arch: Annotated[str | None, typer.Option(help="An arch of the table; this machine's unless given.")] = None,
    model: Annotated[str | None, typer.Option(help="A model's call that fills in all that is not given.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="A dim, as name=size; may be repeated.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="A tensor's dtype, as role=dtype; may be repeated.")] = None,
    flag: Annotated[list[str] | None, typer.Option(help="A scalar argument, as name=value; may be repeated.")] = None,
    given: Annotated[list[str] | None, typer.Option(help="An optional tensor that is there; may be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Which kernel would serve a call of OP, and why not the others."""
    contract = default_registry.contract(op)
    dims = {name: _size(name, value) for name, value in _pairs(shape, contract.dims, "dim")}
    roles = frozenset(tensor.name for tensor in contract.tensors)
    dtypes = {name: _dtype(value) for name, value in _pairs(dtype, roles, "tensor")}
    flags = {
        name: _flag(contract, name, value)
        for name, value in _pairs(flag, frozenset(each.name for each in contract.flags), "flag")
    }
    call = _of_model(contract, model) if model is not None else Signature()
    call = replace(
        call,
        dims={**call.dims, **dims},
        dtypes={**call.dtypes, **dtypes},
        flags={**call.flags, **flags},
        present=_optional(contract, given),
    )
    check_partial(contract, call.dims, {role: call.dtypes[role] for role in roles & call.dtypes.keys()})
    platform = known_platform(arch) if arch is not None else present_platform()
    candidates = default_registry.explain(op, platform, call)
    chosen = next((c.kernel.name for c in candidates if c.accepted), None)
    rows = [
        {
            "kernel": c.kernel.name,
            "backend": c.kernel.backend,
            "accepted": c.accepted,
            "reason": c.reason,
            "evidence": c.evidence,
        }
        for c in candidates
    ]
    if as_json:
        return print_json({"op": op, "arch": platform.arch, "chosen": chosen, "candidates": rows})
    undecided = [c.kernel.name for c in candidates if c.accepted is None]
    unless = f", unless what is not given lets {' or '.join(undecided)} serve" if undecided else ""
    shown = [row | {"accepted": "depends" if row["accepted"] is None else row["accepted"]} for row in rows]
    return print_table(f"{op} on {platform.arch}: {chosen or 'no kernel'}{unless}", shown)


def main() -> None:
    """Entry point. Errors that the toolkit raises on purpose end in one line and exit code 2."""
    try:
        app()
    except TokenspeedError as error:
        print(f"tokenspeed-kernels: {error}", file=sys.stderr)
        sys.exit(2)


def _pairs(options: list[str] | None, known: frozenset[str], what: str) -> list[tuple[str, str]]:
    pairs = []
    for option in options or []:
        name, separator, value = option.partition("=")
        if not separator or name not in known:
            raise UnknownNameError(f"{option!r} is not name=value of a {what}; known: {', '.join(sorted(known))}")
        pairs.append((name, value))
    return pairs


def _size(name: str, value: str) -> int:
    if not value.isdecimal():
        raise UnknownNameError(f"size of {name} must be a whole number, got {value!r}")
    return int(value)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UnknownNameError(f"unknown dtype {name!r}; names are torch's, for example bfloat16 or float8_e4m3fn")
    return found


def _flag(contract: Contract, name: str, value: str) -> Flag:
    """A scalar argument from its text, as Python would write it. Raises `UnknownNameError` for a wrong one."""
    (scalar,) = (scalar for scalar in contract.flags if scalar.name == name)
    choices: dict[str, Flag] = {str(choice): choice for choice in scalar.choices}  # type: ignore[misc]
    if scalar.type is bool:
        choices = {"True": True, "true": True, "False": False, "false": False}
    if scalar.optional:
        choices["None"] = None
    if value in choices:
        return choices[value]
    if scalar.type is torch.dtype:
        return _dtype(value)
    if choices or scalar.type is not str:
        raise UnknownNameError(f"flag {name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def _optional(contract: Contract, roles: list[str] | None) -> frozenset[str]:
    known = {tensor.name for tensor in contract.tensors if tensor.optional}
    for role in roles or []:
        if role not in known:
            names = ", ".join(sorted(known)) or "none"
            raise UnknownNameError(f"{role!r} is no optional tensor of {contract.name}; known: {names}")
    return frozenset(roles or [])


def _of_model(contract: Contract, name: str) -> Signature:
    """The call of a model, with all tensors on the device and laid out as new ones are."""
    source = case_set(contract)
    return source.signature(contract, source.model(name)).placed(())


app.callback()(choose_config)
app.command("bench")(bench)
app.command("tune")(tune)
app.command("verify")(verify)
app.command("compile")(compile_kernels)
app.command("warmup")(warmup)
app.command("config")(show_config)
app.add_typer(cache_app, name="cache")
app.command("new-backend")(new_backend)
