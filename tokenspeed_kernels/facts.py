"""What stands beside every recorded number: the command, the date, the commit and the versions that made it."""

import shlex
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "tokenspeed-kernels",
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "cuda-core",
    "nvidia-cuda-nvrtc",
    "hip-python",
    "numpy",
)


def versions() -> dict[str, str | None]:
    """Python's and those of the packages that matter; None for what is not installed."""
    return {"python": sys.version.split()[0], **{name: _version(name) for name in PACKAGES}}


def device_name() -> str:
    """The accelerator's name, or `cpu`."""
    if not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name()


def facts_now() -> dict[str, Any]:
    """Command, date (UTC), commit, device and installed versions, as JSON can hold them."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    command = " ".join([name, *(shlex.quote(_portable(word)) for word in sys.argv[1:])])
    installed = {name: found for name, found in versions().items() if found is not None}
    today = datetime.now(UTC).date().isoformat()
    return {"command": command, "date": today, "commit": commit(), "device": device_name(), "versions": installed}


def _portable(word: str) -> str:
    """An argument without the folders of this machine."""
    option, equals, value = word.rpartition("=")
    return option + equals + (Path(value).name if Path(value).is_absolute() else value)


@cache
def commit() -> str | None:
    """The checkout's commit, with `+` where files differ from it; None outside a checkout."""
    where = Path(__file__).parent
    try:
        head = _git(where, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(where, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(where: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", where, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
