"""The lane: readouts on their way from a worker to the writer, beside the rows.

Narrow, bounded, and never dropped: when it is full the engine waits, whatever the overflow policy
says of rows. Stands beside stages 1 and 2, in the worker; the writer's end is ``readout_log``.
"""

from __future__ import annotations

import queue
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from actds.errors import ActdsError
from actds_writers.capture.transfer import typed
from actds_writers.ipc import ring
from actds_writers.ipc.messages import IntArray, Stall, StepReadouts
from actds_writers.ipc.ring import RingSpace


@dataclass(frozen=True)
class Rows:
    """Whose readouts they are: request, position and token of each row."""

    requests: IntArray
    positions: IntArray
    token_ids: IntArray


class Lane:
    """The worker's end of the lane.

    Args:
        connection: to the writer's end.
        path: shared memory to make.
        nbytes: its size.
    """

    def __init__(self, connection: Connection, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        self._connection = connection
        self._space = RingSpace(nbytes)
        self._memory = torch.frombuffer(ring.create(path, nbytes), dtype=torch.uint8)
        self._changed = threading.Condition()
        self._gone = False
        # One message is with the writer at a time, so a writer that stands still fills no socket.
        self._waiting: queue.SimpleQueue[StepReadouts | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="actds-lane", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """Return the steps whose readouts the writer has not copied yet."""
        return self._space.depth

    def put(self, step: int, rows: Rows, readouts: torch.Tensor) -> None:
        """Copy the readouts of a step into the lane, waiting for room if need be.

        Args:
            step: number of the step.
            rows: whose they are.
            readouts: float32 ``(n_hooks, n, width)`` in host memory.

        Raises:
            ActdsError: E502 when the writer is gone.
        """
        if not readouts.numel():
            return
        offset, waited = self._reserve(readouts.nbytes, step)
        typed(self._memory, offset, tuple(readouts.shape), torch.float32).copy_(readouts)
        self._waiting.put(
            StepReadouts(
                step,
                offset,
                readouts.nbytes,
                rows.requests,
                rows.positions,
                rows.token_ids,
                waited,
                self.depth,
            )
        )

    def close(self) -> None:
        """End the link."""
        self._waiting.put(None)
        with self._changed:
            self._gone = True
            self._changed.notify_all()
        with suppress(OSError):
            self._connection.close()

    def _reserve(self, nbytes: int, step: int) -> tuple[int, Stall | None]:
        began, began_ns = time.monotonic_ns(), time.time_ns()
        with self._changed:
            depth, waited = self._space.depth, False
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
        while (message := self._waiting.get()) is not None:
            try:
                self._connection.send(message)
                self._connection.recv()
            except (EOFError, OSError, TypeError):  # TypeError: closed while it waits
                with self._changed:
                    self._gone = True
                    self._changed.notify_all()
                return
            with self._changed:
                self._space.free(message.offset)
                self._changed.notify_all()
