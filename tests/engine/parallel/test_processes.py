"""Ranks in processes of their own: started, fed, and gone with whatever goes first."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.test_llm import SMALL, greedy, steady_prompts
from tests.engine.tiny import tiny_checkpoint
from tests.engine.tiny_draft import draft_checkpoint
from tokenspeed_engine import LLM, SamplingParams
from tokenspeed_engine.control import Accepted, Row, Sample, StepPlan
from tokenspeed_engine.models.families import read_model
from tokenspeed_engine.parallel.executor import launch
from tokenspeed_engine.parallel.workers import WORKER, RankFailedError, Workers

CPU = torch.device("cpu")
TWO_PLAIN = dataclasses.replace(SMALL, device="cpu", ranks=2)
TWO = dataclasses.replace(TWO_PLAIN, num_drafts=2, prefix_cache=True, overlap=True)
COUNT = 12


def workers_of(parent: int) -> list[int]:
    """Processes of ranks whose parent is, or was, a process."""
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if _is_worker(folder, parent)]


def _is_worker(folder: Path, parent: int) -> bool:
    try:
        command = (folder / "cmdline").read_bytes().split(b"\0")
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it ended meanwhile
        return False
    return WORKER.encode() in command and int(fields[1]) == parent


def wait_until_gone(pid: int, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < end, f"process {pid} is still there"
        time.sleep(0.05)


@pytest.fixture
def llm() -> Iterator[LLM]:
    engine = LLM(draft_checkpoint(), TWO)
    yield engine
    engine.close()


def test_the_life_of_an_engine(llm: LLM) -> None:
    """Same tokens; then a rank is killed in the middle of requests, which end, as do all later ones."""
    asked, wanted = steady_prompts(tiny_checkpoint(), COUNT)
    assert [generation.token_ids for generation in llm.generate(asked, greedy(COUNT))] == wanted

    (worker,) = workers_of(os.getpid())
    outputs = llm.stream(asked[-1], greedy(50))
    next(outputs)
    os.kill(worker, signal.SIGKILL)
    last = list(outputs)[-1]
    assert (last.finish_reason, last.error) == ("error", "RankFailedError: rank 1 ended with exit code -9")
    (later,) = llm.generate(asked[0], greedy(3))
    assert (later.finish_reason, later.error) == ("error", "RankFailedError: rank 1 ended with exit code -9")
    assert llm.num_free == (llm.num_pages, llm.num_slots)
    assert workers_of(os.getpid()) == []


def test_a_rank_that_fails_says_why_and_close_leaves_nothing() -> None:
    """Signals to the whole process group do not end ranks; a step that fails on one of them does, with its message."""
    executor, _ = launch(tiny_checkpoint(), read_model(tiny_checkpoint()), TWO_PLAIN, CPU)
    try:
        (worker,) = workers_of(os.getpid())
        os.kill(worker, signal.SIGTERM)
        os.kill(worker, signal.SIGINT)
        sample = Sample(SamplingParams(temperature=0.0), 0, 0)
        good = Row("a", (5, 6), 0, (0,), 0, True, (), sample, decode=False)
        (result,) = executor.submit(StepPlan((good,), 0)).result().rows
        assert isinstance(result, Accepted)
        bad = dataclasses.replace(good, tokens=(5, 6, 7), decode=True)
        for _ in range(2):
            with pytest.raises(RankFailedError, match="rank 1 failed: ValueError: a row has 2 drafts"):
                executor.submit(StepPlan((bad,), 1)).result()
    finally:
        executor.close()
    executor.close()
    assert workers_of(os.getpid()) == []


def test_a_rank_that_cannot_be_built_stops_the_start(tmp_path: Path) -> None:
    workers = Workers(tmp_path, TWO, CPU)
    try:
        workers.connect()
        with pytest.raises(RankFailedError, match=r"rank 1 failed: ConfigError: .*config\.json"):
            workers.await_ready()
    finally:
        workers.close()
    assert workers_of(os.getpid()) == []


def test_ranks_end_with_their_parent_however_it_ends() -> None:
    """A program without a guard of its main module, which is killed."""
    program = (
        "import time, tokenspeed_engine as engine\n"
        f"llm = engine.LLM({str(tiny_checkpoint())!r}, engine.EngineOptions(device='cpu', ranks=2))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        (worker,) = workers_of(parent.pid)
        parent.kill()
    wait_until_gone(worker)
