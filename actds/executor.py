"""Where work on each shard is done: threads or processes of this machine, or Ray's workers.

One function is called with every item. What it returns comes in the order of the items, so that
sums of fractions are the same to the last bit wherever they were computed.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor as Pool
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Protocol, TypeVar, get_args

from actds.errors import ActdsError, not_installed

ExecutorName = Literal["threads", "processes", "ray"]
EXECUTORS: tuple[ExecutorName, ...] = get_args(ExecutorName)

AHEAD = 4
"""Items that are worked on or wait for their turn, per worker."""
P = TypeVar("P")
R = TypeVar("R")


class Executor(Protocol):
    """Calls a function with every item."""

    def map(self, function: Callable[[P], R], items: Iterable[P]) -> Iterator[R]:
        """Yield what the function returns, in the order of the items; raise what it raises.

        Items are taken while others are worked on: of an iterator few are in memory at a time.
        """
        ...


class Pooled:
    """Workers; of those in other processes, functions, items and results are pickled.

    Args:
        bind: returns what works on an item with a function, and promises its result.
    """

    def __init__(self, bind: Callable[[Any], Callable[[Any], Future[Any]]], n_workers: int) -> None:
        self._bind, self._ahead = bind, AHEAD * n_workers

    def map(self, function: Callable[[P], R], items: Iterable[P]) -> Iterator[R]:
        """Yield what the function returns, in the order of the items."""
        submit, waiting = self._bind(function), deque[Any]()
        try:
            for item in items:
                if len(waiting) == self._ahead:
                    yield _result(waiting.popleft())
                waiting.append(submit(item))
            while waiting:
                yield _result(waiting.popleft())
        finally:
            for future in waiting:  # of a map that failed, or that nobody reads to its end
                future.cancel()


class Threads:
    """Threads of this process, which end with each map: one for each core, to 32, when None."""

    def __init__(self, n_workers: int | None = None) -> None:
        self.n_workers = n_workers or min(32, os.cpu_count() or 1)

    def map(self, function: Callable[[P], R], items: Iterable[P]) -> Iterator[R]:
        """Yield what the function returns, in the order of the items."""
        with ThreadPoolExecutor(self.n_workers, "actds-map") as pool:
            yield from _pooled(pool, self.n_workers).map(function, items)


def _pooled(pool: Pool, n_workers: int) -> Pooled:
    return Pooled(lambda function: partial(pool.submit, function), n_workers)


def _call(function: Callable[[P], R], item: P) -> R | ActdsError:
    """Return an error of ours as it is: Ray raises another one around it."""
    try:
        return function(item)
    except ActdsError as error:
        return error


def _result(future: Future[R]) -> R:
    result = future.result()
    if isinstance(result, ActdsError):
        raise result
    return result


@contextmanager
def open_executor(name: ExecutorName, n_workers: int | None = None) -> Iterator[Executor]:
    """Yield an executor, which ends with the context.

    Processes are spawned. Ray is the cluster that this process is connected to or that
    ``RAY_ADDRESS`` names, else one of this machine's cores.

    Args:
        name: which.
        n_workers: threads or processes; one for each core when None.

    Raises:
        ActdsError: E009 there is no such executor; E011 Ray is not installed.
    """
    if name == "threads":
        yield Threads(n_workers)
    elif name == "processes":
        count = n_workers or os.cpu_count() or 1
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(count, spawn) as pool:
            yield _pooled(pool, count)
    elif name == "ray":
        with _ray() as workers:
            yield workers
    else:
        expected = f"one of {', '.join(EXECUTORS)}"
        raise ActdsError("E009", "executor", got=str(name)[:80], expected=expected)


@contextmanager
def _ray() -> Iterator[Pooled]:
    """Workers of a Ray cluster that sees the same files at the same paths."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise not_installed("ray", "ray", "executor ray") from error
    started_here = not ray.is_initialized()
    if started_here:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    call = ray.remote(_call)

    def bind(function: Any) -> Callable[[Any], Future[Any]]:
        shared = ray.put(function)
        return lambda item: call.remote(shared, item).future()

    try:
        yield Pooled(bind, max(1, int(ray.cluster_resources().get("CPU", 1))))
    finally:
        if started_here:
            ray.shutdown()
