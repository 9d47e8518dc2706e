"""The order of training rows: a pure function of dataset digest, seed, epoch and geometry.

Nothing here reads a row. An epoch is a sequence of *entries* (a row, as often as it is to be
seen), cut in *pieces* (runs of consecutive rows of one shard, read as one):

1. the pieces are sorted by the words of a Philox stream of their own;
2. the permuted sequence is cut in equal *lanes*; batch ``g`` takes the same number of entries from
   every lane, and a rank owns a range of lanes. So the global batches do not depend on the number
   of ranks;
3. a lane is read in *windows* of whole pieces, each shuffled by its own Philox stream.

A mixture has an order for each of its *parts*, and every batch takes from each its share: over any
number of batches exact to fewer entries than there are parts.

All randomness is counter-based: any batch of any epoch is found without the ones before it.
``mixing_report`` holds an order and the token tables against a perfect shuffle.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from actds.explore.requests import Partners
from actds.format import canonical
from actds.format.inclusion import effective_rows
from actds.format.positions import position_key
from actds.format.roles import Roles
from actds.format.schema import Hook
from actds.format.shard import Shard
from actds.loader.filters import bad
from actds.loader.selection import WEIGHT

ORDER_VERSION = 3
"""Raised when the same arguments give another order; a state of another version is refused."""

Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Counts = Sequence[npt.NDArray[np.integer] | None]
"""How often each row of each shard comes; None of a shard where each comes once."""

PART = "part"
"""The column that numbers the parts of a mixture."""
_REQUEST = np.uint64(32)
_PIECES_STREAM = 2**63  # no lane has this number, so no window shares the stream
_FREQUENCY_STREAM = 2**63 + 1


@dataclass(frozen=True)
class Geometry:
    """The shape of the order.

    Args:
        window_rows: rows held in memory and shuffled together, over all lanes.
        piece_rows: rows of a piece at most.
    """

    batch: int
    lanes: int
    window_rows: int
    piece_rows: int
    phase: str | None = None
    weights: str | None = None

    @property
    def lane_batch(self) -> int:
        return self.batch // self.lanes

    @property
    def window_entries(self) -> int:
        """Return the entries after which a window of a lane takes no further piece."""
        return max(1, self.window_rows // self.lanes)

    @property
    def max_window_rows(self) -> int:
        """Return the different rows of a window of a lane at most: its last piece is whole."""
        return self.window_entries + self.piece_rows


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


def _pieces(
    shard: int, n_rows: int, piece_rows: int, counts: npt.NDArray[np.integer] | None
) -> Ints:
    """Return the pieces of a shard, ``(6, n)``, as ``EpochOrder`` has them."""
    start = np.arange(0, n_rows, piece_rows, dtype=np.int64)
    stop = np.minimum(start + piece_rows, n_rows)
    sums = stop - start
    if counts is not None and counts.size:
        sums = np.add.reduceat(counts.astype(np.int64), start)
    n_visits = np.maximum(1, sums // (stop - start))
    repeat = np.repeat(np.arange(start.size), n_visits)
    visit = np.arange(repeat.size) - np.repeat(np.cumsum(n_visits) - n_visits, n_visits)
    sizes, n_visits = sums[repeat], n_visits[repeat]
    if counts is not None:
        for i in np.flatnonzero(n_visits > 1):
            piece = counts[start[repeat[i]] : stop[repeat[i]]]
            sizes[i] = visit_counts(piece, visit[i], n_visits[i]).sum()
    pieces = (np.full(repeat.size, shard), start[repeat], stop[repeat], visit, n_visits, sizes)
    # A piece whose rows are all left out is none.
    return np.stack(pieces).astype(np.int64)[:, sizes > 0]


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
        pieces: the numbers of the pieces it holds.
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
    """The order of one epoch of a part.

    Rows that are served more than once make a piece longer than its rows. Such a piece is split in
    as many visits as fit in, at independent places of the epoch: copies of a row spread over it,
    and a read still gives about as many entries as it has rows.

    Args:
        n_rows: rows of each shard; the last piece of each may be shorter than the others.
        geometry: the shape of the order.
        key: the Philox key of dataset, seed and part.
        epoch: from 0.
        counts: entries of each row per shard, 0 to leave it out; None where every row has one.

    Attributes, ``(n_pieces,)`` each in the order of the dataset:
        shard, start, stop: its rows.
        visit, n_visits: which of the visits of the same rows this is, from 0.
        sizes: entries that it gives.
    """

    def __init__(
        self,
        n_rows: Sequence[int],
        geometry: Geometry,
        key: tuple[int, int],
        epoch: int,
        counts: Counts | None = None,
    ) -> None:
        self.counts: Counts = [None] * len(n_rows) if counts is None else counts
        self._geometry, self._key, self._epoch = geometry, key, epoch
        shards = [
            _pieces(number, total, geometry.piece_rows, count)
            for number, (total, count) in enumerate(zip(n_rows, self.counts, strict=True))
        ]
        pieces: Ints = np.concatenate([np.empty((6, 0), np.int64), *shards], axis=1)
        self.shard, self.start, self.stop, self.visit, self.n_visits, self.sizes = pieces
        n_pieces = self.sizes.size
        self._piece = piece_order(n_pieces, key, epoch)
        self._start = np.zeros(n_pieces + 1, np.int64)
        np.cumsum(self.sizes[self._piece], out=self._start[1:])

    def rows(self, piece: int) -> Ints:
        """Return the row of the shard of each entry of a piece, ascending."""
        start, stop = int(self.start[piece]), int(self.stop[piece])
        rows = np.arange(start, stop, dtype=np.int64)
        counts = self.counts[self.shard[piece]]
        if counts is None:
            return rows
        visit, n_visits = int(self.visit[piece]), int(self.n_visits[piece])
        return np.repeat(rows, visit_counts(counts[start:stop], visit, n_visits))

    def reads(self, window: Window) -> Iterator[tuple[int, Ints]]:
        """Yield the shard and the rows of the used entries of each piece of a window."""
        for piece, start, stop in np.stack([window.pieces, window.start, window.stop], 1).tolist():
            yield int(self.shard[piece]), self.rows(piece)[start:stop]

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


@dataclass(frozen=True)
class Part:
    """The rows of one part of a mixture: a range of the shards, in an order of its own.

    Args:
        shards: its shards, as a range of those of the spec.
        counts: how often each row of a shard comes; None where each comes once.
        frequencies: what rows come in proportion to, per shard; None where they do not.
    """

    shards: range
    counts: Counts
    frequencies: Sequence[npt.NDArray[np.float64]] | None
    n_entries: int
    share: int
    key: tuple[int, int]


@dataclass(frozen=True)
class BatchSpec:
    """What the batches of a rank are made of.

    Args:
        weights: row weights per shard, float32 ``(n_rows,)`` each; None without.
        paired: hooks of other datasets, with the partner of each row of the shards.
    """

    hooks: Sequence[Hook]
    shards: Sequence[Shard]
    runs: tuple[str, ...]
    parts: Sequence[Part]
    geometry: Geometry
    lanes: range
    provenance: tuple[str, ...]
    weights: Sequence[npt.NDArray[np.float32]] | None = None
    pinned: bool = False
    paired: Sequence[Partners] = ()
    roles: Mapping[str, Roles] = field(default_factory=dict)

    @property
    def widths(self) -> dict[str, Hook]:
        return {hook.name: hook for hook in self.hooks} | {p.name: p.hook for p in self.paired}

    @property
    def columns(self) -> tuple[str, ...]:
        columns = self.provenance
        columns = (*columns, PART) if columns and len(self.parts) > 1 else columns
        return columns if self.weights is None else (*columns, WEIGHT)

    def epoch(self, epoch: int) -> Epoch:
        orders = []
        for part in self.parts:
            counts: Counts | None = part.counts
            if part.frequencies is not None:
                counts = frequency_counts(part.frequencies, part.n_entries, part.key, epoch)
            n_rows = [self.shards[i].n_rows for i in part.shards]
            orders.append(EpochOrder(n_rows, self.geometry, part.key, epoch, counts))
        return Epoch(orders, [part.share for part in self.parts], self.geometry)


class Ordered(Protocol):
    """A ``Loader``."""

    @property
    def batch_spec(self) -> BatchSpec: ...


@dataclass(frozen=True)
class MixingReport:
    """Rows of one request that meet in a batch, and how many would in a perfect shuffle.

    Args:
        n_batches: batches that were looked at, the first ones of the epoch.
        batch: entries of a batch, over all ranks.
        partners: other rows of its own request that a row has in its batch, on average.
        ideal_partners: the same if every order of the epoch were equally likely.
        partners_error: standard error of ``partners``, from batch to batch.
        adjacent: rows of the position before or after that a row has in its batch, on average.
        ideal_adjacent: the same if every order were equally likely.
        effective_rows: entries of equal weight that would say as much of a mean as a batch does
            with its row weights, on average (Kish 1965); ``batch`` without weights.
    """

    n_batches: int
    batch: int
    partners: float
    ideal_partners: float
    partners_error: float
    adjacent: float
    ideal_adjacent: float
    effective_rows: float

    @property
    def ratio(self) -> float:
        """Return the partners as a multiple of the ideal: 1 is a perfect shuffle."""
        return self.partners / self.ideal_partners if self.ideal_partners else 1.0

    @property
    def ratio_error(self) -> float:
        return self.partners_error / self.ideal_partners if self.ideal_partners else 0.0

    def __str__(self) -> str:
        return (
            f"{self.partners:.3g} rows of the same request per row of a batch of {self.batch:,}, "
            f"{self.ratio:.2f} (± {self.ratio_error:.2f}) times the ideal "
            f"{self.ideal_partners:.3g}; {self.adjacent:.3g} at the position beside it, "
            f"ideal {self.ideal_adjacent:.3g} ({self.n_batches} batches)"
        ) + (
            f"; weighted, a batch has {self.effective_rows:,.0f} effective rows"
            if self.effective_rows < self.batch
            else ""
        )


def mixing_report(loader: Ordered, n_batches: int = 64, *, epoch: int = 0) -> MixingReport:
    """Return how well the batches of a loader are mixed, over all of its ranks.

    A row that comes several times in an epoch is a partner of itself each further time. The ideal
    is exact: the mean of the hypergeometric distribution for the request sizes of what is read.
    It takes 8 bytes of memory for each row of the shards, and about as much again to sort them.

    Args:
        loader: the loader; its position does not change.
        n_batches: batches to look at, at most.
        epoch: whose order.

    Raises:
        ActdsError: E014 no full batch, or a number that is too small; E104, E201 to E206 when a
            token table is missing or damaged.

    Spec: 0.1 section 10.3.
    """
    spec = loader.batch_spec
    rows = spec.epoch(epoch)
    n_batches = min(n_batches, rows.n_full_batches)
    if n_batches < 1:
        raise bad("n_batches", "no full batch", "at least one")
    keys = _row_keys(spec)
    counted = [_together(batch) for batch in _first_batches(spec, rows, keys, n_batches)]
    partners, adjacent = np.array(counted).T
    ideal_partners, ideal_adjacent = _ideal(spec, rows, keys, n_batches)
    error = float(partners.std(ddof=1)) / np.sqrt(n_batches) if n_batches > 1 else float("nan")
    return MixingReport(
        n_batches=n_batches,
        batch=spec.geometry.batch,
        partners=float(partners.mean()),
        ideal_partners=ideal_partners,
        partners_error=float(error),
        adjacent=float(adjacent.mean()),
        ideal_adjacent=ideal_adjacent,
        effective_rows=_effective_rows(spec, rows, n_batches),
    )


def _effective_rows(spec: BatchSpec, rows: Epoch, n_batches: int) -> float:
    if spec.weights is None:
        return float(spec.geometry.batch)
    batches = _first_batches(spec, rows, spec.weights, n_batches)
    return float(np.mean([effective_rows(weights) for weights in batches]))


def _row_keys(spec: BatchSpec) -> list[Keys]:
    """Return a number of each row per shard, ``(n_rows,)``: of its request, then its position."""
    keys: list[Keys] = []
    runs: list[tuple[str, str]] = []
    n_requests: dict[tuple[str, str], int] = {}
    for shard in spec.shards:
        tokens = shard.tokens(["request", "position"])
        keys.append(position_key(tokens["request"], tokens["position"]))
        runs.append((shard.manifest.dataset, shard.run))
        n_requests[runs[-1]] = max(n_requests.get(runs[-1], 0), 1 + int(keys[-1].max() >> _REQUEST))
    first = dict(zip(n_requests, np.cumsum([0, *n_requests.values()]), strict=False))
    for key, run in zip(keys, runs, strict=True):
        key += np.uint64(first[run]) << _REQUEST
    return keys


def _first_batches(
    spec: BatchSpec, rows: Epoch, values: Sequence[npt.NDArray[Any]], n_batches: int
) -> Iterator[npt.NDArray[Any]]:
    """Yield values of the rows of the first batches, lane after lane and part after part.

    Args:
        values: of each row per shard, ``(n_rows,)``.
    """
    places = list(np.ndindex(len(spec.parts), spec.geometry.lanes))
    served = []
    for part, lane in places:
        order, shards = rows.orders[part], spec.parts[part].shards
        windows: list[npt.NDArray[Any]] = [np.empty(0, values[0].dtype)]
        n_left, index = rows.before(part, lane, n_batches), 0
        while n_left > 0:
            window = order.window(lane, index)
            pieces = [values[shards[shard]][numbers] for shard, numbers in order.reads(window)]
            windows += [np.concatenate(pieces)[window.order]] if pieces else []
            n_left, index = n_left - len(window.order), index + 1
        served.append(np.concatenate(windows))
    for step in range(n_batches):
        yield np.concatenate(
            [
                entries[rows.before(part, lane, step) : rows.before(part, lane, step + 1)]
                for (part, lane), entries in zip(places, served, strict=True)
            ]
        )


def _together(batch: Keys) -> tuple[float, float]:
    _, n_rows = np.unique(batch >> _REQUEST, return_counts=True)
    place, times = np.unique(batch, return_counts=True)
    beside = np.diff(place) == 1
    neighbours = 2 * (times[:-1] * times[1:])[beside].sum()
    return float((n_rows * (n_rows - 1)).sum()) / len(batch), float(neighbours) / len(batch)


def _ideal(spec: BatchSpec, rows: Epoch, keys: list[Keys], n_batches: int) -> tuple[float, float]:
    parts = range(len(spec.parts))
    entries = [_entries(spec, rows, keys, part) for part in parts]
    place = np.unique(np.concatenate([key for key, _ in entries]))
    times = [np.bincount(np.searchsorted(place, k), n, len(place)) for k, n in entries]
    request = np.cumsum(np.diff(place >> _REQUEST, prepend=place[:1] >> _REQUEST) > 0)
    sizes = [np.bincount(request, n) for n in times]
    beside = np.diff(place) == 1
    taken = [
        sum(rows.before(part, lane, n_batches) for lane in range(spec.geometry.lanes)) / n_batches
        for part in parts
    ]
    partners = neighbours = 0.0
    for p in parts:
        for q in parts:
            # Pairs of the two parts in a batch, over all their pairs in the epoch.
            share = taken[p] * (taken[q] - (p == q))
            share /= times[p].sum() * (times[q].sum() - (p == q))
            partners += share * float((sizes[p] * (sizes[q] - (p == q))).sum())
            pairs = times[p][:-1] * times[q][1:] + times[p][1:] * times[q][:-1]
            neighbours += share * float(pairs[beside].sum())
    return partners / sum(taken), neighbours / sum(taken)


def _entries(spec: BatchSpec, rows: Epoch, keys: list[Keys], part: int) -> tuple[Keys, Floats]:
    numbers, times = [], []
    for number, count in zip(spec.parts[part].shards, rows.orders[part].counts, strict=True):
        numbers.append(keys[number])
        times.append(np.ones(len(keys[number])) if count is None else count.astype(np.float64))
    return np.concatenate(numbers), np.concatenate(times)
