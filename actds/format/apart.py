"""Tables of strangers, read apart: a file that ends its parser is a finding.

The columns come back as Arrow IPC of a process that runs this module, never of the file. What all
tables of a dataset may have together follows from the size of the dataset.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from actds.apart import Apart, Reply, Request, cpu_seconds
from actds.format import parquet

if TYPE_CHECKING:
    from actds.format import tables

_SLACK_NBYTES = 64 << 20  # of the decoder, beside columns that exist twice while they grow
_MIN_NBYTES, _MAX_RATIO = 1 << 25, 16
"""Bytes of all columns for a byte of the dataset: rows are larger than what is said about them, and
so are honest tables without rows than a sixteenth of their columns."""
_lock = threading.Lock()  # one file at a time: each may take the whole room
_parsers = Apart(f"{__name__}:parse", numpy=False)


def start() -> None:
    """Start the process, so that it is ready when the first table is; forget how others ended."""
    _parsers.deaths.clear()
    pid()


def pid() -> int:
    """Return the id of the process, which is started where there is none."""
    with _lock:
        return _parsers.start()


class TablesApart:
    """Reads the tables of one dataset in the other process.

    Args:
        dataset_nbytes: size of all its files: what all columns together may have follows from it.
    """

    def __init__(self, dataset_nbytes: int) -> None:
        self._room = _MIN_NBYTES + _MAX_RATIO * dataset_nbytes
        self._nbytes: dict[str, int] = {}
        self._total = 0
        start()

    def from_parquet(
        self,
        name: tables.TableName,
        data: bytes,
        place: str,
        columns: list[str] | None = None,
        kept: list[str] | None = None,
    ) -> pa.Table:
        """Return a table from the bytes of a file, statistics checked; as ``tables.from_parquet``.

        Raises:
            ActdsError: as ``tables.from_parquet``; E206 also for a file that ends its parser, that
                makes the dataset's tables too large, or that comes after three such files.
        """
        nbytes_before = self._nbytes.get(place, 0)
        limit = self._room - self._total + nbytes_before
        from actds.format import tables  # the other process has no need of it

        words = {"place": place, "columns": columns, "kept": kept, "limit": limit}
        nbytes, table = _read(data, words, tables.bare_schema(name))
        self._nbytes[place] = max(nbytes_before, nbytes)
        self._total += self._nbytes[place] - nbytes_before
        return table


def _read(data: bytes, words: dict[str, Any], schema: pa.Schema) -> tuple[int, pa.Table]:
    """Return the bytes of all columns that were read, and the table of those that are kept."""
    head = schema.serialize().to_pybytes()
    request = Request(
        {**words, "n_schema": len(head)},
        [head, data],
        words["place"],
        "E206",
        "a readable Parquet file",
        _SLACK_NBYTES + 2 * words["limit"],
        cpu_seconds(len(data)),
    )
    with _lock:
        [(answer, body)] = _parsers.ask(request)
    return answer["nbytes"], pa.ipc.open_stream(body).read_all()


def parse(request: dict[str, Any], body: pa.Buffer) -> Iterator[Reply]:
    """Answer with a table as an Arrow stream: the handler in the other process."""
    schema = pa.ipc.read_schema(body.slice(0, request["n_schema"]))
    data, limit = body.slice(request["n_schema"]), request["limit"]
    place, columns = request["place"], request["columns"]
    table = parquet.read(data, place, schema, columns, statistics=True, limit=limit)
    nbytes = table.nbytes
    if request["kept"] is not None:
        table = table.select(request["kept"])
    yield stream_of(table, nbytes=nbytes)


def stream_of(table: pa.Table, **words: Any) -> Reply:
    """Return an answer with a table, as the other process gives it."""
    counted = pa.MockOutputStream()
    _stream(table, counted)
    return Reply(words, counted.size(), lambda sink: _stream(table, pa.PythonFile(sink, "w")))


def _stream(table: pa.Table, sink: Any) -> None:
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
