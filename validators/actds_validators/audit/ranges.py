"""Ranges of positions, asked row by row without writing every position down.

Beside the tokens' pass: what was lost.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from actds.format.positions import pair_key

__all__ = ["StepRanges", "explode"]

Ints = npt.NDArray[np.int64]
BATCH_POSITIONS = 1 << 16


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
        self._keys = pair_key(self._group, self.start)
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
        at = np.searchsorted(self._keys, pair_key(group, position), side="right") - 1
        at = np.maximum(at, 0)
        known &= (self._group[at] == group) & (position >= self.start[at])
        known &= position < self.stop[at]
        return np.where(known, self._offset[at] + position - self.start[at], -1)


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
