"""`tokenspeed-kernels config` and `cache`: what is in force, where it came from, and what is kept on disk."""

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from tokenspeed_kernels.printing import Json, print_json, print_rows
from tokenspeed_registry.configuration import FILE, resolve
from tokenspeed_registry.registry import default_registry

cache_app = typer.Typer(no_args_is_help=True, help="The cache folder: evidence and compiled kernels.")


def choose_config(
    config: Annotated[Path | None, typer.Option(help=f"A TOML file; wins over {FILE}.")] = None,
) -> None:
    """What is here, what would serve a call and why, and whether it is right."""
    if config is not None:
        os.environ[FILE] = str(config)


def show_config(as_json: Json = False) -> None:
    """Every field of the configuration, its value in force, and where that came from."""
    resolved = resolve()
    values = resolved.configuration.model_dump(mode="json")
    rows = [{"field": field, "value": values[field], "from": origin} for field, origin in resolved.origins.items()]
    print_rows(rows, "configuration", as_json)


@cache_app.command("show")
def show_cache(as_json: Json = False) -> None:
    """Where the cache folder is, how many files it has and how large they are together."""
    folder = default_registry.settings.cache
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    print_rows([{"folder": str(folder), "files": len(sizes), "bytes": sum(sizes)}], "cache", as_json)


@cache_app.command("clear")
def clear_cache(as_json: Json = False) -> None:
    """Deletes what the toolkit keeps in the cache folder: evidence of this machine, compiled kernels."""
    folder = default_registry.settings.cache
    removed = [name for name in ("evidence", "compiled") if (folder / name).exists()]
    for name in removed:
        shutil.rmtree(folder / name)
    if as_json:
        print_json({"folder": str(folder), "removed": removed})
    else:
        print(f"removed {', '.join(removed) or 'nothing'} from {folder}")
