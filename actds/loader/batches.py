"""What the batches of a rank are made of, and the rows of each epoch in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from actds.explore.pairs import Partners
from actds.format.roles import Roles
from actds.format.schema import Hook
from actds.format.shard import Shard
from actds.loader.order import Epoch, EpochOrder, Geometry, Pieces, frequency_counts, visit_counts
from actds.loader.selection import ROLE, WEIGHT

Bits = npt.NDArray[Any]
Columns = dict[str, npt.NDArray[Any]]

PART = "part"
"""The column that numbers the parts of a mixture."""
COLUMN_TYPES: dict[str, npt.DTypeLike] = {
    "run": np.uint16,
    "request": np.uint32,
    "position": np.uint32,
    "token_id": np.uint32,
    "phase": np.uint8,
    ROLE: np.int8,
    "step": np.uint64,
    PART: np.int64,
    WEIGHT: np.float32,
}


@dataclass(frozen=True)
class Part:
    """The rows of one part of a mixture: a range of the shards, in an order of its own.

    Args:
        shards: its shards, as a range of those of the spec.
        counts: how often each row of a shard comes; None where each comes once.
        frequencies: what rows come in proportion to, per shard; None where they do not.
        n_entries: entries of an epoch, where rows come in proportion.
        share: its share of every batch, an integer of any sum.
        key: the Philox key.
    """

    shards: range
    counts: Sequence[npt.NDArray[Any] | None]
    frequencies: Sequence[npt.NDArray[np.float64]] | None
    n_entries: int
    share: int
    key: tuple[int, int]


@dataclass(frozen=True)
class BatchSpec:
    """What the batches of a rank are made of.

    Args:
        hooks: the hooks that are read.
        shards: the shards of all parts.
        runs: the runs of the shards.
        parts: the parts of a mixture; one without.
        geometry: the shape of the order.
        lanes: the lanes of this rank.
        provenance: the columns that say whose rows they are; none is read else.
        weights: row weights per shard, float32 ``(n_rows,)`` each; None without.
        pinned: make batches in pinned memory, from which a GPU reads by itself.
        paired: hooks of other datasets, with the partner of each row of the shards.
        roles: the roles of each run, where the column is asked for.
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
        """Return the hooks of a batch by what it calls them."""
        own = {hook.name: hook for hook in self.hooks}
        return own | {pair.name: pair.hook for pair in self.paired}

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns of a batch."""
        columns = self.provenance
        columns = (*columns, PART) if columns and len(self.parts) > 1 else columns
        return columns if self.weights is None else (*columns, WEIGHT)

    def epoch(self, epoch: int) -> EpochRows:
        """Return the order of an epoch, and how often each row comes in it."""
        orders, counts = [], []
        for part in self.parts:
            part_counts = part.counts
            if part.frequencies is not None:
                part_counts = frequency_counts(part.frequencies, part.n_entries, part.key, epoch)
            n_rows = [self.shards[i].n_rows for i in part.shards]
            pieces = Pieces.of_shards(n_rows, self.geometry.piece_rows, part_counts)
            orders.append(EpochOrder(pieces, self.geometry, part.key, epoch))
            counts.append(part_counts)
        return EpochRows(Epoch(orders, [p.share for p in self.parts], self.geometry), counts)


@dataclass(frozen=True)
class EpochRows:
    """The order of an epoch, and how often each row of each part comes in it."""

    order: Epoch
    counts: Sequence[Sequence[npt.NDArray[Any] | None]]

    def rows(self, part: int, piece: int) -> npt.NDArray[np.int64]:
        """Return the row of each entry of a piece, from the piece's start, ascending."""
        pieces = self.order.orders[part].pieces
        start, stop = int(pieces.start[piece]), int(pieces.stop[piece])
        rows = np.arange(stop - start, dtype=np.int64)
        counts = self.counts[part][int(pieces.shard[piece])]
        if counts is None:
            return rows
        visit, n_visits = int(pieces.visit[piece]), int(pieces.n_visits[piece])
        return np.repeat(rows, visit_counts(counts[start:stop], visit, n_visits))


@dataclass(frozen=True)
class Batch:
    """One batch in host memory of its own.

    Args:
        epoch: epoch of the next batch.
        step: number of the next batch in that epoch.
        acts: bit patterns ``(n, d_model)`` per hook.
        rows: token columns and row weights, each of shape (n,); None when neither is asked for.
    """

    epoch: int
    step: int
    acts: dict[str, Bits]
    rows: Columns | None


def n_batches(order: Epoch, drop_last: bool) -> int:
    """Return the batches of an epoch."""
    return order.n_full_batches + (0 if drop_last or not order.n_left else 1)
