"""The order of training rows: a pure function of dataset digest, seed, epoch and geometry.

Nothing here reads a file. An epoch is a sequence of *entries* (a row, as often as it is to be
seen), cut in *pieces* (runs of consecutive rows of one shard, read as one):

1. the pieces are sorted by the words of a Philox stream of their own;
2. the permuted sequence is cut in equal *lanes*; batch ``g`` takes the same number of entries from
   every lane, and a rank owns a range of lanes. So the global batches do not depend on the number
   of ranks;
3. a lane is read in *windows* of whole pieces, each shuffled by its own Philox stream.

A mixture has an order for each of its *parts*, and every batch takes from each its share: over any
number of batches exact to fewer entries than there are parts.

All randomness is counter-based: any batch of any epoch is found without the ones before it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import gcd

import numpy as np
import numpy.typing as npt

from actds.format import canonical

ORDER_VERSION = 3
"""Raised when the same arguments give another order; a state of another version is refused."""

Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]
Counts = Sequence[npt.NDArray[np.integer] | None]
"""How often each row of each shard comes; None of a shard where each comes once."""

_PIECES_STREAM = 2**63  # no lane has this number, so no window shares the stream
_FREQUENCY_STREAM = 2**63 + 1


@dataclass(frozen=True)
class Geometry:
    """The shape of the order.

    Args:
        batch: entries of a global batch, over all ranks; a multiple of ``lanes``.
        lanes: virtual lanes; the world size divides it.
        window_rows: rows held in memory and shuffled together, over all lanes.
        piece_rows: rows of a piece at most.
        phase: the phase that is read, or both.
        weights: None, or ``multiplicity``.
    """

    batch: int
    lanes: int
    window_rows: int
    piece_rows: int
    phase: str | None = None
    weights: str | None = None

    @property
    def lane_batch(self) -> int:
        """Return the entries that one lane gives to a global batch."""
        return self.batch // self.lanes

    @property
    def window_entries(self) -> int:
        """Return the entries after which a window of a lane takes no further piece."""
        return max(1, self.window_rows // self.lanes)

    @property
    def max_window_rows(self) -> int:
        """Return the different rows of a window of a lane at most: its last piece is whole."""
        return self.window_entries + self.piece_rows

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Pieces:
    """The pieces of a selection, in the order of the dataset; arrays have shape (n_pieces,).

    Args:
        shard: index of the shard in the selection.
        start: first row in the shard.
        stop: row after the last.
        visit: which of its visits this is, from 0.
        n_visits: how many pieces the same rows have.
        n_entries: entries that the visit gives.
        counts: entries of each row per shard; None where every row of all shards has one.
    """

    shard: Ints
    start: Ints
    stop: Ints
    visit: Ints
    n_visits: Ints
    n_entries: Ints
    counts: Counts | None = field(default=None, kw_only=True)

    @classmethod
    def of_shards(
        cls, n_rows: Sequence[int], piece_rows: int, counts: Counts | None = None
    ) -> Pieces:
        """Return the pieces of shards.

        Rows that are served more than once make a piece longer than its rows. Such a piece is
        split in as many visits as fit in, at independent places of the epoch: copies
        of a row spread over it, and a read still gives about as many entries as it has rows.

        Args:
            n_rows: rows of each shard.
            piece_rows: rows of a piece; the last one of a shard may be shorter.
            counts: entries of each row per shard, 0 to leave it out; None where every row has one.
        """
        columns: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(6)]
        for shard, total in enumerate(n_rows):
            start = np.arange(0, total, piece_rows, dtype=np.int64)
            stop = np.minimum(start + piece_rows, total)
            row_counts = counts[shard] if counts is not None else None
            sums = stop - start if row_counts is None else _sums(row_counts, start)
            n_visits = np.maximum(1, sums // (stop - start))
            repeat = np.repeat(np.arange(start.size), n_visits)
            visit = np.arange(repeat.size) - np.repeat(np.cumsum(n_visits) - n_visits, n_visits)
            n_entries = sums[repeat]
            if row_counts is not None:
                for i in np.flatnonzero(n_visits[repeat] > 1):
                    piece = row_counts[start[repeat[i]] : stop[repeat[i]]]
                    n_entries[i] = visit_counts(piece, visit[i], n_visits[repeat[i]]).sum()
            values = (np.full(repeat.size, shard), start[repeat], stop[repeat])
            some = n_entries > 0  # a piece whose rows are all left out is none
            for column, value in zip(
                columns, (*values, visit, n_visits[repeat], n_entries), strict=True
            ):
                column.append(value[some].astype(np.int64))
        empty = np.empty(0, np.int64)
        return cls(
            *(np.concatenate(column) if column else empty for column in columns), counts=counts
        )

    def rows(self, piece: int) -> Ints:
        """Return the row of the shard of each entry of a piece, ascending."""
        start, stop = int(self.start[piece]), int(self.stop[piece])
        rows = np.arange(start, stop, dtype=np.int64)
        counts = self.counts[int(self.shard[piece])] if self.counts is not None else None
        if counts is None:
            return rows
        visit, n_visits = int(self.visit[piece]), int(self.n_visits[piece])
        return np.repeat(rows, visit_counts(counts[start:stop], visit, n_visits))


def visit_counts(
    counts: npt.NDArray[np.integer], visit: int, n_visits: int
) -> npt.NDArray[np.int64]:
    """Return how often each row of a piece occurs in one of its visits.

    Copy ``j`` of row ``i`` belongs to visit ``(i + j) mod n_visits``, so the visits partition the
    copies and are about equally long.
    """
    rows = np.arange(counts.size, dtype=np.int64)
    whole, rest = np.divmod(counts.astype(np.int64), n_visits)
    out: Ints = whole + ((visit - rows) % n_visits < rest)
    return out


def _sums(counts: npt.NDArray[np.integer], start: Ints) -> Ints:
    return np.add.reduceat(counts.astype(np.int64), start) if counts.size else start


def order_key(digest: str, seed: int, part: int = 0) -> tuple[int, int]:
    """Return the 128-bit Philox key of a dataset, a seed and a part of a mixture, as two words."""
    text = canonical.dump({"digest": digest, "order": ORDER_VERSION, "part": part, "seed": seed})
    raw = hashlib.sha256(text).digest()
    return int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:16], "little")


def _raw(key: tuple[int, int], epoch: int, stream: int, window: int, n: int) -> Keys:
    # numpy promises that the raw words of Philox never change, and promises nothing about
    # Generator.permutation: an order must survive an update of numpy in the middle of an epoch.
    generator = np.random.Philox(
        key=np.array(key, np.uint64), counter=np.array([0, window, stream, epoch], np.uint64)
    )
    return np.asarray(generator.random_raw(n), np.uint64)


def _permutation(words: Keys) -> Ints:
    """Return the places of random words in the order of the words.

    The place itself is in the lowest bits. So no two are equal, sorting plain numbers is
    enough, and that is several times as fast as a stable ``argsort``.
    """
    places = np.arange(len(words), dtype=np.uint64)
    mask = np.uint64((1 << len(words).bit_length()) - 1)
    return (np.sort((words & ~mask) | places) & mask).astype(np.int64)


def piece_order(n_pieces: int, key: tuple[int, int], epoch: int) -> Ints:
    """Return the pieces of an epoch in the order in which lanes are cut, int64 ``(n_pieces,)``."""
    return _permutation(_raw(key, epoch, _PIECES_STREAM, 0, n_pieces))


def frequency_counts(
    frequencies: Sequence[npt.NDArray[np.float64]], n_entries: int, key: tuple[int, int], epoch: int
) -> list[npt.NDArray[np.int64]]:
    """Return how often each row comes in an epoch, where rows come in proportion to a number.

    Systematic sampling: a comb of ``n_entries`` equal teeth with a random start is laid over the
    numbers. So a row comes as often as it should to less than one, in every epoch, and exactly so
    in the mean of many.

    Args:
        frequencies: numbers of the rows of each shard, at least 0.
        n_entries: entries of the epoch.
        key: the Philox key.
        epoch: from 0.
    """
    start = float(_raw(key, epoch, _FREQUENCY_STREAM, 0, 1)[0] >> np.uint64(11)) / 2.0**53
    scale = n_entries / sum(float(numbers.sum()) for numbers in frequencies)
    counts, sums, low = [], np.zeros(1), 0
    for numbers in frequencies:
        sums = sums[-1] + np.concatenate([[0.0], np.cumsum(numbers) * scale])
        teeth = np.minimum(np.floor(sums + start).astype(np.int64), n_entries)
        counts.append(np.diff(teeth))
        low = int(teeth[-1])
    # Whatever is lost in a sum of many numbers, an epoch has its length.
    shard = max(i for i, numbers in enumerate(frequencies) if numbers.any())
    counts[shard][np.flatnonzero(frequencies[shard])[-1]] += n_entries - low
    return counts


@dataclass(frozen=True)
class Window:
    """One window of one lane: what to read, and in which order to serve it.

    Args:
        first: lane position of its first entry.
        pieces: the pieces it holds, as indices of ``Pieces``.
        start: first entry that is used of each piece; the first piece of a lane may be cut.
        stop: entry after the last that is used of each piece.
        order: permutation of the entries, shape (n_entries,): the k-th entry served is the
            ``order[k]``-th of the used entries, counted over the pieces in turn.
    """

    first: int
    pieces: Ints
    start: Ints
    stop: Ints
    order: Ints


class EpochOrder:
    """The order of one epoch of a part; ``key`` is the Philox key of dataset and seed."""

    def __init__(
        self, pieces: Pieces, geometry: Geometry, key: tuple[int, int], epoch: int
    ) -> None:
        self.pieces = pieces
        self._geometry, self._key, self._epoch = geometry, key, epoch
        n_pieces = pieces.n_entries.size
        self._piece = piece_order(n_pieces, key, epoch)
        self._start = np.zeros(n_pieces + 1, np.int64)
        np.cumsum(pieces.n_entries[self._piece], out=self._start[1:])

    @property
    def n_entries(self) -> int:
        return int(self._start[-1])

    @cached_property
    def _lane_start(self) -> Ints:
        """Lanes are equally long; the first ones have one entry more where it does not divide."""
        size, extra = divmod(self.n_entries, self._geometry.lanes)
        lanes = np.arange(self._geometry.lanes + 1, dtype=np.int64)
        starts: Ints = lanes * size + np.minimum(lanes, extra)
        return starts

    def lane_entries(self, lane: int) -> int:
        return int(self._lane_start[lane + 1] - self._lane_start[lane])

    def _lane_pieces(self, lane: int) -> tuple[int, int]:
        first = int(np.searchsorted(self._start, self._lane_start[lane], "right")) - 1
        stop = int(np.searchsorted(self._start, self._lane_start[lane + 1], "left"))
        return first, max(first, stop)

    def n_windows(self, lane: int) -> int:
        """Return the windows of a lane; one after a piece longer than a window may be empty."""
        n_entries = self.lane_entries(lane)
        return self.window_at(lane, n_entries - 1) + 1 if n_entries else 0

    def window_at(self, lane: int, position: int) -> int:
        """Return the window that holds a position of a lane: that in which its piece begins."""
        low = self._lane_start[lane]
        piece = int(np.searchsorted(self._start, low + position, "right")) - 1
        return int(max(self._start[piece] - low, 0)) // self._geometry.window_entries

    def window(self, lane: int, index: int) -> Window:
        first, stop = self._lane_pieces(lane)
        low, high = self._lane_start[lane], self._lane_start[lane + 1]
        begin, size = low + index * self._geometry.window_entries, self._geometry.window_entries
        # The first piece of a lane may begin before it.
        a = first if not index else int(np.searchsorted(self._start[:stop], begin))
        b = max(a, int(np.searchsorted(self._start[:stop], begin + size)))
        base = self._start[a:b]
        start = np.maximum(low - base, 0)
        end = np.minimum(self._start[a + 1 : b + 1], high) - base
        words = _raw(self._key, self._epoch, lane, index, int((end - start).sum()))
        return Window(
            first=int(max(self._start[a] - low, 0)),
            pieces=self._piece[a:b],
            start=start,
            stop=end,
            order=_permutation(words),
        )


class Epoch:
    """The batches of an epoch: how many there are, and what each takes from lanes and parts."""

    def __init__(
        self, orders: Sequence[EpochOrder], shares: Sequence[int], geometry: Geometry
    ) -> None:
        self.orders = orders
        self._geometry = geometry
        self._shares = tuple(shares)

    @cached_property
    def _taken(self) -> Ints:
        """What lanes give of parts before each step of one period, ``(steps + 1, lanes, parts)``.

        Entry ``t`` of an epoch is counted over lanes and batches. What parts have of the first
        ``t`` entries repeats after as many entries as the shares add up to; and in steps, too.
        """
        lanes, size, total = self._geometry.lanes, self._geometry.lane_batch, sum(self._shares)
        period = total // gcd(total, lanes * size)
        t = np.arange(period * lanes + 1, dtype=np.int64) * size
        below, left, parts = t, total, []
        for share in self._shares[:-1]:
            # The first part takes its share, the next one its share of what is left, and so on.
            part = below * share // left
            parts.append(part)
            below, left = below - part, left - share
        given = np.diff(np.stack([*parts, below], axis=1), axis=0)
        taken = np.zeros((period + 1, lanes, len(self._shares)), np.int64)
        np.cumsum(given.reshape(period, lanes, -1), axis=0, out=taken[1:])
        return taken

    def n_batches(self, drop_last: bool) -> int:
        return self.n_full_batches + (not drop_last and self.n_left > 0)

    @cached_property
    def n_full_batches(self) -> int:
        """Return the full batches: a mixture ends before the first part that would run out."""
        if len(self.orders) == 1:
            return self.orders[0].n_entries // self._geometry.batch
        most = sum(order.n_entries for order in self.orders) // self._geometry.batch
        return bisect_left(range(1, most + 1), True, key=lambda n: not self._lasts(n))

    @property
    def n_left(self) -> int:
        total = sum(order.n_entries for order in self.orders)
        return total - self.n_full_batches * self._geometry.batch

    def before(self, part: int, lane: int, step: int) -> int:
        if len(self.orders) == 1:
            return step * self._geometry.lane_batch
        periods, rest = divmod(step, len(self._taken) - 1)
        return int(periods * self._taken[-1, lane, part] + self._taken[rest, lane, part])

    def sizes(self, lane: int, step: int) -> list[int]:
        """Return the entries that a lane gives of each part to a batch, short or not."""
        if len(self.orders) == 1:
            if step < self.n_full_batches:
                return [self._geometry.lane_batch]
            return [self.orders[0].lane_entries(lane) - step * self._geometry.lane_batch]
        return [
            self.before(part, lane, step + 1) - self.before(part, lane, step)
            for part in range(len(self.orders))
        ]

    def _lasts(self, n_batches: int) -> bool:
        """Return whether every part has the entries of so many batches, in every lane."""
        return all(
            self.before(part, lane, n_batches) <= order.lane_entries(lane)
            for part, order in enumerate(self.orders)
            for lane in range(self._geometry.lanes)
        )
