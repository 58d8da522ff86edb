"""The same work for each of many items, in processes of their own where asked, with progress on stderr."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(work: Callable[[Item], Result], items: Sequence[Item], what: str, jobs: int = 1) -> list[Result]:
    """`work(item)` of every item, in order. `jobs` above 1: in so many processes; `work` is then a top-level function.

    `what` heads the progress bar, which only a terminal sees. Raises what `work` raises.
    """
    results: dict[int, Result] = {}
    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not items) as progress:
        task = progress.add_task(what, total=len(items))
        for position, result in _completed(work, items, jobs):
            results[position] = result
            progress.advance(task)
    return [results[position] for position in range(len(items))]


def _completed(work: Callable[[Item], Result], items: Sequence[Item], jobs: int) -> Iterator[tuple[int, Result]]:
    if jobs <= 1 or len(items) < 2:
        yield from ((position, work(item)) for position, item in enumerate(items))
        return
    # Forked processes cannot use CUDA.
    with ProcessPoolExecutor(min(jobs, len(items)), multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(work, item): position for position, item in enumerate(items)}
        for future in as_completed(futures):
            yield futures[future], future.result()
