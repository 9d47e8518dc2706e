"""Multiplicity: how often each position was served, from the cache references that name it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.format import tables
from actds.format.positions import (
    Index,
    Intervals,
    Ints,
    Keys,
    breakpoints,
    depth,
    position_key,
    split_key,
)


class Servings:
    """How often each position was served again, from ranges of positions that may overlap.

    Counts of ranges that begin and that end, summed up: as many numbers as ranges, however long
    these are.

    Args:
        request: request that computed the positions of each range.
        start: first position.
        stop: position after the last.
        times: how often each range was served; once when None.
    """

    def __init__(
        self,
        request: npt.NDArray[np.integer],
        start: npt.NDArray[np.integer],
        stop: npt.NDArray[np.integer],
        times: npt.NDArray[np.integer] | None = None,
    ) -> None:
        used = stop > start
        request, start, stop = request[used], start[used], stop[used]
        change = np.ones(len(request)) if times is None else times[used].astype(np.float64)
        keys = np.concatenate([position_key(request, start), position_key(request, stop)])
        self._keys, at = np.unique(keys, return_inverse=True)
        changes = np.concatenate([change, -change])
        sums = np.bincount(at.reshape(-1), weights=changes, minlength=len(self._keys))
        self._level = np.cumsum(sums).astype(np.int64)
        self._requests = Index(np.unique(request))

    def __len__(self) -> int:
        return len(self._requests)

    def of(self, request: npt.NDArray[np.integer], position: npt.NDArray[np.integer]) -> Ints:
        """Return how often each position was served again, 0 for one that never was."""
        served = np.zeros(len(request), np.int64)
        if len(self._keys):
            known = np.flatnonzero(self._requests.of(request) >= 0)
            keys = position_key(request[known], position[known])
            at = np.searchsorted(self._keys, keys, side="right") - 1
            served[known] = np.where(at >= 0, self._level[np.maximum(at, 0)], 0)
        return served


def served_counts(
    run: str,
    request: npt.NDArray[np.uint32],
    position: npt.NDArray[np.uint32],
    multiplicity: pa.Table,
) -> npt.NDArray[np.uint32] | None:
    """Return the count of each row, ``(n_rows,)``, from 1; None when every count is 1.

    Args:
        run: the run of the rows.
        request: request of each row.
        position: position of each row.
        multiplicity: the table of the seal: disjoint intervals with a count above 1.

    Spec: 0.1 section 7.5.
    """
    table = multiplicity.filter(pc.equal(multiplicity["run"], run))
    first, start, stop, count = (
        table[name].to_numpy() for name in ("request", "start", "stop", "count")
    )
    again = Servings(first, start, stop, count - 1).of(request, position)
    return (1 + again).astype(np.uint32) if again.any() else None


def resolved_references(spans: pa.Table) -> pa.Table:
    """Return the lines of a run's spans that say which request computed what a cache served."""
    known = pc.is_valid(spans["ref_request"])
    return spans.filter(pc.and_(pc.equal(spans["disposition"], "cache_ref"), known))


def served_again(spans: pa.Table, requests: npt.NDArray[np.integer]) -> Servings:
    """Return how often the prefix cache served each position to some of the requests.

    Args:
        spans: the table of a run.
        requests: numbers of the requests that count.

    Spec: 0.1 section 7.5.
    """
    lines = resolved_references(spans)
    lines = lines.filter(pa.array(np.isin(lines["request"].to_numpy(), requests)))
    return Servings(*(lines[name].to_numpy() for name in ("ref_request", "start", "stop")))


def multiplicity(run: str, captured: Intervals, start: Keys, stop: Keys) -> pa.Table:
    """Return the multiplicity table of a run: maximal intervals of one count above 1.

    Args:
        run: the run.
        captured: the positions that have a row.
        start: first referenced key of each cache reference, in the request that computed it.
        stop: key after its last.

    Returns:
        The table ``multiplicity`` of the spec, sorted by request and start. References to
        positions without a row count nothing.

    Spec: 0.1 section 7.
    """
    if not len(start):
        return tables.empty("multiplicity")
    points = breakpoints(start, stop, captured.start, captured.stop)
    references = depth(start, stop, points)
    references[depth(captured.start, captured.stop, points) == 0] = 0
    change = np.flatnonzero(np.diff(references, prepend=0))
    begin, count = points[change], references[change]
    end = np.append(begin[1:], np.uint64(0))
    served = count > 0
    request, first = split_key(begin[served])
    return tables.build(
        "multiplicity",
        {
            "run": [run] * len(first),
            "request": request,
            "start": first,
            "stop": split_key(end[served])[1],
            "count": count[served] + 1,
        },
    )
