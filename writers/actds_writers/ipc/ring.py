"""Shared memory of worker and writer: the host ring, stage 2 of the data path, and its page.

The worker creates the ring and allocates slices for the rows of steps; the writer attaches to it,
reads them and acknowledges. Slices are contiguous, of any size, and taken one after the other, from
the beginning again at the end of the memory. On the page stands the state of the writer's queues.
"""

from __future__ import annotations

import bisect
import mmap
import os
import shutil
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actds.errors import ActdsError
from actds.format.arrays import DTYPES
from actds.format.schema import DType
from actds_writers.ipc.messages import HookSpec, QueueState

ALIGNMENT = 64
PAGE = mmap.PAGESIZE
Arrays = tuple[np.ndarray, ...]
"""Rows of several hooks: bit patterns ``(n_hooks, n, d_model)``, one array per block."""


def create(path: Path, nbytes: int) -> mmap.mmap:
    """Return new shared memory, reserved now; raises E503 where there is too little."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            return mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _too_little(path, nbytes, str(error.strerror)) from None


def require_room(folder: Path, nbytes: int) -> None:
    """Refuse a folder without room for so many bytes, before an engine is started; raises E503."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise _too_little(folder, nbytes, f"{free} bytes are free")


def _too_little(path: Path, nbytes: int, why: str) -> ActdsError:
    return ActdsError(
        "E503",
        str(path),
        got=f"{nbytes} bytes of shared memory: {why}",
        expected="enough shared memory for the ring",
        next_step="Lower ring_mib, or enlarge /dev/shm (of a container: its shm-size).",
    )


def attach(path: Path, nbytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)


def aligned(nbytes: int, unit: int = ALIGNMENT) -> int:
    return -(-nbytes // unit) * unit


class RingSpace:
    """The allocator of a ring, used by its producer: ``capacity`` bytes, and the slices in use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._starts: list[int] = []
        self._stops: dict[int, int] = {}
        self._next = 0

    @property
    def depth(self) -> int:
        return len(self._starts)

    def reserve(self, nbytes: int) -> int | None:
        """Return the offset of a free slice, ``None`` while there is none; E009 if none ever is."""
        size = aligned(nbytes)
        if size > self.capacity:
            raise ActdsError(
                "E009",
                "ring",
                got=f"a step of {nbytes} bytes in a ring of {self.capacity}",
                expected="a ring that holds at least one step",
                next_step="Raise ring_mib or lower max_num_batched_tokens.",
            )
        start = self._find(size)
        if start is not None:
            bisect.insort(self._starts, start)
            self._stops[start] = self._next = start + size
        return start

    def has_room(self, nbytes: int) -> bool:
        return self._find(aligned(nbytes)) is not None

    def free(self, offset: int) -> None:
        del self._starts[bisect.bisect_left(self._starts, offset)]
        del self._stops[offset]

    def _find(self, size: int) -> int | None:
        # Slices are freed nearly in the order of their reservation: mostly the first try succeeds.
        index = bisect.bisect_left(self._starts, self._next)
        limit = self._starts[index] if index < len(self._starts) else self.capacity
        if limit - self._next >= size:
            return self._next
        free_from = 0
        for start in self._starts:
            if start - free_from >= size:
                return free_from
            free_from = self._stops[start]
        return free_from if self.capacity - free_from >= size else None


@dataclass(frozen=True)
class Block:
    """Hooks of one stage, width and type, whose rows are one array ``(n_hooks, n, d_model)``.

    ``before_nbytes`` is the size of a row in the blocks before this one.
    """

    hooks: tuple[int, ...]
    d_model: int
    dtype: DType
    before_nbytes: int

    @property
    def row_nbytes(self) -> int:
        return len(self.hooks) * self.d_model * DTYPES[self.dtype].itemsize


class RowLayout:
    """The memory layout of the rows of several hooks: one block per stage, width and type.

    Blocks of wide types come first, so that every block is aligned to its type for any number of
    rows, and ``n`` rows take exactly ``n * row_nbytes``. Those of a pipeline stage stand together.
    """

    def __init__(self, hooks: Sequence[HookSpec]) -> None:
        groups: dict[tuple[int, int, DType], list[int]] = {}
        for number, hook in enumerate(hooks):
            groups.setdefault((hook.stage, hook.d_model, hook.dtype), []).append(number)
        blocks: list[Block] = []
        self.row_nbytes = 0
        for (_, d_model, dtype), numbers in sorted(
            groups.items(), key=lambda group: (group[0][0], -DTYPES[group[0][2]].itemsize)
        ):
            blocks.append(Block(tuple(numbers), d_model, dtype, self.row_nbytes))
            self.row_nbytes += blocks[-1].row_nbytes
        self.blocks = tuple(blocks)
        places = {
            number: (b, i) for b, block in enumerate(blocks) for i, number in enumerate(block.hooks)
        }
        self.places = tuple(places[number] for number in range(len(hooks)))
        """By hook, its block and its index in the block."""

    def arrays(self, memory: mmap.mmap, offset: int, n_rows: int) -> Arrays:
        """Return the bit patterns of ``n_rows`` rows in shared memory, by block, without a copy."""
        return tuple(
            view(
                memory,
                offset + n_rows * block.before_nbytes,
                (len(block.hooks), n_rows, block.d_model),
                DTYPES[block.dtype].bits,
            )
            for block in self.blocks
        )

    def empty(self, n_rows: int) -> Arrays:
        return tuple(
            np.empty((len(block.hooks), n_rows, block.d_model), DTYPES[block.dtype].bits)
            for block in self.blocks
        )


def view(memory: mmap.mmap, offset: int, shape: tuple[int, ...], bits: np.dtype[Any]) -> np.ndarray:
    count = int(np.prod(shape))
    return np.frombuffer(memory, dtype=bits, count=count, offset=offset).reshape(shape)


NBYTES = PAGE
_NUMBER, _STATE = struct.Struct("<Q"), struct.Struct("<qqd")
_UNKNOWN = -1.0
_MAX_READS = 1000  # a process that is killed while it publishes leaves a page of no moment


class QueuePage:
    """A page in which a writer publishes the state of its queues: what is read is of one moment.

    A writer that waits for its disk sends nothing, and that is when its queues matter. The number
    is odd while the state changes, and another one afterwards.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._n_published = 0
        self._last: QueueState | None = None
        self._lock = threading.Lock()

    @classmethod
    def beside(cls, ring_path: Path, *, new: bool = False) -> QueuePage:
        """Return the page of a ring; the worker makes it."""
        path = ring_path.with_name(f"{ring_path.name}-queues")
        return cls(create(path, NBYTES) if new else attach(path, NBYTES))

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
        for _ in range(_MAX_READS):
            (before,) = _NUMBER.unpack_from(self._memory)
            depth, backlog, p99 = _STATE.unpack_from(self._memory, _NUMBER.size)
            (after,) = _NUMBER.unpack_from(self._memory)
            if before == after and not before % 2:
                known = None if p99 == _UNKNOWN else p99
                self._last = QueueState(depth, backlog, known) if before else None
                break
        return self._last
