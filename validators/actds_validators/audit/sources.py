"""Sources: the tables of a dataset, one run at a time: for DuckDB, and as parts to be read in turn.

First stage of the audit. Every file is hashed against its ledger entry before anything opens it.
Imports the format room and DuckDB.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actds.errors import ActdsError
from actds.format import layout, tables
from actds.format.shard import TOKENS
from actds.format.tables import TableName
from actds.reading import Catalog
from actds.store import file_sha256
from actds.store.local import LocalStore
from actds_validators.audit.executor import N_THREADS

__all__ = [
    "MEMORY_LIMIT",
    "Part",
    "RunSource",
    "arrow_source",
    "catalog_source",
    "connect",
]

MEMORY_LIMIT = "400MB"
BATCH_ROWS = 1 << 15
LOOKED_AT = 10_000
"""Readouts among which the longest says how many projections a run has; all should have as many."""
RUN_TABLES: tuple[TableName, ...] = (
    "tokens",
    "requests",
    "steps",
    "spans",
    "drops",
    "stalls",
    "occupancy",
    "readouts",
)
PARTED: tuple[TableName, ...] = ("tokens", "readouts")
"""Tables that grow with the tokens."""


@dataclass(frozen=True)
class Part:
    """Rows of a table: one file, or what is in memory instead.

    Args:
        n_rows: number of rows.
        path: Parquet file on a local disk; ``None`` for rows in memory.
        table: the rows in memory.
    """

    n_rows: int
    path: str | None = None
    table: pa.Table | None = None

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield some columns of the rows, in order, a few ten thousand rows at a time."""
        if self.path is not None:
            with pq.ParquetFile(self.path) as file:
                yield from file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False)
        elif self.table is not None:
            yield from self.table.select(columns).to_batches(max_chunksize=BATCH_ROWS)


@dataclass(frozen=True)
class RunSource:
    """One run: a relation per table in a connection of its own.

    Args:
        run: the run.
        connection: DuckDB, with views named as the tables.
        hooks: hooks with readouts, in the order of the dataset.
        n_projections: projections per readout, of the longest of the first ten thousand.
        n_probes: user's probes per readout, likewise.
        parts: the tables ``tokens`` and ``readouts`` in parts: a shard or a ledger entry each.
    """

    run: str
    connection: duckdb.DuckDBPyConnection
    hooks: tuple[str, ...] = ()
    n_projections: int = 0
    n_probes: int = 0
    parts: Mapping[TableName, tuple[Part, ...]] = field(default_factory=dict)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        return self.connection.execute(sql).fetchall()

    def one(self, sql: str) -> tuple[Any, ...]:
        """Return the only row of a query."""
        [row] = self.rows(sql)
        return row

    def columns(self, sql: str) -> dict[str, npt.NDArray[Any]]:
        """Return the columns of a query as numpy arrays; null is NaN in a float column."""
        found = self.connection.execute(sql).fetchnumpy()
        return {
            name: np.ma.filled(column.astype(np.float64), np.nan)
            if isinstance(column, np.ma.MaskedArray) and column.mask.any()
            else np.asarray(column)
            for name, column in found.items()
        }


@contextmanager
def connect() -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a connection to an empty database in memory, bounded and without extensions."""
    with TemporaryDirectory(prefix="actds-audit-") as spill:
        settings: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": MEMORY_LIMIT,
            "threads": str(N_THREADS),
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "preserve_insertion_order": "false",
            "temp_directory": spill,  # by default a folder in the working directory
        }
        connection = duckdb.connect(":memory:", config=settings)
        try:
            yield connection
        finally:
            connection.close()


@contextmanager
def catalog_source(catalog: Catalog, run: str) -> Iterator[RunSource]:
    """Yield the tables of one run of a dataset.

    Files on a local disk are read in place, those of an object store as a whole.

    Raises:
        ActdsError: E202 a file that changed; E109 and E206 no table of the spec; what
            ``Catalog.table`` raises.
    """
    parts: dict[TableName, tuple[Part, ...]] = {}
    with connect() as connection:
        for name in RUN_TABLES:
            if name == "tokens":
                _, shards = catalog.row_sets(run)[0] if catalog.row_sets(run) else ([], [])
                entries = [
                    (f"{layout.shard_dir(s.name)}/{TOKENS}", e.sha256)
                    for s in shards
                    for e in s.manifest.files
                    if e.path == TOKENS
                ]
            else:
                committed = catalog.parts.get((run, name), [])
                entries = [(part.file.path, part.file.sha256) for part in committed]
            if isinstance(catalog.store, LocalStore) and entries:
                paths = []
                for path, sha256 in entries:
                    _check(catalog, path, sha256)
                    # A worker may run in another folder.
                    paths.append(os.path.abspath(catalog.store.local_path(path)))
                    tables.from_parquet(name, paths[-1], path, columns=[])  # its form alone
                connection.read_parquet([_literal(p) for p in paths]).create_view(name)
                if name in PARTED:
                    rows = [pq.read_metadata(local).num_rows for local in paths]
                    parts[name] = tuple(
                        Part(n, path=local) for local, n in zip(paths, rows, strict=True)
                    )
                continue
            if name == "tokens":
                found = [shard.tokens() for shard in shards] if entries else []
                parts[name] = tuple(Part(t.num_rows, table=t) for t in found)
                table = pa.concat_tables([tables.empty(name), *found])
            else:
                table = catalog.table(name, run)
                if name in PARTED:
                    parts[name] = (Part(table.num_rows, table=table),)
            _register(connection, name, table)
        yield _source(run, connection, parts)


@contextmanager
def arrow_source(run: str, found: Mapping[str, pa.Table]) -> Iterator[RunSource]:
    """Yield tables that are in memory; one that is missing is empty."""
    parts: dict[TableName, tuple[Part, ...]] = {}
    with connect() as connection:
        for name in RUN_TABLES:
            table = found.get(name, tables.empty(name))
            _register(connection, name, table)
            if name in PARTED:
                parts[name] = (Part(table.num_rows, table=table),)
        yield _source(run, connection, parts)


def _register(connection: duckdb.DuckDBPyConnection, name: str, table: pa.Table) -> None:
    connection.register(f"{name}_arrow", table)
    connection.execute(f"create view {name} as select * from {name}_arrow")


def _literal(path: str) -> str:
    """Return a path that DuckDB does not take for a pattern."""
    return re.sub(r"([*?\[])", r"[\1]", path)


def _check(catalog: Catalog, path: str, expected: str) -> None:
    got = file_sha256(catalog.store, path)
    if got != expected:
        raise ActdsError(
            "E202", path, got=f"SHA-256 {got[:16]}…", expected=f"{expected[:16]}…, as committed"
        )


def _source(
    run: str,
    connection: duckdb.DuckDBPyConnection,
    parts: Mapping[TableName, tuple[Part, ...]],
) -> RunSource:
    hooks = [
        row[0]
        for row in connection.execute("select distinct hook from readouts order by hook").fetchall()
    ]
    readouts = parts.get("readouts", ())
    longest = {name: _longest(readouts, name) for name in ("projections", "probes")}
    return RunSource(
        run, connection, tuple(hooks), longest["projections"], longest["probes"], parts
    )


def _longest(parts: tuple[Part, ...], name: str) -> int:
    """Return the longest list of a column among the first readouts; they should all be as long."""
    for part in parts:
        for batch in part.batches([name]):
            if batch.num_rows:
                lengths = pc.list_value_length(batch.column(0).slice(0, LOOKED_AT))
                return int(pc.max(lengths).as_py() or 0)
    return 0
