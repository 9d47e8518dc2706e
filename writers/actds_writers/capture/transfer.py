"""Between the device and the writer: copies, the queue of steps and what is dropped, and the lane.

On CUDA a separate stream copies into page-locked memory and the engine's stream never waits; on a
CPU the same calls are plain copies. Steps stay in the worker until the writer asks for more, so
that the oldest one can still be dropped: only whole steps, for all hooks alike.

The life of a dropped step: the policy names it, where a ring is full (``Handover.place``, drop
oldest) or before it is taken in (``Handover.admit``, drop newest, whose rings only wait); the
census hears of it at once, the writer in ``StepsDropped`` beside the rows; there ``StageJoin``
waits for every stage, ``DropLog`` (``shards/logs.py``) makes its lines of ``drops``, and their part
is committed with the others at the end of the run.

The readouts' lane is bounded: when it is full the engine waits under every overflow policy, or, if
it serves traffic, gives up all that a step leaves. Its other end is in ``shards.logs``.
"""

from __future__ import annotations

import logging
import math
import mmap
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from actds.errors import ActdsError
from actds.format import tables
from actds_writers.ipc.link import RingSpace, Sender, create_memory, hang_up
from actds_writers.ipc.messages import (
    FloatArray,
    IntArray,
    QueueState,
    Stall,
    StepDropped,
    StepReadouts,
    StepRows,
    StepsDropped,
)
from actds_writers.sampling import Policy

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
        expected_nbytes: of its staged rows, those that are expected to be stored.
        depths: slices in staging and host ring when it was dropped; ``queues``, the writer's.
    """

    step: int
    slot: int | None
    state: State = "staged"
    reason: str | None = None
    stalls: list[Stall] = field(default_factory=list)
    message: StepRows | None = None
    expected_nbytes: float = 0.0
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
        self._expected_nbytes = 0.0
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

    def fill(self) -> float:
        """Return the bytes that are in the host ring or on their way there, over its capacity."""
        with self._changed:
            return (self._ring.n_used + self._expected_nbytes) / self._ring.capacity

    def share_of_ring(self, nbytes: int) -> float:
        return nbytes / self._ring.capacity

    def admit(self, nbytes: int, step: int, lost: str | None = None, share: float = 1.0) -> Entry:
        """Add a step and reserve its slot; its state is ``dropped`` when there was no room.

        Raises E502 when the writer is gone, E506 when it stands still for longer than there is
        memory, E009 when the ring is too small for the step.

        Args:
            nbytes: bytes over all hooks, 0 where nothing is stored.
            lost: reason to drop it under every policy.
            share: of its rows, those that are expected to be stored.
        """
        with self._changed:
            entry = Entry(step, None)
            while self._notes_nbytes > NOTES_NBYTES:
                if self._sender is not None and self._policy.name != "block":
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
                entry.expected_nbytes = share * nbytes
                self._expected_nbytes += entry.expected_nbytes
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

        Raises E502 when the writer is gone.
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

    def wait(self, entry: Entry, stage: str) -> bool:
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
        return True

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
            self._expected_nbytes -= entry.expected_nbytes
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
    of_draw = (message.inclusion, message.kept, message.wanted)
    return 512 + sum(array.nbytes for array in (*arrays, *of_draw) if array is not None)


CLOSE_TIMEOUT_S = 10.0

_log = logging.getLogger("actds")


class Mark:
    def __init__(self, device: torch.device, *, timed: bool = False) -> None:
        self.event: Any = None
        """The CUDA event, ``None`` on a CPU."""
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
            self.event.record(torch.cuda.current_stream(device))

    def nanoseconds_since(self, earlier: Mark) -> int | None:
        if self.event is None or earlier.event is None:
            return None
        return int(earlier.event.elapsed_time(self.event) * 1e6)


class Copier:
    """Copies from the device to the host in the calling thread, on its own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            if device.index is not None:  # of this thread; page-locking uses the current one
                torch.cuda.set_device(device)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        index: torch.Tensor | None,
        after: Mark,
        poison: torch.Tensor | None = None,
    ) -> None:
        """Copy rows ``(n_hooks, n, width)`` to the host and wait until they have arrived.

        Args:
            index: int64 ``(n_kept,)`` of the rows to copy, on the host; ``None`` for all.
            poison: a part of the sources that becomes -1 once it is copied, so that nobody takes
                it for what is written there next.
        """
        if self._stream is None:
            for target, source in zip(targets, sources, strict=True):
                if index is None:
                    target.copy_(source)
                else:
                    torch.index_select(source, 1, index, out=target)
            if poison is not None:
                poison.fill_(-1)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after.event)
            if index is not None:
                index = index.to(self._device, non_blocking=True)
            for target, source in zip(targets, sources, strict=True):
                kept = source if index is None else source.index_select(1, index)
                target.copy_(kept, non_blocking=True)
            if poison is not None:
                poison.fill_(-1)
        self._stream.synchronize()


class HostMemory:
    """Shared memory as bytes, page-locked until it is closed where the device is CUDA.

    What cannot be locked (a limit of the container) is used as it is: copies take longer then.
    """

    def __init__(self, memory: mmap.mmap, device: torch.device) -> None:
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._device = device
        self._is_locked = False
        if device.type == "cuda":
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            failure = int(runtime.cudaHostRegister(self.bytes.data_ptr(), len(memory), 0))
            self._is_locked = not failure
            if failure:
                self._clear("page-locked", failure)

    def close(self) -> None:
        """Unlock the memory: the next mapping at its address could not be locked otherwise."""
        if self._is_locked:
            self._is_locked = False
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if failure := int(runtime.cudaHostUnregister(self.bytes.data_ptr())):
                self._clear("unlocked", failure)

    def _clear(self, what: str, failure: int) -> None:
        nbytes = len(self.bytes)
        _log.warning("a ring of %d bytes is not %s (CUDA error %d)", nbytes, what, failure)
        with suppress(RuntimeError):  # the next launch would raise the error in its stead
            torch.zeros(1, device=self._device)


def typed(
    memory: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    return memory[offset : offset + nbytes].view(dtype).view(shape)


class Lane:
    """The worker's end of the lane.

    Args:
        step_nbytes: bytes of the largest step, where the engine does not wait for room. Readouts
            are given up while so many do not fit, however few they are themselves: what is kept
            must not depend on the size of a step. ``None`` to wait.
    """

    def __init__(
        self, connection: Connection, path: Path, nbytes: int, step_nbytes: int | None = None
    ) -> None:
        self.path, self.nbytes = path, nbytes
        self._step_nbytes = step_nbytes
        self._given_up: list[int] = []
        self._finished: list[int] = []
        self._connection = connection
        self._space = RingSpace(nbytes)
        self._memory = torch.frombuffer(create_memory(path, nbytes), dtype=torch.uint8)
        self._changed = threading.Condition()
        self._gone = False
        # The writer has one message at a time, so a stalled writer fills no socket.
        self._waiting: queue.SimpleQueue[StepReadouts | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="actds-lane", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        return self._space.depth

    def put(
        self,
        step: int,
        rows: Sequence[IntArray],
        readouts: torch.Tensor,
        finished: tuple[int, ...] = (),
        entropy: FloatArray | None = None,
    ) -> bool:
        """Copy readouts ``(n_hooks, n, width)`` into the lane; return whether they are kept.

        Raises E502 when the writer is gone.

        Args:
            rows: request, position, token and prompt length of each.
            finished, entropy: as in ``StepReadouts``.
        """
        self._finished += finished
        if not readouts.numel():
            return True
        requests, positions, token_ids, prompt_lens = rows
        offset, waited = self._reserve(readouts.nbytes, step)
        if offset is None:
            self._given_up.append(step)
            return False
        typed(self._memory, offset, tuple(readouts.shape), torch.float32).copy_(readouts)
        self._waiting.put(
            StepReadouts(
                step,
                offset,
                readouts.nbytes,
                requests,
                positions,
                token_ids,
                prompt_lens,
                waited,
                self.depth,
                tuple(self._given_up),
                tuple(self._finished),
                entropy,
            )
        )
        self._given_up.clear()
        self._finished.clear()
        return True

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Let the writer take what waits, within the timeout, and close the connection."""
        self._waiting.put(None)
        self._thread.join(timeout_s)
        with self._changed:
            self._gone = True
            self._changed.notify_all()
            hang_up(self._connection)
        self._thread.join()

    def _reserve(self, nbytes: int, step: int) -> tuple[int | None, Stall | None]:
        began, began_ns = time.monotonic_ns(), time.time_ns()
        with self._changed:
            depth, waited = self._space.depth, False
            if self._step_nbytes is not None and not self._space.has_room(self._step_nbytes):
                return None, None
            while (offset := self._space.reserve(nbytes)) is None and not self._gone:
                waited = True
                self._changed.wait()
            if offset is None or self._gone:
                raise ActdsError(
                    "E502", "readouts", got="the writer process is gone", expected="a writer"
                )
        duration = time.monotonic_ns() - began
        return offset, Stall("readouts", began_ns, duration, depth, step) if waited else None

    def _send_all(self) -> None:
        try:
            while (message := self._waiting.get()) is not None:
                self._connection.send(message)
                self._connection.recv()
                with self._changed:
                    self._space.free(message.offset)
                    self._changed.notify_all()
        except (EOFError, OSError):
            pass  # the writer is gone, or the lane is closed
        with self._changed:
            self._gone = True
            self._connection.close()
            self._changed.notify_all()
