"""Parquet in the one form of the spec: judged by its footer, read, judged by its values.

The file is from a stranger. What it claims is compared with its size before a column is read, and
what was read is looked at once before anybody uses it: Arrow itself believes strings and lists.
"""

from __future__ import annotations

import mmap
import os

import pyarrow as pa
import pyarrow.parquet as pq

from actds.errors import ActdsError
from actds.format.pages import Footer, check_pages, check_statistics

_MIN_NBYTES, _MAX_RATIO = 1 << 25, 512


def max_nbytes(file_nbytes: int) -> int:
    """Return how large the columns of a file of so many bytes may be, decoded.

    Above every honest table (356 times, measured: a million rows of which nothing but numbers of
    requests and positions is known); zstd and run lengths alone allow a million times.
    """
    return _MIN_NBYTES + _MAX_RATIO * file_nbytes


def read(
    data: bytes | pa.Buffer | str,
    place: str,
    schema: pa.Schema,
    columns: list[str] | None = None,
    *,
    statistics: bool = False,
    limit: int | None = None,
) -> pa.Table:
    """Return a table from Parquet, with exactly the types of the schema.

    Args:
        data: the file's bytes, or its path.
        place: what an error names.
        schema: the columns that the file must have, in order.
        columns: those to read, all when ``None``.
        statistics: check those of the columns that are read.
        limit: bytes of columns that are not too large; ``max_nbytes`` when ``None``.

    Raises:
        ActdsError: E206 unreadable, a page without its checksum or failing it, a footer that lies
            or has an ``ARROW:schema`` key, columns larger than the limit, strings that are no
            UTF-8; E109 columns that differ from the schema, or nulls where there may be none.

    Spec: 0.1 section 6.2.
    """
    wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
    try:
        file_nbytes = os.path.getsize(data) if isinstance(data, str) else len(data)
        limit = max_nbytes(file_nbytes) if limit is None else limit
        source = data if isinstance(data, str) else pa.BufferReader(data)
        with pq.ParquetFile(source, page_checksum_verification=True) as file:
            if b"ARROW:schema" in (file.metadata.metadata or {}):
                got, expected = "an Arrow schema in the footer", "plain Parquet"
                raise ActdsError("E206", place, got=got, expected=expected)
            check_columns(file.schema_arrow, schema, place)
            footer = _footer(data, place)
            _check_size(file.metadata, wanted, limit, place)
            # A thread of Arrow's pool that still holds Python's bytes when the interpreter ends
            # aborts the process (apache/arrow#34314): bytes are read by this thread alone.
            table = file.read(columns=columns, use_threads=isinstance(data, str))
        table = table.select(wanted.names)
        if table.num_rows != sum(footer.n_rows):
            got, expected = f"{table.num_rows} rows", f"{sum(footer.n_rows)}, as in the footer"
            raise ActdsError("E206", place, got=got, expected=expected)
        if table.nbytes > limit:
            raise _too_large(place, f"{table.nbytes} bytes of columns", limit)
        table.validate(full=True)
        if statistics:
            check_statistics(footer, table, place)
        # Before the cast, which refuses nulls as well, but in words that name no place.
        refuse_nulls(table, wanted, place)
        return table.cast(wanted)
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError, OverflowError) as error:
        if isinstance(error, ActdsError):
            raise
        words = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ActdsError("E206", place, got=words, expected="a readable Parquet file") from None


def _footer(data: bytes | pa.Buffer | str, place: str) -> Footer:
    """Return the footer of a file whose pages are as it says; raises as ``check_pages``."""
    if not isinstance(data, str):
        return check_pages(memoryview(data).cast("B"), place)
    with (
        open(data, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole,
        memoryview(whole) as view,
    ):
        return check_pages(view, place)


def check_columns(schema: pa.Schema, wanted: pa.Schema, place: str) -> None:
    """Check names and types of columns; of a list the type of its elements, whatever their name.

    Raises:
        ActdsError: E109 they differ.
    """
    if schema.names != wanted.names:
        got, expected = f"columns {schema.names}"[:400], f"{wanted.names}"
        raise ActdsError("E109", place, got=got, expected=expected)
    for field, want in zip(schema, wanted, strict=True):
        if _bare(field.type) != _bare(want.type):
            got, expected = str(field.type)[:200], str(want.type)
            raise ActdsError("E109", f"{place} {field.name}", got=got, expected=expected)


def refuse_nulls(table: pa.Table, schema: pa.Schema, place: str) -> None:
    """Refuse nulls in columns that have none, and in every list.

    Raises:
        ActdsError: E109 there is one.
    """
    for field in schema:
        column = table[field.name]
        n_nulls = 0 if field.nullable else column.null_count
        if pa.types.is_list(field.type):
            n_nulls += sum(chunk.flatten().null_count for chunk in column.chunks)
        if n_nulls:
            place = f"{place} {field.name}"
            raise ActdsError("E109", place, got=f"{n_nulls} nulls", expected="no null")


def _bare(kind: pa.DataType) -> tuple[bool, pa.DataType]:
    return (True, kind.value_type) if pa.types.is_list(kind) else (False, kind)


def _check_size(metadata: pq.FileMetaData, wanted: pa.Schema, limit: int, place: str) -> None:
    width = sum(4 if _is_long(field.type) else -(-field.type.bit_width // 8) for field in wanted)
    nbytes = metadata.num_rows * width
    names, long = set(wanted.names), 0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if column.path_in_schema.partition(".")[0] in names:
                long += max(0, column.total_uncompressed_size)
    if metadata.num_rows < 0 or max(nbytes, long) > limit:
        got = f"{metadata.num_rows} rows, {max(nbytes, long)} bytes of columns"
        raise _too_large(place, got, limit)


def _is_long(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_list(kind))


def _too_large(place: str, got: str, limit: int) -> ActdsError:
    return ActdsError("E206", place, got=got, expected=f"at most {limit} bytes for its size")
