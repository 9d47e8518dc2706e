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
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
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
    """Workers of a pool; functions, items and results of processes are pickled.

    Args:
        pool: the pool.
        n_workers: how many it has.
    """

    def __init__(self, pool: Pool, n_workers: int) -> None:
        self._pool, self._ahead = pool, AHEAD * n_workers

    def map(self, function: Callable[[P], R], items: Iterable[P]) -> Iterator[R]:
        """Yield what the function returns, in the order of the items."""
        waiting: deque[Any] = deque()
        try:
            for item in items:
                if len(waiting) == self._ahead:
                    yield waiting.popleft().result()
                waiting.append(self._pool.submit(function, item))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:  # of a map that failed, or that nobody reads to its end
                future.cancel()


class Threads:
    """Threads of this process, which end with each map.

    Args:
        n_workers: how many; one for each core, 32 at most, when None.
    """

    def __init__(self, n_workers: int | None = None) -> None:
        self.n_workers = n_workers or min(32, os.cpu_count() or 1)

    def map(self, function: Callable[[P], R], items: Iterable[P]) -> Iterator[R]:
        """Yield what the function returns, in the order of the items."""
        with ThreadPoolExecutor(self.n_workers, "actds-map") as pool:
            yield from Pooled(pool, self.n_workers).map(function, items)


class Ray:
    """Workers of a Ray cluster that sees the same files at the same paths."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._call = ray.remote(_call)

    def map(self, function: Callable[[P], R], items: Iterable[P]) -> Iterator[R]:
        """Yield what the function returns, in the order of the items."""
        ray = self._ray
        shared = ray.put(function)
        ahead = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        waiting: deque[Any] = deque()
        for item in items:
            if len(waiting) == ahead:
                yield self._result(waiting.popleft())
            waiting.append(self._call.remote(shared, item))
        while waiting:
            yield self._result(waiting.popleft())

    def _result(self, reference: Any) -> Any:
        result = self._ray.get(reference)
        if isinstance(result, ActdsError):
            raise result
        return result


def _call(function: Callable[[P], R], item: P) -> R | ActdsError:
    """Return an error of ours as it is: Ray raises another one around it."""
    try:
        return function(item)
    except ActdsError as error:
        return error


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
            yield Pooled(pool, count)
    elif name == "ray":
        with _ray() as ray:
            yield Ray(ray)
    else:
        expected = f"one of {', '.join(EXECUTORS)}"
        raise ActdsError("E009", "executor", got=str(name)[:80], expected=expected)


@contextmanager
def _ray() -> Iterator[Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise not_installed("ray", "ray", "executor ray") from error
    started_here = not ray.is_initialized()
    if started_here:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield ray
    finally:
        if started_here:
            ray.shutdown()
