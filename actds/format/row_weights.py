"""Row weights: a file that gives every stored row of a dataset a weight, read and checked.

Stands beside the dataset, not in it: an audit writes it, a loader hands its weights out with the
rows. How often a row was served is another matter: ``actds.dataset.multiplicity``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from actds.errors import ActdsError

FORMAT, VERSION = "actds.weights", "1"
SCHEMA = pa.schema(
    [
        pa.field("shard", pa.string(), nullable=False),
        pa.field("row", pa.uint32(), nullable=False),
        pa.field("weight", pa.float32(), nullable=False),
    ]
)
GROUP_ROWS = 1 << 20
"""Rows of a row group at most, and rows that are checked at a time."""
MEAN_TOLERANCE = 1e-3
"""How far the mean weight may be from 1: float32, and the rounding of who wrote it."""

Weights = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RowWeights:
    """A weights file that fits its dataset: one weight per stored row, by shard.

    Args:
        path: the file.
        sha256: its digest.
        claim: what the weights do, in the words of their writer.
        first: first row in the file of each shard.
        n_rows: rows of each shard.
        groups: first row in the file of each row group, and the number of rows.

    Spec: 0.1 section 14.11.
    """

    path: Path
    sha256: str
    claim: str
    first: dict[str, int]
    n_rows: dict[str, int]
    groups: npt.NDArray[np.int64]

    def of_shards(self, shards: list[str]) -> dict[str, Weights]:
        """Return the weights of shards, float32 ``(n_rows,)`` each, from one pass over the file.

        Raises:
            ActdsError: E018 when the file has changed since it was checked.
        """
        files: dict[str, Weights] = {}
        with _parquet(self.path) as file:
            if not np.array_equal(_groups(file), self.groups):
                raise _bad(self.path, "another file than before", "the file that was checked")
            group, loaded = -1, np.empty(0, np.float32)
            for shard in sorted(shards):
                weights, at = np.empty(self.n_rows[shard], np.float32), 0
                while at < len(weights):
                    row = self.first[shard] + at
                    wanted = int(np.searchsorted(self.groups, row, side="right")) - 1
                    if wanted != group:
                        table = file.read_row_group(wanted, columns=["weight"])
                        group, loaded = wanted, _values(self.path, table["weight"])
                    part = loaded[row - self.groups[group] :][: len(weights) - at]
                    weights[at : at + len(part)] = part
                    at += len(part)
                files[shard] = weights
        return files


def read_row_weights(
    path: str | os.PathLike[str], dataset: str, digest: str, stored: Mapping[str, int]
) -> RowWeights:
    """Return a weights file after checking all of it, a row group at a time.

    Args:
        path: a local file.
        dataset: id of the dataset whose rows are to be weighted.
        digest: digest of its seal.
        stored: rows of each of its shards.

    Raises:
        ActdsError: E018 when the file cannot be read, is of another dataset, or does not give
            every stored row exactly one weight that is finite, at least 0, and 1 in the mean.

    Spec: 0.1 section 14.11.
    """
    file_path = Path(path)
    with _parquet(file_path) as file:
        claim = _check_metadata(file_path, file, dataset, digest)
        walk = _Walk(file_path)
        for batch in file.iter_batches(GROUP_ROWS):
            walk.take(batch)
        groups = _groups(file)
    for name in sorted(stored.keys() | walk.n_rows.keys()):
        got, expected = walk.n_rows.get(name, 0), stored.get(name, 0)
        if got != expected:
            raise _bad(file_path, f"{got} rows of shard {name!r}", f"{expected}, as stored")
    walk.end()
    with open(file_path, "rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    return RowWeights(file_path, sha256, claim, walk.first, walk.n_rows, groups)


class _Walk:
    """Goes over a file from its first row to its last, and finds what each shard has."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._total, self._at, self._last = 0.0, 0, ""
        self.first: dict[str, int] = {}
        self.n_rows: dict[str, int] = {}

    def take(self, batch: pa.RecordBatch) -> None:
        """Check the next rows.

        Raises:
            ActdsError: E018 a row out of order or a weight that is none.
        """
        if not batch.num_rows:
            return
        names = batch.column("shard")
        codes, words = names.indices.to_numpy(), names.dictionary.to_pylist()
        rows = batch.column("row").to_numpy()
        starts = np.flatnonzero(np.diff(codes, prepend=-1)).tolist()
        for start, stop in zip(starts, [*starts[1:], len(codes)], strict=True):
            self._take_rows(words[codes[start]], rows[start:stop])
        self._total += float(_values(self._path, batch.column("weight")).sum(dtype=np.float64))

    def _take_rows(self, shard: str, rows: npt.NDArray[np.uint32]) -> None:
        if shard != self._last or not self.n_rows:
            if self.n_rows and shard < self._last:
                raise _bad(self._path, f"shard {shard!r} after {self._last!r}", "sorted shards")
            self._last = shard
            self.first[shard], self.n_rows[shard] = self._at, 0
        n = self.n_rows[shard]
        wrong = np.flatnonzero(rows != np.arange(n, n + len(rows)))
        if wrong.size:
            k = int(wrong[0])
            raise _bad(self._path, f"row {rows[k]} of shard {shard!r}", f"row {n + k}")
        self.n_rows[shard] += len(rows)
        self._at += len(rows)

    def end(self) -> None:
        """Check the mean.

        Raises:
            ActdsError: E018.
        """
        mean = self._total / self._at if self._at else 1.0
        if abs(mean - 1) > MEAN_TOLERANCE:
            raise _bad(self._path, f"mean weight {mean:.6g}", "1 over the stored rows")


@contextmanager
def _parquet(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(
            path, read_dictionary=["shard"], page_checksum_verification=True
        ) as file:
            yield file
    except ActdsError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:  # KeyError: no shard column
        why = str(error).splitlines()[0][:200]
        raise _bad(path, why, "a readable Parquet file") from None


def _check_metadata(path: Path, file: pq.ParquetFile, dataset: str, digest: str) -> str:
    metadata = file.metadata.metadata or {}

    def word(key: str) -> str:
        return bytes(metadata.get(f"actds.{key}".encode(), b"")).decode("utf-8", "replace")

    checks = {
        "format": (f"{word('format')} {word('version')}", f"{FORMAT} {VERSION}"),
        "columns": (_listed(file.schema_arrow), _listed(SCHEMA)),
        "dataset": (word("dataset"), dataset),
        "digest": (word("digest"), digest),
    }
    for what, (got, expected) in checks.items():
        if got != expected:
            raise _bad(path, f"{what} {got!r}"[:400], repr(expected))
    return word("claim")


def _groups(file: pq.ParquetFile) -> npt.NDArray[np.int64]:
    sizes = [file.metadata.row_group(k).num_rows for k in range(file.num_row_groups)]
    return np.cumsum([0, *sizes], dtype=np.int64)


def _listed(schema: pa.Schema) -> str:
    kinds = [f.type.value_type if pa.types.is_dictionary(f.type) else f.type for f in schema]
    return ", ".join(f"{name} {kind}" for name, kind in zip(schema.names, kinds, strict=True))


def _values(path: Path, column: pa.Array | pa.ChunkedArray) -> Weights:
    if column.null_count:
        raise _bad(path, f"{column.null_count} rows with no weight", "one of each row")
    weights = np.asarray(column.to_numpy(), np.float32)
    wrong = weights[~(np.isfinite(weights) & (weights >= 0))]
    if wrong.size:
        raise _bad(path, f"a weight of {wrong[0]}", "finite weights of at least 0")
    return weights


def _bad(path: Path, got: str, expected: str) -> ActdsError:
    return ActdsError("E018", str(path), got=got, expected=expected)
