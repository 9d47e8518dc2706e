"""Ranges of positions, asked row by row without writing every position down.

Beside the tokens' pass: what was lost, and what was served from the prefix cache. Imports the
format room's `intervals`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from actds.format.positions import index_in

__all__ = ["Index", "Servings", "StepRanges", "explode"]

Ints = npt.NDArray[np.int64]
MAX_TABLE = 1 << 16
BATCH_POSITIONS = 1 << 16


class Index:
    """Numbers to their places in a sorted list.

    Args:
        values: whole numbers, each once, rising.
    """

    def __init__(self, values: npt.NDArray[np.integer]) -> None:
        self._values = values.astype(np.int64)
        self._low = int(self._values[0]) if len(values) else 0
        self._span = int(self._values[-1]) - self._low + 1 if len(values) else 0
        self._table: npt.NDArray[np.int32] | None = None
        if len(values) < self._span <= 4 * len(values) + MAX_TABLE:
            self._table = np.full(self._span, -1, np.int32)
            self._table[self._values - self._low] = np.arange(len(values), dtype=np.int32)

    def __len__(self) -> int:
        return len(self._values)

    def numbers(self, places: Ints) -> Ints:
        """Return the numbers at some places."""
        return self._values[places]

    def of(self, numbers: npt.NDArray[np.integer]) -> Ints:
        """Return the place of each number, -1 where it is not in the list."""
        asked = numbers.astype(np.int64)
        if self._table is None:
            return index_in(self._values, asked)
        at = asked - self._low
        inside = (at >= 0) & (at < self._span)
        return np.where(inside, self._table[np.where(inside, at, 0)], -1).astype(np.int64)


class StepRanges:
    """Half-open ranges of positions of a (step, request), disjoint within each.

    Args:
        step: place of the step of each range.
        request: place of the request.
        start: first position.
        stop: position after the last.
    """

    def __init__(self, step: Ints, request: Ints, start: Ints, stop: Ints) -> None:
        self._n_requests = int(request.max()) + 1 if len(request) else 1
        pair = step * self._n_requests + request
        order = np.lexsort((start, pair))
        self.step, self.request = step[order], request[order]
        self.start, self.stop = start[order], stop[order]
        self._pairs, group = np.unique(pair[order], return_inverse=True)
        self._group = group.reshape(-1)
        self._keys = (self._group << 32) | self.start
        self._offset = np.cumsum(self.stop - self.start) - (self.stop - self.start)

    @property
    def n_positions(self) -> int:
        """Return the positions in all ranges."""
        return int((self.stop - self.start).sum())

    def find(self, step: Ints, request: Ints, position: Ints) -> Ints:
        """Return the number of each position, ranges laid end to end; -1 outside of them all."""
        if not len(self._pairs):
            return np.full(len(step), -1, np.int64)
        pair = step * self._n_requests + request
        group = np.minimum(np.searchsorted(self._pairs, pair), len(self._pairs) - 1)
        known = (self._pairs[group] == pair) & (request >= 0) & (request < self._n_requests)
        at = np.searchsorted(self._keys, (group << 32) | position, side="right") - 1
        at = np.maximum(at, 0)
        known &= (self._group[at] == group) & (position >= self.start[at])
        known &= position < self.stop[at]
        return np.where(known, self._offset[at] + position - self.start[at], -1)


class Servings:
    """How often each position was served from the prefix cache.

    Counts of ranges that begin and that end, summed up: as many numbers as ranges, however long
    these are.

    Args:
        request: request that computed the positions of each range.
        start: first position.
        stop: position after the last.
    """

    def __init__(self, request: Ints, start: Ints, stop: Ints) -> None:
        used = stop > start
        request, start, stop = request[used], start[used], stop[used]
        keys = np.concatenate([(request << 32) | start, (request << 32) | stop])
        self._keys, at = np.unique(keys, return_inverse=True)
        changes = np.repeat([1.0, -1.0], len(request))
        change = np.bincount(at.reshape(-1), weights=changes, minlength=len(self._keys))
        self._level = np.cumsum(change).astype(np.int64)
        self._requests = Index(np.unique(request))

    def __len__(self) -> int:
        return len(self._requests)

    def of(self, request: Ints, position: Ints) -> Ints:
        """Return how often each position was served, 0 for one that never was."""
        served = np.zeros(len(request), np.int64)
        if len(self._keys):
            asked = np.flatnonzero(self._requests.of(request) >= 0)
            keys = (request[asked] << 32) | position[asked]
            at = np.searchsorted(self._keys, keys, side="right") - 1
            served[asked] = np.where(at >= 0, self._level[np.maximum(at, 0)], 0)
        return served


def explode(start: Ints, stop: Ints, size: int = BATCH_POSITIONS) -> Iterator[tuple[Ints, Ints]]:
    """Yield the positions of ranges, with the number of the range of each.

    Args:
        start: first position of each range.
        stop: position after the last.
        size: positions at a time at most.
    """
    ends = np.cumsum(stop - start)
    shift = start - (ends - (stop - start))
    for done in range(0, int(ends[-1]) if len(ends) else 0, size):
        at = np.arange(done, min(done + size, int(ends[-1])))
        first, last = np.searchsorted(ends, at[[0, -1]], side="right")
        which = np.repeat(
            np.arange(first, last + 1),
            np.diff(np.minimum(ends[first : last + 1], at[-1] + 1), prepend=done),
        )
        yield which, at + shift[which]
