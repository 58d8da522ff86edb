"""`tokenspeed-kernels new-backend`: what it writes installs, serves, is refused and is switched off like any plugin.

The package is installed without a network into a virtual environment of its own, which sees the packages of the running
one through a `.pth` file.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_kernels.cli import main
from tokenspeed_registry import CONTRACT_VERSION

SERVE = """
import json, torch, tokenspeed_kernels as tk
from tokenspeed_registry import TokenspeedError, default_registry

def serves(rows, dtype, backend=None):
    x = torch.ones(rows, 8, dtype=dtype)
    try:
        with tk.trace() as calls:
            tk.silu_mul(x, backend=backend)
    except TokenspeedError as error:
        return str(error)
    return calls[0].kernel

print(json.dumps({
    "within": serves(32, torch.float32),
    "too many rows": serves(257, torch.float32),
    "other dtype": serves(32, torch.bfloat16),
    "asked for": serves(257, torch.bfloat16, "mine"),
    "plugin": next([each.usable, each.reason] for each in default_registry.plugins() if each.name == "mine"),
}))
"""


@dataclass(frozen=True)
class Installed:
    """A virtual environment in which the generated package is installed in editable mode."""

    python: Path
    package: Path
    scratch: Path

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "TOKENSPEED_KERNELS_CACHE": str(self.scratch / "cache"), **environment}
        command = [str(self.python), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False, cwd=self.package, env=variables
        )

    def answer(self, *arguments: str, **environment: str) -> Any:
        result = self.run(*arguments, **environment)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    scratch = tmp_path_factory.mktemp("new_backend")
    cli("new-backend", "mine", "--into", str(scratch))
    package = scratch / "tokenspeed_mine"
    home = scratch / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    paths = {"base": str(home), "platbase": str(home)}
    site_packages = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    # addsitedir and not the path alone: editable installs of the running environment are .pth files themselves.
    here = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in dict.fromkeys(here)]
    (site_packages / "running_environment.pth").write_text("".join(lines))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    install = [*pip, "--no-build-isolation", "--disable-pip-version-check", "--editable", str(package)]
    result = subprocess.run(install, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return Installed(python, package, scratch)


@pytest.fixture
def other_contract(installed: Installed) -> Iterator[None]:
    """The package as if it had been written against the next contract version."""
    module = installed.package / "tokenspeed_mine" / "__init__.py"
    text = module.read_text()
    changed, count = re.subn(r"contract_version=\d+", f"contract_version={CONTRACT_VERSION + 1}", text)
    assert count == 1
    module.write_text(changed)
    yield
    module.write_text(text)


def cli(*arguments: str) -> int:
    """Runs the command in this process; its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tokenspeed-kernels", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)


def test_its_kernel_is_chosen_within_its_limits_and_refused_with_reasons_beyond(installed: Installed) -> None:
    served = installed.answer("-c", SERVE)
    assert served["plugin"] == [True, ""]
    assert served["within"] == "mine.silu_mul"
    assert served["too many rows"] == "torch.silu_mul"
    assert served["other dtype"] == "torch.silu_mul"
    reasons = "needs dtype of gate_up == float32, got bfloat16; needs rows <= 256, got 257"
    assert f"mine.silu_mul: refused: {reasons}" in served["asked for"]


def test_it_is_explained(installed: Installed) -> None:
    call = ("silu_mul", "--shape", "width=8", "--dtype", "gate_up=float32", "--shape", "rows=257")
    command = ("-c", "from tokenspeed_kernels.cli import main; main()", "explain", *call, "--json")
    report = installed.answer(*command)
    assert report["chosen"] == "torch.silu_mul"
    (refused,) = (row for row in report["candidates"] if row["kernel"] == "mine.silu_mul")
    assert refused["accepted"] is False
    assert refused["reason"] == "needs rows <= 256, got 257"


def test_it_is_switched_off_by_configuration(installed: Installed) -> None:
    config = installed.scratch / "config.toml"
    config.write_text('[plugins]\ndisabled = ["mine"]\n')
    served = installed.answer("-c", SERVE, TOKENSPEED_KERNELS_CONFIG=str(config))
    assert served["within"] == "torch.silu_mul"
    assert served["asked for"].endswith("disabled by configuration")
    assert served["plugin"] == [False, "disabled by configuration"]


@pytest.mark.usefixtures("other_contract")
def test_it_is_refused_by_name_when_built_for_another_contract_version(installed: Installed) -> None:
    reason = f"built for contract version {CONTRACT_VERSION + 1}, this is {CONTRACT_VERSION}"
    served = installed.answer("-c", SERVE)
    assert served["within"] == "torch.silu_mul"
    assert "'mine' cannot serve it" in served["asked for"]
    assert reason in served["asked for"]
    assert served["plugin"] == [False, reason]


def test_its_own_tests_pass_and_its_bench_runs(installed: Installed) -> None:
    result = installed.run("-m", "pytest", "-p", "no:cacheprovider")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "5 passed" in result.stdout
    timed = installed.run("bench.py")
    assert timed.returncode == 0, timed.stderr
    assert re.search(r"^qwen4_exp .*: mine\.silu_mul [\d.]+ us, [\d.]+ GB/s$", timed.stdout, re.MULTILINE)
    assert re.search(r"^deepseek_v3 .*: left out, moves \d+ MB$", timed.stdout, re.MULTILINE)


def test_what_it_writes_is_formatted_and_linted(installed: Installed) -> None:
    python_files = [str(path) for path in installed.package.rglob("*.py")]
    ruff = [sys.executable, "-m", "ruff"]
    own = 'lint.isort.known-first-party = ["tokenspeed_kernels", "tokenspeed_mine", "tokenspeed_registry"]'
    config = ["--no-cache", "--config", str(Path(__file__).parents[2] / "pyproject.toml"), "--config", own]
    for arguments in (["check"], ["format", "--check"]):
        command = [*ruff, *arguments, *config, *python_files]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("Mine", "must be a Python identifier of lower-case letters and digits"),
        ("my-backend", "must be a Python identifier"),
        ("8bit", "must be a Python identifier"),
        ("class", "must be a Python identifier"),
        ("mine_", "must be a Python identifier"),
        ("", "must be a Python identifier"),
        ("torch", "taken by a backend"),
        ("cuda", "taken by a backend"),
        ("reference", "taken by a backend"),
        ("registry", "there is a package tokenspeed_registry already"),
    ],
)
def test_a_name_that_will_not_do_is_one_line_and_exit_code_2(
    name: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("new-backend", "--into", str(tmp_path), "--", name) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tokenspeed-kernels: backend name {name!r}: ")
    assert complaint in line
    assert not list(tmp_path.iterdir())


def test_what_is_there_already_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenspeed_mine").mkdir()
    (tmp_path / "file").touch()
    for into in (tmp_path, tmp_path / "file"):
        assert cli("new-backend", "mine", "--into", str(into)) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert not list((tmp_path / "tokenspeed_mine").iterdir())
