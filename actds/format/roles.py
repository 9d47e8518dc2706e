"""Roles of a run's positions, asked row by row.

Spec: 0.1 section 6.3.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actds.format.positions import position_key


class Roles:
    """The roles of the positions of one run.

    Args:
        table: the run's table ``roles``.
    """

    def __init__(self, table: pa.Table) -> None:
        start, stop = (position_key(table["request"], table[name]) for name in ("start", "stop"))
        order = np.argsort(start, kind="stable")
        self._start, self._stop = start[order], stop[order]
        self._role = table["role"].combine_chunks().take(pa.array(order))

    def of(self, request: npt.ArrayLike, position: npt.ArrayLike) -> pa.Array:
        """Return the role of each position, string ``(n,)``; null where it is not known."""
        key = position_key(request, position)
        if not len(self._start):
            return pa.nulls(len(key), pa.string())
        at = np.searchsorted(self._start, key, side="right") - 1
        known = at >= 0
        known[known] = key[known] < self._stop[at[known]]
        return self._role.take(pa.array(at, mask=~known))
