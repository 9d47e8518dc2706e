"""How well batches are mixed: rows of one request that meet in a batch, against a perfect shuffle.

Only the order and the token tables are read: no activation is, and the loader need not have
provenance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actds.format.positions import position_key
from actds.loader.filters import bad
from actds.loader.loader import Loader
from actds.loader.order import Epoch
from actds.loader.pipeline import BatchSpec

Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

_REQUEST = np.uint64(32)


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
    """

    n_batches: int
    batch: int
    partners: float
    ideal_partners: float
    partners_error: float
    adjacent: float
    ideal_adjacent: float

    @property
    def ratio(self) -> float:
        """Return the partners as a multiple of the ideal: 1 is a perfect shuffle."""
        return self.partners / self.ideal_partners if self.ideal_partners else 1.0

    @property
    def ratio_error(self) -> float:
        """Return the standard error of the ratio."""
        return self.partners_error / self.ideal_partners if self.ideal_partners else 0.0

    def __str__(self) -> str:
        return (
            f"{self.partners:.3g} rows of the same request per row of a batch of {self.batch:,}, "
            f"{self.ratio:.2f} (± {self.ratio_error:.2f}) times the ideal "
            f"{self.ideal_partners:.3g}; {self.adjacent:.3g} at the position beside it, "
            f"ideal {self.ideal_adjacent:.3g} ({self.n_batches} batches)"
        )


def mixing_report(loader: Loader, n_batches: int = 64, *, epoch: int = 0) -> MixingReport:
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
    counted = [_met(batch) for batch in _batches(spec, rows, keys, n_batches)]
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
    )


def _row_keys(spec: BatchSpec) -> list[Keys]:
    """Return a number of each row per shard, ``(n_rows,)``: of its request, then its position."""
    first: dict[tuple[str, str], int] = {}
    n_requests = 0
    keys: list[Keys] = []
    for shard in spec.shards:
        tokens = shard.tokens(["request", "position"])
        request = tokens["request"].to_numpy().astype(np.uint64)
        run = (shard.manifest.dataset, shard.run)
        if run not in first:
            first[run] = n_requests
            n_requests += _n_requests(spec, run)
        keys.append(position_key(request + np.uint64(first[run]), tokens["position"].to_numpy()))
    return keys


def _n_requests(spec: BatchSpec, run: tuple[str, str]) -> int:
    of_run = (shard for shard in spec.shards if (shard.manifest.dataset, shard.run) == run)
    return 1 + max(int(shard.tokens(["request"])["request"].to_numpy().max()) for shard in of_run)


def _batches(spec: BatchSpec, rows: Epoch, keys: list[Keys], n_batches: int) -> Iterator[Keys]:
    """Yield the keys of the rows of the first batches, lane after lane and part after part."""
    lanes, order = range(spec.geometry.lanes), rows
    served = {
        (part, lane): _served(spec, rows, keys, part, lane, order.before(part, lane, n_batches))
        for part in range(len(spec.parts))
        for lane in lanes
    }
    for step in range(n_batches):
        yield np.concatenate(
            [
                entries[order.before(part, lane, step) : order.before(part, lane, step + 1)]
                for (part, lane), entries in served.items()
            ]
        )


def _served(
    spec: BatchSpec, rows: Epoch, keys: list[Keys], part: int, lane: int, n_entries: int
) -> Keys:
    order, shards = rows.orders[part], spec.parts[part].shards
    windows: list[Keys] = [np.empty(0, np.uint64)]
    n_found, index = 0, 0
    while n_found < n_entries:
        window = order.window(lane, index)
        pieces = [
            keys[shards[int(order.pieces.shard[piece])]][order.pieces.rows(piece)[start:stop]]
            for piece, start, stop in zip(
                window.pieces.tolist(), window.start.tolist(), window.stop.tolist(), strict=True
            )
        ]
        if pieces:
            windows.append(np.concatenate(pieces)[window.order])
        n_found, index = n_found + len(window.order), index + 1
    return np.concatenate(windows)


def _met(batch: Keys) -> tuple[float, float]:
    """Return partners and neighbours of a row in a batch, on average."""
    _, n_rows = np.unique(batch >> _REQUEST, return_counts=True)
    place, times = np.unique(batch, return_counts=True)
    beside = np.diff(place) == 1
    neighbours = 2 * (times[:-1] * times[1:])[beside].sum()
    return float((n_rows * (n_rows - 1)).sum()) / len(batch), float(neighbours) / len(batch)


def _ideal(spec: BatchSpec, rows: Epoch, keys: list[Keys], n_batches: int) -> tuple[float, float]:
    """Return partners and neighbours of a row in a batch, if every order were equally likely."""
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
    counts = rows.orders[part].pieces.counts or [None] * len(spec.parts[part].shards)
    for number, count in zip(spec.parts[part].shards, counts, strict=True):
        numbers.append(keys[number])
        times.append(np.ones(len(keys[number])) if count is None else count.astype(np.float64))
    return np.concatenate(numbers), np.concatenate(times)
