"""Hash of what a kernel is made of, by which evidence tells whether it speaks of the kernel as it stands.

That is the file that defines it, every file of the same top-level package that this one imports, directly or not, and
the files that the kernel names itself (`sources`). Imports are read from the text: nothing is imported for it.
"""

import ast
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any


def source_hash(function: Callable[..., Any], sources: Iterable[str] = ()) -> str:
    """16 hexadecimal digits; empty for a function without a file. `sources` are relative to that file."""
    path = source_file(function)
    if path is None:
        return ""
    root = _root(path, function.__module__)
    files = {path} if root is None else _reachable(path, root)
    # By name, so that the hash is the same on every machine; where the package lies does not count.
    base = root or path.parent
    named = {file.relative_to(base).as_posix(): file for file in files}
    named |= {name: path.parent / name for name in sources}
    digest = hashlib.sha256()
    for name in sorted(named):
        digest.update(f"{name} {hashlib.sha256(named[name].read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def source_file(function: Callable[..., Any]) -> Path | None:
    """The file that defines the function; None for one typed in at a prompt."""
    name = inspect.getsourcefile(function)
    return Path(name).resolve() if name is not None and Path(name).exists() else None


def _root(path: Path, module: str) -> Path | None:
    """The folder that holds the module's top-level package; None where the file does not lie as its name says."""
    parts = module.split(".")
    inner = Path(*parts) / "__init__.py" if path.name == "__init__.py" else Path(*parts).with_suffix(".py")
    if len(inner.parts) > len(path.parents):
        return None
    root = path.parents[len(inner.parts) - 1]
    return root if root / inner == path else None


def _reachable(path: Path, root: Path) -> set[Path]:
    found, todo = {path}, [path]
    while todo:
        current = todo.pop()
        files = {_file_of(name, root) for name in _imports(current, root, current.stat().st_mtime_ns)}
        new = {file for file in files if file is not None} - found
        found |= new
        todo += new
    return found


@cache
def _imports(path: Path, root: Path, changed: int) -> frozenset[tuple[str, ...]]:
    """What a file imports of its package; `changed`, its time of change, keeps an edited one from the cache."""
    inner = path.relative_to(root)
    package = inner.parts[0].removesuffix(".py")
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:  # of a newer Python, behind a check of the version
        return frozenset()
    return frozenset(name for name in _imported_names(tree, inner.parts[:-1]) if name[0] == package)


def _imported_names(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Dotted names, as tuples, of all that import statements anywhere in a file may mean by a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            # What follows `import` is a module of the package, or something in the package's own file.
            yield from ((*base, alias.name) for alias in node.names)


def _file_of(name: tuple[str, ...], root: Path) -> Path | None:
    """The file of a module, or of the one that a dotted name is an attribute of; None for what is not there."""
    for parts in (name, name[:-1]):
        for file in (root.joinpath(*parts).with_suffix(".py"), root.joinpath(*parts, "__init__.py")):
            if parts and file.is_file():
                return file
    return None
