"""How often each row of a shard was served, from the multiplicity table."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["served_counts"]


def served_counts(
    run: str,
    request: npt.NDArray[np.uint32],
    position: npt.NDArray[np.uint32],
    multiplicity: pa.Table,
) -> npt.NDArray[np.uint32] | None:
    """Return the count of each row, shape (n_rows,), from 1; None when every count is 1.

    Args:
        run: the run of the rows.
        request: request of each row.
        position: position of each row.
        multiplicity: the table of the seal: disjoint intervals with a count above 1.

    Spec: 0.1 section 7.5.
    """
    table = multiplicity.filter(pc.equal(multiplicity["run"], run))
    if not table.num_rows:
        return None
    low, stop = (_keys(table["request"].to_numpy(), table[name].to_numpy()) for name in _ENDS)
    count = table["count"].to_numpy()
    order = np.argsort(low, kind="stable")
    low, stop, count = low[order], stop[order], count[order]
    key = _keys(request, position)
    at = np.searchsorted(low, key, side="right") - 1
    inside = (at >= 0) & (key < stop[at])
    if not inside.any():
        return None
    return np.where(inside, count[at], 1).astype(np.uint32)


_ENDS = ("start", "stop")


def _keys(
    request: npt.NDArray[np.integer], position: npt.NDArray[np.integer]
) -> npt.NDArray[np.uint64]:
    return (request.astype(np.uint64) << np.uint64(32)) | position.astype(np.uint64)
