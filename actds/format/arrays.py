"""Arrays of one hook: zarr v3 metadata and the one shard file, written whole and read in ranges.

Rows are *bit patterns*, ``uint16`` for bfloat16 and float16, ``uint32`` for float32: no step
between the engine and the trainer may round, and numpy has no bfloat16.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import ml_dtypes
import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.format import canonical
from actds.format.codec import MAX_BLOCK_NBYTES, CodecError, copied_items, crc32c, decode_chunk
from actds.store import StoredFile, buffers

if TYPE_CHECKING:
    import torch

Bits = npt.NDArray[Any]
"""Bit patterns, ``(n_rows, d_model)`` of ``uint16`` or ``uint32``."""

SHARD_PATH = "c/0/0"
"""The one shard file of an array, below its folder."""

_PART_NBYTES = 1 << 22  # what a thread of a pool decodes at a time
_FRAME_OVERHEAD_NBYTES, _CRC_NBYTES, _INDEX_ENTRY_NBYTES = 16, 4, 16

TARGET_CHUNK_NBYTES = 1 << 20
MAX_CHUNK_NBYTES = 1 << 26
_MAX_METADATA_NBYTES = 1 << 16
_MIN_DECODED_NBYTES, _MAX_RATIO = 1 << 26, 1024
"""Bytes of rows for a byte of their file, beyond the largest chunk: activations have 1.5, a chunk
of padding and one row 400, zeros 30,000, and time to decode goes with them."""


@dataclass(frozen=True)
class DType:
    """One array type of the format.

    Args:
        bits: the numpy type of the bit patterns.
        fill: the bits of ``fill_value`` ``NaN``, which pad the last chunk.
        exponent: the bits of the exponent, all set where a value is not finite.
        native: the numpy type of the values.
    """

    name: str
    bits: np.dtype[Any]
    fill: int
    exponent: int
    native: np.dtype[Any]

    @property
    def itemsize(self) -> int:
        return int(self.bits.itemsize)

    @property
    def magnitude(self) -> int:
        """Return the bits of a value without its sign, none of them set where it is zero."""
        return (1 << (8 * self.itemsize - 1)) - 1


DTYPES = {
    entry.name: entry
    for entry in (
        DType("bfloat16", np.dtype("<u2"), 0x7FC0, 0x7F80, np.dtype(ml_dtypes.bfloat16)),
        DType("float16", np.dtype("<u2"), 0x7E00, 0x7C00, np.dtype("<f2")),
        DType("float32", np.dtype("<u4"), 0x7FC0_0000, 0x7F80_0000, np.dtype("<f4")),
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
    """Size, type and chunks of one array, from its metadata.

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
        if key not in got or key not in expected or got[key] != expected[key]:
            has, wanted = (
                json.dumps(side[key])[:400] if key in side else "absent" for side in (got, expected)
            )
            return f"{key} {has}", f"{key} {wanted}"
    raise AssertionError("the documents are equal")


class ArrayReader:
    """Reads the rows of one array; safe to use from several threads.

    Every answer is a fresh array of bit patterns that belongs to the caller: a trainer may
    normalise its batch in place (one does).

    Args:
        zarr_json: the bytes of the array's ``zarr.json``.
        file: the shard file ``c/0/0``, as a store opens it; closed with the reader, and when the
            reader cannot be made.
        place: how errors name the array.

    Raises:
        ActdsError: E108 when the metadata is not of the allowed form, E204 when the file's size,
            index or checksums are damaged.

    Spec: 0.1 section 4.
    """

    def __init__(self, zarr_json: bytes, file: StoredFile, place: str) -> None:
        self._place = place
        self._file: StoredFile | None = file
        try:
            self._layout = layout = parse_metadata(zarr_json, place)
            self.n_rows, self.d_model = layout.n_rows, layout.d_model
            self.dtype, self.rows_per_chunk = layout.dtype.name, layout.rows_per_chunk
            self.n_chunks = layout.n_chunks
            self._offsets = self._read_index(file.nbytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        return self.n_rows * self.d_model * self._layout.dtype.itemsize

    def read_chunks(self, first: int, last: int, out: Bits | None = None) -> Bits:
        """Return the rows of the chunks ``[first, last)``, read as one range of the file.

        Args:
            first: the first chunk.
            last: the chunk to stop before, at most ``n_chunks``.
            out: bit patterns ``(n_rows, d_model)`` to fill, C-contiguous; fresh when None.

        Raises:
            ActdsError: E204 when a chunk is damaged.
            ValueError: the range or ``out`` does not fit.

        Spec: 0.1 section 4.
        """
        if not 0 <= first <= last <= self.n_chunks:
            raise ValueError(f"chunks [{first}, {last}) of {self.n_chunks}")
        rows = self.rows_per_chunk
        return self.read(min(first * rows, self.n_rows), min(last * rows, self.n_rows), out)

    def read(self, start: int, stop: int, out: Bits | None = None) -> Bits:
        """Return the rows ``[start, stop)``; arguments and errors as in ``read_chunks``."""
        if not 0 <= start <= stop <= self.n_rows:
            raise ValueError(f"rows [{start}, {stop}) of {self.n_rows}")
        out = self._output(stop - start, out)
        rows = self.rows_per_chunk
        for index, frame in self._frames(start // rows, -(-stop // rows)):
            base = index * rows
            low, high = max(start, base), min(stop, base + rows)
            target = out[low - start : high - start]
            if high - low == rows:
                self._decode(index, frame, target)
            else:
                target[:] = self._decoded(index, frame)[low - base : high - base]
        return out

    def check_padding(self) -> None:
        """Check that what pads the last chunk is fill; no other method reads it.

        Raises:
            ActdsError: E204 when it is not, or the chunk is damaged.

        Spec: 0.1 section 4.2.
        """
        last = self.n_chunks - 1
        for _, frame in self._frames(last, self.n_chunks):
            padding = self._decoded(last, frame)[self.n_rows - last * self.rows_per_chunk :]
            n_odd = int((padding != self._layout.dtype.fill).sum())
            if n_odd:
                raise self._damaged(f"{n_odd} values behind the last row", "fill alone")

    @property
    def is_copied(self) -> bool:
        """Return whether all chunks are as long as copied ones: the array is raw."""
        return bool((np.diff(self._offsets) == self._largest).all())

    @property
    def _largest(self) -> int:
        return self._layout.chunk_nbytes + _FRAME_OVERHEAD_NBYTES + _CRC_NBYTES

    def read_all(self, pool: Executor | None = None) -> Bits:
        """Return all rows ``(n_rows, d_model)``; the threads of ``pool`` decode side by side."""
        if pool is None:
            return self.read(0, self.n_rows)
        out = self._output(self.n_rows, None)
        step = max(1, _PART_NBYTES // self._layout.chunk_nbytes)

        def part(first: int) -> None:
            last = min(first + step, self.n_chunks)
            self.read_chunks(
                first, last, out[first * self.rows_per_chunk : last * self.rows_per_chunk]
            )

        for _ in pool.map(part, range(0, self.n_chunks, step)):
            pass
        return out

    def gather(self, rows: npt.ArrayLike | Sequence[int]) -> Bits:
        """Return the named rows in the order named; every chunk is decoded once.

        Args:
            rows: row numbers ``(n,)``, in any order, repeats allowed.

        Raises:
            ActdsError: E204 when a chunk is damaged.
            ValueError: a number is no row.

        Spec: 0.1 section 4.
        """
        wanted = np.asarray(rows)
        if wanted.size == 0:
            return self._output(0, None)
        if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
            raise ValueError(f"rows of {wanted.dtype} {wanted.shape}; expected integers (n,)")
        if int(wanted.min()) < 0 or int(wanted.max()) >= self.n_rows:
            raise ValueError(f"rows in [{wanted.min()}, {wanted.max()}] of {self.n_rows}")
        wanted = wanted.astype(np.int64)
        out = self._output(wanted.size, None)
        chunks = wanted // self.rows_per_chunk
        order = np.argsort(chunks, kind="stable")
        touched, starts = np.unique(chunks[order], return_index=True)
        for index, where in zip(touched.tolist(), np.split(order, starts[1:]), strict=True):
            for _, frame in self._frames(index, index + 1):
                decoded = self._decoded(index, frame)
                out[where] = decoded[wanted[where] - index * self.rows_per_chunk]
        return out

    def take(self, rows: npt.NDArray[np.int64], out: Bits) -> None:
        """Fill an array with rows in ascending order; chunks without one are not read.

        Args:
            rows: row numbers ``(n,)``, none below the one before.
            out: bit patterns ``(n, d_model)``, C-contiguous.

        Raises:
            ActdsError: E204 when a chunk is damaged.
            ValueError: a number is no row, or ``out`` does not fit.

        Spec: 0.1 section 4.
        """
        self._output(rows.size, out)
        for a, b, chunk, index in self._touched(rows):
            out[a:b] = chunk[index]

    def by_chunk(self, rows: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, Bits]]:
        """Yield rows in ascending order, chunk by chunk; chunks without one are not read.

        Args:
            rows: row numbers ``(n,)``, none below the one before.

        Yields:
            Which of them a chunk has, ``[a, b)``, and their bit patterns ``(b - a, d_model)``:
            valid until the next ones are asked for, and in the processor's cache.

        Raises:
            ActdsError: E204 when a chunk is damaged.
            ValueError: a number is no row.

        Spec: 0.1 section 4.
        """
        for a, b, chunk, index in self._touched(rows):
            lent = buffers.exchange({})  # so that nothing is read into them meanwhile
            yield a, b, chunk[index]
            buffers.exchange(lent)

    def _touched(
        self, rows: npt.NDArray[np.int64]
    ) -> Iterator[tuple[int, int, Bits, slice | npt.NDArray[np.int64]]]:
        """Yield which ascending rows a chunk has, ``[a, b)``, its rows, and their places in it."""
        if not rows.size:
            return
        low, high, per = int(rows[0]), int(rows[-1]) + 1, self.rows_per_chunk
        if low < 0 or high > self.n_rows:
            raise ValueError(f"rows in [{low}, {high}) of {self.n_rows}")
        if high - low == rows.size and bool((rows[1:] > rows[:-1]).all()):
            for number, frame in self._frames(low // per, -(-high // per)):
                a, b = max(low, number * per), min(high, (number + 1) * per)
                inside = slice(a - number * per, b - number * per)
                yield a - low, b - low, self._decoded(number, frame), inside
            return
        chunks, first = np.unique(rows // per, return_index=True)
        bounds = [*first.tolist(), rows.size]
        # Chunks that lie side by side are read as one.
        for run in np.split(np.arange(chunks.size), np.flatnonzero(np.diff(chunks) > 1) + 1):
            frames = self._frames(int(chunks[run[0]]), int(chunks[run[-1]]) + 1)
            for i, (number, frame) in zip(run.tolist(), frames, strict=True):
                a, b = bounds[i], bounds[i + 1]
                yield a, b, self._decoded(number, frame), rows[a:b] - number * per

    def _output(self, n_rows: int, out: Bits | None) -> Bits:
        shape, bits = (n_rows, self.d_model), self._layout.dtype.bits
        if out is None:
            return np.empty(shape, bits)
        if out.shape != shape or out.dtype != bits or not out.flags.c_contiguous:
            raise ValueError(f"out of {out.dtype} {out.shape}; expected contiguous {bits} {shape}")
        return out

    def _decode(self, index: int, frame: memoryview, target: Bits) -> None:
        self._decode_body(index, self._checked(index, frame), target)

    def _checked(self, index: int, frame: memoryview) -> memoryview:
        body, got, expected = _checksums(frame)
        if got != expected:
            frame = self._again(int(self._offsets[index]), frame)
            body, got, expected = _checksums(frame)
        if got != expected:
            raise self._damaged(f"chunk {index} with crc32c {got:08x}", f"{expected:08x}")
        return body

    def _again(self, offset: int, data: memoryview) -> memoryview:
        if self._file is None or not self._file.forget(offset, len(data)):
            return data
        return self._pread(offset, len(data))

    def _decode_body(self, index: int, body: memoryview, target: Bits) -> None:
        try:
            decode_chunk(body, target, itemsize=self._layout.dtype.itemsize)
        except CodecError as error:
            raise self._damaged(f"chunk {index}: {error}", "a sound blosc frame") from None

    def _decoded(self, index: int, frame: memoryview) -> Bits:
        """Return a chunk in the buffer of this thread, to be copied from before the next one."""
        body = self._checked(index, frame)
        stored = copied_items(body, self._layout.chunk_nbytes, self._layout.dtype.itemsize)
        shape, bits = (self.rows_per_chunk, self.d_model), self._layout.dtype.bits
        if stored is not None:
            return np.frombuffer(stored, bits).reshape(shape)
        chunk = buffers.of_thread("chunk", self._layout.chunk_nbytes).view(bits).reshape(shape)
        self._decode_body(index, body, chunk)
        return chunk

    def _frames(self, first: int, last: int) -> Iterator[tuple[int, memoryview]]:
        """Yield (chunk, frame with checksum); the frames live until the next read."""
        offsets = self._offsets
        read_nbytes = 0 if self._file is None else self._file.read_nbytes
        while first < last:
            # As many whole chunks as fit one read; at least one.
            limit = int(offsets[first]) + read_nbytes
            stop = int(np.searchsorted(offsets[: last + 1], limit, side="right")) - 1
            stop = max(stop, first + 1)
            base = int(offsets[first])
            data = self._pread(base, int(offsets[stop]) - base)
            for index in range(first, stop):
                yield index, data[int(offsets[index]) - base : int(offsets[index + 1]) - base]
            first = stop

    def _pread(self, offset: int, nbytes: int) -> memoryview:
        """Return bytes of the file that live until this thread's next read of it."""
        if self._file is None:
            raise ValueError(f"{self._place}: the reader is closed")
        try:
            return self._file.read(offset, nbytes)
        except EOFError as error:
            raise self._damaged(str(error), f"{offset + nbytes} bytes") from None
        except OSError as error:
            reason = os.strerror(error.errno or errno.EIO)
            raise self._damaged(f"a read error: {reason}", "a readable file") from error

    def _read_index(self, size: int) -> npt.NDArray[np.int64]:
        """Return where chunks start and the last one ends, ``(n_chunks + 1,)``, checked."""
        index_nbytes = self.n_chunks * _INDEX_ENTRY_NBYTES
        data_nbytes = size - index_nbytes - _CRC_NBYTES
        # Compared before anything is allocated: the claimed rows may be absurd.
        if data_nbytes < self.n_chunks * (_FRAME_OVERHEAD_NBYTES + _CRC_NBYTES):
            raise self._damaged(f"{size} bytes", f"room for {self.n_chunks} chunks and an index")
        if self.nbytes > _MIN_DECODED_NBYTES + _MAX_RATIO * size:
            decoded = f"{self.nbytes} bytes of rows in a file of {size}"
            raise self._damaged(decoded, f"at most {_MAX_RATIO} for one")
        tail = self._pread(data_nbytes, index_nbytes + _CRC_NBYTES)
        index, got, expected = _checksums(tail)
        if got != expected:
            index, got, expected = _checksums(self._again(data_nbytes, tail))
        if got != expected:
            raise self._damaged(f"an index with crc32c {got:08x}", f"{expected:08x}")
        entries = np.frombuffer(bytes(index), "<u8").reshape(-1, 2)
        sizes = entries[:, 1]
        if (
            int(sizes.max()) > self._largest
            or int(sizes.min()) <= _FRAME_OVERHEAD_NBYTES + _CRC_NBYTES
        ):
            raise self._damaged(
                f"chunks of {sizes.min()} to {sizes.max()} bytes",
                f"more than 20, at most {self._largest}",
            )
        offsets = np.zeros(self.n_chunks + 1, np.int64)
        np.cumsum(sizes.astype(np.int64), out=offsets[1:])
        if not np.array_equal(entries[:, 0], offsets[:-1].astype(np.uint64)):
            raise self._damaged("chunks out of order or with gaps", "chunks one after another")
        if int(offsets[-1]) != data_nbytes:
            raise self._damaged(f"{data_nbytes} bytes of chunks", f"{int(offsets[-1])}")
        return offsets

    def _damaged(self, got: str, expected: str) -> ActdsError:
        return ActdsError("E204", self._place, got=got, expected=expected)


def _checksums(data: memoryview) -> tuple[memoryview, int, int]:
    body = data[:-_CRC_NBYTES]
    return body, crc32c(body), struct.unpack("<I", data[-_CRC_NBYTES:])[0]


def _kind_of(bits: Bits, dtype: str) -> DType:
    kind = dtype_of(dtype)
    if bits.dtype != kind.bits:
        raise ValueError(f"bits of {bits.dtype}; expected {kind.bits} for {dtype}")
    return kind


def as_ml_dtypes(bits: Bits, dtype: str = "bfloat16") -> npt.NDArray[Any]:
    """Return bit patterns as numpy values (``ml_dtypes.bfloat16``, float16, float32), a view."""
    return bits.view(_kind_of(bits, dtype).native)


def widen(bits: Bits, dtype: str = "bfloat16") -> npt.NDArray[np.float32]:
    """Return bit patterns as float32 values, of the same shape; every value is kept.

    A bfloat16 is the upper half of a float32, so its bits stay too, also those of a NaN.
    """
    kind = _kind_of(bits, dtype)
    if dtype != "bfloat16":
        return bits.view(kind.native).astype(np.float32, copy=False)
    wide = bits.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def to_torch(bits: Bits, dtype: str = "bfloat16") -> torch.Tensor:
    """Return bit patterns as a torch tensor of ``dtype``, same shape, that shares their memory.

    Raises:
        ValueError: the bits do not fit ``dtype``, or are read-only.
    """
    import torch

    kind = _kind_of(bits, dtype)
    if not bits.flags.writeable:
        raise ValueError("the bits are read-only")
    # torch has no zero-copy way from numpy to bfloat16; a signed integer of its size is one.
    signed = torch.from_numpy(bits.view(f"<i{kind.itemsize}"))
    return signed.view(getattr(torch, dtype))


def from_torch(tensor: torch.Tensor) -> Bits:
    """Return the bit patterns of a bfloat16, float16 or float32 tensor, same shape.

    A contiguous tensor in host memory shares its memory with the result; others are copied.

    Raises:
        ValueError: the tensor is of another type.
    """
    import torch

    kind = dtype_of(str(tensor.dtype).removeprefix("torch."))
    signed = torch.int16 if kind.itemsize == 2 else torch.int32
    bits: Bits = tensor.detach().cpu().contiguous().view(signed).numpy().view(kind.bits)
    return bits
