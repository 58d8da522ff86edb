"""The processes of all ranks but the first, seen from there: started, fed, watched, ended.

A rank that fails leaves the others waiting in the middle of a step, so that no state can be trusted: its failure ends
all of them. Workers end by themselves when the connection to their parent closes, however that comes about.
"""

import contextlib
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import torch

from tokenspeed_engine.control import ExecutorLostError
from tokenspeed_engine.options import EngineOptions
from tokenspeed_engine.parallel.group import connect, open_store
from tokenspeed_engine.parallel.ranks import Group, Ranks

WORKER = "tokenspeed_engine.parallel.worker"
STDERR = 2
GRACE = 0.2
"""Seconds in which ranks that waited for one that failed fail too: what all of them say shows which was the first."""
PATIENCE = 5.0
"""Seconds that a worker may take to say why it failed, or to end."""


class RankFailedError(ExecutorLostError):
    """A rank failed, and with it the engine; the message says which one and why."""


@dataclass(frozen=True)
class Assignment:
    """The first message to a worker: what it is to build. port: of the store where ranks find each other."""

    rank: int
    size: int
    port: int
    device: str
    threads: int
    folder: Path
    options: EngineOptions


@dataclass(frozen=True)
class Report:
    """A message from a worker: it imported all it needs, it is ready for plans, or it failed and why."""

    failure: str | None = None


class Workers:
    """Ranks 1 to `options.ranks` − 1.

    Raises RankFailedError where one of them does not come up.
    """

    def __init__(self, folder: Path, options: EngineOptions, device: torch.device) -> None:
        self.size = options.ranks
        self._device = device
        self._store = open_store()
        self._group: Group | None = None
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._failure: str | None = None
        self._failed = threading.Event()
        self._watcher: threading.Thread | None = None
        self._wake, self._woken = Pipe()
        try:
            for rank in range(1, self.size):
                self._spawn(rank, folder, options)
            self._await_reports()
        except BaseException:
            self.close()
            raise

    def connect(self) -> Ranks:
        """The first rank, connected to these."""
        self._group = connect(self._store, 0, self.size, self._device)
        return Ranks(0, self.size, self._group)

    def await_ready(self) -> None:
        """Waits until all can take plans, and watches them from then on. Raises RankFailedError."""
        self._await_reports()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def send(self, data: bytes) -> None:
        """Sends a pickled plan to every worker. Raises RankFailedError."""
        self.check()
        try:
            for connection in self._connections:
                connection.send_bytes(data)
        except OSError as error:
            raise self.failure(error) from error

    def check(self) -> None:
        """Raises RankFailedError if a rank has failed."""
        if self._failure is not None:
            raise RankFailedError(self._failure)

    def failure(self, error: Exception) -> RankFailedError:
        """What made a step fail on the first rank with `error`: a worker's failure, or that itself. Ends the others."""
        if not self._failed.wait(PATIENCE):
            self._fail(f"rank 0 failed: {type(error).__name__}: {error}")
        assert self._failure is not None
        return RankFailedError(self._failure)

    def close(self) -> None:
        """Ends all workers, and waits for that."""
        self._failure = self._failure or "the ranks were closed"
        if self._wake.closed:
            return
        self._wake.send_bytes(b"")
        if self._watcher is not None:
            self._watcher.join()
        for connection in (*self._connections, self._wake, self._woken):
            connection.close()
        self._end(patience=PATIENCE)
        self._abort_group()

    def _spawn(self, rank: int, folder: Path, options: EngineOptions) -> None:
        own, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", WORKER, str(theirs.fileno())]
            # What they print is no part of what this process prints.
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=STDERR, pass_fds=[theirs.fileno()])
        self._processes.append(process)
        self._connections.append(own)
        device = f"cuda:{(self._device.index or 0) + rank}" if self._device.type == "cuda" else "cpu"
        threads = max(1, torch.get_num_threads() // self.size)
        own.send(Assignment(rank, self.size, self._store.port, device, threads, folder, options))

    def _await_reports(self) -> None:
        """One of each worker."""
        waiting = list(self._connections)
        while waiting:
            for connection in wait(waiting):
                assert isinstance(connection, Connection)
                failure = self._read(connection)
                if failure is not None:
                    raise RankFailedError(failure)
                waiting.remove(connection)

    def _watch(self) -> None:
        """Workers that run have nothing to say but that they fail."""
        if self._woken in wait([*self._connections, self._woken]):
            return
        time.sleep(GRACE)
        said = [self._read(connection) for connection in self._connections if connection.poll()]
        self._fail("; ".join(message for message in said if message is not None))

    def _read(self, connection: Connection) -> str | None:
        """What a worker says of its failure, if it did fail."""
        rank = 1 + self._connections.index(connection)
        try:
            report = connection.recv()
        except (EOFError, OSError):
            process = self._processes[rank - 1]
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            return f"rank {rank} ended with exit code {process.returncode}"
        assert isinstance(report, Report)
        return None if report.failure is None else f"rank {rank} failed: {report.failure}"

    def _fail(self, message: str) -> None:
        """Ends everything that waits for another rank, in this process too."""
        self._failure = self._failure or message
        self._failed.set()
        self._end(patience=0.0)
        self._abort_group()

    def _abort_group(self) -> None:
        """Ends what waits on a GPU. Gloo needs no such call: it fails when the others' connections close."""
        if self._device.type == "cuda" and self._group is not None:
            self._group.abort()

    def _end(self, patience: float) -> None:
        for process in self._processes:
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
