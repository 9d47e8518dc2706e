"""Metadata of one array: its types, its geometry, and the one form of its ``zarr.json``."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from actds.errors import ActdsError
from actds.format import canonical
from actds.format.codec import MAX_BLOCK_NBYTES

__all__ = [
    "DTYPES",
    "DType",
    "Layout",
    "array_metadata",
    "chunk_rows",
    "dtype_of",
    "geometry",
    "group_metadata",
    "parse_metadata",
]

TARGET_CHUNK_NBYTES = 1 << 20
MAX_CHUNK_NBYTES = 1 << 26
_MAX_METADATA_NBYTES = 1 << 16


@dataclass(frozen=True)
class DType:
    """One array type of the format.

    Args:
        bits: the numpy type of the bit patterns.
        fill: the bits of ``fill_value`` ``NaN``, which pad the last chunk.
        native: the numpy type of the values.
    """

    name: str
    bits: np.dtype[Any]
    fill: int
    native: np.dtype[Any]

    @property
    def itemsize(self) -> int:
        """Return the bytes of one value."""
        return int(self.bits.itemsize)


DTYPES = {
    entry.name: entry
    for entry in (
        DType("bfloat16", np.dtype("<u2"), 0x7FC0, np.dtype(ml_dtypes.bfloat16)),
        DType("float16", np.dtype("<u2"), 0x7E00, np.dtype("<f2")),
        DType("float32", np.dtype("<u4"), 0x7FC0_0000, np.dtype("<f4")),
    )
}
"""The array types of the format by their zarr name."""


def dtype_of(name: str) -> DType:
    """Return the array type of a zarr name.

    Raises:
        ValueError: the format has no such type.
    """
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def chunk_rows(d_model: int, itemsize: int) -> int:
    """Return the rows of one chunk: the power of two that is nearest to 1 MiB of values.

    Spec: 0.1 section 4.
    """
    if d_model < 1:
        raise ValueError(f"d_model is {d_model}; expected at least 1")
    return int(2 ** max(0, round(math.log2(TARGET_CHUNK_NBYTES / (d_model * itemsize)))))


def geometry(n_rows: int, d_model: int, itemsize: int) -> tuple[int, int]:
    """Return rows per chunk and number of chunks; a short array has one short chunk.

    Spec: 0.1 section 4.
    """
    if n_rows < 1:
        raise ValueError(f"an array of {n_rows} rows; expected at least 1")
    rows = min(chunk_rows(d_model, itemsize), 1 << (n_rows - 1).bit_length())
    return rows, -(-n_rows // rows)


def group_metadata() -> bytes:
    """Return the ``zarr.json`` of the group that holds the arrays of a shard.

    Spec: 0.1 section 4.
    """
    return canonical.dump({"attributes": {}, "node_type": "group", "zarr_format": 3})


def array_metadata(n_rows: int, d_model: int, dtype: str) -> bytes:
    """Return the ``zarr.json`` of one array, canonical bytes.

    Args:
        n_rows: rows, at least 1.
        d_model: values of one row.
        dtype: ``bfloat16``, ``float16`` or ``float32``.

    Raises:
        ValueError: an argument is out of range.

    Spec: 0.1 section 4.
    """
    rows, _ = geometry(n_rows, d_model, dtype_of(dtype).itemsize)
    return canonical.dump(_document(n_rows, d_model, dtype, rows))


def _document(n_rows: int, d_model: int, dtype: str, rows: int) -> dict[str, Any]:
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    blosc = {
        "blocksize": MAX_BLOCK_NBYTES,
        "clevel": 1,
        "cname": "zstd",
        "shuffle": "shuffle",
        "typesize": dtype_of(dtype).itemsize,
    }
    sharding = {
        "chunk_shape": [rows, d_model],
        "codecs": [little, {"name": "blosc", "configuration": blosc}, {"name": "crc32c"}],
        "index_codecs": [little, {"name": "crc32c"}],
        "index_location": "end",
    }
    shard_shape = [-(-n_rows // rows) * rows, d_model]
    return {
        "attributes": {},
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard_shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "data_type": dtype,
        "fill_value": "NaN",
        "node_type": "array",
        "shape": [n_rows, d_model],
        "zarr_format": 3,
    }


@dataclass(frozen=True)
class Layout:
    """What the metadata of one array says.

    Args:
        n_rows: rows of the array, without padding.
        d_model: values of one row.
        dtype: the array type.
        rows_per_chunk: rows of one inner chunk, a power of two.
    """

    n_rows: int
    d_model: int
    dtype: DType
    rows_per_chunk: int

    @property
    def n_chunks(self) -> int:
        """Return the number of inner chunks, the padded last one included."""
        return -(-self.n_rows // self.rows_per_chunk)

    @property
    def chunk_nbytes(self) -> int:
        """Return the bytes of one inner chunk, decoded."""
        return self.rows_per_chunk * self.d_model * self.dtype.itemsize


def parse_metadata(data: bytes, place: str) -> Layout:
    """Return the layout that a ``zarr.json`` of the one allowed form describes.

    Args:
        data: the bytes of the file.
        place: what an error names.

    Raises:
        ActdsError: E108 when anything differs from that form.

    Spec: 0.1 section 4.
    """

    def refuse(got: str, expected: str) -> ActdsError:
        return ActdsError("E108", place, got=got, expected=expected)

    if len(data) > _MAX_METADATA_NBYTES:
        raise refuse(f"{len(data)} bytes", f"at most {_MAX_METADATA_NBYTES} bytes")
    try:
        document = canonical.parse(data, place)
    except ActdsError as error:
        raise refuse(error.got, error.expected) from None
    try:
        (n_rows, d_model), dtype = document["shape"], document["data_type"]
        rows = document["codecs"][0]["configuration"]["chunk_shape"][0]
    except (KeyError, IndexError, TypeError, ValueError):
        raise refuse("no shape, data_type or inner chunk_shape", "an array of the spec") from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise refuse(f"data_type {dtype!r:.60}", f"one of {', '.join(DTYPES)}")
    sizes = (n_rows, d_model, rows)
    if not all(type(size) is int and 0 < size < 2**48 for size in sizes):
        raise refuse(f"sizes {sizes!r:.90}", "integers above 0")
    layout = Layout(n_rows, d_model, DTYPES[dtype], rows)
    if rows & (rows - 1) or layout.chunk_nbytes > MAX_CHUNK_NBYTES:
        raise refuse(
            f"chunks of {rows} rows, {layout.chunk_nbytes} bytes",
            f"a power of two of rows, at most {MAX_CHUNK_NBYTES} bytes",
        )
    expected = _document(n_rows, d_model, dtype, rows)
    if document != expected:
        raise refuse(*_first_difference(document, expected))
    return layout


def _first_difference(got: dict[str, Any], expected: dict[str, Any]) -> tuple[str, str]:
    for key in sorted(got.keys() | expected.keys()):
        if got.get(key) != expected.get(key):
            absent = "absent"
            found, wanted = (
                json.dumps(side[key])[:400] if key in side else absent for side in (got, expected)
            )
            return f"{key} {found}", f"{key} {wanted}"
    raise AssertionError("the documents are equal")
