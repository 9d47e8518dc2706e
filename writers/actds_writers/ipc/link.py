"""Transport between the processes of one harvest: Unix sockets in a private folder.

Folder and key are in one environment variable, which engine and worker processes inherit; a
configuration field would enter the engine's compile-cache key and make every run compile again.
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
from actds_writers.config import HarvestSettings

ENVIRONMENT = "ACTDS_LINK"
CONNECT_TIMEOUT_S = 180.0
"""A busy machine takes a minute to start a process; one that has died is noticed at once."""
MAX_WAITING = 100_000
"""Messages that may wait; about a minute of a busy engine."""
CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Link:
    """The addresses of writer and census, and what every process of a harvest needs to know.

    Args:
        folder: private folder of the sockets and the ring.
        key: shared secret of the harvest, hexadecimal.
        hooks: ``(kind, layer)`` of each hook to capture.
        ring_nbytes: size of the host ring; the worker takes more when two steps need it.
        staging_nbytes: size of the staging ring; the worker takes more when a step needs it.
        client_pid: process of the command.
        live: whether the engine serves traffic, which continues when capture fails.
        lane_nbytes: size of the readouts' lane; the worker takes more when two steps need it.
        readouts: value of ``capture.readouts``.
        probes_path: npy file of the user's probes, ``None`` without.
    """

    folder: str
    key: str
    run: str
    hooks: tuple[tuple[str, int], ...]
    settings: HarvestSettings
    ring_nbytes: int
    staging_nbytes: int
    client_pid: int
    live: bool = False
    lane_nbytes: int = 0
    readouts: str = NONE
    probes_path: str | None = None

    def to_environment(self) -> str:
        """Return the value of the environment variable."""
        shared = set(HarvestSettings.model_fields)
        settings = self.settings.model_dump(mode="json", include=shared)
        return json.dumps({**self.__dict__, "settings": settings})

    @classmethod
    def from_environment(cls) -> Link | None:
        """Return the link of this process, ``None`` outside a harvest."""
        text = os.environ.get(ENVIRONMENT)
        if not text:
            return None
        fields = json.loads(text)
        fields["settings"] = HarvestSettings.model_validate_json(json.dumps(fields["settings"]))
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
        """Return a connection whose first message is the sender's role.

        Args:
            name: the listener: ``writer``, ``census`` or ``readouts``.
            timeout_s: how long to wait for the listener.
            is_alive: whether the listener can still come up.

        Raises:
            ActdsError: E506 when there is no listener in time.
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
    """Sends in the background, in order, and never blocks its caller.

    A serving engine uses it for the census: a socket whose receiver is stalled (a slow disk is
    enough) would stop the scheduler, and with it the service. The scheduler's thread fills the
    queue; only the thread ``actds-sender`` writes to the connection.
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
            ActdsError: E505 when the receiver is gone or too far behind.
        """
        if self._gone:
            raise _lost_census("the process is gone")
        if self._queue.qsize() >= self._limit:
            self._gone = True  # a missing message would make the account wrong
            raise _lost_census(f"{self._limit} messages wait for it")
        self._queue.put(message)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send what waits, within the timeout, and close the connection."""
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
    return ActdsError(
        "E505", "census process", got=got, expected="a process that takes every message"
    )
