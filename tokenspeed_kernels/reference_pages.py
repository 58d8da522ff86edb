"""Writes the reference pages from the contracts: `python -m tokenspeed_kernels.reference_pages docs`.

`docs/reference.md` lists all ops, `docs/reference/FAMILY.md` describes those of a family. They hold what this
distribution declares and the evidence it ships, nothing of the machine: the same on every one of them.
"""

import importlib.metadata
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import tokenspeed_kernels
from tokenspeed_registry import Contract, Kernel, Priority, TokenspeedError
from tokenspeed_registry.cases import case_set
from tokenspeed_registry.describe import arguments, prose, results
from tokenspeed_registry.evidence import read
from tokenspeed_registry.platform import PLATFORMS
from tokenspeed_registry.plugins import ENTRY_POINTS, PluginStatus
from tokenspeed_registry.record import Record
from tokenspeed_registry.registry import default_registry

DISTRIBUTION = "tokenspeed-kernels"
INDEX = """# Reference

Generated from the contracts by `make docs`; do not edit. What holds of every op is in
[calling ops from another engine](integrator.md). Every op also takes `backend`, the backend or kernel that must serve
the call, and, where it returns anything, `out`, contiguous tensors for the results.

"""
FAMILY = """# {family}

Generated from the contracts by `make docs`; do not edit. All ops: [reference](../reference.md).

In shapes, a name is a dim: its size is the same wherever it occurs in the op. *Static* dims and the scalar arguments
listed as flags are part of what a kernel is chosen by; all others may change from call to call at no cost.
"""


def pages() -> dict[str, str]:
    """Paths under the docs folder and what belongs there.

    Raises `TokenspeedError` where a module of the distribution's own backends does not import: its kernels would be
    missing.
    """
    exported = (getattr(tokenspeed_kernels, name) for name in tokenspeed_kernels.__all__)
    contracts: list[Contract] = [op.contract for op in exported if hasattr(op, "contract")]
    plugins = _own_plugins()
    families: dict[str, list[Contract]] = {}
    for contract in contracts:
        families.setdefault(contract.family, []).append(contract)
    rows = [
        f"| [`{contract.name}`](reference/{family}.md#{contract.name}) | {family} | {_summary(contract)} |"
        for family in sorted(families)
        for contract in families[family]
    ]
    written = {"reference.md": INDEX + "\n".join(["| op | family | what |", "|---|---|---|", *rows]) + "\n"}
    for family, members in families.items():
        sections = ["\n".join(_section(contract, plugins)) for contract in members]
        written[f"reference/{family}.md"] = "\n".join([FAMILY.format(family=family), *sections])
    return written


def write(docs: Path) -> None:
    """Writes all pages and removes those of families that are no more."""
    wanted = pages()
    (docs / "reference").mkdir(parents=True, exist_ok=True)
    for path in (docs / "reference").glob("*.md"):
        if f"reference/{path.name}" not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (docs / name).write_text(text, "utf-8")


def _section(contract: Contract, plugins: list[PluginStatus]) -> Iterator[str]:
    yield f"## {contract.name}\n\n{prose(contract)}\n"
    yield from _list("Arguments", {f"`{name}`": text for name, text in arguments(contract)})
    yield from _list("Returns", {f"`{name}`": text for name, text in results(contract)} or {"nothing": ""})
    facts = {
        "static dims": _code(contract.static),
        "flags": _code(flag.name for flag in contract.flags),
        "relations": _code(contract.where),
        "of one dtype": "; ".join(_code(group) for group in contract.same_dtype),
        "contents checked": _code(dict.fromkeys(check.argument for check in contract.checks)),
        "model shapes": "; ".join(case_set(contract).models),
    }
    yield from _list("Facts", {name: text for name, text in facts.items() if text})
    kernels = {
        f"`{kernel.name}`": "; ".join(_of_kernel(kernel, plugin))
        for plugin in plugins
        for kernel in plugin.kernels
        if kernel.op == contract.name
    }
    yield from _list("Kernels", kernels | {"`reference`": "any device; float64, slow"})


def _of_kernel(kernel: Kernel, plugin: PluginStatus) -> Iterator[str]:
    yield kernel.requires.describe()
    if kernel.constraints:
        yield ", ".join(f"`{limit.needs()}`" for limit in kernel.constraints)
    bands = {int(band): band.name.lower() for band in Priority}
    yield f"priority {bands.get(kernel.priority, kernel.priority)}"
    if not kernel.graph_capturable:
        yield "not in CUDA graphs"
    if kernel.compiler is None:
        yield "calls torch alone"
        return
    yield f"compiled by {kernel.compiler}"
    found = {arch: _evidence(kernel, plugin, arch) for arch in PLATFORMS}
    yield "evidence: " + (", ".join(f"{arch} {known}" for arch, known in found.items() if known) or "none")


def _evidence(kernel: Kernel, plugin: PluginStatus, arch: str) -> str:
    """What the plugin's own files know of the kernel as it stands, whatever compiler is installed here."""
    if plugin.plugin is None or plugin.plugin.evidence is None:
        return ""

    def describe(record: Record) -> str:
        compiler = f" ({record.compiler})" if record.compiler else ""
        return f"{record.level.name.lower()}{compiler}"

    records = (record for record in read(plugin.plugin.evidence / f"{arch}.json") if record.kernel == kernel.name)
    return " and ".join(sorted(describe(record) for record in records if record.source_hash == kernel.source_hash))


def _own_plugins() -> list[PluginStatus]:
    """The plugins of this distribution: those of others that are installed do not belong in its reference."""
    entries = importlib.metadata.entry_points(group=ENTRY_POINTS)
    own = {entry.name for entry in entries if entry.dist is not None and entry.dist.name == DISTRIBUTION}
    plugins = [status for status in default_registry.plugins() if status.name in own]
    for status in plugins:
        if status.plugin is None or (status.usable and status.reason) or "failed to import" in status.reason:
            raise TokenspeedError(f"the reference cannot be written here: plugin {status.name}: {status.reason}")
    return plugins


def _summary(contract: Contract) -> str:
    """The docstring's first paragraph."""
    return " ".join(prose(contract).split("\n\n")[0].split()).replace("|", "\\|")


def _list(title: str, items: Mapping[str, str]) -> Iterator[str]:
    if items:
        yield f"**{title}**\n"
        yield from (f"- {name}: {text}" if text else f"- {name}" for name, text in items.items())
        yield ""


def _code(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
