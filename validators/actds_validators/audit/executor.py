"""Engine: a function over the parts of a run, in threads of this process or in Ray's workers.

Beside every pass. Results come in the order of the parts whatever the engine, so that sums of
fractions are the same to the last bit. Imports the format room's errors.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeVar

from actds.errors import ActdsError

__all__ = ["N_THREADS", "Engine", "EngineName", "Threads", "open_engine"]

EngineName = Literal["threads", "ray"]
N_THREADS = 2
AHEAD = 4
"""Parts that are worked on or wait for their turn, per thread."""
P = TypeVar("P")
R = TypeVar("R")


class Engine(Protocol):
    """Calls a function with every part."""

    def map(self, function: Callable[[P], R], parts: Sequence[P]) -> Iterator[R]:
        """Yield what the function returns, in the order of the parts."""
        ...


class Threads:
    """Threads of this process."""

    def map(self, function: Callable[[P], R], parts: Sequence[P]) -> Iterator[R]:
        """Yield what the function returns, in the order of the parts."""
        with ThreadPoolExecutor(N_THREADS, "actds-audit") as pool:
            waiting: deque[Any] = deque()
            for part in parts:
                if len(waiting) == AHEAD * N_THREADS:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(function, part))
            while waiting:
                yield waiting.popleft().result()


class Ray:
    """Workers of a Ray cluster that sees the same files at the same paths."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._call = ray.remote(_call)

    def map(self, function: Callable[[P], R], parts: Sequence[P]) -> Iterator[R]:
        """Yield what the function returns, in the order of the parts."""
        ray = self._ray
        shared = ray.put(function)
        ahead = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        waiting: deque[Any] = deque()
        for part in parts:
            if len(waiting) == ahead:
                yield ray.get(waiting.popleft())
            waiting.append(self._call.remote(shared, part))
        while waiting:
            yield ray.get(waiting.popleft())


def _call(function: Callable[[P], R], part: P) -> R:
    return function(part)


@contextmanager
def open_engine(name: EngineName) -> Iterator[Engine]:
    """Yield an engine.

    Ray is the cluster that this process is connected to or that ``RAY_ADDRESS`` names, else one of
    this machine's cores, which ends with the context.

    Raises:
        ActdsError: E011 Ray is not installed.
    """
    if name == "threads":
        yield Threads()
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ActdsError(
            "E011",
            "--engine ray",
            got="the package ray is not installed",
            expected="the extra actds[ray]",
            next_step='pip install "actds[ray]"',
        ) from error
    mine = not ray.is_initialized()
    if mine:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield Ray(ray)
    finally:
        if mine:
            ray.shutdown()
