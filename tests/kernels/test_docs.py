"""The documentation says what is so: its Python runs as it stands, what it links to, names and commands exists."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer

from tokenspeed_kernels import reference_pages
from tokenspeed_kernels.cli import app
from tokenspeed_registry import Kernel, Plugin, Priority, TokenspeedError, arch, default_registry
from tokenspeed_registry.conformance import check_kernel
from tokenspeed_registry.evidence import EvidenceStore
from tokenspeed_registry.plugins import PluginStatus
from tokenspeed_registry.record import Level, Record

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CPU = torch.device("cpu")
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])
WRITTEN = [page for page in PAGES if page.parent.name != "reference" and page.name != "benchmarks.md"]
"""Those that nobody generates."""
PACKAGES = [
    "registry/tokenspeed_registry",
    "tokenspeed_kernels",
    "backends/cuda/tokenspeed_cuda",
    "engine/tokenspeed_engine",
]
FORMULAS = frozenset({"RMS0", "RMS1", "GRMS1"})
"""What the page on the models defines itself."""
SOURCES = ["registry", "tokenspeed_kernels", "backends", "engine", "tests", "bench"]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def test_python_of_the_integrators_page_runs_in_order() -> None:
    found = blocks(DOCS / "integrator.md", "python")
    assert len(found) > 5
    exec(compile("\n".join(found), "integrator.md", "exec"), {"__name__": "integrator"})


def test_python_of_the_readme_runs() -> None:
    found = blocks(ROOT / "README.md", "python")
    assert len(found) == 2
    for source in found:
        exec(compile(source, "README.md", "exec"), {"__name__": "readme"})


def test_the_developers_kernel_fails_as_the_page_says_and_passes_once_mended() -> None:
    source, rerun = blocks(DOCS / "kernel_developer.md", "python")
    exec(compile(rerun, "kernel_developer.md", "exec"), {"__name__": "developer"})
    mended = source.replace("1 + weight if", "1 + weight.float() if")
    assert mended != source
    with pytest.warns(UserWarning, match="Mismatch dtype"):  # torch's own, of its slower path
        reports = [check_kernel(default_registry.contract("rms_norm"), defined(text), CPU) for text in (source, mended)]
    assert reports[0].failures
    for failure in reports[0].failures:
        assert re.search(r"\bdtype=float32, weight_dtype=(bfloat16|float16)\b.*zero_centred=True", failure)
    assert reports[1].ok, reports[1].failures


def defined(source: str) -> Kernel:
    """The kernel that the page's module defines."""
    namespace: dict[str, object] = {"__name__": "developer"}
    exec(compile(source, "kernel_developer.md", "exec"), namespace)
    (kernel,) = (value for value in namespace.values() if isinstance(value, Kernel))
    return kernel


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_commands(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]*)(?:#[^)]*)?\)", text):
        assert "://" in target or (page.parent / target).exists(), f"{page.name} links to {target}"
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for command in re.findall(r"^(?:`|\$ )?tokenspeed-kernels ([a-z-]+)", text, re.MULTILINE):
        assert command in known, f"{page.name} mentions {command}"


def paragraphs(page: Path) -> Iterator[list[str]]:
    """What stands in backticks, by paragraph or row of a table; blocks of code left out."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n\n|\n(?=\|)", text):
        yield re.findall(r"`([^`]+)`", paragraph)


@pytest.mark.parametrize("page", [page for page in WRITTEN if page.name != "kernel_developer.md"], ids=lambda p: p.name)
def test_files_and_folders_exist(page: Path) -> None:
    """Under the root or a package, or where only a name is given beside the one before. The page left out names files
    of the package that its reader makes."""
    bases = [ROOT, *(ROOT / package for package in PACKAGES)]
    for quoted in paragraphs(page):
        beside: list[Path] = []
        for word in " ".join(quoted).split():
            if re.fullmatch(r"\w[\w./-]*(?:\.py|/)|\w[\w.-]*/[\w./-]+\.\w+", word):
                found = [base / word for base in (*beside, *bases) if (base / word).exists()]
                assert found, f"{page.name} names {word}"
                beside = [found[0] if found[0].is_dir() else found[0].parent]


@functools.cache
def known_words() -> frozenset[str]:
    """Every word of the sources but this file's, and of the names of their files."""
    files = [ROOT / "pyproject.toml", ROOT / "Makefile"]
    files += [file for folder in SOURCES for kind in ("*.py", "*.template") for file in (ROOT / folder).rglob(kind)]
    found = {word for file in files if file != Path(__file__) for word in re.findall(r"\w+", file.read_text())}
    return frozenset(found | {part for file in files for part in re.findall(r"\w+", str(file.relative_to(ROOT)))})


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_names_occur_in_the_sources(page: Path) -> None:
    """Ops, options, classes, fields: an identifier in backticks, dotted or called, and what `name=value` sets.

    The page on metrics leaves their prefix out, and prometheus_client puts their ending on. Environment variables are
    named after fields.
    """
    for quoted in paragraphs(page):
        for entry in quoted:
            if match := re.fullmatch(r"(?:with )?@?([a-z_]\w*(?:\.\w+)*)(?:\(.*\)|=[^=].*)?", entry, re.I | re.DOTALL):
                for name in match[1].split("."):
                    field = name.removeprefix("TOKENSPEED_KERNELS_").lower()
                    spellings = {name, f"tokenspeed_{name}", name.removesuffix("_total"), field}
                    assert spellings & (known_words() | FORMULAS), f"{page.name} names {entry}"


def test_the_reference_is_what_the_contracts_say() -> None:
    written = reference_pages.pages()
    there = {path.relative_to(DOCS).as_posix() for path in [DOCS / "reference.md", *(DOCS / "reference").glob("*.md")]}
    assert there == set(written), "run: make docs"
    for name, text in written.items():
        assert (DOCS / name).read_text() == text, f"{name} is not what the contracts say; run: make docs"
    ops = [op for page in written for op in re.findall(r"^## (\w+)$", written[page], re.MULTILINE)]
    assert sorted(ops) == sorted(c.name for c in default_registry.contracts.values())


def test_the_reference_shows_evidence_of_the_source_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError

    fast = Kernel(
        "fast.silu_mul", "silu_mul", "fast", function, requires=arch("sm_90a"), priority=Priority.TUNED, compiler="cute"
    )
    evidence = EvidenceStore([tmp_path])
    evidence.record(Record(fast.name, fast.source_hash, "sm_90a", "cute 4.8", {Level.VERIFIED: {}}))
    evidence.record(Record(fast.name, "older", "gfx950", "triton 3.6", {Level.COMPILED: {}}))
    plugin = Plugin("fast", modules=(), probe=lambda: None, evidence=tmp_path)
    status = PluginStatus("fast", True, plugin=plugin, kernels=[fast])
    monkeypatch.setattr(reference_pages, "_own_plugins", lambda: [status])
    page = reference_pages.pages()["reference/moe.md"]
    line = "- `fast.silu_mul`: arch sm_90a; priority tuned; compiled by cute; evidence: sm_90a verified (cute 4.8)\n"
    assert line in page


def test_the_reference_is_not_written_without_all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    (status,) = (status for status in default_registry.plugins() if status.name == "torch")
    monkeypatch.setattr(status, "reason", "module tokenspeed_kernels.torch.moe failed to import")
    with pytest.raises(TokenspeedError, match=r"torch\.moe failed to import"):
        reference_pages.pages()


def test_writing_removes_pages_of_families_that_are_no_more(tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "gone.md").touch()
    reference_pages.write(tmp_path)
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")}
    assert written == set(reference_pages.pages())
