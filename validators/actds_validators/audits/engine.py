"""Engine: a function over the parts of a run, in threads of this process or in Ray's workers.

Beside every pass. Results come in the order of the parts whatever the engine, so that sums of
fractions are the same to the last bit. Imports nothing of the audit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol, TypeVar

from actds.errors import ActdsError

__all__ = ["Engine", "EngineName", "make_engine"]

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
    """Workers of a Ray cluster that sees the same files: the one in ``RAY_ADDRESS``, or its own."""

    def __init__(self) -> None:
        try:
            import ray
        except ImportError as error:
            raise ActdsError(
                "E012",
                "--engine ray",
                got="no package ray",
                expected="Ray",
                next_step="pip install 'actds[ray]'",
            ) from error
        self._ray = ray
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")

    def map(self, function: Callable[[P], R], parts: Sequence[P]) -> Iterator[R]:
        """Yield what the function returns, in the order of the parts."""
        ray = self._ray
        shared = ray.put(function)
        call = ray.remote(_call)
        ahead = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        waiting: deque[Any] = deque()
        for part in parts:
            if len(waiting) == ahead:
                yield ray.get(waiting.popleft())
            waiting.append(call.remote(shared, part))
        while waiting:
            yield ray.get(waiting.popleft())


def _call(function: Callable[[P], R], part: P) -> R:
    return function(part)


def make_engine(name: EngineName) -> Engine:
    """Return an engine.

    Raises:
        ActdsError: E012 Ray is not installed.
    """
    return Ray() if name == "ray" else Threads()
