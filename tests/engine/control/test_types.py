"""A call in the wrong state does not type-check.

The lines of `wrong_state/` that must not type-check are marked with the `type: ignore` that mypy wants on them. Here
mypy runs over copies without the marks, so that exactly the marked lines must be reported, each with its code.
"""

import re
from pathlib import Path

import pytest
from mypy import api

FOLDER = Path(__file__).parent / "wrong_state"
ROOT = next(folder for folder in FOLDER.parents if (folder / "pyproject.toml").exists())
MARK = re.compile(r"# type: ignore\[([a-z-]+)\]")
CONFIG = """
[mypy]
strict = True
python_version = 3.11
mypy_path = engine
explicit_package_bases = True
follow_imports = silent
cache_dir = .mypy_cache/wrong_state
[mypy-tokenspeed_engine.llm]
follow_imports = skip
"""
REPORT = re.compile(r"^(.*):(\d+): error: .*\[([a-z-]+)\]$", re.MULTILINE)


def test_mypy_rejects_the_marked_lines_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marked = set()
    for source in sorted(FOLDER.glob("*.py")):
        text = source.read_text()
        for number, line in enumerate(text.splitlines(), start=1):
            marked |= {(source.name, number, code) for code in MARK.findall(line)}
        (tmp_path / source.name).write_text(MARK.sub("#", text))
    assert len(marked) > 20
    assert "allowed.py" not in {name for name, _, _ in marked}
    assert (tmp_path / "allowed.py").exists()

    # The project's settings, but for what only the execution plane imports: reading torch takes a minute.
    config = tmp_path / "mypy.ini"
    config.write_text(CONFIG)
    monkeypatch.chdir(ROOT)
    report, errors, _ = api.run(["--config-file", str(config), "--no-error-summary", "--no-pretty", str(tmp_path)])
    assert errors == ""
    assert {(Path(name).name, int(number), code) for name, number, code in REPORT.findall(report)} == marked
