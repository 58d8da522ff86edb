"""Work in processes of its own survives processes that die."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_kernels.benchmark.prepare import Ahead, Task
from tokenspeed_kernels.compile_command import Task as CompileTask
from tokenspeed_kernels.compile_command import _died
from tokenspeed_kernels.parallel import completed, each
from tokenspeed_registry import Kernel, Platform, known_platform


def work(item: tuple[int, Path]) -> int:
    """Kills itself at 3, at 5 only the first time; fails at 9."""
    number, folder = item
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 5 and not (folder / "once").exists():
        (folder / "once").touch()
        os._exit(7)
    if number == 9:
        raise ValueError("nine")
    return number * number


def done(numbers: range, folder: Path, jobs: int) -> list[Any]:
    return each(work, [(number, folder) for number in numbers], "work", jobs, lambda item, how: f"{item[0]}: {how}")


def test_a_process_that_dies_takes_no_other_item_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once more alone is enough for one, not for the other."""
    killed = "its process was killed by SIGKILL"
    assert done(range(7), tmp_path, 2) == [0, 1, 4, f"3: {killed}", 16, 25, 36]
    said = capsys.readouterr().err
    assert f"{killed}; once more at the end, alone" in said
    assert "its process ended with 7; once more at the end, alone" in said
    assert f"{killed} again" in said


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_work_raises_is_raised(tmp_path: Path, jobs: int) -> None:
    with pytest.raises(ValueError, match="nine"):
        done(range(8, 11), tmp_path, jobs)


def test_items_may_come_one_by_one(tmp_path: Path) -> None:
    items = ((number, tmp_path) for number in range(3))
    assert sorted(completed(work, items, 2, lambda item, how: -1)) == [(0, 0), (1, 1), (2, 4)]


def test_a_compiler_that_kills_its_process_is_a_row_that_is_not_ok() -> None:
    (row,) = _died(CompileTask("triton.linear", "gfx950", False, None), "its process was killed by SIGSEGV")
    assert (row["kernel"], row["arch"], row["ok"]) == ("triton.linear", "gfx950", False)


def test_what_kills_its_compiler_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor any other call that would launch it."""
    ahead = Ahead(known_platform("sm_90a"))
    kernels = [Kernel(name, "double", "triton", print) for name in ("good", "bad", "alike")]
    keys = {"good": {"a"}, "bad": {"a", "b"}, "alike": {"b"}}

    def launched(kernel: Kernel, call: Any, platform: Platform) -> set[str]:
        return keys[kernel.name]

    monkeypatch.setattr("tokenspeed_kernels.benchmark.prepare.launched", launched)
    monkeypatch.setattr("tokenspeed_kernels.benchmark.prepare._call", lambda kernel, arguments: ((), {}))
    monkeypatch.setattr("tokenspeed_kernels.benchmark.prepare.compile_task", lethal)
    tasks = [task for kernel in kernels for task in ahead.tasks(kernel, "model", {})]
    assert [(task.kernel, task.key) for task in tasks] == [("good", "a"), ("bad", "b")]
    ahead.compile(tasks, 2)
    assert ahead.sort_out(kernels, "model") == ([kernels[0]], kernels[1:])
    assert ahead.sort_out(kernels, "another call") == (kernels, [])


def lethal(task: Task) -> int:
    if task.key == "b":
        os.kill(os.getpid(), signal.SIGSEGV)
    return 1
