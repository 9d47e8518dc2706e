"""Memory for batches, used again when nobody refers to a batch any more."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from actds.format.arrays import DTYPES
from actds.schema import Hook

__all__ = ["BatchMemory", "Target", "put"]

Bits = npt.NDArray[Any]
Target = tuple[int, Bits]
"""Rows of memory, with the number of the first: bit patterns ``(n, d_model)``."""


class BatchMemory:
    """Memory for batches, each with a number, into which rows go before it is complete.

    A trainer may keep a batch, or a view of it, for as long as it likes, and write into it: only
    with the last reference does its memory come back. Fresh memory costs a page fault per 4 KiB,
    which on some machines is more than reading and decoding together.

    ``n_batches`` lie in one block; where more are kept, each has memory of its own. Row ``i`` of
    batch ``b`` has the number ``b * max_rows + i``.

    Args:
        hooks: the hooks of a batch by name.
        max_rows: rows of a batch at most.
        n_batches: batches of the block, at least 1.
        pinned: take pinned memory.
    """

    def __init__(
        self, hooks: Mapping[str, Hook], max_rows: int, n_batches: int, pinned: bool
    ) -> None:
        self.max_rows = max_rows
        self._hooks, self._n_batches = hooks, n_batches
        self._nbytes = {
            name: max_rows * hook.d_model * DTYPES[hook.dtype].itemsize
            for name, hook in hooks.items()
        }
        self._blocks: dict[str, Any] = {
            name: _pinned(n_batches * nbytes) if pinned else _pages(n_batches * nbytes)
            for name, nbytes in self._nbytes.items()
        }
        self._free = deque(range(n_batches))
        self._given: set[int] = set()
        self._further: dict[int, dict[str, Bits]] = {}
        self._numbers = itertools.count(n_batches)
        self._closed = False

    def take(self) -> int:
        """Return the number of memory that is free now."""
        try:
            return self._free.pop()
        except IndexError:
            number = next(self._numbers)
            self._further[number] = {
                name: np.empty((self.max_rows, hook.d_model), DTYPES[hook.dtype].bits)
                for name, hook in self._hooks.items()
            }
            return number

    def targets(self, numbers: Iterable[int]) -> dict[str, list[Target]]:
        """Return the memory of batches per hook, by the numbers of rows: the block, and others."""
        others = [number for number in numbers if number >= self._n_batches]
        return {
            name: [
                (0, self._flat(name, 0, self._n_batches).reshape(-1, hook.d_model)),
                *((number * self.max_rows, self._further[number][name]) for number in others),
            ]
            for name, hook in self._hooks.items()
        }

    def batch(self, number: int, n_rows: int) -> dict[str, Bits]:
        """Return a batch, ``(n_rows, d_model)`` per hook; its memory comes back with the last one.

        Args:
            number: from ``take``; not given out as a batch yet.
            n_rows: its rows, ``max_rows`` at most.
        """
        if number in self._further:
            return {name: rows[:n_rows] for name, rows in self._further[number].items()}
        self._given.add(number)
        released = itertools.count(1)
        found = {}
        for name in self._hooks:
            # Every view of this array refers to it, since it is itself a view of what is no array.
            flat = self._flat(name, number, number + 1)
            weakref.finalize(flat, self._release, number, released).atexit = False
            found[name] = flat.reshape(self.max_rows, -1)[:n_rows]
        return found

    def complete(self, number: int) -> None:
        """Say that a batch has all its rows, so that memory of its own goes with it."""
        self._further.pop(number, None)

    def close(self) -> None:
        """Give the system all memory back that is in no batch; what is, with the batch."""
        self._closed = True
        self._further.clear()
        for number in set(range(self._n_batches)) - self._given:
            self._give_back(number)

    def _flat(self, name: str, first: int, stop: int) -> Bits:
        nbytes = self._nbytes[name]
        block = memoryview(self._blocks[name])[first * nbytes : stop * nbytes]
        return np.frombuffer(block, DTYPES[self._hooks[name].dtype].bits)

    def _release(self, number: int, released: Iterator[int]) -> None:
        if next(released) < len(self._hooks):
            return
        self._given.discard(number)
        if self._closed:
            self._give_back(number)
        else:
            self._free.append(number)

    def _give_back(self, number: int) -> None:
        for name, block in self._blocks.items():
            if isinstance(block, mmap.mmap):
                start = -(-number * self._nbytes[name] // mmap.PAGESIZE) * mmap.PAGESIZE
                stop = (number + 1) * self._nbytes[name] // mmap.PAGESIZE * mmap.PAGESIZE
                if stop > start:
                    block.madvise(mmap.MADV_DONTNEED, start, stop - start)


def put(values: Bits, places: npt.NDArray[np.int64], targets: list[Target]) -> None:
    """Put rows where they belong.

    Args:
        values: bit patterns ``(n, d_model)``.
        places: the number of each row, ``(n,)``, all different.
        targets: memory that has these numbers.
    """
    if len(targets) == 1:
        ((first, rows),) = targets
        rows[places - first if first else places] = values
        return
    for first, rows in targets:
        inside = np.flatnonzero((places >= first) & (places < first + len(rows)))
        rows[places[inside] - first] = values[inside]


def _pages(nbytes: int) -> mmap.mmap:
    # Private: memory that is shared has no huge pages, and is not given back.
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _pinned(nbytes: int) -> npt.NDArray[np.uint8]:
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
