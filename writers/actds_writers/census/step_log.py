"""The step log: what scheduler and worker said of every step, in columns, small for long runs.

Beside the census, which fills it; pure.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from actds.format import tables
from actds_writers.census.packing import IntMatrix, pack, unpack

BLOCK_STEPS = 1024
OPEN_BLOCKS = 2
"""Blocks that stay as they are: worker and scheduler do not tell of a step at the same time."""
NOTHING = np.iinfo(np.int64).min
_WORDS = ("kernel_mode",)
_FLOATS = tuple(f.name for f in tables.SCHEMAS["steps"] if f.type == pa.float64())
_NAMES = (
    *(f.name for f in tables.SCHEMAS["steps"] if f.name != "step"),
    "new_tokens",
)
_INDEX = {name: index for index, name in enumerate(_NAMES)}

Value = int | float | str | None


class StepLog:
    """What is known of each step, by the names of the ``steps`` table, and ``new_tokens``."""

    def __init__(self) -> None:
        self._blocks: dict[int, IntMatrix | bytes] = {}
        self._words: list[str] = []

    def put(self, step: int, values: Mapping[str, Value]) -> None:
        """Note values of a step; what is not named stays unknown, or as it was."""
        block = self._open(step // BLOCK_STEPS)
        at = step % BLOCK_STEPS
        for name, value in values.items():
            block[_INDEX[name], at] = self._bits(name, value)

    def get(self, step: int, name: str) -> int | None:
        """Return an integer that was noted, ``None`` for what is not known."""
        block = self._blocks.get(step // BLOCK_STEPS)
        if block is None:
            return None
        if isinstance(block, bytes):
            block = unpack(block, len(_NAMES))
        found = int(block[_INDEX[name], step % BLOCK_STEPS])
        return None if found == NOTHING else found

    def table(self, given: str) -> tuple[np.ndarray, dict[str, pa.Array]]:
        """Return the numbers of the steps of which a column is known, sorted, and all columns.

        Args:
            given: the column that a step must have.
        """
        steps, parts = [np.empty(0, np.int64)], [np.empty((len(_NAMES), 0), np.int64)]
        for number, block in sorted(self._blocks.items()):
            columns = unpack(block, len(_NAMES)) if isinstance(block, bytes) else block
            there = np.flatnonzero(columns[_INDEX[given]] != NOTHING)
            steps.append(there + number * BLOCK_STEPS)
            parts.append(columns[:, there])
        values = np.concatenate(parts, axis=1)
        return np.concatenate(steps), {name: self._array(name, values) for name in _NAMES}

    def _open(self, number: int) -> IntMatrix:
        block = self._blocks.get(number)
        if isinstance(block, np.ndarray):
            return block
        if block is None:
            opened: IntMatrix = np.full((len(_NAMES), BLOCK_STEPS), NOTHING, np.int64)
        else:
            opened = unpack(block, len(_NAMES))
        self._blocks[number] = opened
        unpacked = [n for n, one in self._blocks.items() if isinstance(one, np.ndarray)]
        for old in sorted(unpacked)[:-OPEN_BLOCKS]:
            if old != number:
                self._blocks[old] = pack(self._blocks[old])  # type: ignore[arg-type]
        return opened

    def _bits(self, name: str, value: Value) -> int:
        if value is None:
            return int(NOTHING)
        if name in _FLOATS:
            return int(np.float64(value).view(np.int64))
        if isinstance(value, str):
            if value not in self._words:
                self._words.append(value)
            return self._words.index(value)
        return int(value)

    def _array(self, name: str, values: IntMatrix) -> pa.Array:
        column = values[_INDEX[name]]
        unknown = column == NOTHING
        if name in _FLOATS:
            return pa.array(column.view(np.float64), mask=unknown)
        if name in _WORDS:
            codes = column.tolist()
            return pa.array([None if c == NOTHING else self._words[c] for c in codes], pa.string())
        return pa.array(column, mask=unknown)
