"""Transport between the processes of one harvest: Unix sockets in a private folder.

Every process that may connect finds folder and key in one environment variable, which engine and
worker processes inherit; a configuration field would enter the engine's compile-cache key and make
every run compile anew. A ``Sender`` is a connection with a thread of its own.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from actds.errors import ActdsError
from actds.format.readouts import NONE

ENVIRONMENT = "ACTDS_LINK"
CONNECT_TIMEOUT_S = 180.0
"""A busy machine takes a minute to start a process; one that has died is seen at once."""
MAX_WAITING = 100_000
"""Messages that may wait; about a minute of a busy engine."""
CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Link:
    """Where the writer and the census listen.

    Args:
        folder: private folder of the sockets and the ring.
        key: shared secret of the harvest, hexadecimal.
        run: run id.
        hooks: ``(kind, layer)`` of each hook to capture.
        store_dtype: type to store rows in, ``None`` for the type the model computes in.
        policy: name of the overflow policy.
        ring_nbytes: size of the host ring; the worker takes more when two steps need it.
        client_pid: process of the command.
        live: whether the engine serves traffic, which goes on when capture fails.
        staging_nbytes: size of the staging ring; the worker takes more when a step needs it.
        lane_nbytes: size of the readouts' lane; the worker takes more when two steps need it.
        readouts: value of ``capture.readouts``.
        probes_path: npy file of the user's probes, ``None`` without.
        check: whether the hooks are checked before the first row.
    """

    folder: str
    key: str
    run: str
    hooks: tuple[tuple[str, int], ...]
    store_dtype: str | None
    policy: str
    ring_nbytes: int
    client_pid: int
    live: bool = False
    staging_nbytes: int = 0
    lane_nbytes: int = 0
    readouts: str = NONE
    probes_path: str | None = None
    check: bool = True

    def to_environment(self) -> str:
        """Return the value of the environment variable."""
        return json.dumps(self.__dict__)

    @classmethod
    def from_environment(cls) -> Link | None:
        """Return the link of this process, ``None`` outside a harvest."""
        text = os.environ.get(ENVIRONMENT)
        if not text:
            return None
        fields = json.loads(text)
        fields["hooks"] = tuple((kind, int(layer)) for kind, layer in fields["hooks"])
        return cls(**fields)

    def listen(self, name: str) -> Listener:
        """Return a listener for ``writer`` or ``census``."""
        return Listener(self._address(name), family="AF_UNIX", authkey=bytes.fromhex(self.key))

    def connect(
        self,
        name: str,
        role: str,
        timeout_s: float = CONNECT_TIMEOUT_S,
        is_alive: Callable[[], bool] = lambda: True,
    ) -> Connection:
        """Return a connection whose first message says who speaks.

        Args:
            name: who listens: ``writer``, ``census`` or ``readouts``.
            role: who speaks.
            timeout_s: how long to wait for the listener.
            is_alive: whether it can still come up.

        Raises:
            ActdsError: E506 when nobody listens within the time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                connection = Client(
                    self._address(name), family="AF_UNIX", authkey=bytes.fromhex(self.key)
                )
                connection.send(role)
                return connection
            except (FileNotFoundError, ConnectionRefusedError):
                alive = is_alive()
                if time.monotonic() > deadline or not alive:
                    waited = f"no listener within {timeout_s:.0f} s"
                    raise ActdsError(
                        "E506",
                        f"link {name}",
                        got=waited if alive else "its process has ended",
                        expected=f"the {name} process",
                    ) from None
                time.sleep(0.02)

    def _address(self, name: str) -> str:
        return str(Path(self.folder) / f"{name}.sock")


class Sender:
    """Sends in the background, in order, and never makes its caller wait.

    By it a serving engine tells the census: a socket whose other side stands still (a stalled disk
    is enough) would stop the scheduler, and with it the service. The queue is filled by the
    scheduler's thread; the thread ``actds-sender`` alone writes to the connection.

    Args:
        connection: where to.
        limit: messages that may wait.
    """

    def __init__(self, connection: Connection, limit: int = MAX_WAITING) -> None:
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
            raise _lost_census("it is gone")
        if self._queue.qsize() >= self._limit:
            self._gone = True  # a message that is left out would make the account wrong
            raise _lost_census(f"{self._limit} messages wait for it")
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


def _lost_census(got: str) -> ActdsError:
    return ActdsError("E505", "census process", got=got, expected="it to take every message")
