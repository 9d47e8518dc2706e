"""Labels: token classes that somebody gave, such as system, user, assistant, template, code.

Beside the coverage. A dataset stores no text and so no roles; whoever made the prompts knows them.
Imports the format room's errors, pyarrow, `sources`, `ranges`, the names of the tables' own classes
and the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actds.errors import ActdsError
from actds.format.positions import Index, position_key
from actds_validators.audit.class_counts import CLASSES, NOWHERE
from actds_validators.audit.result import ClassesFile
from actds_validators.audit.sources import RunSource

__all__ = ["LabelFile", "Labels", "class_words", "labels_of", "match_labels", "read_labels"]

Ints = npt.NDArray[np.int64]

COLUMNS = {
    "request": pa.uint32(),
    "start": pa.uint32(),
    "stop": pa.uint32(),
    "class": pa.string(),
}
MAX_CLASSES = 32
_FILE = "a Parquet file with request, start, stop, class, and maybe run"
_NUMBER = "a whole number from 0 to 4294967295"


@dataclass(frozen=True)
class LabelFile:
    """Labels as they were given.

    Args:
        path: the file.
        sha256: its digest.
        table: request, half-open range of positions, class, and maybe run; ranges of one request
            do not overlap.
    """

    path: Path
    sha256: str
    table: pa.Table


def read_labels(path: Path) -> LabelFile:
    """Return the labels of a Parquet file; without ``run`` they are of every run.

    Raises:
        ActdsError: E009 when the file cannot be read, lacks a column, has one of another type, has
            no row, too many classes, one without a name or with that of a class of the tables, or
            ranges that are empty or overlap.
    """
    try:
        data = path.read_bytes()
        given = pq.read_table(pa.BufferReader(data), use_threads=False, pre_buffer=False)
        given.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise _bad(path, str(error).splitlines()[0][:200], _FILE) from None
    if not set(COLUMNS) <= set(given.column_names):
        raise _bad(path, f"columns {', '.join(given.column_names)[:200]}", _FILE)
    if not given.num_rows:
        raise _bad(path, "no row", "a range at least")
    kinds = COLUMNS | ({"run": pa.string()} if "run" in given.column_names else {})
    table = pa.table({name: _column(path, given, name, kind) for name, kind in kinds.items()})
    n_classes = pc.count_distinct(table["class"]).as_py()
    if n_classes > MAX_CLASSES:
        raise _bad(path, f"{n_classes} classes", f"{MAX_CLASSES} at most")
    _refuse_ranges(path, table)
    return LabelFile(path, hashlib.sha256(data).hexdigest(), table)


def match_labels(labels: LabelFile, sources: list[RunSource]) -> ClassesFile:
    """Return how much of the dataset the labels name.

    A range matches that begins within a request of the dataset, of its run where the labels have
    one, else of any. Of one that goes on beyond the request's end the rest counts for nothing.

    Raises:
        ActdsError: E009 when none matches.
    """
    table = labels.table
    start, stop = (table[name].to_numpy().astype(np.int64) for name in ("start", "stop"))
    matching = np.zeros(table.num_rows, bool)
    n_labelled = n_positions = 0
    for source in sources:
        found = source.columns(
            "select request::bigint request, any_value(prompt_len::bigint "
            "+ greatest(generated_len, 1) - 1) n from requests group by request order by request"
        )
        n_positions += int(found["n"].sum())
        at = Index(found["request"]).of(table["request"].to_numpy())
        length = np.append(found["n"].astype(np.int64), 0)[at]
        here = start < length
        if "run" in table.column_names:
            here &= pc.equal(table["run"], source.run).to_numpy()
        matching |= here
        n_labelled += int((np.minimum(stop, length) - start)[here].sum())
    if not matching.any():
        raise _bad(
            labels.path,
            f"none of {table.num_rows:,} ranges begins within a request of the dataset; the first "
            f"is {_range(table, 0)}",
            "numbers of requests and runs as in the dataset's table of requests",
        )
    return ClassesFile(
        path=str(labels.path),
        sha256=labels.sha256,
        n_ranges=table.num_rows,
        n_matching=int(matching.sum()),
        n_labelled=n_labelled,
        n_positions=n_positions,
    )


class Labels:
    """The labels of one run, asked row by row.

    Args:
        table: as `read_labels` returns it, of one run.
        words: names of all classes; a label's code is its place among them.
    """

    def __init__(self, table: pa.Table, words: tuple[str, ...]) -> None:
        self.words = words
        request, start, stop = (
            table[name].to_numpy().astype(np.int64) for name in ("request", "start", "stop")
        )
        keys = position_key(request, start)
        order = np.argsort(keys, kind="stable")
        self._keys = keys[order]
        self._request, self._stop = request[order], stop[order]
        code = {word: k for k, word in enumerate(words)}
        codes = [code[word] for word in table["class"].to_pylist()]
        self._code = np.array(codes, np.int64)[order]

    def of(
        self, request: npt.NDArray[np.int64], position: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return the code of the class of each position, -1 for one without a label."""
        if not len(self._keys):
            return np.full(len(request), -1, np.int64)
        at = np.searchsorted(self._keys, position_key(request, position), side="right") - 1
        labelled, at = at >= 0, np.maximum(at, 0)
        labelled &= (self._request[at] == request) & (position < self._stop[at])
        return np.where(labelled, self._code[at], -1)


def class_words(labels: pa.Table) -> tuple[str, ...]:
    """Return the names of all classes."""
    return tuple(sorted(labels["class"].unique().to_pylist()))


def labels_of(labels: pa.Table, run: str) -> Labels:
    """Return the labels of a run."""
    words = class_words(labels)
    if "run" in labels.column_names:
        labels = labels.filter(pc.equal(labels["run"], run))
    return Labels(labels, words)


def _column(path: Path, given: pa.Table, name: str, kind: pa.DataType) -> pa.ChunkedArray:
    """Return a column in the type that it should have; nothing is cut or spelt out."""
    column = given[name]
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    words = pa.types.is_string(kind)
    fits = (_is_text if words else pa.types.is_integer)(column.type)
    if not fits:
        expected = f"a column of {'strings' if words else 'whole numbers'}"
        raise _bad(path, f"{name} of type {column.type}", expected)

    def refuse(wrong: pa.ChunkedArray, got: Callable[[object], str], expected: str) -> None:
        row = pc.index(wrong, True).as_py()
        if row >= 0:
            raise _bad(path, f"row {row}: {name} {got(column[row].as_py())}", expected)

    expected = "a name" if words else _NUMBER
    refuse(column.is_null(), lambda value: "is null", expected)
    if words:
        blank = pc.equal(pc.utf8_trim_whitespace(column.cast(kind)), "")
        refuse(blank, lambda value: "is empty", expected)
    else:
        top = pa.scalar(2**32 - 1)
        wide = column.cast(pa.int64(), safe=False)  # of a uint64 beyond it, a negative one
        beyond = pc.or_(pc.less(wide, 0), pc.greater(wide, top))
        refuse(beyond, lambda value: f"is {value}", expected)
    if name == "class":
        own = (*CLASSES, NOWHERE)
        taken = pc.is_in(column.cast(kind), pa.array(own, kind))
        got = "is {!r}, a class of the tables".format
        refuse(taken, got, f"another name than {', '.join(own)}")
    return column.cast(kind)


def _is_text(kind: pa.DataType) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    )


def _refuse_ranges(path: Path, table: pa.Table) -> None:
    """Raise E009 for a range that is empty, or that overlaps another of its request."""
    request, start, stop = (
        table[name].to_numpy().astype(np.int64) for name in ("request", "start", "stop")
    )
    empty = np.flatnonzero(stop <= start)
    if len(empty):
        got = f"row {empty[0]}: {_range(table, int(empty[0]))}, which ends before it begins"
        raise _bad(path, got, "a stop above its start")
    run = np.zeros(len(request), np.int64)
    if "run" in table.column_names:
        run = table["run"].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    order = np.lexsort((start, request, run))
    before, after = order[:-1], order[1:]
    same = (request[before] == request[after]) & (run[before] == run[after])
    over = np.flatnonzero(same & (start[after] < stop[before]))
    if len(over):
        pairs = np.sort(np.stack([before[over], after[over]]), axis=0)
        one, other = pairs[:, np.argmin(pairs[1])].tolist()
        got = f"row {other}: {_range(table, other)} overlaps row {one}: {_range(table, one)}"
        raise _bad(path, got, "ranges of one request that do not overlap")


def _range(table: pa.Table, row: int) -> str:
    """Return a range in words."""
    line = table.slice(row, 1).to_pylist()[0]
    run = f"run {line['run'][:80]}, " if "run" in line else ""
    return f"{run}request {line['request']}, positions {line['start']} to {line['stop']}"


def _bad(path: Path, got: str, expected: str) -> ActdsError:
    return ActdsError(
        "E009",
        f"--classes {path}",
        got=got,
        expected=expected,
        next_step="Correct the file; docs/audit.md says under Coverage what it holds.",
    )
