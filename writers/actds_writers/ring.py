"""The host ring: shared memory through which step slices travel from worker to writer.

Stage 2 of three; stands between transfer and writer. Offsets grow without end; a slice is always
contiguous, so the tail of the memory is skipped when a slice does not fit behind the last one.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from actds.errors import ActdsError

ALIGNMENT = 64


def create(path: Path, nbytes: int) -> mmap.mmap:
    """Return fresh shared memory of a fixed size, reserved now so that a full disk shows now.

    Raises:
        ActdsError: E503 when the memory cannot be reserved.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            return mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ActdsError(
            "E503",
            str(path),
            got=f"{nbytes} bytes of shared memory: {error.strerror}",
            expected="enough shared memory for the ring",
            next_step="Lower --ring-mib, or enlarge the shared memory of the machine.",
        ) from None


def attach(path: Path, nbytes: int) -> mmap.mmap:
    """Return the memory that another process created."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)


class RingSpace:
    """The producer's book of a ring: where the next slice goes, and what is still in use.

    Args:
        capacity: bytes of the memory.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._head = 0
        self._tail = 0
        self._ends: deque[int] = deque()

    @property
    def depth(self) -> int:
        """Return the number of slices in use."""
        return len(self._ends)

    def reserve(self, nbytes: int) -> int | None:
        """Return the logical offset of a free contiguous slice, ``None`` while there is none.

        Raises:
            ActdsError: E009 when the slice can never fit.
        """
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if size > self.capacity:
            raise ActdsError(
                "E009",
                "ring",
                got=f"a step of {nbytes} bytes in a ring of {self.capacity}",
                expected="a ring that holds at least one step",
                next_step="Raise --ring-mib or lower max_num_batched_tokens.",
            )
        start = self._head
        room_behind = self.capacity - start % self.capacity
        if size > room_behind:
            start += room_behind
        if start + size - self._tail > self.capacity:
            return None
        self._head = start + size
        self._ends.append(self._head)
        return start

    def free(self, offset: int) -> None:
        """Give back every slice that ends at or before a logical offset."""
        while self._ends and self._ends[0] <= offset:
            self._tail = self._ends.popleft()
        if not self._ends:
            self._tail = self._head


def end_of(offset: int, nbytes: int) -> int:
    """Return the logical offset behind a slice, which the consumer gives back."""
    return offset + -(-nbytes // ALIGNMENT) * ALIGNMENT


def view(
    memory: mmap.mmap, offset: int, shape: tuple[int, ...], bits: type[np.unsignedinteger[Any]]
) -> np.ndarray:
    """Return the slice at a logical offset as bit patterns, without a copy."""
    count = int(np.prod(shape))
    flat = np.frombuffer(memory, dtype=bits, count=count, offset=offset % len(memory))
    return flat.reshape(shape)
