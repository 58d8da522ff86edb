"""A process that is one rank: it builds its part of the model and runs the plans that the first rank sends.

Run as `python -m tokenspeed_engine.parallel.worker FD`, FD being its end of the connection.
"""

import logging
import os
import pickle
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection

import torch

from tokenspeed_engine.building import build_runner
from tokenspeed_engine.models.families import read_model
from tokenspeed_engine.parallel.group import connect, join_store
from tokenspeed_engine.parallel.ranks import Ranks
from tokenspeed_engine.parallel.workers import Assignment, Report

logger = logging.getLogger(__name__)


def main() -> None:
    """Ends with its parent, or with its own first failure, which it reports."""
    # Signals to a terminal's or a service's processes are for the first rank, which may have requests to finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    assignment: Assignment = connection.recv()
    logging.basicConfig(level=logging.WARNING, format=f"rank {assignment.rank}: %(message)s")
    plans: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, plans), daemon=True).start()
    try:
        _run(assignment, connection, plans)
    except BaseException as error:
        logger.exception("this rank failed")
        connection.send(Report(f"{type(error).__name__}: {error}"))
        _exit(1)


def _run(assignment: Assignment, connection: Connection, plans: "queue.SimpleQueue[bytes]") -> None:
    torch.set_num_threads(assignment.threads)
    rank, size, device = assignment.rank, assignment.size, torch.device(assignment.device)
    torch.zeros(1, device=device)  # a device that cannot be used shows before others wait for this rank
    connection.send(Report())
    group = connect(join_store(assignment.port), rank, size, device)
    description = read_model(assignment.folder).on(Ranks(rank, size, group))
    runner, _ = build_runner(assignment.folder, description, assignment.options, device)
    connection.send(Report())
    while True:
        runner.submit(pickle.loads(plans.get())).result()


def _receive(connection: Connection, plans: "queue.SimpleQueue[bytes]") -> None:
    """Takes plans in while a step runs, and so notices that the parent is gone even if that step never ends."""
    try:
        while True:
            plans.put(connection.recv_bytes())
    except (EOFError, OSError):
        _exit(0)


def _exit(code: int) -> None:
    """Without the interpreter's own end, which would wait for a step that waits for another rank."""
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
