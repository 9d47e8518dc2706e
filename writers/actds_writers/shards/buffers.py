"""Shard buffers: where the rows of one phase wait until they make a shard.

Part of stage 3; stands between ring and committer. Preallocated once; a buffer is filled in step
order and handed over whole at a step's end, so that 'committed up to step s' is exact per phase.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actds_writers.ipc.messages import HookSpec
from actds_writers.ipc.ring import Arrays, RowLayout

TOKEN_COLUMNS = {
    "request": np.uint32,
    "position": np.uint32,
    "token_id": np.uint32,
    "step": np.uint64,
    "attempt": np.uint16,
    "chunk": np.uint32,
    "flags": np.uint16,
}


@dataclass(frozen=True)
class Slice:
    """The rows of one step and phase that are to be stored.

    Args:
        step: number of the step.
        rows: ``(n_hooks, n, d_model)`` bit patterns of each block; may be views of the ring.
        select: indexes of the rows to store, ``None`` for all of them.
        columns: token columns of the stored rows.
    """

    step: int
    rows: Arrays
    select: np.ndarray | None
    columns: dict[str, np.ndarray]

    @property
    def n_rows(self) -> int:
        """Return the number of rows to store."""
        return len(self.columns["request"])


class ShardBuffer:
    """Rows of one phase, at most ``capacity``.

    Args:
        hooks: the hooks, in ring order.
        capacity: target rows of a shard plus the rows of the largest step.
    """

    def __init__(self, hooks: tuple[HookSpec, ...], capacity: int) -> None:
        self.hooks = hooks
        self.capacity = capacity
        self._layout = RowLayout(hooks)
        self._rows = self._layout.empty(capacity)
        self._columns = {
            name: np.empty(capacity, dtype=kind) for name, kind in TOKEN_COLUMNS.items()
        }
        self.clear()

    def clear(self) -> None:
        """Forget the rows; the memory stays."""
        self.n_rows = 0
        self.first_step: int | None = None
        self.last_step = 0
        self._ends: list[tuple[int, int]] = []  # of each step, and the rows up to its end

    def append(self, piece: Slice) -> None:
        """Copy the rows of a step behind those already there."""
        first, last = self.n_rows, self.n_rows + piece.n_rows
        for block, rows in zip(self._rows, piece.rows, strict=True):
            target = block[:, first:last]
            if piece.select is None:
                np.copyto(target, rows)
            else:
                np.take(rows, piece.select, axis=1, out=target)
        for name, column in self._columns.items():
            column[first:last] = piece.columns[name]
        self.n_rows = last
        if self.first_step is None:
            self.first_step = piece.step
        self.last_step = piece.step
        self._ends.append((piece.step, last))

    def keep_through(self, step: int) -> None:
        """Forget the rows of later steps."""
        while self._ends and self._ends[-1][0] > step:
            self._ends.pop()
        self.last_step, self.n_rows = self._ends[-1] if self._ends else (0, 0)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the rows in use."""
        return self.n_rows * self._layout.row_nbytes

    def rows_by_hook(self) -> dict[str, np.ndarray]:
        """Return the rows of each hook, ``(n_rows, d_model)``, views of the buffer."""
        places = zip(self.hooks, self._layout.places, strict=True)
        return {hook.name: self._rows[b][i, : self.n_rows] for hook, (b, i) in places}

    def columns(self) -> dict[str, np.ndarray]:
        """Return the token columns, views of the buffer."""
        return {name: column[: self.n_rows] for name, column in self._columns.items()}
