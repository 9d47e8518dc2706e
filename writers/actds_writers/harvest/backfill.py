"""Backfill: which requests of a dataset lack rows, and how far a replay's rows are from the others.

A row is lacking where a position was computed and lost, or served from a prefix cache or KV from
outside without a stored row of it. Positions that a rule left out on purpose are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from actds.errors import ActdsError
from actds.format.positions import position_key, union
from actds.load.dataset import Dataset
from actds.load.pairs import find_partners, prefix_hashes
from actds_writers.harvest.canary import FAR, coarser, distances, types_of

__all__ = ["Shared", "compare", "lacking"]

ROWS_AT_A_TIME = 1 << 14
_LOST = ("dropped", "aborted")


def lacking(dataset: Dataset) -> dict[tuple[str, int], int]:
    """Return how many positions of each request lack a row, by run and request; only those.

    Raises:
        ActdsError: as reading tables.

    Spec: 0.1 sections 7.2 and 7.4.
    """
    found: dict[tuple[str, int], int] = {}
    for run in dataset.catalog.run_ids:
        spans = dataset.catalog.table("spans", run)
        captured = spans.filter(pc.equal(spans["disposition"], "captured"))
        stored = union(
            *(position_key(captured["request"], captured[name]) for name in ("start", "stop"))
        )
        for span in spans.to_pylist():
            kind, owner = span["disposition"], span["ref_request"]
            n = span["stop"] - span["start"]
            if kind == "cache_ref" and owner is not None:
                ends = position_key(owner, [span["start"], span["stop"]])
                low, high = stored.n_below(ends).tolist()
                n -= high - low
            elif kind != "cache_ref" and (kind not in _LOST or span["step"] is None):
                continue
            if n:
                name = run, span["request"]
                found[name] = found.get(name, 0) + n
    return found


@dataclass(frozen=True)
class Shared:
    """Rows of a replay beside those of its source.

    Args:
        n_new: rows of a hook whose tokens, up to their position, have no row in the source.
        n_both: rows that both have.
        median: relative L2 between the two, over all hooks; NaN where there is none.
        p99: 99th percentile of the same.
        n_far: rows farther apart than rounding moves one.
    """

    n_new: int
    n_both: int
    median: float
    p99: float
    n_far: int

    def line(self) -> str:
        """Return the comparison in one line."""
        words = f"{self.n_new:,} positions that the source lacked have a row; {self.n_both:,} in "
        words += "both"
        if self.n_both:
            words += f": median relative L2 {self.median:.1e}, p99 {self.p99:.1e}"
        return words

    def require_same(self, path: str) -> None:
        """Refuse rows that are not those of the source.

        Raises:
            ActdsError: E418 when rows of equal tokens are farther apart than rounding moves one.
        """
        if self.n_far:
            raise ActdsError(
                "E418",
                path,
                got=f"{self.n_far} rows far from those of the source at equal tokens",
                expected="equal rows but for rounding",
                next_step="Do not join the two; replay with the settings of the source.",
            )


def compare(source: Dataset, replay: Dataset) -> Shared:
    """Return how the rows of a replay compare with those of its source, at the common hooks.

    Holds 32 bytes for each row of both, and the rows of 16,384 pairs.

    Raises:
        ActdsError: as reading tables and rows.
    """
    hooks = [name for name in replay.hooks if name in source.hooks]
    types = [kind for one in (source, replay) for run in one.runs
             for kind in types_of(one.catalog, run)]  # fmt: skip
    far, apart = FAR[coarser(types)], [np.empty(0)]
    n_new = n_both = 0
    for number, hook in enumerate(hooks):
        shards = replay.shards_of(hook)
        found = find_partners(prefix_hashes(replay, shards), shards, "source", source, hook)
        partner = np.concatenate([*found.rows, np.empty(0, np.int64)])
        mine = np.flatnonzero(partner >= 0)
        if number == 0:
            n_new, n_both = len(partner) - len(mine), len(mine)
        for rows in _blocks(mine):
            stored, again = source.array(hook)[partner[rows]], replay.array(hook)[rows]
            apart.append(distances(stored, again)[0])
    relative = np.concatenate(apart)
    median, p99 = np.quantile(relative, [0.5, 0.99]) if len(relative) else (np.nan, np.nan)
    return Shared(n_new, n_both, float(median), float(p99), int((relative > far).sum()))


def _blocks(rows: np.ndarray) -> Iterator[np.ndarray]:
    for first in range(0, len(rows), ROWS_AT_A_TIME):
        yield rows[first : first + ROWS_AT_A_TIME]
