"""What the model's logits said of the token that was sampled after a row, asked row by row.

Spec: 0.1 section 6.3.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actds.format.positions import position_key


class Sampled:
    """The sampled tokens of one run.

    Args:
        table: the run's table ``sampled``, or some of its columns.
    """

    def __init__(self, table: pa.Table) -> None:
        key = position_key(table["request"], table["position"])
        order = np.argsort(key, kind="stable")
        self._key = key[order]
        columns = [name for name in table.column_names if name not in ("request", "position")]
        self._lines = table.select(columns).combine_chunks().take(pa.array(order))

    def __len__(self) -> int:
        return len(self._key)

    def after(self, name: str, request: npt.ArrayLike, position: npt.ArrayLike) -> pa.Array:
        """Return a column of the token sampled after each position ``(n,)``, null where none was.

        Rows of the last position of a prompt and of decode steps have one; whoever else's token
        came next was given.
        """
        key = position_key(request, np.asarray(position, np.int64) + 1)
        column = self._lines[name].combine_chunks()
        if not len(self):
            return pa.nulls(len(key), column.type)
        at = np.minimum(np.searchsorted(self._key, key), len(self) - 1)
        return column.take(pa.array(at, mask=self._key[at] != key))
