"""Data: the tables of a run in parts, and token classes that somebody gave.

Every file is hashed against its ledger entry before anything opens it. Ranges of positions are
asked row by row without writing every position down.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actds.dataset.catalog import Catalog
from actds.errors import ActdsError
from actds.format import tables
from actds.format.apart import Apart, Reply, Request, cpu_seconds, stream_of
from actds.format.parquet import max_nbytes
from actds.format.positions import Index, pair_key, position_key
from actds.format.shard import TOKENS
from actds.format.tables import TableName
from actds.store import layout
from actds.store.local import LocalStore
from actds_validators.arrays import Bools, Ints
from actds_validators.audit.result import ClassesFile

N_THREADS = 2
BATCH_ROWS = 1 << 15
DENSE = 8
"""Keys are found in a table of so many times their number at most, else sorted."""
LOOKED_AT = 10_000
"""Readouts among which the longest says how many projections a run has; all should have as many."""
RUN_TABLES: tuple[TableName, ...] = (
    "tokens",
    "requests",
    "steps",
    "spans",
    "roles",
    "drops",
    "stalls",
    "occupancy",
    "readouts",
    "sampled",
)
Read = Callable[[Callable[["TablePart"], Any], Sequence["TablePart"]], Iterator[Any]]
"""How a function is called with every part: `map`, or that of an executor."""


@dataclass(frozen=True)
class TablePart:
    """Rows of a table: one file, or what is in memory instead."""

    of: TableName
    n_rows: int
    path: str | None = None  # Parquet file on a local disk; None for rows in memory
    table: pa.Table | None = None

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        if self.path is not None:
            with pq.ParquetFile(self.path) as file:
                yield from file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False)
        elif self.table is not None:
            yield from self.table.select(columns).to_batches(max_chunksize=BATCH_ROWS)


def column(batch: pa.RecordBatch | pa.Table, name: str) -> Ints:
    """Return a column of whole numbers.

    Raises:
        ActdsError: E109 a null.
    """
    if batch[name].null_count:
        n = batch[name].null_count
        raise ActdsError("E109", name, got=f"{n} nulls", expected="no null")
    values: Ints = batch[name].to_numpy(zero_copy_only=False).astype(np.int64)
    return values


def places(keys: Ints) -> tuple[Ints, Ints]:
    """Return the numbers that there are, rising, and the place of each key among them."""
    low = int(keys.min()) if len(keys) else 0
    size = int(keys.max()) - low + 1 if len(keys) else 0
    if size > DENSE * len(keys):
        return np.unique(keys, return_inverse=True)
    is_used = np.zeros(size, bool)
    is_used[keys - low] = True
    known = np.flatnonzero(is_used)
    if len(known) == size:
        return known + low, keys - low
    return known + low, (np.cumsum(is_used) - 1)[keys - low]


RUN_LABELS = {"replica": "serving.replica", "overflow policy": "capture.overflow_policy"}
"""Kinds of strata of whole runs, and the field of the run record that names each."""


@dataclass(frozen=True)
class RunSource:
    """One run: its tables in parts, a shard or a ledger entry each."""

    run: str
    parts: Mapping[TableName, tuple[TablePart, ...]]
    hooks: tuple[str, ...] = ()
    n_projections: int = 0  # projections per readout, of the longest of the first ten thousand
    n_probes: int = 0  # user's probes per readout, likewise
    labels: Mapping[str, str] = field(default_factory=dict)  # of `RUN_LABELS`, those that are known

    def n_rows(self, name: TableName) -> int:
        return sum(part.n_rows for part in self.parts[name])

    def table(self, name: TableName, columns: Sequence[str]) -> pa.Table:
        empty = tables.empty(name).select(list(columns))
        batches = [batch for part in self.parts[name] for batch in part.batches(list(columns))]
        parts = [pa.Table.from_batches([batch]).cast(empty.schema) for batch in batches]
        return pa.concat_tables([empty, *parts]).combine_chunks()

    def columns(self, name: TableName, columns: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        return numbers(self.table(name, columns))

    def served_requests(self, columns: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        table = self.table("requests", list(dict.fromkeys([*columns, "finish_reason"])))
        return numbers(table.filter(tables.is_served(table)).select(list(columns)))

    def spans(self, disposition: str, columns: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        table = self.table("spans", ["disposition", "start", "stop", *columns])
        kept = pc.and_(
            pc.equal(table["disposition"], disposition), pc.greater(table["stop"], table["start"])
        )
        return numbers(table.filter(kept).drop_columns("disposition"))


def numbers(table: pa.Table) -> dict[str, npt.NDArray[Any]]:
    """Return the columns as numpy arrays: whole numbers as int64, with nulls as float64 with NaN.

    Strings and binary are objects, null is None.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name in table.column_names:
        column = table[name]
        if pa.types.is_integer(column.type):
            column = column.cast(pa.float64() if column.null_count else pa.int64(), safe=False)
        arrays[name] = column.to_numpy()
    return arrays


def is_known(values: npt.NDArray[Any]) -> Bools:
    return ~np.isnan(values.astype(np.float64))


def catalog_source(catalog: Catalog, run: str) -> RunSource:
    """Return the tables of one run of a dataset.

    Files on a local disk are read in place, those of an object store as a whole.

    Raises:
        ActdsError: E202 a file that changed; E109 and E206 no table of the spec; what
            ``Catalog.table`` raises.
    """
    parts: dict[TableName, tuple[TablePart, ...]] = {}
    row_sets = catalog.row_sets(run)
    shards = row_sets[0][1] if row_sets else []
    of_shards = [f"{layout.shard_dir(shard.name)}/{TOKENS}" for shard in shards]
    for name in RUN_TABLES:
        entries = [part.file.path for part in catalog.parts.get((run, name), [])]
        entries = of_shards if name == "tokens" else entries
        if isinstance(catalog.store, LocalStore) and entries:
            parts[name] = tuple(_local_part(catalog, name, path) for path in entries)
            continue
        read = [s.tokens() for s in shards] if name == "tokens" else [catalog.table(name, run)]
        parts[name] = tuple(TablePart(name, table.num_rows, table=table) for table in read)
    record = catalog.runs.get(run)
    known = {name: field.value for name, field in (record.fields if record else {}).items()}
    labels = {k: str(known[f]) for k, f in RUN_LABELS.items() if known.get(f) is not None}
    return source_of(run, parts, labels)


def _local_part(catalog: Catalog, name: TableName, path: str) -> TablePart:
    """Return a file of a local disk, which was read whole once, apart: it is what it says."""
    n_rows = catalog.read_table(name, path).num_rows
    local = os.path.abspath(catalog.store.local_path(path))  # a worker may run in another folder
    return TablePart(name, n_rows, path=local)


def source_of(
    run: str, parts: Mapping[TableName, tuple[TablePart, ...]], labels: Mapping[str, str]
) -> RunSource:
    readouts = parts["readouts"]
    batches = (batch for part in readouts for batch in part.batches(["hook"]))
    hooks = sorted({hook for batch in batches for hook in pc.unique(batch["hook"]).to_pylist()})
    n_projections, n_probes = (longest(readouts, name) for name in ("projections", "probes"))
    return RunSource(run, parts, tuple(hooks), n_projections, n_probes, labels)


def longest(parts: tuple[TablePart, ...], name: str) -> int:
    for part in parts:
        for batch in part.batches([name]):
            if batch.num_rows:
                lengths = pc.list_value_length(batch.column(0).slice(0, LOOKED_AT))
                return int(pc.max(lengths).as_py() or 0)
    return 0


BATCH_POSITIONS = 1 << 16


class StepRanges:
    """Half-open ranges of positions of a (step, request), disjoint within each."""

    def __init__(self, step: Ints, request: Ints, start: Ints, stop: Ints) -> None:
        self._n_requests = int(request.max()) + 1 if len(request) else 1
        pair = step * self._n_requests + request
        order = np.lexsort((start, pair))
        self.step, self.request = step[order], request[order]
        self.start, self.stop = start[order], stop[order]
        self._pairs, self._group = np.unique(pair[order], return_inverse=True)
        self._keys = pair_key(self._group, self.start)
        self._offset = np.cumsum(self.stop - self.start) - (self.stop - self.start)

    @property
    def n_positions(self) -> int:
        return int((self.stop - self.start).sum())

    def find(self, step: Ints, request: Ints, position: Ints) -> Ints:
        """Return the number of each position, ranges laid end to end; -1 outside of them all."""
        if not len(self._pairs):
            return np.full(len(step), -1, np.int64)
        pair = step * self._n_requests + request
        group = np.minimum(np.searchsorted(self._pairs, pair), len(self._pairs) - 1)
        known = (self._pairs[group] == pair) & (request >= 0) & (request < self._n_requests)
        at = np.searchsorted(self._keys, pair_key(group, position), side="right") - 1
        at = np.maximum(at, 0)
        known &= (self._group[at] == group) & (position >= self.start[at])
        known &= position < self.stop[at]
        return np.where(known, self._offset[at] + position - self.start[at], -1)


def explode(start: Ints, stop: Ints, size: int = BATCH_POSITIONS) -> Iterator[tuple[Ints, Ints]]:
    """Yield the positions of ranges, with the number of the range of each."""
    ends = np.cumsum(stop - start)
    shift = start - (ends - (stop - start))
    for done in range(0, int(ends[-1]) if len(ends) else 0, size):
        at = np.arange(done, min(done + size, int(ends[-1])))
        first, last = np.searchsorted(ends, at[[0, -1]], side="right")
        of_range = np.repeat(
            np.arange(first, last + 1),
            np.diff(np.minimum(ends[first : last + 1], at[-1] + 1), prepend=done),
        )
        yield of_range, at + shift[of_range]


CLASSES = ("special", "shared prefix", "prompt", "generated")
"""Classes that the tables tell."""
NOWHERE = "reference without a row"
"""Class of the positions that were served from the cache and of which no row is stored."""
LABEL_COLUMNS = {
    "request": pa.uint32(),
    "start": pa.uint32(),
    "stop": pa.uint32(),
    "class": pa.string(),
}
MAX_CLASSES = 32
_MAX_FILE_NBYTES, _SLACK_NBYTES = 1 << 29, 128 << 20
_FILE = "a Parquet file with request, start, stop, class, and maybe run"
_NUMBER = "a whole number from 0 to 4294967295"


@dataclass(frozen=True)
class LabelFile:
    """Labels as they were given."""

    path: Path
    sha256: str
    table: pa.Table  # request, half-open range, class, maybe run; those of a request do not overlap


def read_labels(path: Path) -> LabelFile:
    """Return the labels of a Parquet file; without ``run`` they are of every run.

    Raises:
        ActdsError: E009 when the file cannot be read, lacks a column, has one of another type, has
            no row, too many classes, one without a name or with that of a class of the tables, or
            ranges that are empty or overlap.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_NBYTES + 1)
        if len(data) > _MAX_FILE_NBYTES:
            raise _bad(path, f"more than {_MAX_FILE_NBYTES:,} bytes", _FILE)
        given = _parsed(path, data)
    except (pa.ArrowException, OSError) as error:
        raise _bad(path, str(error).splitlines()[0][:200], _FILE) from None
    if not set(LABEL_COLUMNS) <= set(given.column_names):
        raise _bad(path, f"columns {', '.join(given.column_names)[:200]}", _FILE)
    if not given.num_rows:
        raise _bad(path, "no row", "a range at least")
    kinds = LABEL_COLUMNS | ({"run": pa.string()} if "run" in given.column_names else {})
    table = pa.table({name: _column(path, given, name, kind) for name, kind in kinds.items()})
    n_classes = pc.count_distinct(table["class"]).as_py()
    if n_classes > MAX_CLASSES:
        raise _bad(path, f"{n_classes} classes", f"{MAX_CLASSES} at most")
    _refuse_ranges(path, table)
    return LabelFile(path, hashlib.sha256(data).hexdigest(), table)


_labels = Apart(f"{__name__}:answer")


def _parsed(path: Path, data: bytes) -> pa.Table:
    limit = _SLACK_NBYTES + 2 * max_nbytes(len(data))
    request = Request({}, [data], f"classes {path}", "E009", _FILE, limit, cpu_seconds(len(data)))
    _labels.deaths.clear()
    try:
        [(_, body)] = _labels.ask(request)
    except ActdsError as error:
        raise _bad(path, error.got, error.expected) from None
    return pa.ipc.open_stream(body).read_all()


def answer(request: dict[str, Any], body: pa.Buffer) -> Iterator[Reply]:
    given = pq.read_table(pa.BufferReader(body), use_threads=False, pre_buffer=False)
    given.validate(full=True)
    names = [name for name in (*LABEL_COLUMNS, "run") if name in given.column_names]
    yield stream_of(given.select(names))


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
        given = source.served_requests(["request", "prompt_len", "generated_len"])
        n_owed = given["prompt_len"] + np.maximum(given["generated_len"], 1) - 1
        known, first = np.unique(given["request"], return_index=True)
        n_positions += int(n_owed[first].sum())
        at = Index(known).of(table["request"].to_numpy())
        length = np.append(n_owed[first].astype(np.int64), 0)[at]
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


def role_labels(sources: Sequence[RunSource]) -> pa.Table | None:
    """Return the roles of all runs as labels, in the columns of a label file; None without any.

    Spec: 0.1 section 6.3.
    """
    every = []
    for source in sources:
        roles = source.table("roles", ["request", "start", "stop", "role"])
        run = pa.array([source.run] * roles.num_rows, pa.string())
        every.append(roles.rename_columns([*LABEL_COLUMNS]).append_column("run", run))
    table = pa.concat_tables(every)
    return table if table.num_rows else None


class Labels:
    """The labels of one run, asked row by row.

    Args:
        words: names of all classes; a label's code is its place among them.
    """

    def __init__(self, table: pa.Table, words: tuple[str, ...]) -> None:
        self.words = words
        start, stop = (position_key(table["request"], table[name]) for name in ("start", "stop"))
        order = np.argsort(start, kind="stable")
        self._start, self._stop = start[order], stop[order]
        code = pc.index_in(table["class"], pa.array(words, table["class"].type))
        self._code = code.to_numpy()[order].astype(np.int64)

    def of(self, request: Ints, position: Ints) -> Ints:
        """Return the code of the class of each position, -1 for one without a label."""
        if not len(self._start):
            return np.full(len(request), -1, np.int64)
        keys = position_key(request, position)
        at = np.searchsorted(self._start, keys, side="right") - 1
        return np.where((at >= 0) & (keys < self._stop[at]), self._code[at], -1)


def class_words(labels: pa.Table) -> tuple[str, ...]:
    return tuple(sorted(labels["class"].unique().to_pylist()))


def labels_of(labels: pa.Table, run: str) -> Labels:
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
    is_text = column.type in (pa.string(), pa.large_string(), pa.string_view())
    if not (is_text if words else pa.types.is_integer(column.type)):
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
        wide = column.cast(pa.int64(), safe=False)  # of a uint64 beyond it, a negative one
        beyond = pc.or_(pc.less(wide, 0), pc.greater(wide, 2**32 - 1))
        refuse(beyond, lambda value: f"is {value}", expected)
    if name == "class":
        reserved = (*CLASSES, NOWHERE)
        taken = pc.is_in(column.cast(kind), pa.array(reserved, kind))
        got = "is {!r}, a class of the tables".format
        refuse(taken, got, f"another name than {', '.join(reserved)}")
    return column.cast(kind)


def _refuse_ranges(path: Path, table: pa.Table) -> None:
    request, start, stop = (column(table, name) for name in ("request", "start", "stop"))
    empty = np.flatnonzero(stop <= start)
    if len(empty):
        got = f"row {empty[0]}: {_range(table, int(empty[0]))}, which ends before it begins"
        raise _bad(path, got, "a stop above its start")
    run = np.zeros(len(request), np.int64)
    if "run" in table.column_names:
        run = table["run"].combine_chunks().dictionary_encode().indices.to_numpy()
    order = np.lexsort((start, request, run))
    before, after = order[:-1], order[1:]
    same = (request[before] == request[after]) & (run[before] == run[after])
    over = np.flatnonzero(same & (start[after] < stop[before]))
    if len(over):
        pairs = np.sort(np.stack([before[over], after[over]]), axis=0)
        first, other = pairs[:, np.argmin(pairs[1])].tolist()
        got = f"row {other}: {_range(table, other)} overlaps row {first}: {_range(table, first)}"
        raise _bad(path, got, "ranges of one request that do not overlap")


def _range(table: pa.Table, row: int) -> str:
    line = table.slice(row, 1).to_pylist()[0]
    run = f"run {line['run'][:80]}, " if "run" in line else ""
    return f"{run}request {line['request']}, positions {line['start']} to {line['stop']}"


def _bad(path: Path, got: str, expected: str) -> ActdsError:
    return ActdsError(
        "E009",
        f"classes {path}",
        got=got,
        expected=expected,
        next_step="Correct the file: one line per span, with run, request, start, stop and class.",
    )
