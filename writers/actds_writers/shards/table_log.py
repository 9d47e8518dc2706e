"""Rows of a table that is committed at the end of a run: packed, so that a long run stays small.

Beside stage 3, inside the writer process. Imports the format room only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from actds.commit import commit_part
from actds.format import tables
from actds.ledger import Chain
from actds.schema import PartTable
from actds.store import Store

__all__ = ["TableLog"]

PACKED_ROWS = 2048
"""A row as an object takes half a kilobyte to one, packed about a tenth of it."""
ROWS_PER_PART = 1_000_000


class TableLog:
    """Collects the rows of a table.

    Args:
        name: the table.
    """

    def __init__(self, name: PartTable) -> None:
        self._name: PartTable = name
        self._rows: list[dict[str, Any]] = []
        self._packed: list[pa.Table] = []

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows, each with every column of the table."""
        self._rows.extend(rows)
        if len(self._rows) >= PACKED_ROWS:
            self._pack()

    def keep_through(self, step: int) -> pa.Table:
        """Forget the rows of later steps; return those that are left."""
        self._pack()
        self._packed = [table.filter(pc.less_equal(table["step"], step)) for table in self._packed]
        return pa.concat_tables([tables.empty(self._name), *self._packed])

    def commit(self, store: Store, chain: Chain, run: str) -> None:
        """Commit the rows in parts; nothing when there are none.

        Raises:
            ActdsError: as ``commit_part``.
        """
        self._pack()
        if not self._packed:
            return
        table = pa.concat_tables(self._packed)
        for n, first in enumerate(range(0, table.num_rows, ROWS_PER_PART)):
            commit_part(store, chain, self._name, run, n, table.slice(first, ROWS_PER_PART))

    def _pack(self) -> None:
        if self._rows:
            names = tables.SCHEMAS[self._name].names
            columns: dict[str, object] = {n: [row[n] for row in self._rows] for n in names}
            self._packed.append(tables.build(self._name, columns))
            self._rows.clear()
