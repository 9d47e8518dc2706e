"""The writer process: the worker side of the account, isolated from engine and command.

``python -m actds_writers.writer_process`` reads its settings and link from standard input. The
main thread owns the writer and takes messages; ``actds-accept`` accepts connections; the writer's
threads encode and commit shards and ask the census first, one at a time, over their own connection.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from actds.errors import ActdsError
from actds.schema import CloseReason
from actds.store import open_for_writing
from actds_writers.config import WriterSettings
from actds_writers.ipc.link import Hub, Link, process_arguments
from actds_writers.ipc.messages import (
    Done,
    Finish,
    Secure,
    StepRows,
    StepsDropped,
    WorkerHello,
    WriterProgress,
)
from actds_writers.shards.logs import LaneEnd
from actds_writers.shards.writer import Writer

log = logging.getLogger("actds")
POLL_S = 0.1
PROGRESS_INTERVAL_S = 0.25
SECURE_TIMEOUT_S = 60.0
"""How long a commit waits for the census; longer than a busy disk takes, as it writes as well."""
ORPHAN_PATIENCE_S = 30.0
"""How long the process waits for the engine after the command itself is gone."""


class WriterProcess:
    """Runs one writer until the engine is gone and the command ends the run or is gone too."""

    def __init__(self, link: Link, settings: WriterSettings) -> None:
        self._settings = settings
        self._link = link
        self._hub = Hub(link.listen("writer"))
        self._lane = LaneEnd(link.listen("readouts"))
        self._census = link.connect("census", "writer")
        self._securing = threading.Lock()
        self._writer: Writer | None = None
        self._reason: CloseReason | None = None
        self._failed = False
        self._last_progress = 0.0

    def run(self) -> int:
        """Run until the run has ended; return the exit code."""
        while not self._ended():
            self._hub.poll(POLL_S, self._take)
            self._report()
        return self._finish()

    def _take(self, role: str, message: object, connection: Connection) -> None:
        try:
            answer = self._answer(message)
        except ActdsError as error:
            self._fail(error)
        except OSError as error:
            self._fail(ActdsError("E503", "writer", got=str(error), expected="a working disk"))
        else:
            if answer is not None:
                try:
                    connection.send(answer)
                except OSError as error:
                    log.debug("%s left while it was answered: %r", role, error)

    def _answer(self, message: object) -> object | None:
        """Return the answer to a message, ``None`` for none."""
        if isinstance(message, WorkerHello):
            self._writer = self._begin(message)
        elif isinstance(message, StepRows) and self._writer is not None:
            return self._writer.step(message)
        elif isinstance(message, StepsDropped) and self._writer is not None:
            return self._writer.dropped(message)
        elif isinstance(message, ActdsError):
            raise message
        elif isinstance(message, Finish):
            self._reason = message.reason
        return None

    def _begin(self, hello: WorkerHello) -> Writer:
        path = self._link.probes_path
        writer = Writer(
            open_for_writing(self._settings.harvest.out),
            self._settings,
            hello,
            self._secure,
            probes=Path(path).read_bytes() if path else None,
        )
        if writer.readouts is not None:
            self._lane.open(writer.readouts)
        return writer

    def _secure(self, last_step: int) -> None:
        """Wait until the census of a step is durable; runs before each commit, on its thread.

        Raises:
            ActdsError: E505 when the census is gone, E506 when it does not answer, or the error
                that it answers with.
        """
        try:
            with self._securing:
                self._census.send(Secure(last_step))
                answer = self._census.recv() if self._census.poll(SECURE_TIMEOUT_S) else None
        except (EOFError, OSError):
            raise ActdsError(
                "E505",
                f"census at step {last_step}",
                got="the census process is gone",
                expected="a durable census before any row",
                next_step="actds recover accounts for what is committed.",
            ) from None
        if isinstance(answer, ActdsError):
            raise answer
        if answer is None:
            raise ActdsError(
                "E506",
                f"census at step {last_step}",
                got=f"no answer within {SECURE_TIMEOUT_S:.0f} s",
                expected="a durable census before any row",
            )

    def _ended(self) -> bool:
        """Return whether no further message can come."""
        if "worker" in self._hub.roles():
            return self._hub.is_left_by("harvest", ORPHAN_PATIENCE_S)
        return self._reason is not None or self._hub.is_left_by("harvest")

    def _report(self) -> None:
        if self._writer is None or time.monotonic() - self._last_progress < PROGRESS_INTERVAL_S:
            return
        self._last_progress = time.monotonic()
        if self._writer.error is not None:
            self._fail(self._writer.error)
        self._hub.send("harvest", self._progress(self._writer), patient=False)

    @staticmethod
    def _progress(writer: Writer) -> WriterProgress:
        committer, meters = writer.committer, writer.meters
        return WriterProgress(
            n_rows=meters.n_rows,
            last_step=writer.last_step,
            row_nbytes=writer.row_nbytes,
            queue_depth=committer.queue_depth,
            ring_nbytes=meters.ring_nbytes,
            backlog_nbytes=committer.backlog_nbytes,
            commits=committer.meter.totals,
            stages=writer.stages(),
            memory_nbytes=writer.memory_nbytes,
            t_ns=time.time_ns(),
        )

    def _fail(self, error: ActdsError) -> None:
        if self._failed:
            return
        self._failed = True
        log.error("%s", error)
        self._hub.send("harvest", error)
        if self._writer is None:
            self._hub.disconnect("worker")  # it would wait for acknowledgements for ever

    def _finish(self) -> int:
        totals: dict[str, int] = {}
        if self._writer is not None:
            reason: CloseReason = "failed" if self._failed else (self._reason or "interrupted")
            try:
                totals = self._writer.finish(reason)
            except ActdsError as error:
                self._fail(error)
            self._hub.send("harvest", self._progress(self._writer))
        self._hub.close()
        # The census learns from the ledger what is committed; that we left is all it needs.
        self._census.close()
        self._hub.send("harvest", Done(totals))
        return 1 if self._failed else 0


if __name__ == "__main__":
    sys.exit(WriterProcess(*process_arguments("writer")).run())
