"""Intervals of positions: sets of (request, position) pairs as sorted half-open key ranges.

A key is ``request << 32 | position``, so one number line holds every request of a run and an
interval of one request never touches that of another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
_POSITION = np.uint64(0xFFFFFFFF)
_REQUEST_SHIFT = np.uint64(32)


def keys(request: npt.ArrayLike, position: npt.ArrayLike) -> Keys:
    """Return the key of each (request, position), uint64 ``(n,)``."""
    shifted = np.asarray(request).astype(np.uint64) << _REQUEST_SHIFT
    return shifted | np.asarray(position).astype(np.uint64)


def request_of(key: Keys) -> npt.NDArray[np.int64]:
    """Return the request of each key, int64 ``(n,)``."""
    return (key >> _REQUEST_SHIFT).astype(np.int64)


def position_of(key: Keys) -> npt.NDArray[np.int64]:
    """Return the position of each key, int64 ``(n,)``."""
    return (key & _POSITION).astype(np.int64)


@dataclass(frozen=True)
class Intervals:
    """A set of keys as sorted, disjoint, not touching half-open ranges.

    Args:
        start: first key of each range, uint64 ``(n,)``.
        stop: key after the last of each range, uint64 ``(n,)``.
    """

    start: Keys
    stop: Keys

    def __len__(self) -> int:
        return len(self.start)

    @property
    def n_keys(self) -> int:
        """Return how many keys the set holds."""
        return int((self.stop - self.start).sum())

    def contains(self, start: Keys, stop: Keys) -> npt.NDArray[np.bool_]:
        """Return for each non-empty range whether the set holds all of it."""
        at = np.searchsorted(self.start, start, side="right") - 1
        found = at >= 0
        inside = np.zeros(len(start), bool)
        inside[found] = self.stop[at[found]] >= stop[found]
        return inside


def depth(start: Keys, stop: Keys, at: Keys) -> npt.NDArray[np.int64]:
    """Return how many of the ranges, in any order and overlapping, hold each key ``at``."""
    opened = np.searchsorted(np.sort(start), at, side="right")
    closed = np.searchsorted(np.sort(stop), at, side="right")
    return (opened - closed).astype(np.int64)


def breakpoints(*edges: Keys) -> Keys:
    """Return the distinct edges in order: between two of them nothing changes."""
    return np.unique(np.concatenate(edges)) if edges else np.empty(0, np.uint64)


def select(points: Keys, keep: npt.NDArray[np.bool_]) -> Intervals:
    """Return the set of the segments ``[points[i], points[i+1])`` with ``keep[i]``, joined.

    Args:
        points: breakpoints, uint64 ``(n,)``.
        keep: bool ``(n,)``; the last one has no segment and is ignored.
    """
    inside = np.concatenate([[False], keep[:-1], [False]]) if len(points) else np.zeros(1, bool)
    change = np.flatnonzero(inside[1:] != inside[:-1])
    return Intervals(points[change[0::2]], points[change[1::2]])


def union(start: Keys, stop: Keys) -> Intervals:
    """Return the set that non-empty ranges cover, in any order and overlapping."""
    points = breakpoints(start, stop)
    return select(points, depth(start, stop, points) > 0)


def overlap(start: Keys, stop: Keys) -> Intervals:
    """Return the set of keys that two or more of the non-empty ranges hold."""
    points = breakpoints(start, stop)
    return select(points, depth(start, stop, points) > 1)


def of_keys(sorted_keys: Keys) -> Intervals:
    """Return the set of sorted, distinct keys."""
    if not len(sorted_keys):
        return Intervals(sorted_keys, sorted_keys)
    after = sorted_keys + np.uint64(1)
    first = np.concatenate([[True], sorted_keys[1:] != after[:-1]])
    last = np.concatenate([first[1:], [True]])
    return Intervals(sorted_keys[first], after[last])


def difference(left: Intervals, right: Intervals) -> Intervals:
    """Return the keys of ``left`` that are not in ``right``."""
    points = breakpoints(left.start, left.stop, right.start, right.stop)
    held = depth(left.start, left.stop, points) > 0
    return select(points, held & (depth(right.start, right.stop, points) == 0))


def index_in(
    distinct: npt.NDArray[np.int64], values: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return where each value stands in sorted, distinct numbers, -1 where it does not.

    Numbers without a hole, as ids usually are, need no search: that is 5 times as fast.
    """
    if not len(distinct):
        return np.full(len(values), -1, np.int64)
    if int(distinct[-1]) - int(distinct[0]) == len(distinct) - 1:
        at: npt.NDArray[np.int64] = values - distinct[0]
        at[(at < 0) | (at >= len(distinct))] = -1
        return at
    at = np.minimum(np.searchsorted(distinct, values), len(distinct) - 1)
    found: npt.NDArray[np.int64] = np.where(distinct[at] == values, at, -1)
    return found
