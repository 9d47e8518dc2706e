"""The census process: the scheduler side of the account, with its own ledger chain.

``python -m actds_writers.census_process`` reads its settings and link from standard input. It
outlives engine, writer and command, so it accounts for whatever happens to them; a journal is
durable before the rows are, so it may be killed itself. The main thread owns the census;
``actds-accept`` accepts connections; ``actds-journal`` writes the journal and answers the writer.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from actds import layout, schema
from actds.errors import ActdsError
from actds.ledger import Chain
from actds.schema import CloseReason, Genesis
from actds.store import local_folder, open_store
from actds_writers.census.census import Census
from actds_writers.census.journal import (
    LOST_REASON,
    RESERVE,
    Journal,
    commit_census,
    end_writer_chain,
    merged,
    remove_journal,
)
from actds_writers.config import CensusSettings
from actds_writers.ipc.link import Hub, Link
from actds_writers.ipc.messages import ClientFacts, Done, Failed, Finish, Secure, Secured

log = logging.getLogger("actds")
POLL_S = 0.1
PROGRESS_INTERVAL_S = 0.25
ORPHAN_PATIENCE_S = 60.0
MAX_DRAINED = 100_000
"""Messages taken before an answer to the writer; what its rows depend on has long been sent."""


class CensusProcess:
    """Runs one census until scheduler and writer are gone.

    Its memory grows with the run, because the tables are made at the end, from all of it; old
    entries are packed, and ``sizing.census_nbytes`` is the bound.
    """

    def __init__(self, link: Link, settings: CensusSettings) -> None:
        self._settings, self._link = settings, link
        self._hub = Hub(link.listen("census"))
        self._store = open_store(settings.root)
        self._census = Census()
        self._client = ClientFacts()
        self._chain: Chain | None = None
        self._engine_spoke = False
        self._journal = Journal(self._store, settings.run, self._begin)
        self._wanted: int | None = None
        self._reason: CloseReason | None = None
        self._last_progress = 0.0
        self._orphaned_since: float | None = None
        self._reserved: Path | None = None

    def run(self) -> int:
        """Run until the run has ended; return the exit code."""
        while not self._ended():
            self._hub.poll(POLL_S, self._take)
            self._secure()
            self._reserve()
            self._report()
        if "harvest" not in self._hub.roles():
            # The command was killed; nobody else is left to remove sockets and ring.
            self._hub.close()
            shutil.rmtree(self._link.folder, ignore_errors=True)
        try:
            totals = self._finish()
        except ActdsError as error:
            log.error("%s", error)
            self._hub.send("harvest", Failed.of(error))
            return 1
        self._hub.send("harvest", replace(self._census.progress(), connected=True))
        self._hub.send("harvest", Done(totals))
        return 0

    def _take(self, role: str, message: object, _connection: Connection) -> None:
        if role in ("scheduler", "worker"):
            self._census.observe(message)
            self._journal.add(message)
            self._engine_spoke = True
        elif isinstance(message, ClientFacts):
            self._client = merged(self._client, message)
            self._journal.add(message)
        elif isinstance(message, Secure):
            self._wanted = message.last_step
        elif isinstance(message, Finish):
            self._reason = message.reason

    def _secure(self) -> None:
        """Answer the writer when the census of its rows is durable.

        Worker and scheduler send before the writer does, over their own sockets: take what has
        arrived there first.
        """
        if self._wanted is None:
            return
        drained = 0
        while drained < MAX_DRAINED and (n_messages := self._hub.poll(0, self._take)):
            drained += n_messages
        step = self._wanted
        if not self._census.has_scheduled(step):
            if "scheduler" in self._hub.roles():
                return
            error = ActdsError(
                "E505",
                f"census at step {step}",
                got="the scheduler disconnected without reporting it",
                expected="the schedule of every row",
            )
            self._hub.send("writer", Failed.of(error))
        else:
            self._journal.secure(lambda error: self._answer_secured(step, error))
        self._wanted = None

    def _answer_secured(self, step: int, error: ActdsError | None) -> None:
        self._hub.send("writer", Secured(step) if error is None else Failed.of(error))

    def _begin(self) -> str | None:
        """Begin the chain once engine and dataset exist; return the dataset's id.

        Early, and not with the tables, so that a later recovery can fence it.
        """
        if not self._engine_spoke or not self._store.exists(layout.GENESIS):
            return None
        genesis = schema.parse(Genesis, self._store.read(layout.GENESIS), layout.GENESIS)
        settings = self._settings
        self._chain = self._chain or Chain.begin(
            self._store, genesis.dataset, settings.run, "census", settings.software
        )
        return genesis.dataset

    def _ended(self) -> bool:
        roles = self._hub.roles()
        if roles & {"scheduler", "worker", "writer"}:
            if not self._hub.is_left_by("harvest"):
                return False
            self._orphaned_since = self._orphaned_since or time.monotonic()
            return time.monotonic() - self._orphaned_since > ORPHAN_PATIENCE_S
        if self._reason is not None:
            return True
        return self._hub.is_left_by("harvest")

    def _report(self) -> None:
        if time.monotonic() - self._last_progress > PROGRESS_INTERVAL_S:
            self._last_progress = time.monotonic()
            connected = self._hub.has_met("scheduler")
            progress = replace(self._census.progress(), connected=connected)
            self._hub.send("harvest", progress, patient=False)

    def _reserve(self) -> None:
        """Hold back disk space as soon as the dataset exists."""
        folder = local_folder(self._settings.root)
        if folder is None or self._reserved is not None or not (folder / layout.GENESIS).exists():
            return
        self._reserved = folder / f"{RESERVE}{self._settings.run}"
        try:
            with open(self._reserved, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._settings.reserve_nbytes)
        except OSError as error:
            log.warning("cannot reserve disk space: %s", error.strerror)

    def _finish(self) -> dict[str, int]:
        """Write the tables, close the chain, end the writer's chain if it is still open."""
        if self._reserved is not None:
            self._reserved.unlink(missing_ok=True)
        store, run = self._store, self._settings.run
        if not store.exists(layout.GENESIS):
            return {}  # the engine never came up: nothing exists that could be accounted for
        genesis = schema.parse(Genesis, store.read(layout.GENESIS), layout.GENESIS)
        ended = end_writer_chain(store, genesis.dataset, run)
        # The tables follow from the journal, should they have to be written a second time.
        self._journal.finish()
        if ended is None:
            # The journal may have begun all the same.
            if self._chain is not None:
                self._chain.close("failed", {})
            remove_journal(store, run)
            return {}
        chain = self._chain or Chain.begin(
            store, genesis.dataset, run, "census", self._settings.software
        )
        found = self._census.tables(
            ended.acknowledged, self._client, LOST_REASON, ended.dropped_steps
        )
        commit_census(store, chain, run, found)
        chain.close(self._reason or "interrupted", found.totals)
        remove_journal(store, run)
        return found.totals


def main() -> int:
    """Run the process; settings and link come pickled through standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command decides when a harvest ends
    logging.basicConfig(format="actds census: %(message)s", stream=sys.stderr)
    link, settings = pickle.load(sys.stdin.buffer)
    return CensusProcess(link, settings).run()


if __name__ == "__main__":
    sys.exit(main())
