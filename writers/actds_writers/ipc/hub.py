"""The event loop of the writer and census processes: accepts connections and reads all of them.

The thread ``actds-accept`` takes new peers; the process's main thread polls them and sends. The
table of peers is shared by both, under a lock.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, wait

log = logging.getLogger("actds")
FIRST_CONTACT_S = 120.0
"""How long a process waits for the first message of the one that started it."""


class Hub:
    """Accepts connections in the background and dispatches their messages.

    Args:
        listener: where peers connect; the first message of each is its role.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._peers: dict[Connection, str] = {}
        self._met: set[str] = set()
        self._began = time.monotonic()
        threading.Thread(target=self._accept, name="actds-accept", daemon=True).start()

    def close(self) -> None:
        """Accept no further peers; removes the socket while its folder still exists."""
        self._listener.close()

    def has_met(self, role: str) -> bool:
        """Return whether a peer of the role ever connected."""
        return role in self._met

    def is_left_by(self, role: str) -> bool:
        """Return whether a peer of the role has gone, or did not connect in time."""
        if role in self.roles():
            return False
        return self.has_met(role) or time.monotonic() - self._began > FIRST_CONTACT_S

    def roles(self) -> set[str]:
        """Return the roles that are connected now."""
        with self._lock:
            return set(self._peers.values())

    def connection(self, role: str) -> Connection | None:
        """Return the connection of a role, ``None`` when it is gone."""
        with self._lock:
            return next((c for c, r in self._peers.items() if r == role), None)

    def poll(self, timeout_s: float, take: Callable[[str, object, Connection], None]) -> int:
        """Pass waiting messages, one per peer, to ``take(role, message, connection)``.

        Returns how many there were. A connection that has ended is removed: that is how the loop
        learns that a peer is gone.
        """
        with self._lock:
            peers = dict(self._peers)
        if not peers:
            threading.Event().wait(timeout_s)
            return 0
        n_messages = 0
        for ready in wait(list(peers), timeout_s):
            if not isinstance(ready, Connection):
                continue
            try:
                message = ready.recv()
            except (EOFError, OSError):
                self._forget(ready)
                continue
            n_messages += 1
            take(peers[ready], message, ready)
        return n_messages

    def send(self, role: str, message: object, *, patient: bool = True) -> bool:
        """Send a message to a role; return whether it was sent.

        Args:
            patient: wait until the receiver has room. Progress, which the next message renews, must
                not: a command busy in its engine would stop the writer, and the writer the engine.
        """
        connection = self.connection(role)
        if connection is None:
            return False
        if not patient and not select.select([], [connection], [], 0)[1]:
            return False
        try:
            connection.send(message)
        except OSError:
            self._forget(connection)
            return False
        return True

    def disconnect(self, role: str) -> None:
        """Close the connection of a role."""
        connection = self.connection(role)
        if connection is not None:
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        with self._lock:
            role = self._peers.pop(connection, None)
        connection.close()
        log.debug("peer %s is gone", role)

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except (AuthenticationError, EOFError, ConnectionError) as error:
                log.warning("refused a connection: %r", error)
                continue
            except OSError:
                return  # the listener is closed
            try:
                role = connection.recv()
            except (EOFError, OSError) as error:
                log.warning("a peer disconnected before it sent its role: %r", error)
                continue
            with self._lock:
                self._peers[connection] = str(role)
                self._met.add(str(role))
