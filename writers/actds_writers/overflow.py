"""Overflow: what happens to a step when the writer is behind, and the queue it waits in.

Stage 2 of the token's way, on the worker's side; knows the ring and the link to the writer. The
queue stays here, in the worker, until the writer asks for more: only so can the oldest step still
be given up. Whole step slices are lost, never half a row set.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np

from actds.errors import ActdsError
from actds_writers.link import Policy
from actds_writers.messages import RingFree, Stall, StepDropped, StepRows
from actds_writers.ring import RingSpace

NO_TOKENS = np.empty(0, np.int64)
AHEAD = 2
"""Messages that the writer may hold at once; the next is announced while it copies the last."""


class Handover:
    """Hands steps to the writer under an overflow policy.

    Args:
        writer: connection to the writer process.
        space: book of the ring.
        policy: what to do when the ring is full.
        on_drop: told of every dropped step, in the thread that caused it.
    """

    def __init__(
        self,
        writer: Connection,
        space: RingSpace,
        policy: Policy,
        on_drop: Callable[[StepDropped], None],
    ) -> None:
        self._writer, self._space, self._policy = writer, space, policy
        self._on_drop = on_drop
        self._queue: deque[StepRows | StepDropped] = deque()
        self._n_ahead = 0
        self._changed = threading.Condition()
        self._gone = False
        self.writer_state: RingFree | None = None
        self._listener = threading.Thread(target=self._listen, name="actds-handover", daemon=True)
        self._listener.start()

    @property
    def depth(self) -> int:
        """Return the number of slices in the ring."""
        return self._space.depth

    def place(self, nbytes: int, step: int) -> tuple[int | None, Stall | None]:
        """Return where a step goes, ``None`` when it is to be dropped; and how long it waited.

        Args:
            nbytes: bytes of the step over all hooks.
            step: number of the step.

        Raises:
            ActdsError: E502 when the writer is gone, E009 when no ring would ever hold it.
        """
        with self._changed:
            offset = self._reserve(nbytes)
            if offset is not None or self._policy == "drop_newest":
                return offset, None
            while self._policy == "drop_oldest" and self._drop_oldest():
                offset = self._reserve(nbytes)
                if offset is not None:
                    return offset, None
            if self._policy == "drop_oldest":
                return None, None  # all there is, is with the writer already
            return self._wait(nbytes, step)

    def put(self, message: StepRows | StepDropped) -> None:
        """Queue a step, or the fact that it was dropped, in step order.

        Raises:
            ActdsError: E502 when the writer is gone.
        """
        with self._changed:
            if isinstance(message, StepDropped):
                self._on_drop(message)
            self._queue.append(message)
            self._pump()

    def close(self) -> None:
        """End the link; the writer learns that nothing more comes."""
        # A plain close leaves the socket open for as long as the listener waits on it.
        with socket.socket(fileno=os.dup(self._writer.fileno())) as link, suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
        self._listener.join()
        self._writer.close()

    def _reserve(self, nbytes: int) -> int | None:
        self._check()
        return self._space.reserve(nbytes)

    def _wait(self, nbytes: int, step: int) -> tuple[int, Stall]:
        began, began_ns, depth = time.monotonic_ns(), time.time_ns(), self._space.depth
        while (offset := self._reserve(nbytes)) is None:
            self._changed.wait()
        return offset, Stall("ring", began_ns, time.monotonic_ns() - began, depth, step)

    def _drop_oldest(self) -> bool:
        """Give up the oldest step that the writer does not hold; return whether there was one."""
        for index, waiting in enumerate(self._queue):
            if isinstance(waiting, StepRows):
                rows = replace(waiting, offset=0, token_ids=NO_TOKENS)
                dropped = StepDropped(
                    rows, "queue_full", self._policy, time.time_ns(), self._space.depth
                )
                self._queue[index] = dropped
                self._space.free(waiting.offset)
                self._on_drop(dropped)
                return True
        return False

    def _pump(self) -> None:
        """Announce steps to the writer, as many as it may hold."""
        self._check()
        # A loss counts as well: to a writer that stands still nothing may be sent without end.
        while self._queue and self._n_ahead < AHEAD:
            message = self._queue.popleft()
            self._n_ahead += 1
            try:
                self._writer.send(message)
            except OSError:
                self._gone = True
                self._changed.notify_all()
                self._check()
        self._changed.notify_all()

    def _listen(self) -> None:
        """Take the writer's acknowledgements for as long as it lives."""
        while True:
            try:
                message = self._writer.recv()
            except Exception:  # whatever ends this thread must wake the one that waits for it
                with self._changed:
                    self._gone = True
                    self._changed.notify_all()
                return
            with self._changed:
                self.writer_state = message
                if message.offset is not None:
                    self._space.free(message.offset)
                self._n_ahead -= 1
                if not self._gone:
                    try:
                        self._pump()
                    except ActdsError:
                        return  # the next call of the worker says so

    def _check(self) -> None:
        if self._gone:
            raise ActdsError("E502", "ring", got="the writer process is gone", expected="a writer")
