"""A sender that never makes its caller wait: by it a serving engine tells the census.

Stands between scheduler and census; imports the errors only. A socket whose other side stands
still (a stalled disk is enough) would stop the scheduler, and with it the service.
"""

from __future__ import annotations

import queue
import threading
from multiprocessing.connection import Connection

from actds.errors import ActdsError

__all__ = ["Sender"]

LIMIT = 100_000
"""Messages that may wait; about a minute of a busy engine."""
CLOSE_TIMEOUT_S = 10.0


class Sender:
    """Sends in the background, in order.

    Args:
        connection: where to.
        limit: messages that may wait.
    """

    def __init__(self, connection: Connection, limit: int = LIMIT) -> None:
        self._connection, self._limit = connection, limit
        self._queue: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._gone = False
        self._thread = threading.Thread(target=self._work, name="actds-sender", daemon=True)
        self._thread.start()

    def send(self, message: object) -> None:
        """Queue a message; returns at once.

        Raises:
            ActdsError: E505 when the other side is gone or too far behind.
        """
        if self._gone:
            raise _lost("it is gone")
        if self._queue.qsize() >= self._limit:
            self._gone = True  # a message that is left out would make the account wrong
            raise _lost(f"{self._limit} messages wait for it")
        self._queue.put(message)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send what waits, as far as the time allows, and close the connection."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        self._gone = True
        if not self._thread.is_alive():
            self._connection.close()

    def _work(self) -> None:
        while (message := self._queue.get()) is not None and not self._gone:
            try:
                self._connection.send(message)
            except OSError:
                self._gone = True


def _lost(got: str) -> ActdsError:
    return ActdsError("E505", "census process", got=got, expected="it to take every message")
