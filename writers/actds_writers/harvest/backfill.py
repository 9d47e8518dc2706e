"""Backfill: the positions of a dataset that lack a row, and which of them a replay has a row of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from actds.format.positions import Intervals, difference, position_key, split_key
from actds.format.tables import UNSERVED
from actds.load.coverage import covered, lacking
from actds.load.dataset import Dataset
from actds.reading import Catalog

__all__ = ["Filled", "filled", "missing"]


def missing(dataset: Dataset) -> dict[tuple[str, int], Intervals]:
    """Return the positions that lack a row, by run and request; only requests that have some.

    Raises:
        ActdsError: as reading tables.

    Spec: 0.1 sections 7.2 and 7.4.
    """
    found: dict[tuple[str, int], Intervals] = {}
    for run in dataset.catalog.run_ids:
        owed = lacking(dataset.catalog, run)
        request, _ = split_key(owed.start)
        numbers, first = np.unique(request, return_index=True)
        starts, stops = (np.split(ends, first[1:]) for ends in (owed.start, owed.stop))
        for number, start, stop in zip(numbers.tolist(), starts, stops, strict=False):
            found[run, number] = Intervals(start, stop)
    return found


@dataclass(frozen=True)
class Filled:
    """What a backfill has found.

    Args:
        n_lacked: positions of the source that lacked a row.
        why: those that still lack one, by reason in words.
    """

    n_lacked: int
    why: Mapping[str, int]

    @property
    def n_left(self) -> int:
        """Return how many positions still lack a row."""
        return sum(self.why.values())

    def line(self) -> str:
        """Return the outcome in one line."""
        words = f"{self.n_lacked - self.n_left:,} of {self.n_lacked:,} positions that lacked a row "
        words += "have one now"
        if not self.n_left:
            return words
        reasons = ", ".join(f"{n:,} {why}" for why, n in self.why.items())
        return f"{words}; {self.n_left:,} still lack one: {reasons}"


def filled(owed: Mapping[tuple[str, int], Intervals], replay: Catalog) -> Filled:
    """Return of which missing positions a replay has a row, and why not of the others.

    Args:
        owed: the positions, as ``missing`` returns them.
        replay: the replay.

    Raises:
        ActdsError: as reading tables.
    """
    left = dict(owed)
    reasons = dict.fromkeys(owed, "not served")
    for run in replay.run_ids:
        rows = covered(replay, run)
        unserved = {
            line["request"]: line
            for line in replay.table("requests", run).to_pylist()
            if line["finish_reason"] in UNSERVED
        }
        for line in replay.table("origins", run).to_pylist():
            name, again = (line["source_run"], line["source_request"]), line["request"]
            if name not in left:
                continue
            if again in unserved:
                if unserved[again]["finish_reason"] == "skipped":
                    code = (unserved[again]["reason"] or "").partition(" ")[0]
                    reasons[name] = f"in requests that cannot be served again ({code})"
                continue
            moved = position_key(again, 0) - position_key(name[1], 0)
            _, first, after = rows.cut(left[name].start + moved, left[name].stop + moved)
            left[name] = difference(left[name], Intervals(first - moved, after - moved))
            reasons[name] = "lost again"
    why: Counter[str] = Counter()
    for name, positions in left.items():
        if positions.n_keys:
            why[reasons[name]] += positions.n_keys
    return Filled(sum(one.n_keys for one in owed.values()), dict(why))
