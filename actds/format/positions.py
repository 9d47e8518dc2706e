"""Positions of requests: their 64-bit keys, sets of keys as intervals, and places in sorted lists.

The key of a position is its request in the upper and its position in the lower 32 bits. So one
number line holds every position of a run, in order, and no interval of a request touches another's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
_LOW = np.uint64(0xFFFFFFFF)
_N_BITS = np.uint64(32)
_MAX_TABLE = 1 << 16


def pair_key(high: npt.ArrayLike, low: npt.ArrayLike) -> Keys:
    """Return pairs of numbers below 2^32 as one number each, uint64 ``(n,)``, sorted as they are.

    The two broadcast: one of them may be a single number.
    """
    shifted = np.asarray(high).astype(np.uint64) << _N_BITS
    return np.asarray(shifted | np.asarray(low).astype(np.uint64))


def position_key(request: npt.ArrayLike, position: npt.ArrayLike) -> Keys:
    """Return the key of each position of a request, uint64 ``(n,)``.

    Spec: 0.1 section 5.2.
    """
    return pair_key(request, position)


def values_at(keys: Keys, known: Keys, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the value at each key, NaN where there is none; ``known`` is sorted and distinct."""
    at_keys = np.full(len(keys), np.nan)
    at = np.searchsorted(known, keys)
    is_known = at < len(known)
    is_known[is_known] = known[at[is_known]] == keys[is_known]
    at_keys[is_known] = values[at[is_known]]
    return at_keys


def split_key(key: npt.ArrayLike) -> tuple[Ints, Ints]:
    """Return request and position of each key, or the two numbers of a pair, int64 ``(n,)``."""
    keys = np.asarray(key, np.uint64)
    return (keys >> _N_BITS).astype(np.int64), (keys & _LOW).astype(np.int64)


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
        return int((self.stop - self.start).sum())

    def n_below(self, keys: Keys) -> Ints:
        """Return how many keys of the set are below each key."""
        before = np.concatenate([np.zeros(1, np.uint64), np.cumsum(self.stop - self.start)])
        at = np.searchsorted(self.start, keys, side="right")
        inside = np.zeros(len(keys), np.uint64)
        some = at > 0
        over = self.stop[at[some] - 1] - np.minimum(keys[some], self.stop[at[some] - 1])
        inside[some] = over
        below: Ints = (before[at] - inside).astype(np.int64)
        return below

    def cut(self, start: Keys, stop: Keys) -> tuple[Ints, Keys, Keys]:
        """Return the parts of ranges that lie in the set: of which range, first key, key after.

        Args:
            start: first key of each range, in any order and overlapping.
            stop: key after the last of each.
        """
        low = np.searchsorted(self.stop, start, side="right")
        n = np.maximum(np.searchsorted(self.start, stop, side="left") - low, 0)
        of_range: Ints = np.repeat(np.arange(len(start)), n)
        nth = np.arange(len(of_range)) - np.repeat(np.cumsum(n) - n, n)
        at = low[of_range] + nth
        return (
            of_range,
            np.maximum(self.start[at], start[of_range]),
            np.minimum(self.stop[at], stop[of_range]),
        )


def depth(start: Keys, stop: Keys, at: Keys) -> Ints:
    """Return how many of the ranges, in any order and overlapping, hold each key ``at``."""
    n: Ints = np.searchsorted(_sorted(start), at, side="right").astype(np.int64, copy=False)
    n -= np.searchsorted(_sorted(stop), at, side="right")
    return n


def _sorted(keys: Keys) -> Keys:
    return keys if (keys[1:] >= keys[:-1]).all() else np.sort(keys)


def breakpoints(*edges: Keys) -> Keys:
    """Return the distinct edges in order: between two of them nothing changes."""
    if not sum(map(len, edges)):
        return np.empty(0, np.uint64)
    keys = np.sort(np.concatenate(edges))  # np.unique hashes first: five times slower (measured)
    distinct: Keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])]
    return distinct


def select(points: Keys, keep: npt.NDArray[np.bool_]) -> Intervals:
    """Return the set of the segments ``[points[i], points[i+1])`` with ``keep[i]``, joined.

    Args:
        points: breakpoints, uint64 ``(n,)``.
        keep: bool ``(n,)``; the last one has no segment and is ignored.
    """
    inside = np.concatenate([[False], keep[:-1], [False]]) if len(points) else np.zeros(1, bool)
    change = np.flatnonzero(inside[1:] != inside[:-1])
    return Intervals(points[change[0::2]], points[change[1::2]])


def _is_disjoint(start: Keys, stop: Keys) -> bool:
    """Return whether ranges are in order and do not overlap; they may touch."""
    return bool((start[1:] >= stop[:-1]).all())


def union(start: Keys, stop: Keys) -> Intervals:
    """Return the set that non-empty ranges cover, in any order and overlapping."""
    if _is_disjoint(start, stop):  # as they nearly always are: no sort, and a quarter of the memory
        apart = start[1:] > stop[:-1]
        some = bool(len(start))
        first, last = np.append(some, apart), np.append(apart, some)
        return Intervals(start[first[: len(start)]], stop[last[: len(stop)]])
    points = breakpoints(start, stop)
    return select(points, depth(start, stop, points) > 0)


def overlap(start: Keys, stop: Keys) -> Intervals:
    """Return the set of keys that two or more of the non-empty ranges hold."""
    if _is_disjoint(start, stop):
        return Intervals(start[:0], stop[:0])
    points = breakpoints(start, stop)
    return select(points, depth(start, stop, points) > 1)


def of_keys(sorted_keys: Keys) -> Intervals:
    if not len(sorted_keys):
        return Intervals(sorted_keys, sorted_keys)
    after = sorted_keys + np.uint64(1)
    first = np.concatenate([[True], sorted_keys[1:] != after[:-1]])
    last = np.concatenate([first[1:], [True]])
    return Intervals(sorted_keys[first], after[last])


def difference(left: Intervals, right: Intervals) -> Intervals:
    """Return the keys of ``left`` that are not in ``right``."""
    if np.array_equal(left.start, right.start) and np.array_equal(left.stop, right.stop):
        return Intervals(left.start[:0], left.stop[:0])
    points = breakpoints(left.start, left.stop, right.start, right.stop)
    covered = depth(left.start, left.stop, points) > 0
    return select(points, covered & (depth(right.start, right.stop, points) == 0))


class Index:
    """Indices of numbers in a sorted list; ids with few holes, as they usually are, by a table.

    Args:
        values: whole numbers, each once, rising.
    """

    def __init__(self, values: npt.NDArray[np.integer]) -> None:
        self._values = values.astype(np.int64)
        self._low = int(self._values[0]) if len(values) else 0
        self._span = int(self._values[-1]) - self._low + 1 if len(values) else 0
        self._table: npt.NDArray[np.int32] | None = None
        if len(values) < self._span <= 4 * len(values) + _MAX_TABLE:
            self._table = np.full(self._span, -1, np.int32)
            self._table[self._values - self._low] = np.arange(len(values), dtype=np.int32)

    def __len__(self) -> int:
        return len(self._values)

    def numbers(self, places: Ints) -> Ints:
        return self._values[places]

    def of(self, numbers: npt.NDArray[np.integer]) -> Ints:
        """Return the place of each number, -1 where it is not in the list."""
        values = numbers.astype(np.int64)
        if not len(self._values):
            return np.full(len(values), -1, np.int64)
        if self._span == len(self._values):  # no hole at all
            at: Ints = values - self._low
            at[(at < 0) | (at >= self._span)] = -1
            return at
        if self._table is not None:
            at = values - self._low
            inside = (at >= 0) & (at < self._span)
            return np.where(inside, self._table[np.where(inside, at, 0)], -1).astype(np.int64)
        at = np.minimum(np.searchsorted(self._values, values), len(self._values) - 1)
        return np.where(self._values[at] == values, at, -1).astype(np.int64)
