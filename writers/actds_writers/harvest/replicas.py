"""Replicas of an engine: each a run of one dataset, in a process that serves what it is handed.

vLLM runs the data-parallel replicas of a dense model as independent engines that share only the
requests. So each is a run with writer, census and chains of its own, in a process,
``python -m actds_writers.harvest.replicas FD``, that takes its work from a connection and tells its
progress there. On one machine each gets a share of the prompts; of a cluster (``harvest.cluster``)
one piece after the other.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from types import FrameType
from typing import Protocol

from actds.errors import ActdsError
from actds_writers.config import WriteSettings
from actds_writers.engine_protocol import find_engine
from actds_writers.harvest.one_engine import Ended, Feed, Piece, PieceFeed, Run, interrupts_handled
from actds_writers.harvest.prepare import Plan, request_key
from actds_writers.harvest.result import Observer
from actds_writers.monitor.progress import Snapshot, beside, summed

MODULE = "actds_writers.harvest.replicas"
POLL_S = 0.2
SNAPSHOT_S = 0.5


@dataclass(frozen=True)
class Work:
    settings: WriteSettings
    plan: Plan
    lock: int
    number: int
    n_replicas: int
    in_pieces: bool = False
    """Whether the prompts are handed out while the engine runs."""
    n_beside: int | None = None
    """Engines that share the machine; all replicas when None."""


@dataclass(frozen=True)
class Began:
    """What a replica says when a signal ends its run in order."""

    run: str


@dataclass(frozen=True)
class Wanted:
    """What a replica says when it has room for a piece; of its prompts some may not have ended."""

    n_left: int


def shares(settings: WriteSettings, plan: Plan, n_replicas: int) -> list[Plan]:
    """Return the plan of each replica: every ``n_replicas``-th prompt; never more than prompts.

    Prompts that are skipped before the engine starts belong to the first.
    """
    servable = [encoded.prompt.index for encoded in plan.encoded if encoded.skip is None]
    n_replicas = max(1, min(n_replicas, len(servable)))
    owner = {index: number % n_replicas for number, index in enumerate(servable)}
    owners = {request_key(index): number for index, number in owner.items()}
    kind = find_engine(settings.engine)
    return [
        replace(
            plan,
            engine=kind.of_replica(plan.engine, number),
            encoded=tuple(e for e in plan.encoded if owner.get(e.prompt.index, 0) == number),
            client=tuple(p for p in plan.client if owners.get(p.key, 0) == number),
        )
        for number in range(n_replicas)
    ]


def harvest_replicas(
    settings: WriteSettings, plans: Sequence[Plan], lock: int, observer: Observer
) -> list[Ended]:
    """Harvest every plan with an engine of its own; return how each run ended.

    A replica that fails ends the others in order. Ctrl-C or SIGTERM ends all in order, a second one
    at once.
    """
    with ExitStack() as stack:
        replicas = [
            Replica(Work(settings, plan, lock, number, len(plans)))
            for number, plan in enumerate(plans)
        ]
        for replica in replicas:
            stack.callback(replica.end)
        with interrupts_passed_on(replicas, observer) as n_interrupts:
            _await_all(replicas, settings, observer)
    if n_interrupts() > 1:
        raise KeyboardInterrupt
    return [replica.ended for replica in replicas if replica.ended is not None]


def _await_all(replicas: Sequence[Replica], settings: WriteSettings, observer: Observer) -> None:
    pending, is_ending = set(replicas), False
    words = f"Starting {len(replicas)} engines for {settings.model}"
    with ExitStack() as starting, ExitStack() as harvesting:
        starting.enter_context(observer.starting(words))
        serving = False
        while pending:
            by_connection = {replica.connection: replica for replica in pending}
            for ready in wait(list(by_connection), POLL_S):
                assert isinstance(ready, Connection)
                by_connection[ready].take(observer)
            pending = {replica for replica in pending if replica.ended is None}
            if not is_ending and any(r.ended is not None and r.ended.failure for r in replicas):
                is_ending = True
                for replica in pending:
                    replica.interrupt()
            heard = [r for r in replicas if r.snapshot is not None]
            if not serving and heard and all(r in heard or r.ended for r in replicas):
                serving = True
                starting.close()
                harvesting.enter_context(
                    observer.harvesting(
                        lambda: summed([r.snapshot for r in replicas if r.snapshot is not None])
                    )
                )


class Replica:
    def __init__(self, work: Work) -> None:
        self.number = work.number
        self.connection, theirs = Pipe()
        self.snapshot: Snapshot | None = None
        self.ended: Ended | None = None
        self._is_ready, self._n_interrupts = False, 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),  # what the engine prints; stdout is for the result
            start_new_session=True,  # a Ctrl-C is for the command, which passes it on
            pass_fds=(work.lock, theirs.fileno()),
        )
        theirs.close()
        with suppress(OSError):  # it has died; its end is noticed when it is read
            self.connection.send(work)

    def take(self, observer: Observer) -> None:
        message = self.receive()
        if isinstance(message, Ended):
            self.ended = message
        elif isinstance(message, Snapshot):
            self.snapshot = message
        elif isinstance(message, str):
            observer.said(f"replica {self.number}: {message}")

    def receive(self) -> object:
        """Return the next message of the process; its end is one as well."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            got, expected = f"its process ended with code {code}", "a process until its run's end"
            return Ended.failed(
                ActdsError("E504", f"replica {self.number}", got=got, expected=expected)
            )
        if isinstance(message, Began):
            self._is_ready = True
            if self._n_interrupts:
                self._signal()
        return message

    def interrupt(self) -> None:
        """End its run in order, or at once the second time; one that starts hears of it later."""
        self._n_interrupts += 1
        if self._is_ready or self._n_interrupts > 1:
            self._signal()

    def _signal(self) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Wait for the end of the process, or bring it about."""
        self.connection.close()  # at which it ends its run
        try:
            self._process.wait(60 if self.ended is not None else 600)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Interruptible(Protocol):
    """A replica of this machine, or of another one."""

    def interrupt(self) -> None:
        """End its run in order, or at once the second time."""


@contextmanager
def interrupts_passed_on(
    replicas: Sequence[Interruptible], observer: Observer
) -> Iterator[Callable[[], int]]:
    """Pass Ctrl-C and SIGTERM on to all replicas; yields the number of both so far."""
    n_interrupts = 0

    def note(signum: int, _frame: FrameType | None) -> None:
        nonlocal n_interrupts
        n_interrupts += 1
        for replica in replicas:
            replica.interrupt()
        if n_interrupts == 1:
            observer.said(f"\n{signal.Signals(signum).name}: draining; repeat to stop at once.")

    with interrupts_handled(note):
        yield lambda: n_interrupts


class _Relay(Observer):
    """Tells the command what the run of this replica has to say."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self.run, self.is_ready = "", False

    def send(self, message: object) -> None:
        with self._sending, suppress(OSError):
            self._connection.send(message)

    def said(self, line: str) -> None:
        if "draining; repeat" not in line:
            self.send(line.strip())

    def starting(self, words: str) -> AbstractContextManager[object]:
        """Say that the run has its signal handlers: it sets them before it starts the engine."""
        self.is_ready = True
        self.send(Began(self.run))
        return super().starting(words)

    @contextmanager
    def harvesting(self, snapshot: Callable[[], Snapshot]) -> Iterator[None]:
        def work(ended: threading.Event) -> None:
            self.send(snapshot())
            while not ended.wait(SNAPSHOT_S):
                self.send(snapshot())

        try:
            with beside(work, "actds-relay"):
                yield
        finally:
            self.send(snapshot())


def _listen(connection: Connection, pieces: SimpleQueue[Piece]) -> None:
    """Take pieces; end the run in order when the command is gone."""
    with suppress(EOFError, OSError):
        while True:
            pieces.put(connection.recv())
    os.kill(os.getpid(), signal.SIGTERM)


def serve_replica() -> int:
    connection = Connection(int(sys.argv[1]))
    work: Work = connection.recv()
    pieces: SimpleQueue[Piece] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, pieces), daemon=True).start()
    relay = _Relay(connection)

    def in_pieces(plan: Plan, poll: Callable[[], None]) -> Feed:
        return PieceFeed(plan, poll, lambda n_left: relay.send(Wanted(n_left)), pieces)

    def interrupted(signum: int, _frame: FrameType | None) -> None:
        # The run has handlers of its own; once they are gone a late interrupt has nothing to end.
        if not relay.is_ready:
            os._exit(128 + signum)

    signal.signal(signal.SIGTERM, interrupted)
    settings = work.settings
    if settings.metrics_port:
        port = settings.metrics_port + work.number
        settings = settings.model_copy(update={"metrics_port": port})
    replica = (work.number, work.n_replicas)
    try:
        feed = in_pieces if work.in_pieces else Feed
        began, n_beside = time.monotonic(), work.n_beside or work.n_replicas
        run = Run(settings, work.plan, work.lock, began, relay, feed, replica, n_beside)
        relay.run = run.id
        ended = run.run()
    except ActdsError as error:
        ended = Ended.failed(error)
    relay.send(ended)
    return 0


if __name__ == "__main__":
    # Under its own name, so that what is sent can be read by the command.
    from actds_writers.harvest import replicas

    sys.exit(replicas.serve_replica())
