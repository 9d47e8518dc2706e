"""The request log: what the scheduler said of every request; ended ones are packed.

Beside the census, which fills it; pure.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass

import zstandard

from actds_writers.census.packing import squeeze
from actds_writers.ipc.messages import RequestArrived, RequestFinished

BATCH = 512


@dataclass(slots=True)
class Request:
    """One request as the scheduler told of it.

    Args:
        arrived: when it came.
        finished: when it ended, ``None`` while it runs.
        first_token_ns: when its first sampled token was fed.
        n_preemptions: times it lost its KV blocks.
    """

    arrived: RequestArrived
    finished: RequestFinished | None = None
    first_token_ns: int | None = None
    n_preemptions: int = 0


class RequestLog:
    """The requests of a run: those that run by number, those that have ended in packed batches."""

    def __init__(self) -> None:
        self._running: dict[int, Request] = {}
        self._ended: list[Request] = []
        self._packed: list[bytes] = []

    def arrive(self, message: RequestArrived) -> None:
        """Note a new request."""
        self._running[message.request] = Request(message)

    def running(self, request: int) -> Request | None:
        """Return a request that has not ended, ``None`` for one that has or never came."""
        return self._running.get(request)

    def end(self, message: RequestFinished) -> None:
        """Note the end of a request.

        Raises:
            KeyError: no such request runs.
        """
        ended = self._running.pop(message.request)
        ended.finished = message
        self._ended.append(ended)
        if len(self._ended) >= BATCH:
            self._packed.append(squeeze(pickle.dumps(self._ended)))
            self._ended = []

    def batches(self) -> Iterator[list[Request]]:
        """Yield all requests, some at a time, in no order."""
        for data in self._packed:
            yield pickle.loads(zstandard.ZstdDecompressor().decompress(data))
        yield [*self._ended, *self._running.values()]
