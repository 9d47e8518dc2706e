"""The census process: the scheduler-side witness behind a socket, with a ledger chain of its own.

``python -m actds_writers.census_process`` reads its settings and link from standard input. It
outlives engine, writer and command, so that whatever happens to them is accounted for.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import sys
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow as pa

from actds import layout, schema, tables
from actds.errors import ActdsError
from actds.ledger import Chain, fence, read_ledger
from actds.schema.v0_1 import (
    CloseReason,
    Genesis,
    PartBody,
    PartTable,
    ShardBody,
    ShardManifest,
)
from actds.shard import commit_part
from actds.store import Store, open_store
from actds_writers.census import Census, CensusTables
from actds_writers.link import Link
from actds_writers.messages import ClientFacts, Done, Failed, Finish
from actds_writers.serve import Hub
from actds_writers.settings import CensusSettings

log = logging.getLogger("actds")
POLL_S = 0.1
PROGRESS_INTERVAL_S = 0.25
ORPHAN_PATIENCE_S = 60.0
ROWS_PER_PART = 1_000_000
RESERVE = ".tmp-reserve"


class CensusProcess:
    """Runs one census until scheduler and writer are gone."""

    def __init__(self, link: Link, settings: CensusSettings) -> None:
        self._settings, self._link = settings, link
        self._hub = Hub(link.listen("census"))
        self._census = Census()
        self._client = ClientFacts()
        self._reason: CloseReason | None = None
        self._last_progress = 0.0
        self._orphaned_since: float | None = None
        self._reserved: Path | None = None

    def run(self) -> int:
        """Serve until the run has ended; return the exit code."""
        while not self._ended():
            self._hub.poll(POLL_S, self._take)
            self._reserve()
            self._report()
        if "harvest" not in self._hub.roles():
            # The command was killed; nobody else is left to remove sockets and ring.
            shutil.rmtree(self._link.folder, ignore_errors=True)
        try:
            totals = self._finish()
        except ActdsError as error:
            log.error("%s", error)
            self._hub.tell("harvest", Failed.of(error))
            return 1
        self._hub.tell("harvest", Done(totals))
        return 0

    def _take(self, role: str, message: object, _connection: Connection) -> None:
        if role in ("scheduler", "worker"):
            self._census.observe(message)
        elif isinstance(message, ClientFacts):
            self._client = ClientFacts(
                message.prompts or self._client.prompts,
                {**self._client.engine_cached, **message.engine_cached},
            )
        elif isinstance(message, Finish):
            self._reason = message.reason

    def _ended(self) -> bool:
        roles = self._hub.roles()
        if roles & {"scheduler", "worker", "writer"}:
            if "harvest" in roles or not self._hub.has_met("harvest"):
                return False
            self._orphaned_since = self._orphaned_since or time.monotonic()
            return time.monotonic() - self._orphaned_since > ORPHAN_PATIENCE_S
        if self._reason is not None:
            return True
        return self._hub.has_met("harvest") and "harvest" not in roles

    def _report(self) -> None:
        if time.monotonic() - self._last_progress > PROGRESS_INTERVAL_S:
            self._last_progress = time.monotonic()
            connected = self._hub.has_met("scheduler")
            progress = replace(self._census.progress(), connected=connected)
            self._hub.tell("harvest", progress, patient=False)

    def _reserve(self) -> None:
        """Hold back disk space as soon as the dataset exists."""
        folder = Path(self._settings.root)
        if self._reserved is not None or not (folder / layout.GENESIS).exists():
            return
        self._reserved = folder / RESERVE
        try:
            with open(self._reserved, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._settings.reserve_nbytes)
        except OSError as error:
            log.warning("no disk space can be held back: %s", error.strerror)

    def _finish(self) -> dict[str, int]:
        """Write the tables, close the chain, end the writer's chain if its process could not."""
        if self._reserved is not None:
            self._reserved.unlink(missing_ok=True)
        store = open_store(self._settings.root)
        if not store.exists(layout.GENESIS):
            return {}  # the engine never came up: nothing exists that could be accounted for
        genesis = schema.parse(Genesis, store.read(layout.GENESIS), layout.GENESIS)
        ended = end_writer_chain(store, genesis.dataset, self._settings.run)
        if ended is None:
            return {}  # the run never began
        chain = Chain.begin(
            store, genesis.dataset, self._settings.run, "census", self._settings.software
        )
        found = self._census.tables(
            ended.acknowledged, self._client, "writer_ended", ended.dropped_steps
        )
        self._commit(store, chain, found)
        chain.close(self._reason or "interrupted", found.totals)
        return found.totals

    def _commit(self, store: Store, chain: Chain, found: CensusTables) -> None:
        parts: list[tuple[PartTable, pa.Table]] = [
            ("requests", found.requests),
            ("steps", found.steps),
            ("spans", found.spans),
        ]
        for name, table in parts:
            for n, first in enumerate(range(0, max(table.num_rows, 1), ROWS_PER_PART)):
                piece = table.slice(first, ROWS_PER_PART)
                commit_part(store, chain, name, self._settings.run, n, piece)


@dataclass(frozen=True)
class WriterEnd:
    """How a writer ended.

    Args:
        acknowledged: per phase, the last step whose rows are committed.
        dropped_steps: steps that stand in the committed drop log.
    """

    acknowledged: dict[str, int]
    dropped_steps: frozenset[int]


def end_writer_chain(store: Store, dataset: str, run: str) -> WriterEnd | None:
    """Fence the run's writer chain if it is still open; return what is committed.

    Returns ``None`` when the run has no writer chain.

    The ledger decides what is committed: an acknowledgement that got lost on its way is no loss.

    Spec: 0.1 section 8.3.
    """
    for state in read_ledger(store, dataset).values():
        if state.run != run or state.kind != "writer":
            continue
        acknowledged: dict[str, int] = {}
        dropped: set[int] = set()
        if state.state == "open":
            fence(store, dataset, state.chain, "its writer ended without closing the chain")
        for record in state.records:
            body = record.typed_body()
            if isinstance(body, ShardBody):
                path = layout.manifest_path(body.shard)
                manifest = schema.parse(ShardManifest, store.read(path), path)
                last = acknowledged.get(manifest.phase, -1)
                acknowledged[manifest.phase] = max(last, manifest.last_step)
            elif isinstance(body, PartBody) and body.table == "drops":
                data = store.read(body.file.path)
                steps = tables.from_parquet("drops", data, body.file.path, ["step"])["step"]
                dropped.update(steps.to_pylist())
        return WriterEnd(acknowledged, frozenset(dropped))
    return None


def main() -> int:
    """Run the process; settings and link come pickled through standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command decides when a harvest ends
    logging.basicConfig(format="actds census: %(message)s", stream=sys.stderr)
    link, settings = pickle.load(sys.stdin.buffer)
    return CensusProcess(link, settings).run()


if __name__ == "__main__":
    sys.exit(main())
