"""Datasets opened for reading: hooks, tables, lazy arrays."""

from __future__ import annotations

import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actds.errors import ActdsError
from actds.executor import ExecutorName, open_executor
from actds.format import arrays, tables
from actds.format.row_weights import RowWeights, read_row_weights
from actds.format.shard import Shard
from actds.format.tables import TableName
from actds.load import show
from actds.load.context import Context, RequestRows, RowPlaces, Tokenizer
from actds.load.stats import Stats, cache_folder, stats_of_rows
from actds.reading import Catalog, unknown_columns
from actds.schema import Hook, Phase, RunRecord, Seal
from actds.sealing import check_provenance
from actds.store import Store, open_store
from actds.store.cache import Cache

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

__all__ = [
    "Dataset",
    "LazyArray",
    "OpenArrays",
    "open",
    "open_array",
    "rows_at_a_time",
    "rows_together",
]

CACHE_NBYTES = 64 << 30
"""What a cache of remote datasets keeps at most, unless it is told otherwise."""
MAX_OPEN_ARRAYS = 64
"""Files that stay open: a dataset may have more shards than a process may open."""

ROW_NUMBERS = frozenset({"request", "position"})
"""Columns that number the rows of an imported run, also where they are no places in a text."""

_MAX_READ_NBYTES = 1 << 26  # rows of all hooks that are read together, unless a chunk has more

Floats = npt.NDArray[np.float32]
Values = npt.NDArray[Any]


def open(
    uri: str | Path,
    *,
    cache: str | Path | None = None,
    cache_bytes: int | None = None,
    i_accept_unsealed: bool = False,
    i_accept_unprovenanced: bool = False,
) -> Dataset:
    """Open a dataset for reading; one that is unsealed or lacks provenance is refused.

    The structure, every size and every document is checked here; tables are hashed when they are
    read, arrays have a checksum per chunk; ``actds validate`` checks the whole content.

    Args:
        uri: the dataset's folder, or a URI: ``file://``, ``s3://``, ``gs://``, ``az://``,
            ``abfs://``, ``https://`` or ``http://``.
        cache: folder in which tables and blocks of arrays of a remote dataset are kept; processes
            may share it. With ``cache_bytes`` alone, one in the user's cache folder
            (``ACTDS_CACHE``); with neither, nothing is kept unless ``ACTDS_CACHE_BYTES`` is set.
        cache_bytes: the most that the cache keeps: ``ACTDS_CACHE_BYTES``, else 64 GiB.
        i_accept_unsealed: read a dataset that is not sealed, with a warning: rows may be missing.
        i_accept_unprovenanced: read rows without a run record or a census, with a warning.

    Raises:
        ActdsError: E306 not sealed; E401 no run record; E403 no census; E101 no dataset there;
            E102 to E107 a broken or missing document; E201, E202, E205 a file of another size
            or digest; E301 to E312 a broken ledger; E009, E011 a location that cannot be opened,
            or a bound of a cache that is no number of bytes.

    Spec: 0.1 sections 8.4 and 10.
    """
    store = open_store(uri)
    _give_cache(store, cache, cache_bytes)
    catalog = Catalog.read(store)
    if not catalog.is_sealed:
        seal = f"seal {catalog.seal.n} of an older ledger" if catalog.seal else "no seal"
        unsealed = ActdsError("E306", str(uri), got=seal, expected="a seal of the present ledger")
        _accept(unsealed, i_accept_unsealed)
    try:
        check_provenance(catalog)
    except ActdsError as error:
        _accept(error, i_accept_unprovenanced)
    return Dataset(catalog)


def _give_cache(store: Store, folder: str | Path | None, nbytes: int | None) -> None:
    """Let a remote store keep what it reads, where that is asked for."""
    named = os.environ.get("ACTDS_CACHE_BYTES")
    bound = named if nbytes is None else str(nbytes)
    if bound is not None and not (bound.isascii() and bound.isdecimal() and int(bound)):
        place = "ACTDS_CACHE_BYTES" if nbytes is None else "cache_bytes"
        raise ActdsError("E009", place, got=bound[:80], expected="a number of bytes above 0")
    if folder is None and bound is None:
        return
    path = cache_folder() / "remote" if folder is None else Path(folder).expanduser()
    store.keep(Cache(path, CACHE_NBYTES if bound is None else int(bound)))


def _accept(error: ActdsError, accepted: bool) -> None:
    if not accepted:
        raise error
    warnings.warn(f"read all the same: {error}", UserWarning, stacklevel=3)


class Dataset:
    """A dataset as it was when it was opened: hooks, rows and tables.

    The methods named like a table of the spec return a ``pyarrow.Table`` of all runs, one after the
    other; positions and counts are integers, times are nanoseconds. Requests, steps and drops are
    numbered from 0 within their run: joins need ``run`` as well. Where there are several runs,
    give ``run=True``, which adds it as the first column, or ``run=False``, which leaves it out.

    All these methods raise ``ActdsError``: E014 where there are several runs and ``run`` is not
    given; E104, E109, E201, E202 or E206 when a file is missing or damaged.

    Attributes:
        path: its location, as a string.
        hooks: its hooks by name; each has ``name``, ``kind``, ``layer``, ``d_model``, ``dtype``.
        runs: its run records by run; ``fields`` of one maps a provenance name to its value.
        shards: its shards, by run and then in the order of their commits.
        catalog: its ledger and documents.

    Spec: 0.1 section 10.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.path = catalog.store.uri
        self.hooks: dict[str, Hook] = {hook.name: hook for hook in catalog.genesis.hooks}
        self.runs: dict[str, RunRecord] = catalog.runs
        unknown = {run: unknown_columns(record) for run, record in self.runs.items()}
        self.shards = [
            Shard(catalog.store, manifest, unknown.get(manifest.run, frozenset()))
            for manifest in catalog.shards
        ]
        self._row_places: dict[str, RowPlaces] = {}

    def __repr__(self) -> str:
        return f"<actds.Dataset {self.path}: {self.n_rows} rows, hooks {', '.join(self.hooks)}>"

    def _repr_html_(self) -> str:
        return show.dataset_html(self)

    def plot_norms(self, hooks: str | Iterable[str] | None = None) -> Figure:
        """Return a figure of matplotlib: norms of rows by position, of all hooks or some.

        From the readouts if there are any, else from 16,384 rows of each hook.

        Raises:
            ActdsError: E011 matplotlib is not installed; E014 no such hook.
        """
        return show.plot_norms(self, hooks)

    def plot_coverage(self) -> Figure:
        """Return a figure of matplotlib: what became of the positions, by phase and position.

        Raises:
            ActdsError: E011 matplotlib is not installed.
        """
        return show.plot_coverage(self)

    @property
    def seal(self) -> Seal | None:
        """Return the seal; None for a dataset that was opened unsealed."""
        return self.catalog.seal if self.catalog.is_sealed else None

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the seal, hexadecimal: it identifies the content.

        Of a dataset that was opened unsealed, it is that of the ledger as it was then.
        """
        return self.catalog.digest

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return the phases that have rows, of ``prefill`` and ``decode``."""
        there = {shard.phase for shard in self.shards if "phase" not in shard.unknown}
        return cast("tuple[Phase, ...]", tuple(p for p in tables.PHASES if p in there))

    @property
    def n_rows(self) -> int:
        """Return the number of rows of a hook; the largest, where hooks differ."""
        return max(len(self.array(hook)) for hook in self.hooks)

    def array(self, hook: str) -> LazyArray:
        """Return the rows of a hook, ``(n_rows, d_model)``, which are read when indexed.

        Row ``i`` belongs to row ``i`` of ``tokens(hook)``.

        Args:
            hook: name of the hook, for example ``resid_post.10``.

        Raises:
            ActdsError: E014 the dataset has no such hook.
        """
        shards = self.shards_of(hook)
        return LazyArray(self.hooks[hook], shards)

    def stats(self, hook: str, *, executor: ExecutorName = "threads") -> Stats:
        """Return statistics of a hook's rows: moments, norms and the geometric median.

        Reads all rows of the hook once, shard by shard. The result is kept in the user's cache
        folder (``ACTDS_CACHE``) under the dataset's digest; a pass that was interrupted continues
        after the last shard that it finished.

        Args:
            hook: name of the hook.
            executor: where the shards are read: ``threads`` or ``processes`` of this machine, or
                ``ray``; the same numbers to the bit.

        Raises:
            ActdsError: E014 the dataset has no such hook; E011 Ray is not installed; as indexing
                ``array(hook)``.
        """
        shards = self.shards_of(hook)
        counts = [None] * len(shards)
        with open_executor(executor) as on:
            return stats_of_rows(
                self.hooks[hook], shards, counts,
                key=self.digest, cache=cache_folder(), executor=on,
            )  # fmt: skip

    def row_weights(self, path: str | os.PathLike[str]) -> RowWeights:
        """Read a weights file of this dataset, and check all of it.

        Args:
            path: what ``actds audit --weights`` wrote.

        Raises:
            ActdsError: E018 it is damaged, belongs to another dataset, or lacks a row.

        Spec: 0.1 section 10.4.
        """
        rows = {shard.name: shard.n_rows for shard in self.shards}
        return read_row_weights(path, self.catalog.genesis.dataset, self.digest, rows)

    def shards_of(self, hook: str) -> list[Shard]:
        """Return the shards that hold a hook, in the order of ``array``.

        Args:
            hook: name of the hook.

        Raises:
            ActdsError: E014 the dataset has no such hook.
        """
        self._check_hook(hook)
        return [shard for shard in self.shards if hook in shard.hooks]

    def tokens(
        self, hook: str | None = None, *, columns: list[str] | None = None, run: bool | None = None
    ) -> pa.Table:
        """Return the token table: one line per activation row, in the order of ``array``.

        Columns of which an imported run says nothing are null, but for request and position, which
        then number its rows in the order of the set.

        Args:
            hook: whose rows; None takes the first hook. All hooks have the same rows unless they
                have shards of their own.
            columns: columns to read; None reads all.
            run: add the run as the first column; see the class.

        Raises:
            ActdsError: E014 no such hook or column; E203 another number of lines than rows; and
                as for every table.

        Spec: 0.1 section 6.3.
        """
        run = self._with_run("tokens", run)
        schema = tables.bare_schema("tokens")
        shards = self.shards_of(hook or next(iter(self.hooks)))
        for name in sorted({name for shard in shards for name in shard.unknown - ROW_NUMBERS}):
            place = schema.get_field_index(name)
            schema = schema.set(place, schema.field(name).with_nullable(True))
        if columns is not None:
            _check_columns(columns, schema.names)
            schema = pa.schema([schema.field(name) for name in columns])
        parts = [
            (shard.run, _with_nulls(shard.tokens(columns), shard.unknown).cast(schema))
            for shard in shards
        ]
        return _joined(schema.empty_table(), parts, run)

    def requests(self, *, run: bool | None = None) -> pa.Table:
        """Return one line per request: lengths, end, cached tokens.

        ``run`` and errors: see ``Dataset``. Spec: 0.1 section 6.3.
        """
        return self._table("requests", run)

    def steps(self, *, run: bool | None = None) -> pa.Table:
        """Return one line per scheduler step: its time and its tokens by phase.

        ``run`` and errors: see ``Dataset``. Spec: 0.1 section 6.3.
        """
        return self._table("steps", run)

    def spans(self, *, run: bool | None = None) -> pa.Table:
        """Return the disposition of every position, one line per span of positions.

        ``run`` and errors: see ``Dataset``. Spec: 0.1 sections 6.3 and 7.2.
        """
        return self._table("spans", run)

    def drops(self, *, run: bool | None = None) -> pa.Table:
        """Return one line per range of rows that the writer dropped, with the reason.

        ``run`` and errors: see ``Dataset``. Spec: 0.1 section 6.3.
        """
        return self._table("drops", run)

    def stalls(self, *, run: bool | None = None) -> pa.Table:
        """Return one line per time that a stage of the writer had to wait.

        ``run`` and errors: see ``Dataset``. Spec: 0.1 section 6.3.
        """
        return self._table("stalls", run)

    def occupancy(self, *, run: bool | None = None) -> pa.Table:
        """Return how long the queue of each stage had each depth, in nanoseconds.

        ``run`` and errors: see ``Dataset``. Spec: 0.1 section 6.3.
        """
        return self._table("occupancy", run)

    def readouts(self, *, run: bool | None = None) -> pa.Table:
        """Return the norm, projections and probes of every computed row, stored or lost.

        ``run`` and errors: see ``Dataset``. Spec: 0.1 sections 6.3 and 7.8.
        """
        return self._table("readouts", run)

    def canary(self, *, run: bool | None = None) -> pa.Table:
        """Return the comparison of stored rows with rows of requests replayed alone.

        ``run`` and errors: see ``Dataset``. Spec: 0.1 sections 6.3 and 7.9.
        """
        return self._table("canary", run)

    def request(
        self, request: int, *, run: str | None = None, hook: str | None = None
    ) -> RequestRows:
        """Return tokens and rows of a request's positions, also of those from the prefix cache.

        Args:
            request: number of the request in its run.
            run: the run; may be left out where there is one.
            hook: whose rows; None takes the first hook.

        Raises:
            ActdsError: E014 no such request, run or hook; and as for every table.

        Spec: 0.1 sections 6.3 and 7.2.
        """
        return self._places(hook).request(self._only_run(run), request)

    def context(
        self,
        row: int,
        before: int = 16,
        after: int = 16,
        *,
        hook: str | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> Context:
        """Return the tokens around a row, across prefix-cache references.

        Args:
            row: number of the row in ``array(hook)``.
            before: tokens before it.
            after: tokens after it.
            hook: whose row; None takes the first hook.
            tokenizer: decodes the tokens, as those of ``transformers``; None leaves them numbers.

        Raises:
            IndexError: there is no such row.
            ActdsError: as ``request``.
        """
        return self._places(hook).context(row, before, after, tokenizer)

    def _places(self, hook: str | None) -> RowPlaces:
        name = hook or next(iter(self.hooks))
        if name not in self._row_places:
            self._row_places[name] = RowPlaces(self, name)
        return self._row_places[name]

    def _only_run(self, run: str | None) -> str:
        runs = self.catalog.run_ids
        if run is None and len(runs) == 1:
            return runs[0]
        if run not in runs:
            raise ActdsError("E014", "run", got=repr(run), expected=f"one of {', '.join(runs)}")
        return run

    def multiplicity(self) -> pa.Table:
        """Return how often rows were served, where the prefix cache served them again.

        Columns ``run``, ``request``, ``start``, ``stop`` and ``count``: the rows of the positions
        ``[start, stop)`` of a request were served ``count`` times, 1 + prefix-cache hits. Rows in
        no line were served once.

        Raises:
            ActdsError: E306 the dataset is not sealed; and as for every table.

        Spec: 0.1 sections 6.3 and 7.5.
        """
        if self.seal is None:
            raise ActdsError("E306", self.path, got="no seal", expected="a sealed dataset")
        return self.catalog.table("multiplicity")

    def _table(self, name: TableName, run: bool | None) -> pa.Table:
        run = self._with_run(name, run)
        parts = [(one, self.catalog.table(name, one)) for one in self.catalog.run_ids]
        return _joined(tables.empty(name), parts, run)

    def _with_run(self, name: TableName, run: bool | None) -> bool:
        if run is None and len(self.catalog.run_ids) > 1:
            raise ActdsError(
                "E014",
                name,
                got=f"{len(self.catalog.run_ids)} runs, each of which numbers its requests from 0",
                expected="run=True for a column to join on, or run=False",
                next_step=f"dataset.{name}(run=True), and joins on run and request.",
            )
        return bool(run)

    def _check_hook(self, hook: str) -> None:
        if hook not in self.hooks:
            raise ActdsError(
                "E014",
                self.path,
                got=f"hook {hook!r}",
                expected=f"one of {', '.join(self.hooks)}",
            )


def _with_nulls(table: pa.Table, unknown: frozenset[str]) -> pa.Table:
    """Return a table with null in the columns of which nothing is known."""
    for name in sorted((unknown - ROW_NUMBERS).intersection(table.column_names)):
        field = table.schema.field(name).with_nullable(True)
        nulls = pa.nulls(table.num_rows, field.type)
        table = table.set_column(table.schema.get_field_index(name), field, nulls)
    return table


def _joined(empty: pa.Table, parts: list[tuple[str, pa.Table]], run: bool) -> pa.Table:
    """Return tables one after the other, with the run of each in front when asked."""
    joined = pa.concat_tables([empty, *(table for _, table in parts)])
    if not run:
        return joined
    column = pa.chunked_array(
        [pa.repeat(pa.scalar(name, pa.string()), table.num_rows) for name, table in parts],
        type=pa.string(),
    )
    return joined.add_column(0, pa.field("run", pa.string(), nullable=False), column)


def _check_columns(columns: list[str], known: list[str]) -> None:
    for column in columns:
        if column not in known:
            raise ActdsError(
                "E014", "tokens", got=f"column {column!r}", expected=f"one of {', '.join(known)}"
            )


def open_array(shard: Shard, hook: Hook) -> arrays.ArrayReader:
    """Return the reader of a hook's rows in a shard.

    Raises:
        ActdsError: E108 when the array has another type or width than the hook; and as
            ``Shard.array``.
    """
    reader = shard.array(hook.name)
    if (reader.dtype, reader.d_model) != (hook.dtype, hook.d_model):
        got = f"{reader.dtype} rows of {reader.d_model}"
        reader.close()
        raise ActdsError(
            "E108",
            f"shards/{shard.name} {hook.name}",
            got=got,
            expected=f"{hook.dtype} rows of {hook.d_model}, as actds.json says",
        )
    return reader


class OpenArrays:
    """The arrays of shards, opened on first use; the most recent ones stay open. For any thread.

    Args:
        shards: the shards.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._lock = threading.Lock()
        self._readers: OrderedDict[tuple[int, str], arrays.ArrayReader] = OrderedDict()

    def __len__(self) -> int:
        return len(self._readers)

    def get(self, number: int, hook: Hook) -> arrays.ArrayReader:
        """Return the reader of a hook's rows in the shard of that number.

        Readers past the limit are forgotten, not closed: another thread may be inside one, and
        the last reference closes the file.

        Raises:
            ActdsError: as ``open_array``.
        """
        key = (number, hook.name)
        with self._lock:
            reader = self._readers.get(key)
            if reader is not None:
                self._readers.move_to_end(key)
                return reader
        reader = open_array(self._shards[number], hook)
        with self._lock:
            self._readers[key] = reader
            while len(self._readers) > MAX_OPEN_ARRAYS:
                self._readers.popitem(last=False)
        return reader

    def close(self) -> None:
        """Close every file; no thread reads any more."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()


def rows_together(rows_per_chunk: Iterable[int], most: int) -> int:
    """Return how many rows to read at a time of hooks that may differ in width.

    Whole chunks of every hook, unless these are more than ``most`` rows; and whole chunks of the
    widest hook in any case. A narrow hook has chunks of many rows, and as many rows of a wide one
    may not fit into memory.

    Args:
        rows_per_chunk: rows of a chunk of each hook, powers of two.
        most: rows to read together at most.
    """
    sizes = sorted(rows_per_chunk)
    return min(sizes[-1], max(sizes[0], 1 << max(most, 1).bit_length() - 1))


def rows_at_a_time(readers: Mapping[str, arrays.ArrayReader]) -> int:
    """Return how many rows of every hook of a shard to read at a time, in bounded memory."""
    row_nbytes = sum(r.d_model * arrays.DTYPES[r.dtype].itemsize for r in readers.values())
    sizes = (reader.rows_per_chunk for reader in readers.values())
    return rows_together(sizes, _MAX_READ_NBYTES // row_nbytes)


class LazyArray:
    """The rows of a hook, ``(n_rows, d_model)``, in the order of the shards, read when indexed.

    Indexing reads: an integer, a slice, integers ``(n,)`` or a mask choose rows, and a second
    index chooses channels. The result is a new float32 array, which holds every stored value
    exactly. ``torch`` gives tensors of the stored type, ``bits`` and ``gather`` its bit patterns.
    Use it from any thread.

    There is no ``ml_dtypes.bfloat16`` array: NumPy sums it in 8 bits, so that means come out 98 %
    off, and so do pandas, dask and others.

    Args:
        hook: the hook.
        shards: the shards that hold it.

    Attributes:
        hook: the hook; ``hook.dtype`` is the stored type.
    """

    def __init__(self, hook: Hook, shards: list[Shard]) -> None:
        self.hook = hook
        self._shards = shards
        self._starts = np.cumsum([0, *(shard.n_rows for shard in shards)], dtype=np.int64)
        self.files = OpenArrays(shards)

    def __repr__(self) -> str:
        return f"<LazyArray {self.hook.name} {self.shape} {self.hook.dtype}>"

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def shape(self) -> tuple[int, int]:
        """Return rows and channels."""
        return (len(self), self.hook.d_model)

    @property
    def ndim(self) -> int:
        """Return 2: rows and channels."""
        return 2

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the type that indexing gives, float32; ``hook.dtype`` is the stored one."""
        return np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all rows as indexing gives them."""
        return len(self) * self.hook.d_model * self.dtype.itemsize

    def __getitem__(self, index: Any) -> Floats:
        """Return the chosen rows, or of each the chosen channels, as float32.

        Args:
            index: rows, or a pair of rows and channels. One row gives ``(d_model,)``, ``n`` rows
                ``(n, d_model)``; channels replace ``d_model`` as in NumPy.

        Raises:
            IndexError: a row outside the array, an index of another kind, or lists of rows and
                of channels at once.
            ActdsError: E104, E108, E201 to E204 when a shard is missing or damaged.
        """
        rows, channels = self._split(index)
        return arrays.widen(self._rows(rows), self.hook.dtype)[..., channels]

    def float32(self, index: Any = slice(None)) -> Floats:
        """Return ``array[index]``; its shape and errors are the same."""
        return self[index]

    def torch(self, index: Any = slice(None)) -> torch.Tensor:
        """Return the chosen rows as a new CPU tensor of the stored type, for example bfloat16.

        Args:
            index: rows, or rows and channels, with shapes as in ``array[index]``.

        Raises:
            ImportError: torch is not installed.
            IndexError, ActdsError: as ``array[index]``.
        """
        rows, channels = self._split(index)
        return arrays.to_torch(self._rows(rows), self.hook.dtype)[..., channels]

    def _split(self, index: Any) -> tuple[Any, Any]:
        if not isinstance(index, tuple):
            return index, slice(None)
        if len(index) != 2:
            raise IndexError(f"{len(index)} indices; expected rows, or rows and channels")
        rows, channels = index
        if rows is None or channels is None:
            raise IndexError("no new axis; expected rows, or rows and channels")
        if not isinstance(rows, slice | int | np.integer) and np.ndim(channels):
            # NumPy would pair them: row 0 with channel 3, row 1 with channel 4.
            raise IndexError("lists of rows and of channels; take the rows, then the channels")
        return rows, slice(None) if channels is Ellipsis else channels

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Values:
        if copy is False:
            raise ValueError("a lazy array cannot be viewed without a copy")
        values = self[:]
        return values if dtype is None else values.astype(dtype)

    def bits(self, start: int, stop: int) -> Values:
        """Return the bit patterns of the rows ``[start, stop)``, ``(stop - start, d_model)``.

        They are ``uint16`` for bfloat16 and float16, ``uint32`` for float32.

        Raises:
            IndexError: the range leaves the array.
            ActdsError: as ``array[index]``.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows [{start}, {stop}) of {len(self)}")
        out = np.empty((stop - start, self.hook.d_model), arrays.DTYPES[self.hook.dtype].bits)
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        for number in range(first, len(self._shards)):
            begin, end = int(self._starts[number]), int(self._starts[number + 1])
            if begin >= stop:
                break
            low, high = max(start, begin), min(stop, end)
            self.files.get(number, self.hook).read(
                low - begin, high - begin, out[low - start : high - start]
            )
        return out

    def gather(self, rows: npt.ArrayLike) -> Values:
        """Return the bit patterns of rows in the given order, ``(n, d_model)``, as ``bits``.

        Args:
            rows: row numbers ``(n,)``; negative ones count from the end, repeats are allowed.

        Raises:
            IndexError: a number is outside the array, or ``rows`` is no list of integers.
            ActdsError: as ``array[index]``.
        """
        wanted = np.asarray(rows)
        if wanted.size == 0:
            wanted = wanted.astype(np.int64)
        if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
            raise IndexError(f"rows of {wanted.dtype} {wanted.shape}; expected integers (n,)")
        wanted = wanted.astype(np.int64)
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        if wanted.size and (int(wanted.min()) < 0 or int(wanted.max()) >= len(self)):
            raise IndexError(f"rows in [{wanted.min()}, {wanted.max()}] of {len(self)}")
        out = np.empty((len(wanted), self.hook.d_model), arrays.DTYPES[self.hook.dtype].bits)
        shard_of = np.searchsorted(self._starts, wanted, side="right") - 1
        for number in np.unique(shard_of).tolist():
            here = shard_of == number
            out[here] = self.files.get(number, self.hook).gather(
                wanted[here] - self._starts[number]
            )
        return out

    def _rows(self, index: Any) -> Values:
        if index is Ellipsis:
            index = slice(None)
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return self.bits(start, max(start, stop))
            return self.gather(np.arange(start, stop, step))
        if isinstance(index, int | np.integer) and not isinstance(index, bool):
            one: Values = self.gather([int(index)])[0]
            return one
        chosen = np.asarray(index)
        if chosen.dtype == np.bool_:
            if chosen.shape != (len(self),):
                raise IndexError(f"a mask of {chosen.shape}; expected ({len(self)},)")
            chosen = np.flatnonzero(chosen)
        return self.gather(chosen)
