"""The same work for each of many items, in processes of their own where asked, with progress on stderr.

A process may die, for want of memory or of a fault in a compiler. Another takes its place, and its item is tried once
more when all others are done and their memory is free; should it die again, the rest stands.
"""

import multiprocessing
import queue
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Item = TypeVar("Item")
Result = TypeVar("Result")


class DiedError(Exception):
    """A process ended before its work did; the message says how."""


def each(
    work: Callable[[Item], Result], items: Sequence[Item], what: str, jobs: int, died: Callable[[Item, str], Result]
) -> list[Result]:
    """`work(item)` of every item, in order. `jobs` above 1: in so many processes; `work` is then a top-level function.

    `what` heads the progress bar, which only a terminal sees. `died(item, how)` stands in for the result of an item
    whose process died twice. Raises what `work` raises.
    """
    results: dict[int, Result] = {}
    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not items) as progress:
        task = progress.add_task(what, total=len(items))
        for position, result in completed(work, items, jobs if len(items) > 1 else 1, died):
            results[position] = result
            progress.advance(task)
    return [results[position] for position in range(len(items))]


def completed(
    work: Callable[[Item], Result], items: Iterable[Item], jobs: int, died: Callable[[Item, str], Result]
) -> Iterator[tuple[int, Result]]:
    """Positions and results as they come, as `each` makes them. The first items are worked on while later ones come."""
    if jobs <= 1:
        yield from ((position, work(item)) for position, item in enumerate(items))
        return
    again: list[tuple[int, Item]] = []
    idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
    for _ in range(jobs):
        idle.put(None)

    def run(item: Item) -> Result:
        worker = idle.get()
        try:
            worker = worker or _Worker(work)
            result: Result = worker.run(item)
        finally:
            idle.put(worker if worker is not None and worker.alive else None)
        return result

    threads = ThreadPoolExecutor(jobs)
    try:
        futures = {threads.submit(run, item): (position, item) for position, item in enumerate(items)}
        for future in as_completed(futures):
            position, item = futures[future]
            try:
                yield position, future.result()
            except DiedError as error:
                print(f"{item}: {error}; once more at the end, alone", file=sys.stderr)
                again.append((position, item))
    finally:
        threads.shutdown(cancel_futures=True)
        for _ in range(jobs):
            if (worker := idle.get()) is not None:
                worker.stop()
    for position, item in again:
        worker = _Worker(work)
        try:
            yield position, worker.run(item)
        except DiedError as error:
            print(f"{item}: {error} again", file=sys.stderr)
            yield position, died(item, str(error))
        finally:
            worker.stop()


class _Worker:
    """A process that does one item after another."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("spawn")  # forked processes cannot use CUDA
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(work, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.alive = True

    def run(self, item: Any) -> Any:
        try:
            self._pipe.send(item)
            result, error = self._pipe.recv()
        except (EOFError, OSError):
            self.stop()
            raise DiedError(_how(self._process.exitcode or 0)) from None
        if error is not None:
            raise error
        return result

    def stop(self) -> None:
        self.alive = False
        self._pipe.close()
        self._process.join()


def _serve(work: Callable[[Any], Any], pipe: Connection) -> None:
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return
        answer: tuple[Any, Exception | None]
        try:
            answer = work(item), None
        except Exception as error:
            answer = None, error
        pipe.send(answer)


def _how(code: int) -> str:
    return f"its process was killed by {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"
