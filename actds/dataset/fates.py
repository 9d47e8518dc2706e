"""Fates: how many positions have which disposition and reason, as every command counts them."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pyarrow.compute as pc

FateCounts = Counter[tuple[str, str | None]]
NEVER = "never computed"
"""The fate of an aborted position that no step computed."""
WATERFALL = (
    *("cache_ref", "filtered", "thinned", "undelivered", NEVER, "aborted", "dropped", "captured"),
)
"""Fates in the order in which they take positions away."""
FATE_COLUMNS = ("start", "stop", "step", "disposition", "reason")
"""Columns of the spans that counting reads."""
COMPUTED = ("captured", "dropped", "aborted")
"""Fates of the positions that could have been stored: what a share lost is a share of."""


def fate_counts(spans: pa.Table) -> FateCounts:
    """Return the positions by disposition, or ``never computed``, and reason.

    Args:
        spans: the ``FATE_COLUMNS``, as the census has them.

    Spec: 0.1 section 14.1.
    """
    length = pc.cast(pc.subtract(spans["stop"], spans["start"]), pa.int64())
    columns = [spans["disposition"], spans["reason"], pc.is_null(spans["step"]), length]
    names = ["disposition", "reason", "unseen"]
    counts: FateCounts = Counter()
    table = pa.table(columns, [*names, "length"]).group_by(names).aggregate([("length", "sum")])
    for row in table.to_pylist():
        never = row["disposition"] == "aborted" and row["unseen"]
        counts[NEVER if never else row["disposition"], row["reason"]] += row["length_sum"]
    return counts


def n_computed(counts: FateCounts) -> int:
    """Return the positions that a step computed and that could have been stored."""
    return sum(n for (fate, _), n in counts.items() if fate in COMPUTED)
