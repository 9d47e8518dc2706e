"""Datasets opened for reading: hooks, tables, lazy arrays."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

import numpy as np
import pyarrow as pa

from actds.dataset.catalog import Catalog
from actds.dataset.reading import read_catalog, unknown_columns
from actds.errors import ActdsError
from actds.executor import ExecutorName, open_executor
from actds.explore import show
from actds.explore.lazy import LazyArray
from actds.explore.requests import Context, RequestRows, RowPlaces, Tokenizer
from actds.explore.show import fates, norm_profile
from actds.explore.stats import Counts, Floats, Stats, cache_folder, stats_of_rows
from actds.format import tables
from actds.format.inclusion import Sample, inclusion_of_rows, is_drawn_from
from actds.format.row_weights import RowWeights, read_row_weights
from actds.format.schema import Hook, Phase, RunRecord, Seal
from actds.format.shard import Shard
from actds.format.tables import TableName
from actds.publish.sealing import check_provenance, parse_pin
from actds.store import Store, layout, open_store, refuse_within_dataset
from actds.store.cache import Cache
from actds.text import counted, format_nbytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CACHE_NBYTES = 64 << 30
"""What a cache of remote datasets keeps at most, unless it is told otherwise."""
ROW_NUMBERS = frozenset({"request", "position"})
"""Columns that number the rows of an imported run, also where they are no places in a text."""


class OpenOptions(TypedDict, total=False):
    """What ``open`` is told of a dataset."""

    seal: str | None
    i_accept_unsealed: bool
    i_accept_unprovenanced: bool


def open(
    uri: str | Path,
    *,
    cache: str | Path | None = None,
    cache_bytes: int | None = None,
    seal: str | None = None,
    i_accept_unsealed: bool = False,
    i_accept_unprovenanced: bool = False,
) -> Dataset:
    """Open a dataset for reading; one that is unsealed or lacks provenance is refused.

    The structure, every size and every document is checked here; tables are hashed when they are
    read, arrays have a checksum per chunk; ``actds validate`` checks the whole content. With
    ``seal`` every file of an array is hashed when this process first reads of it, and E202 refuses
    other bytes than those of the seal; of a remote dataset, all of the file is fetched for that.

    Args:
        uri: the dataset's folder, or a URI: ``file://``, ``s3://``, ``gs://``, ``az://``,
            ``abfs://``, ``https://`` or ``http://``.
        cache: folder in which tables and blocks of arrays of a remote dataset are kept; processes
            may share it. With ``cache_bytes`` alone, one in the user's cache folder
            (``ACTDS_CACHE``); with neither, nothing is kept unless ``ACTDS_CACHE_BYTES`` is set.
        cache_bytes: the most that the cache keeps: ``ACTDS_CACHE_BYTES``, else 64 GiB.
        seal: digest of a seal that you trust, ``sha256:HEX``: what is read is exactly what that
            seal covers, whatever was added to the dataset since.
        i_accept_unsealed: read a dataset that is not sealed, with a warning: rows may be missing.
        i_accept_unprovenanced: read rows without a run record or a census, with a warning.

    Raises:
        ActdsError: E306 not sealed; E401 no run record; E403 no census; E101 no dataset there;
            E102 to E107 a broken or missing document; E201, E202, E205 a file of another size
            or digest; E301 to E312 a broken ledger; E804 it has no seal with this digest; E009,
            E011 a location that cannot be opened, a bound of a cache that is no number of bytes,
            or a pin that is no digest.

    Spec: 0.1 sections 8.4, 10 and 15.5.
    """
    pinned = None if seal is None else parse_pin(seal)
    store = open_store(uri)
    _give_cache(store, cache, cache_bytes)
    catalog = read_catalog(store, seal=pinned)
    if not catalog.is_sealed:
        _accept(catalog.not_sealed(str(uri)), i_accept_unsealed)
    try:
        check_provenance(catalog)
    except ActdsError as error:
        _accept(error, i_accept_unprovenanced)
    return Dataset(catalog)


def open_apart(uri: str | Path, *, imported: bool = False) -> Dataset:
    """Open a dataset as ``open`` does; its tables are parsed in a process with bounds.

    For commands that look at what a stranger made. Training reads the same tables again and again,
    and has no need of it after a validation.

    Args:
        imported: whether a dataset without provenance is accepted, with a warning.
    """
    catalog = open(uri, i_accept_unprovenanced=imported).catalog
    catalog.parse_apart()
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
    refuse_within_dataset(path, "cache")
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
    Spec: 0.1 section 6.3; of spans also 7.2, of readouts 7.8, of the canary 7.9.

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
            Shard(
                catalog.store,
                manifest,
                unknown.get(manifest.run, frozenset()),
                catalog.parse,
            )
            for manifest in catalog.shards
        ]
        self._row_places: dict[str, RowPlaces] = {}

    def __repr__(self) -> str:
        return f"<actds.Dataset {self.path}: {self.n_rows} rows, hooks {', '.join(self.hooks)}>"

    def _repr_html_(self) -> str:
        models = {model["name"] for model in self.models if model["name"] is not None}
        rows = {phase: 0 for phase in self.phases}
        for shard in self.shards:
            if shard.phase in rows:
                rows[shard.phase] += shard.n_rows
        seal = self.seal
        facts = {
            "path": self.path,
            "state": "not sealed" if seal is None else f"seal {seal.n}, {self.digest[:16]}",
            "model": ", ".join(sorted(models)) or "not recorded",
            "runs": f"{counted(len(self.runs), 'run')}, {counted(len(self.shards), 'shard')}",
            "phases": ", ".join(f"{n:,} {phase}" for phase, n in rows.items()) or "no row",
        }
        lines = [
            (
                name,
                f"{len(self.array(name)):,}",
                f"{hook.d_model:,}",
                hook.dtype,
                format_nbytes(self._stored_nbytes(name)),
            )
            for name, hook in self.hooks.items()
        ]
        head = ("hook", "rows", "channels", "type", "stored")
        return show.page("actds.Dataset", facts, head, lines)

    def _stored_nbytes(self, hook: str) -> int:
        folder = f"{layout.array_dir(hook)}/"
        files = (file for shard in self.shards_of(hook) for file in shard.manifest.files)
        return sum(file.nbytes for file in files if file.path.startswith(folder))

    def plot_norms(self, hooks: str | Iterable[str] | None = None) -> Figure:
        """Return a figure of matplotlib: norms of rows by position, of all hooks or some.

        From the readouts if there are any, else from 16,384 rows of each hook.

        Raises:
            ActdsError: E011 matplotlib is not installed; E014 no such hook.
        """
        names = [hooks] if isinstance(hooks, str) else self.hooks if hooks is None else hooks
        return show.plot_norms([norm_profile(self.catalog, self.array(name)) for name in names])

    def plot_coverage(self) -> Figure:
        """Return a figure of matplotlib: what became of the positions, by phase and position.

        Raises:
            ActdsError: E011 matplotlib is not installed.
        """
        return show.plot_coverage(fates(self.catalog))

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
    def models(self) -> tuple[dict[str, str | None], ...]:
        """Return ``name`` and ``weights_sha256`` of the models of its runs; None for unknown."""
        names = ("name", "weights_sha256")
        models: list[dict[str, str | None]] = []
        for record in self.runs.values():
            fields = (record.fields.get(f"model.{name}") for name in names)
            values = (
                None if field is None or field.value is None else str(field.value)
                for field in fields
            )
            if (model := dict(zip(names, values, strict=True))) not in models:
                models.append(model)
        return tuple(models)

    @property
    def result_key(self) -> str:
        """Return what results are kept under: the digest, and whether arrays are bound to it.

        What was computed without a pin may be of rows that nobody compared with their digest.
        """
        return f"{self.digest} bound" if self.catalog.store.binds else self.digest

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return the phases that have rows, of ``prefill`` and ``decode``."""
        present = {shard.phase for shard in self.shards if "phase" not in shard.unknown}
        return cast("tuple[Phase, ...]", tuple(p for p in tables.PHASES if p in present))

    @property
    def n_rows(self) -> int:
        """Return the number of rows, of all hooks or of those that their requests chose."""
        return sum({(s.run, s.manifest.row_set_sha256): s.n_rows for s in self.shards}.values())

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

        Rows that were drawn with different probabilities count ``1 / inclusion`` each: the
        statistics estimate those of the rows that they were drawn from (Hajek), from
        ``effective_rows``.

        Reads all rows of the hook once, shard by shard. The result is kept in the user's cache
        folder (``ACTDS_CACHE``) under the dataset's digest; a pass that was interrupted continues
        after the last shard that it finished.

        Args:
            hook: name of the hook.
            executor: where the shards are read: ``threads`` or ``processes`` of this machine, or
                ``ray``; the same numbers to the bit.

        Raises:
            ActdsError: E014 the dataset has no such hook, or rows of it are not finite; E011 Ray is
                not installed; as indexing ``array(hook)``.
        """
        shards = self.shards_of(hook)
        inclusion = self.inclusion(shards)
        sample = None if inclusion is None else Sample.of(np.concatenate(inclusion))
        counts: list[Counts | None] = [None] * len(shards)
        if inclusion is not None and sample is not None and sample.is_unequal:
            counts = [1 / shares for shares in inclusion]
        with open_executor(executor) as on:
            return stats_of_rows(
                self.hooks[hook],
                shards,
                counts,
                key=self.result_key,
                cache=cache_folder(),
                executor=on,
            )

    def inclusion(self, shards: Iterable[Shard]) -> list[Floats] | None:
        """Return the probability that each row of shards is there with, float64 ``(n_rows,)``.

        None where their runs store every row.

        Raises:
            ActdsError: E424 a probability that is none; and as ``Shard.tokens``.

        Spec: 0.1 section 7.10.
        """
        records = [(shard, self.runs.get(shard.run)) for shard in shards]
        if not any(is_drawn_from(record) for _, record in records):
            return None
        return [inclusion_of_rows(shard, record) for shard, record in records]

    def row_weights(self, path: str | os.PathLike[str]) -> RowWeights:
        """Read a weights file of this dataset, and check all of it.

        Args:
            path: what ``actds audit --weights`` wrote.

        Raises:
            ActdsError: E018 it is damaged, belongs to another dataset, or lacks a row.

        Spec: 0.1 section 14.11.
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
        if hook not in self.hooks:
            expected = f"one of {', '.join(self.hooks)}"
            raise ActdsError("E014", self.path, got=f"hook {hook!r}", expected=expected)
        return [shard for shard in self.shards if hook in shard.hooks]

    def tokens(
        self, hook: str | None = None, *, columns: list[str] | None = None, run: bool | None = None
    ) -> pa.Table:
        """Return the token table: one line per activation row, in the order of ``array``.

        Columns of which an imported run says nothing are null, but for request and position, which
        then number its rows in the order of the set.

        Args:
            hook: whose rows; None takes the first hook. All hooks have the same rows unless they
                have shards of their own, or requests chose theirs.
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
            for name in set(columns).difference(schema.names):
                expected = f"one of {', '.join(schema.names)}"
                raise ActdsError("E014", "tokens", got=f"column {name!r}", expected=expected)
            schema = pa.schema([schema.field(name) for name in columns])
        parts = [
            (shard.run, _with_nulls(shard.tokens(columns), shard.unknown).cast(schema))
            for shard in shards
        ]
        return _joined(schema.empty_table(), parts, run)

    def requests(self, *, run: bool | None = None) -> pa.Table:
        """Return one line per request: lengths, end, cached tokens."""
        return self._table("requests", run)

    def steps(self, *, run: bool | None = None) -> pa.Table:
        """Return one line per scheduler step: its time and its tokens by phase."""
        return self._table("steps", run)

    def spans(self, *, run: bool | None = None) -> pa.Table:
        """Return the disposition of every position, one line per span of positions."""
        return self._table("spans", run)

    def roles(self, *, run: bool | None = None) -> pa.Table:
        """Return who wrote the positions of chats, one line per range of positions of one role.

        Positions in no line have no known role, as all of a prompt that is a text.
        """
        return self._table("roles", run)

    def origins(self, *, run: bool | None = None) -> pa.Table:
        """Return where the tokens of replayed requests came from, one line per request.

        Positions before ``n_given`` were given to the model there, the others it sampled. A request
        in no line was no replay.
        """
        return self._table("origins", run)

    def sampled(self, *, run: bool | None = None) -> pa.Table:
        """Return entropy, log-probability and margin of sampled tokens, one line per token.

        Of the model's own logits, in nats. ``position`` is the one that the token takes; the token
        that a request sampled last has a line and no row. A run without ``--entropy`` has none.
        """
        return self._table("sampled", run)

    def drops(self, *, run: bool | None = None) -> pa.Table:
        """Return one line per range of rows that the writer dropped, with the reason."""
        return self._table("drops", run)

    def stalls(self, *, run: bool | None = None) -> pa.Table:
        """Return one line per time that a stage of the writer had to wait."""
        return self._table("stalls", run)

    def occupancy(self, *, run: bool | None = None) -> pa.Table:
        """Return how long the queue of each stage had each depth, in nanoseconds."""
        return self._table("occupancy", run)

    def readouts(self, *, run: bool | None = None) -> pa.Table:
        """Return the norm, projections and probes of every computed row, stored or lost."""
        return self._table("readouts", run)

    def alerts(self, *, run: bool | None = None) -> pa.Table:
        """Return where the score of a request rose above the threshold of the run's profile."""
        return self._table("alerts", run)

    def attention(self, *, run: bool | None = None) -> pa.Table:
        """Return where decode steps attended, of the requests and layers that were looked at."""
        return self._table("attention", run)

    def canary(self, *, run: bool | None = None) -> pa.Table:
        """Return the comparison of stored rows with rows of requests replayed alone."""
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
            self._row_places[name] = RowPlaces(self.catalog, self.array(name))
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
            raise self.catalog.not_sealed(self.path)
        return self.catalog.table("multiplicity")

    def _table(self, name: TableName, run: bool | None) -> pa.Table:
        run = self._with_run(name, run)
        parts = [(run_id, self.catalog.table(name, run_id)) for run_id in self.catalog.run_ids]
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


def _with_nulls(table: pa.Table, unknown: frozenset[str]) -> pa.Table:
    for name in sorted((unknown - ROW_NUMBERS).intersection(table.column_names)):
        field = table.schema.field(name).with_nullable(True)
        nulls = pa.nulls(table.num_rows, field.type)
        table = table.set_column(table.schema.get_field_index(name), field, nulls)
    return table


def _joined(empty: pa.Table, parts: list[tuple[str, pa.Table]], run: bool) -> pa.Table:
    joined = pa.concat_tables([empty, *(table for _, table in parts)])
    if not run:
        return joined
    column = pa.chunked_array(
        [pa.repeat(pa.scalar(name, pa.string()), table.num_rows) for name, table in parts],
        type=pa.string(),
    )
    return joined.add_column(0, pa.field("run", pa.string(), nullable=False), column)
