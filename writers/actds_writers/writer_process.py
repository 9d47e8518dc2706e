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
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from actds.errors import ActdsError
from actds.format.schema import CloseReason
from actds.store import open_for_writing
from actds_writers.config import WriterSettings
from actds_writers.ipc.link import Hub, Link, hang_up, process_arguments
from actds_writers.ipc.messages import (
    Done,
    Finish,
    RingFree,
    Secure,
    Secured,
    StepAttention,
    StepDropped,
    StepRows,
    StepsDropped,
    WorkerHello,
    WriterProgress,
)
from actds_writers.shards import StageJoin
from actds_writers.shards.logs import LaneEnd
from actds_writers.shards.writer import Writer

log = logging.getLogger("actds")
POLL_S = 0.1
PROGRESS_INTERVAL_S = 0.25
SECURE_TIMEOUT_S = 150.0
"""How long a commit waits for the census; longer than a store is asked again (two minutes)."""
ORPHAN_PATIENCE_S = 30.0
"""How long the process waits for the engine after the command itself is gone."""
GONE_TIMEOUT_S = 10.0
"""How long a step waits for a pipeline stage whose worker is gone: its engine ends within that."""


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
        self._join = StageJoin(link.hooks)
        self._workers: dict[int, Connection] = {}
        self._late: tuple[int, float] | None = None
        self._reason: CloseReason | None = None
        self._failed = False
        self._last_progress = 0.0

    def run(self) -> int:
        """Run until the run has ended; return the exit code."""
        while not self._ended():
            if not self._hub.poll(POLL_S, self._take):
                self._watch_stages()
            if self._writer is not None and not self._failed:
                self._writer.commit_old()
            self._report()
        return self._finish()

    def _take(self, role: str, message: object, connection: Connection) -> None:
        try:
            if isinstance(message, WorkerHello):
                self._meet(message, connection)
            elif isinstance(message, StepRows | StepsDropped):
                self._add(message, connection)
            elif isinstance(message, StepAttention):
                if self._writer is not None:
                    self._writer.attention.add(message)
            elif isinstance(message, ActdsError):
                raise message
            elif isinstance(message, Finish):
                self._reason = message.reason
        except ActdsError as error:
            self._fail(error)
        except OSError as error:
            self._fail(ActdsError("E503", "writer", got=str(error), expected="a working disk"))

    def _meet(self, hello: WorkerHello, connection: Connection) -> None:
        """Take the hello of a worker; begin the run with the last pipeline stage."""
        whole = self._join.meet(hello)
        self._workers[hello.stage] = connection
        if whole is not None:
            self._writer = self._begin(whole)
            self._store()

    def _add(self, message: StepRows | StepsDropped, connection: Connection) -> None:
        stage = next((s for s, known in self._workers.items() if known is connection), None)
        if stage is not None:
            self._join.add(stage, message)
            self._store()

    def _store(self) -> None:
        """Store the steps that every stage has sent, and acknowledge them."""
        writer = self._writer
        if writer is None:
            return
        if self._failed and self._join.n_stages > 1:
            self._abandon(writer)
            return
        for joined in self._join.steps():
            step = joined.step
            free = writer.dropped(step) if isinstance(step, StepDropped) else writer.step(step)
            for stage, place in joined.places.items():
                self._free(stage, replace(free, offset=place))

    def _free(self, stage: int, free: RingFree) -> None:
        try:
            self._workers[stage].send(free)
        except OSError as error:
            log.debug("stage %d left while it was answered: %r", stage, error)

    def _abandon(self, writer: Writer) -> None:
        for stage, place in self._join.abandon():
            self._free(stage, writer.free(place))

    def _watch_stages(self) -> None:
        """Fail when a step waits too long for a stage: one that stopped, or was never there."""
        late = None if self._failed else self._join.late()
        if late is None:
            self._late = None
            return
        step, silent, error = late
        now = time.monotonic()
        if self._late is None or self._late[0] != step:
            self._late = (step, now)
        has_left = any(not self._hub.is_connected(self._workers[stage]) for stage in silent)
        patience_s = self._settings.stage_timeout_s
        if now - self._late[1] > (min(patience_s, GONE_TIMEOUT_S) if has_left else patience_s):
            self._fail(error)

    def _begin(self, hello: WorkerHello) -> Writer:
        path, profile = self._link.probes_path, self._link.profile_path
        writer = Writer(
            open_for_writing(self._settings.harvest.out),
            self._settings,
            hello,
            self._secure,
            probes=Path(path).read_bytes() if path else None,
            profile=Path(profile) if profile else None,
        )
        if writer.readouts is not None:
            self._lane.open(writer.readouts)
        return writer

    def _secure(self, last_step: int) -> None:
        """Wait until the census of a step is durable; runs before each commit, on its thread.

        Raises E505 when the census is gone, E506 when it does not answer, or the error that it
        answers with.
        """
        try:
            with self._securing:
                answer = self._ask_census(last_step)
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

    def _ask_census(self, last_step: int) -> object:
        """Return the census' answer, ``None`` without one in time; a late one is of before."""
        draws = self._settings.harvest.design(self._settings.run) is not None
        self._census.send(Secure(last_step, self._join.n_stages if draws else 0))
        while self._census.poll(SECURE_TIMEOUT_S):
            answer = self._census.recv()
            if not isinstance(answer, Secured) or answer.last_step >= last_step:
                return answer
        return None

    def _ended(self) -> bool:
        if "worker" in self._hub.roles():
            return self._hub.is_left_by("harvest", ORPHAN_PATIENCE_S)
        return self._reason is not None or self._hub.is_left_by("harvest")

    def _report(self) -> None:
        if self._writer is None or time.monotonic() - self._last_progress < PROGRESS_INTERVAL_S:
            return
        self._last_progress = time.monotonic()
        self._writer.publish()
        self._watch_writer(self._writer)
        is_left = not all(map(self._hub.is_connected, self._workers.values()))
        progress = replace(self._progress(self._writer), is_left=is_left)
        self._hub.send("harvest", progress, patient=False)

    def _watch_writer(self, writer: Writer) -> None:
        """Fail when the disk has, or the stages' readouts are of different rows."""
        error = writer.error or (writer.readouts.fault if writer.readouts else None)
        if error is not None:
            self._fail(error)

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
            cast=writer.cast,
            watched=None if writer.watch is None else writer.watch.totals,
            not_drawn=writer.not_drawn,
            of_run=writer.of_run,
        )

    def _fail(self, error: ActdsError) -> None:
        if self._failed:
            return
        self._failed = True
        log.error("%s", error)
        self._hub.send("harvest", error)
        if self._writer is None:
            self._hub.disconnect("worker")  # it would wait for acknowledgements for ever
        elif self._join.n_stages > 1:
            self._abandon(self._writer)
            if self._writer.readouts is not None:
                self._writer.readouts.end_at(self._writer.last_step)

    def _finish(self) -> int:
        totals: dict[str, int] = {}
        late = self._join.late()
        if late is not None and self._reason == "finished":
            self._fail(late[2])
        if self._writer is not None:
            if self._join.n_stages > 1 and self._writer.readouts is not None:
                self._writer.readouts.wait()  # the last of them may disagree
            self._watch_writer(self._writer)
            reason: CloseReason = "failed" if self._failed else (self._reason or "interrupted")
            try:
                totals = self._writer.finish(reason)
            except ActdsError as error:
                self._fail(error)
            self._hub.send("harvest", self._progress(self._writer))
        self._hub.close()
        # The census learns from the ledger what is committed; that we left is all it needs.
        hang_up(self._census)  # a late part of the readouts may still ask it
        self._hub.send("harvest", Done(totals))
        return 1 if self._failed else 0


if __name__ == "__main__":
    sys.exit(WriterProcess(*process_arguments("writer")).run())
