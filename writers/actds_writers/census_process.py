"""The census process: the scheduler side of the account, with its own ledger chain.

``python -m actds_writers.census_process`` reads its settings and link from standard input. It
outlives engine, writer and command, so it accounts for whatever happens to them; a journal is
durable before the rows are, so it may be killed itself. The main thread owns the census;
``actds-accept`` accepts connections; ``actds-journal`` writes the journal and answers the writer.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from actds.dataset.ledger import Chain
from actds.dataset.reading import read_genesis
from actds.errors import ActdsError
from actds.format.schema import CloseReason
from actds.format.tables import UNKNOWN_WEIGHTS
from actds.store import layout, local_folder, open_store
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
from actds_writers.ipc.link import Hub, Link, process_arguments
from actds_writers.ipc.messages import ClientFacts, Done, Finish, Secure, Secured

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
        self._told = False
        self._journal = Journal(self._store, settings.run, self._begin)
        self._wanted: int | None = None
        self._reason: CloseReason | None = None
        self._beside: dict[str, int] = {}
        self._last_progress = 0.0
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
            self._hub.send("harvest", error)
            return 1
        self._hub.send("harvest", replace(self._census.progress(), connected=True))
        self._hub.send("harvest", Done(totals))
        return 0

    def _take(self, role: str, message: object, _connection: Connection) -> None:
        if role in ("scheduler", "worker"):
            self._census.observe(message)
            self._tell_mismatch()
            self._journal.add(message)
            self._engine_spoke = True
        elif isinstance(message, ClientFacts):
            self._client = merged(self._client, message)
            self._journal.add(message)
        elif isinstance(message, Secure):
            self._wanted = message.last_step
        elif isinstance(message, Finish):
            self._reason = message.reason
            if message.unknown_weights:
                self._beside[UNKNOWN_WEIGHTS] = 1

    def _tell_mismatch(self) -> None:
        """End the run through its writer, once, when worker and scheduler name other tokens."""
        error = self._census.sampled.mismatch
        if error is not None and not self._told:
            self._told = self._hub.send("writer", error)

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
            self._hub.send("writer", error)
        else:
            self._journal.secure(lambda error: self._answer_secured(step, error))
        self._wanted = None

    def _answer_secured(self, step: int, error: ActdsError | None) -> None:
        self._hub.send("writer", error or Secured(step))

    def _begin(self) -> str | None:
        """Begin the chain once engine and dataset exist; return the dataset's id.

        Early, and not with the tables, so that a later recovery can fence it.
        """
        dataset = self._dataset() if self._engine_spoke else None
        if dataset is not None:
            self._chain = self._chain or self._begin_chain(dataset)
        return dataset

    def _dataset(self) -> str | None:
        """Return the id of the dataset; None while there is none, or one of another harvest."""
        if not self._store.exists(layout.GENESIS):
            return None
        dataset = read_genesis(self._store).dataset
        return dataset if self._settings.dataset in (None, dataset) else None

    def _begin_chain(self, dataset: str) -> Chain:
        run, software = self._settings.run, self._settings.software
        return Chain.begin(self._store, dataset, run, "census", software)

    def _ended(self) -> bool:
        if self._hub.roles() & {"scheduler", "worker", "writer"}:
            return self._hub.is_left_by("harvest", ORPHAN_PATIENCE_S)
        return self._reason is not None or self._hub.is_left_by("harvest")

    def _report(self) -> None:
        if time.monotonic() - self._last_progress > PROGRESS_INTERVAL_S:
            self._last_progress = time.monotonic()
            connected = self._hub.has_met("scheduler")
            progress = replace(self._census.progress(), connected=connected)
            self._hub.send("harvest", progress, patient=False)

    def _reserve(self) -> None:
        """Hold back disk space as soon as the dataset exists."""
        folder = local_folder(self._settings.root)
        if folder is None or self._reserved is not None or self._dataset() is None:
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
        dataset = self._dataset()
        if dataset is None:
            return {}  # the run never began: nothing of it exists that could be accounted for
        ended = end_writer_chain(store, dataset, run)
        # The tables follow from the journal, should they have to be written a second time.
        self._journal.finish()
        if ended is None:
            # The journal may have begun all the same.
            if self._chain is not None:
                self._chain.close("failed", {})
            remove_journal(store, run)
            return {}
        chain = self._chain or self._begin_chain(dataset)
        tables = self._census.tables(
            ended.acknowledged, self._client, LOST_REASON, ended.dropped_steps
        )
        commit_census(store, chain, run, tables)
        chain.close(self._reason or "interrupted", tables.totals | self._beside)
        remove_journal(store, run)
        return tables.totals


if __name__ == "__main__":
    sys.exit(CensusProcess(*process_arguments("census")).run())
