"""`tokenspeed-kernels new-backend NAME`: a plugin package with one kernel, its limits and its tests, to start from.

Its files are those of `templates/backend`, in which `$name`, `$package`, `$version` and `$contract_version` are filled
in and the folder `package` takes the package's name.
"""

import importlib.util
import keyword
import re
from collections.abc import Iterator
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePath
from string import Template
from typing import Annotated

import typer

from tokenspeed_registry import CONTRACT_VERSION, RegistrationError
from tokenspeed_registry.registry import default_registry

# The name becomes part of a package's and of a distribution's name, which pip folds to lower case.
_NAME = re.compile(r"[a-z]([a-z0-9_]*[a-z0-9])?")


def new_backend(
    name: Annotated[str, typer.Argument(help="What users will choose the backend by: a lower-case identifier.")],
    into: Annotated[Path, typer.Option(help="The folder that gets the package's folder.")] = Path(),
) -> None:
    """Writes an installable plugin package with one kernel, its tests and a README that says what to do next."""
    folder = write_backend(name, into)
    typer.echo(f"wrote {folder}; next: pip install --editable {folder}, then its README.md")


def write_backend(name: str, into: Path) -> Path:
    """Writes the package's folder, `tokenspeed_NAME`, into an existing or new folder, and returns it.

    Raises `RegistrationError` for a name that is no lower-case identifier or is taken by a backend or a package, and
    for a folder that is there already or cannot be written.
    """
    package = f"tokenspeed_{name}"
    folder = into / package
    _check_name(name, package)
    values = {
        "name": name,
        "package": package,
        "version": version("tokenspeed-kernels"),
        "contract_version": str(CONTRACT_VERSION),
    }
    try:
        folder.mkdir(parents=True)
        for path, source in _templates(PurePath(), files("tokenspeed_kernels") / "templates" / "backend"):
            parts = [package if part == "package" else part for part in path.parts]
            target = folder.joinpath(*parts).with_suffix("")
            target.parent.mkdir(exist_ok=True)
            target.write_text(Template(source.read_text("utf-8")).substitute(values), "utf-8")
    except FileExistsError as error:
        raise RegistrationError(f"{error.filename} is there already") from error
    except OSError as error:
        raise RegistrationError(f"{folder}: {error}") from error
    return folder


def _check_name(name: str, package: str) -> None:
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise RegistrationError(f"backend name {name!r}: must be a Python identifier of lower-case letters and digits")
    backends = {kernel.backend for kernel in default_registry.kernels()}
    if name in backends | {plugin.name for plugin in default_registry.plugins()}:
        raise RegistrationError(f"backend name {name!r}: taken by a backend that is installed here")
    if importlib.util.find_spec(package) is not None:
        raise RegistrationError(f"backend name {name!r}: there is a package {package} already")


def _templates(path: PurePath, folder: Traversable) -> Iterator[tuple[PurePath, Traversable]]:
    """Every template file under the folder, with its path, which begins with `path`."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _templates(path / entry.name, entry)
        elif entry.name.endswith(".template"):
            yield path / entry.name, entry
