"""Packing: integer columns that wait to the end of a run, small while they do. Pure."""

from __future__ import annotations

import numpy as np
import zstandard

IntMatrix = np.ndarray[tuple[int, int], np.dtype[np.int64]]


def pack(columns: IntMatrix) -> bytes:
    """Return columns ``(n_columns, n)`` compressed: differences along a column, by byte.

    Columns that grow evenly take almost nothing; noise takes its own size.
    """
    n_columns, n = columns.shape
    # Differences wrap around, and so do the sums that undo them.
    before = np.zeros((n_columns, 1), np.int64)
    differences = np.ascontiguousarray(np.diff(columns, axis=1, prepend=before))
    by_byte = differences.view(np.uint8).reshape(n_columns, n, 8).transpose(0, 2, 1)
    return squeeze(by_byte.tobytes())


def squeeze(data: bytes) -> bytes:
    """Return bytes compressed, in memory of their own size."""
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
