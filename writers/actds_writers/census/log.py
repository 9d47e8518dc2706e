"""Logs of every step and request, in memory, old entries compressed for long runs."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import zstandard

from actds.format import tables
from actds_writers.ipc.messages import RequestArrived, RequestFinished

IntMatrix = np.ndarray[tuple[int, int], np.dtype[np.int64]]
BLOCK_STEPS = 1024
OPEN_BLOCKS = 2
"""Blocks left uncompressed: worker and scheduler report a step at different times."""
NOTHING = np.iinfo(np.int64).min
_WORDS = ("kernel_mode",)
_FLOATS = tuple(f.name for f in tables.SCHEMAS["steps"] if f.type == pa.float64())
_NAMES = (
    *(f.name for f in tables.SCHEMAS["steps"] if f.name != "step"),
    "new_tokens",
)
_INDEX = {name: index for index, name in enumerate(_NAMES)}

Value = int | float | str | None
BATCH_REQUESTS = 512
"""Ended requests that are packed together."""


class StepLog:
    """What is known of each step, by the names of the ``steps`` table, and ``new_tokens``."""

    def __init__(self) -> None:
        self._blocks: dict[int, IntMatrix | bytes] = {}
        self._words: list[str] = []

    def put(self, step: int, values: Mapping[str, Value]) -> None:
        """Note values of a step; the others are unchanged."""
        block = self._open(step // BLOCK_STEPS)
        at = step % BLOCK_STEPS
        for name, value in values.items():
            block[_INDEX[name], at] = self._bits(name, value)

    def get(self, step: int, name: str) -> int | None:
        """Return an integer value of a step, ``None`` when it is not known."""
        block = self._blocks.get(step // BLOCK_STEPS)
        if block is None:
            return None
        if isinstance(block, bytes):
            block = unpack(block, len(_NAMES))
        found = int(block[_INDEX[name], step % BLOCK_STEPS])
        return None if found == NOTHING else found

    def table(self, given: str) -> tuple[np.ndarray, dict[str, pa.Array]]:
        """Return the sorted steps whose column ``given`` is known, and all their columns."""
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


@dataclass(slots=True)
class LoggedRequest:
    """One request as the scheduler reported it; ``first_token_ns`` is when that token was fed."""

    arrived: RequestArrived
    finished: RequestFinished | None = None
    first_token_ns: int | None = None
    n_preemptions: int = 0


class RequestLog:
    """The requests of a run: running ones by number, ended ones in packed batches."""

    def __init__(self) -> None:
        self._running: dict[int, LoggedRequest] = {}
        self._ended: list[LoggedRequest] = []
        self._packed: list[bytes] = []

    def arrive(self, message: RequestArrived) -> None:
        """Note a new request."""
        self._running[message.request] = LoggedRequest(message)

    def running(self, request: int) -> LoggedRequest | None:
        """Return a running request, ``None`` for any other number."""
        return self._running.get(request)

    def end(self, message: RequestFinished) -> None:
        """Note the end of a request.

        Raises:
            KeyError: no such request runs.
        """
        ended = self._running.pop(message.request)
        ended.finished = message
        self._ended.append(ended)
        if len(self._ended) >= BATCH_REQUESTS:
            self._packed.append(squeeze(pickle.dumps(self._ended)))
            self._ended = []

    def batches(self) -> Iterator[list[LoggedRequest]]:
        """Yield all requests, some at a time, in no order."""
        for data in self._packed:
            yield pickle.loads(zstandard.ZstdDecompressor().decompress(data))
        yield [*self._ended, *self._running.values()]


def pack(columns: IntMatrix) -> bytes:
    """Return columns ``(n_columns, n)`` compressed: differences along a column, by byte.

    Columns that grow evenly take almost nothing; noise does not shrink.
    """
    n_columns, n = columns.shape
    # Differences wrap around, and so do the sums that undo them.
    before = np.zeros((n_columns, 1), np.int64)
    differences = np.ascontiguousarray(np.diff(columns, axis=1, prepend=before))
    by_byte = differences.view(np.uint8).reshape(n_columns, n, 8).transpose(0, 2, 1)
    return squeeze(by_byte.tobytes())


def squeeze(data: bytes) -> bytes:
    """Return bytes compressed, in memory of that size."""
    packed = zstandard.ZstdCompressor(level=1).compress(data)
    # What the compressor returns keeps the memory of the worst case: hundreds of times as much.
    return bytes(memoryview(packed))


def unpack(data: bytes, n_columns: int) -> IntMatrix:
    """Return what ``pack`` was given."""
    plain = zstandard.ZstdDecompressor().decompress(data)
    by_byte = np.frombuffer(plain, np.uint8).reshape(n_columns, 8, -1)
    differences = np.ascontiguousarray(by_byte.transpose(0, 2, 1)).view(np.int64)[:, :, 0]
    columns: IntMatrix = np.cumsum(differences, axis=1, dtype=np.int64)
    return columns
