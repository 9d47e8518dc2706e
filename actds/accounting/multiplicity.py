"""Multiplicity: how often each row was served, from the cache references that name it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from actds.format import tables
from actds.format.positions import Intervals, Keys, breakpoints, depth, position_of, request_of


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
    points = breakpoints(start, stop, captured.start, captured.stop)
    references = depth(start, stop, points)
    references[depth(captured.start, captured.stop, points) == 0] = 0
    change = np.flatnonzero(np.diff(references, prepend=0))
    begin, count = points[change], references[change]
    end = np.append(begin[1:], np.uint64(0))
    held = count > 0
    begin, end, count = begin[held], end[held], count[held]
    return tables.build(
        "multiplicity",
        {
            "run": [run] * len(begin),
            "request": request_of(begin),
            "start": position_of(begin),
            "stop": position_of(end),
            "count": count + 1,
        },
    )
