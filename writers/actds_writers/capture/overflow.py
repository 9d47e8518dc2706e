"""Overflow: the queue of steps in stages 1 and 2, and which of them are dropped.

Bookkeeping of both rings and the connection to the writer, without tensors. Steps stay in the
worker until the writer asks for more, so that the oldest one can still be dropped. Only whole steps
are dropped, for all hooks alike.

The life of a dropped step: the policy names it, where a ring is full (``Handover.place``, drop
oldest) or before it is taken in (``Handover.admit``, drop newest, whose rings only wait); the
census hears of it at once, the writer in ``StepsDropped`` beside the rows; there ``StageJoin``
waits for every stage, ``DropLog`` (``shards/logs.py``) makes its lines of ``drops``, and their part
is committed with the others at the end of the run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Literal

import numpy as np

from actds.errors import ActdsError
from actds.format import tables
from actds_writers.ipc.link import Sender, hang_up
from actds_writers.ipc.messages import QueueState, Stall, StepDropped, StepRows, StepsDropped
from actds_writers.ipc.ring import RingSpace
from actds_writers.policies import Block, Policy

NO_TOKENS = np.empty(0, np.int64)
AHEAD = 2
"""Messages without acknowledgement: the next is on its way while the writer copies the last."""
LOSSES_AT_ONCE = 256
NOTES_NBYTES = 64 << 20
"""Memory for records of dropped steps; above it the engine waits under every policy, and where it
must not the capture ends."""

State = Literal["staged", "moving", "ready", "sent", "dropped"]


@dataclass
class Entry:
    """A step between engine and writer.

    Args:
        slot: offset in the staging ring, ``None`` when it has no rows there.
        state: ``staged`` in stage 1, ``moving``, ``ready`` in stage 2, ``sent``, or ``dropped``.
        message: set when the rows are identified.
        depths: slices in staging and host ring when it was dropped; ``queues``, the writer's.
    """

    step: int
    slot: int | None
    state: State = "staged"
    reason: str | None = None
    stalls: list[Stall] = field(default_factory=list)
    message: StepRows | None = None
    dropped_ns: int = 0
    depths: tuple[int, int] = (0, 0)
    queues: QueueState | None = None


class Handover:
    """Hands steps to the writer under an overflow policy.

    Args:
        on_drop: called with step and reason of every drop, in the thread that caused it.
        queues: returns the state of the writer's queues as it is now.
        serves: whether the engine serves traffic: then it waits for a writer under ``block`` alone.

    ``waiting`` names the rings that a step waits for now: ``staging``, ``ring``, both or neither.
    """

    def __init__(
        self,
        writer: Connection,
        staging: RingSpace,
        ring: RingSpace,
        policy: Policy,
        on_drop: Callable[[int, str], None],
        queues: Callable[[], QueueState | None] = lambda: None,
        *,
        serves: bool = False,
    ) -> None:
        self._writer, self._staging, self._ring = writer, staging, ring
        # A large message to a writer that stands still would wait, and the engine for its lock.
        self._sender = Sender(writer) if serves else None
        self.queues = queues
        self._policy, self.on_drop = policy, on_drop
        self._queue: deque[Entry] = deque()
        # The same entries by where they may be dropped; those that moved on are skipped.
        self._in_staging: deque[Entry] = deque()
        self._in_ring: deque[Entry] = deque()
        self._n_ahead = 0
        self._notes_nbytes = 0
        self._changed = threading.Condition()
        self._gone = False
        self._closed = False
        self.waiting: set[str] = set()
        self._listener = threading.Thread(target=self._listen, name="actds-handover", daemon=True)
        self._listener.start()

    @property
    def depths(self) -> tuple[int, int]:
        return self._staging.depth, self._ring.depth

    @property
    def is_idle(self) -> bool:
        with self._changed:
            return not self._queue and self._n_ahead == 0

    # the engine's thread ----------------------------------------------------------------------

    def admit(self, nbytes: int, step: int, lost: str | None = None) -> Entry:
        """Add a step and reserve its slot; its state is ``dropped`` when there was no room.

        Args:
            nbytes: bytes over all hooks, 0 where nothing is stored.
            lost: reason to drop it under every policy.

        Raises:
            ActdsError: E502 when the writer is gone, E506 when it stands still for longer than
                there is memory, E009 when the ring is too small for the step.
        """
        with self._changed:
            entry = Entry(step, None)
            while self._notes_nbytes > NOTES_NBYTES:
                if self._sender is not None and self._policy.name != Block.name:
                    raise ActdsError(
                        "E506",
                        "ring",
                        got=f"{NOTES_NBYTES >> 20} MiB of records of dropped steps",
                        expected="a writer, and a disk, that takes them",
                    )
                self.wait(entry, "staging")
            if nbytes and lost is not None:
                self._drop(entry, lost)
            while nbytes and lost is None:
                self._check()
                entry.slot = self._staging.reserve(nbytes)
                if entry.slot is not None:
                    break
                if not self._policy.staging_is_full(self, entry):
                    self._drop(entry, self._why_staging_is_full())
                    break
            self._queue.append(entry)
            if entry.slot is not None:
                self._in_staging.append(entry)
            return entry

    # the transfer's threads -------------------------------------------------------------------

    def give_up_step(self, entry: Entry) -> None:
        """Drop a step that is not identified yet, as there is no room for its readouts.

        It may have been dropped before: that its readouts are missing as well is the reason then.
        """
        with self._changed:
            self._free_slot(entry)
            if entry.reason != tables.FAILED_LOAD:
                self._drop(entry, tables.READOUTS_FULL)

    def lose(self, entry: Entry, reason: str) -> None:
        """Drop a step whose rows may not be stored, under every policy; it is not placed yet."""
        with self._changed:
            if entry.state == "staged" and entry.slot is not None:
                self._free_slot(entry)
                self._drop(entry, reason)

    def place(self, entry: Entry, nbytes: int) -> int | None:
        """Return the offset of the next entry's rows in the host ring, ``None`` if it is dropped.

        Raises:
            ActdsError: E502 when the writer is gone.
        """
        with self._changed:
            if entry.state == "dropped" or not nbytes:
                return None
            entry.state = "moving"
            while True:
                self._check()
                offset = self._ring.reserve(nbytes)
                if offset is not None:
                    return offset
                if not self._policy.ring_is_full(self, entry):
                    self._free_slot(entry)
                    self._drop(entry, "queue_full")
                    return None

    def moved(self, entry: Entry, message: StepRows) -> None:
        with self._changed:
            self._free_slot(entry)
            stage1, stage2 = self.depths
            entry.message = replace(
                message, stalls=tuple(entry.stalls), depth_stage1=stage1, depth_stage2=stage2
            )
            if entry.state == "dropped":
                self._note(entry)
            else:
                entry.state = "ready"
                if entry.message.nbytes:
                    self._in_ring.append(entry)
            self._pump()

    def send(self, message: object) -> None:
        with self._changed:
            self._check()
            self._send(message)

    def end_waiting(self) -> None:
        """Wake all waiting threads; every further call raises."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Close the connection, by which the writer learns that no step follows."""
        self.end_waiting()
        if self._sender is not None:
            self._sender.end()
        hang_up(self._writer)
        if self._sender is not None:
            self._sender.end()  # a message that was waiting has failed
        self._listener.join()
        self._writer.close()

    # for policies, under the lock -------------------------------------------------------------

    def wait(self, entry: Entry, stage: str) -> None:
        """Wait for a change; the time is one stall of the stage, ``staging`` or ``ring``."""
        depth = self._ring.depth if stage == "ring" else self._staging.depth
        began, began_ns = time.monotonic_ns(), time.time_ns()
        self.waiting.add(stage)
        self._changed.wait()
        self.waiting.discard(stage)
        stall = Stall(stage, began_ns, time.monotonic_ns() - began, depth, entry.step)
        if entry.stalls and entry.stalls[-1].stage == stage:
            before = entry.stalls.pop()
            stall = replace(before, duration_ns=began_ns + stall.duration_ns - before.t_ns)
        entry.stalls.append(stall)
        self._check()

    def drop_staged(self) -> bool:
        while self._in_staging:
            waiting = self._in_staging.popleft()
            if waiting.state == "staged":
                self._free_slot(waiting)
                self._drop(waiting, self._why_staging_is_full())
                return True
        return False

    def drop_ready(self) -> bool:
        while self._in_ring:
            waiting = self._in_ring.popleft()
            if waiting.state == "ready" and waiting.message is not None:
                self._ring.free(waiting.message.offset)
                self._drop(waiting, "queue_full")
                self._note(waiting)
                return True
        return False

    # under the lock ---------------------------------------------------------------------------

    def _why_staging_is_full(self) -> str:
        return "queue_full" if "ring" in self.waiting else "dma_backpressure"

    def _drop(self, entry: Entry, reason: str) -> None:
        entry.state, entry.reason = "dropped", reason
        entry.dropped_ns, entry.depths, entry.queues = time.time_ns(), self.depths, self.queues()
        self.on_drop(entry.step, reason)

    def _note(self, entry: Entry) -> None:
        """Keep only the part of a dropped step that its log needs."""
        assert entry.message is not None
        entry.message = replace(entry.message, offset=0, nbytes=0, token_ids=NO_TOKENS)
        self._notes_nbytes += _note_nbytes(entry.message)

    def _free_slot(self, entry: Entry) -> None:
        if entry.slot is not None:
            self._staging.free(entry.slot)
            entry.slot = None
            self._changed.notify_all()

    def _pump(self) -> None:
        self._check()
        # A drop counts as well: messages to a stalled writer must not pile up.
        while self._n_ahead < AHEAD and (message := self._next()) is not None:
            self._n_ahead += 1
            self._send(message)
        for book, state in ((self._in_staging, "staged"), (self._in_ring, "ready")):
            while book and book[0].state != state:
                book.popleft()
        self._changed.notify_all()

    def _send(self, message: object) -> None:
        try:
            (self._sender or self._writer).send(message)
        except (OSError, ActdsError):
            self._gone = True
            self._changed.notify_all()
            self._check()

    def _next(self) -> StepRows | StepsDropped | None:
        losses: list[StepDropped] = []
        while self._queue and (message := self._queue[0].message) is not None:
            entry = self._queue[0]
            if entry.state == "dropped" and len(losses) < LOSSES_AT_ONCE:
                self._queue.popleft()
                self._notes_nbytes -= _note_nbytes(message)
                reason, when = entry.reason or "queue_full", (entry.dropped_ns, *entry.depths)
                losses.append(StepDropped(message, reason, self._policy.name, *when, entry.queues))
            elif losses:
                break
            else:
                self._queue.popleft()
                entry.state = "sent"
                return message
        return StepsDropped(tuple(losses)) if losses else None

    def _listen(self) -> None:
        """Take the writer's acknowledgements for as long as it lives."""
        while True:
            try:
                message = self._writer.recv()
            except Exception:  # whatever ends this thread must wake those that wait for it
                with self._changed:
                    self._gone = True
                    self._changed.notify_all()
                return
            with self._changed:
                if message.offset is not None:
                    self._ring.free(message.offset)
                self._n_ahead -= 1
                if not self._gone:
                    try:
                        self._pump()
                    except ActdsError:
                        return  # the next call of the worker raises it

    def _check(self) -> None:
        if self._gone or self._closed:
            raise ActdsError("E502", "ring", got="the writer process is gone", expected="a writer")


def _note_nbytes(message: StepRows) -> int:
    arrays = (message.requests, message.n_rows, message.prompt_lens, message.positions)
    return 512 + sum(array.nbytes for array in arrays)
