"""Opening a dataset: hooks, tables and lazy arrays of what is sealed and has provenance."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import cast

import pyarrow as pa

from actds.errors import ActdsError
from actds.format import tables
from actds.format.shard import Shard
from actds.format.tables import TableName
from actds.load.lazy import LazyArray
from actds.load.stats import Stats, stats_of
from actds.reading import Catalog
from actds.schema import Hook, Phase, RunRecord, Seal
from actds.sealing import check_provenance
from actds.store import open_store

__all__ = ["Dataset", "open"]


def open(
    uri: str | Path, *, i_accept_unsealed: bool = False, i_accept_unprovenanced: bool = False
) -> Dataset:
    """Return a dataset for reading; one that is unsealed or lacks provenance is refused.

    The structure, every size and every document is checked here; files are hashed when they are
    read; ``actds validate`` checks the whole content.

    Args:
        uri: the dataset's folder.
        i_accept_unsealed: read a ledger that is not closed, with a warning. Nothing says that the
            rows are all there.
        i_accept_unprovenanced: read rows of which nobody says how they came to be, with a warning.

    Raises:
        ActdsError: E306 not sealed; E401, E403 without provenance; what ``Catalog.read`` raises.

    Spec: 0.1 sections 8.4 and 10.
    """
    catalog = Catalog.read(open_store(uri))
    if not catalog.is_sealed:
        seal = f"seal {catalog.seal.n} of an older ledger" if catalog.seal else "no seal"
        unsealed = ActdsError("E306", str(uri), got=seal, expected="a seal of the present ledger")
        _accept(unsealed, i_accept_unsealed)
    try:
        check_provenance(catalog)
    except ActdsError as error:
        _accept(error, i_accept_unprovenanced)
    return Dataset(catalog)


def _accept(error: ActdsError, accepted: bool) -> None:
    if not accepted:
        raise error
    warnings.warn(f"read all the same: {error}", UserWarning, stacklevel=3)


class Dataset:
    """A dataset as it was when it was opened.

    Tables are those of all runs, one after the other. Requests, steps and drops are numbered within
    their run: a join takes ``run`` as well, so where there are several runs each table asks for
    ``run=True``, which puts it in front as a column, or ``run=False``, which does without.

    Args:
        catalog: what its ledger reaches.

    Spec: 0.1 section 10.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.path = catalog.store.uri
        self.hooks: dict[str, Hook] = {hook.name: hook for hook in catalog.genesis.hooks}
        self.runs: dict[str, RunRecord] = catalog.runs
        self.shards = [Shard(catalog.store, manifest) for manifest in catalog.shards]

    def __repr__(self) -> str:
        return f"<actds.Dataset {self.path}: {self.n_rows} rows, hooks {', '.join(self.hooks)}>"

    @property
    def seal(self) -> Seal | None:
        """Return the seal; None for a dataset that was opened unsealed."""
        return self.catalog.seal if self.catalog.is_sealed else None

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the seal: it names this very content."""
        return self.catalog.digest

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return the phases that have rows."""
        there = {shard.phase for shard in self.shards}
        return cast("tuple[Phase, ...]", tuple(p for p in tables.PHASES if p in there))

    @property
    def n_rows(self) -> int:
        """Return the rows of a hook; the most, where hooks have shards of their own."""
        return max(len(self.array(hook)) for hook in self.hooks)

    def array(self, hook: str) -> LazyArray:
        """Return the rows of a hook over all shards; row ``i`` is that of ``tokens(hook)``.

        Raises:
            ActdsError: E014 the dataset has no such hook.
        """
        self._check_hook(hook)
        return LazyArray(self.hooks[hook], self.shards_of(hook))

    def stats(self, hook: str) -> Stats:
        """Return mean, variance and mean norm of a hook's rows, added up in float64.

        Raises:
            ActdsError: E014 the dataset has no such hook; as reading its rows.
        """
        return stats_of(self.array(hook))

    def shards_of(self, hook: str) -> list[Shard]:
        """Return the shards that hold a hook, in the order of ``array``.

        Raises:
            ActdsError: E014 the dataset has no such hook.
        """
        self._check_hook(hook)
        return [shard for shard in self.shards if hook in shard.hooks]

    def tokens(
        self, hook: str | None = None, *, columns: list[str] | None = None, run: bool | None = None
    ) -> pa.Table:
        """Return the token tables of all shards, one row per activation row.

        Args:
            hook: whose rows; the first hook's when None, which are those of every hook unless
                hooks have shards of their own.
            columns: columns to read, all when None.
            run: put the run in front as a column. None does not, and is refused where there are
                several runs.

        Raises:
            ActdsError: E014 no such hook, or several runs and ``run`` is not given; what
                ``Shard.tokens`` raises.
        """
        run = self._with_run("tokens", run)
        schema = tables.bare_schema("tokens")
        if columns is not None:
            _check_columns(columns, schema.names)
            schema = pa.schema([schema.field(name) for name in columns])
        parts = [
            (shard.run, shard.tokens(columns))
            for shard in self.shards_of(hook or next(iter(self.hooks)))
        ]
        return _joined(schema.empty_table(), parts, run)

    def requests(self, *, run: bool | None = None) -> pa.Table:
        """Return one row per request; with ``run``, its run is the first column."""
        return self._table("requests", run)

    def steps(self, *, run: bool | None = None) -> pa.Table:
        """Return one row per scheduler step; with ``run``, its run is the first column."""
        return self._table("steps", run)

    def spans(self, *, run: bool | None = None) -> pa.Table:
        """Return what became of every position; with ``run``, its run is the first column."""
        return self._table("spans", run)

    def drops(self, *, run: bool | None = None) -> pa.Table:
        """Return what the writer dropped and why; with ``run``, its run is the first column."""
        return self._table("drops", run)

    def stalls(self, *, run: bool | None = None) -> pa.Table:
        """Return when a stage had to wait; with ``run``, its run is the first column."""
        return self._table("stalls", run)

    def occupancy(self, *, run: bool | None = None) -> pa.Table:
        """Return how long each stage's queue stood at each depth."""
        return self._table("occupancy", run)

    def readouts(self, *, run: bool | None = None) -> pa.Table:
        """Return the readouts of every computed row, captured or lost."""
        return self._table("readouts", run)

    def canary(self, *, run: bool | None = None) -> pa.Table:
        """Return the comparison of stored rows with rows of requests replayed alone."""
        return self._table("canary", run)

    def multiplicity(self) -> pa.Table:
        """Return how often rows were served, where more than once.

        Raises:
            ActdsError: E306 the dataset is not sealed.
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
