"""The state of the writer's queues, in shared memory: what a reader sees is of one moment.

A writer that waits for its disk sends nothing, and that is when its queues matter.
"""

from __future__ import annotations

import mmap
import struct
import threading
from pathlib import Path

from actds_writers.ipc import ring
from actds_writers.ipc.messages import QueueState

NBYTES = ring.PAGE
_NUMBER, _STATE = struct.Struct("<Q"), struct.Struct("<qqd")
_UNKNOWN = -1.0
_MAX_READS = 1000
"""A process that is killed while it publishes leaves a page that is of no moment."""


class QueuePage:
    """A page in which one process publishes the state of its queues, and another one reads it.

    Its number is odd while the state changes, and another one afterwards.

    Args:
        memory: at least ``NBYTES``, zeros at first.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._n_published = 0
        self._last: QueueState | None = None
        self._lock = threading.Lock()

    @classmethod
    def beside(cls, ring_path: Path, *, create: bool = False) -> QueuePage:
        """Return the page that belongs to a ring; the worker makes it.

        Raises:
            ActdsError: E503 when the memory cannot be reserved.
        """
        path = ring_path.with_name(f"{ring_path.name}-queues")
        return cls(ring.create(path, NBYTES) if create else ring.attach(path, NBYTES))

    def publish(self, state: QueueState) -> None:
        """Replace the state; any thread of one process may."""
        depth, backlog, p99 = state
        with self._lock:
            self._n_published += 1
            _NUMBER.pack_into(self._memory, 0, 2 * self._n_published - 1)
            last = _UNKNOWN if p99 is None else p99
            _STATE.pack_into(self._memory, _NUMBER.size, depth, backlog, last)
            _NUMBER.pack_into(self._memory, 0, 2 * self._n_published)

    def read(self) -> QueueState | None:
        """Return the state as it is now, ``None`` before the first one."""
        for _ in range(_MAX_READS):
            (before,) = _NUMBER.unpack_from(self._memory)
            depth, backlog, p99 = _STATE.unpack_from(self._memory, _NUMBER.size)
            (after,) = _NUMBER.unpack_from(self._memory)
            if before == after and not before % 2:
                known = None if p99 == _UNKNOWN else p99
                self._last = QueueState(depth, backlog, known) if before else None
                break
        return self._last
