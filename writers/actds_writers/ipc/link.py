"""Links between the processes of one harvest: Unix sockets in a private folder.

Imports the messages only. Every process that may connect finds folder and key in one environment
variable, which engine and worker processes inherit; a configuration field would enter the
engine's compile-cache key and make every run compile anew.
"""

from __future__ import annotations

import json
import os
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
"""A busy machine takes a minute to start a process; one that has died is seen at once."""


@dataclass(frozen=True)
class Link:
    """Where the writer and the census listen.

    Args:
        folder: private folder of the sockets and the ring.
        key: shared secret of the harvest, hexadecimal.
        run: run id.
        hooks: ``(kind, layer)`` of each hook to capture.
        settings: of the harvest.
        ring_nbytes: size of the host ring; the worker takes more when two steps need it.
        staging_nbytes: size of the staging ring; the worker takes more when a step needs it.
        client_pid: process of the command.
        live: whether the engine serves traffic, which goes on when capture fails.
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
