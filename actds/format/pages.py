"""Pages and footer of a Parquet file, as they stand in the file and not as a library shows them.

A library passes over a page without a checksum, and believes the rows and statistics of a footer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from actds.errors import ActdsError

Struct = dict[int, Any]
"""Fields by number: numbers, bytes, booleans, structs, and lists of these."""

_MAX_DEPTH = 16
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)


class ThriftError(ValueError):
    """Bytes that are no struct of the protocol."""


class _Reader:
    def __init__(self, data: bytes | memoryview, position: int) -> None:
        self.data, self.position = data, position

    def take(self, nbytes: int) -> bytes | memoryview:
        end = self.position + nbytes
        if nbytes < 0 or end > len(self.data):
            raise ThriftError(f"{nbytes} bytes at {self.position} of {len(self.data)}")
        taken, self.position = self.data[self.position : end], end
        return taken

    def byte(self) -> int:
        position = self.position
        if position >= len(self.data):
            raise ThriftError(f"an end at {position}")
        self.position = position + 1
        return self.data[position]

    def varint(self) -> int:
        value = shift = 0
        while (byte := self.byte()) >= 0x80:
            value |= (byte & 0x7F) << shift
            shift += 7
            if shift > 63:
                raise ThriftError(f"an integer of more than 64 bits at {self.position}")
        return value | byte << shift

    def integer(self) -> int:
        value = self.varint()
        return value >> 1 ^ -(value & 1)

    def struct(self, depth: int) -> Struct:
        if depth > _MAX_DEPTH:
            raise ThriftError(f"more than {_MAX_DEPTH} structs inside one another")
        fields: Struct = {}
        number = 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.integer()
            if number in fields:
                raise ThriftError(f"field {number} twice")
            kind = head & 15
            # Most values are integers: a footer has hundreds, and is read for each small table.
            fields[number] = self.integer() if kind in _INTEGERS else self.value(kind, depth)
        return fields

    def value(self, kind: int, depth: int) -> Any:
        if kind in _INTEGERS:
            return self.integer()
        if kind == _BINARY:
            return bytes(self.take(self.varint()))
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_LIST, _SET):
            return self.items(depth + 1)
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind in (_BYTE, _DOUBLE):
            return bytes(self.take(1 if kind == _BYTE else 8))
        raise ThriftError(f"a value of type {kind} at {self.position}")

    def items(self, depth: int) -> list[Any]:
        if depth > _MAX_DEPTH:
            raise ThriftError(f"more than {_MAX_DEPTH} lists inside one another")
        head = self.byte()
        n, kind = head >> 4, head & 15
        n = self.varint() if n == 15 else n
        if n > len(self.data) - self.position:  # an item has a byte at least
            raise ThriftError(f"a list of {n} items in {len(self.data) - self.position} bytes")
        if kind in (_TRUE, _FALSE):  # in a list a boolean is a byte of its own
            return [byte == _TRUE for byte in self.take(n)]
        return [self.value(kind, depth) for _ in range(n)]


def read_struct(data: bytes | memoryview, position: int = 0) -> tuple[Struct, int]:
    """Return a struct and where it ends.

    Raises:
        ThriftError: the bytes are no struct, or end before it does.
    """
    reader = _Reader(data, position)
    return reader.struct(0), reader.position


_MAGIC, _TAIL_NBYTES = b"PAR1", 8
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_HEADERS = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}
"""By type of a page: the field of its header that says how many values it has."""
_ASIDE = {4: "an offset index", 6: "a column index", 8: "encryption", 1: "a path to another file"}
"""Fields of a column chunk that lead a reader to something else than its pages."""
_ASIDE_METADATA = {10: "index pages", 14: "a Bloom filter"}


@dataclass(frozen=True)
class Footer:
    """What a footer says of the data, after that was compared with the pages.

    Args:
        n_rows: rows of each row group.
        columns: by row group, the columns' metadata: fields by their numbers, and names.
    """

    n_rows: list[int]
    columns: list[list[tuple[str, Struct]]]


def check_pages(data: memoryview, place: str) -> Footer:
    """Return a file's footer after comparing it with the pages, each of which has a checksum.

    What the checksums are, and what the pages hold, is for the library that decodes them.

    Args:
        data: the whole file.
        place: what an error names.

    Raises:
        ActdsError: E206 a page without a checksum, a footer that names other rows or pages than
            there are, or that leads to anything but its pages.

    Spec: 0.1 section 6.2.
    """
    try:
        return _checked(data)
    except (ThriftError, KeyError, TypeError, IndexError, AttributeError, UnicodeDecodeError) as e:
        got = f"{type(e).__name__}: {e}"[:200]
        raise ActdsError("E206", place, got=got, expected="a Parquet file") from None
    except _Refused as refused:
        got, expected = refused.args
        raise ActdsError("E206", place, got=got, expected=expected) from None


class _Refused(Exception):
    """What is there, and what is expected."""


def _checked(data: memoryview) -> Footer:
    size = len(data)
    if size < len(_MAGIC) + _TAIL_NBYTES or data[:4] != _MAGIC or data[-4:] != _MAGIC:
        raise _Refused(f"{size} bytes that are no Parquet file", "PAR1 at both ends")
    nbytes = int.from_bytes(data[-8:-4], "little")
    start = size - _TAIL_NBYTES - nbytes
    if start < len(_MAGIC):
        raise _Refused(f"a footer of {nbytes} bytes in a file of {size}", "a footer in the file")
    # As bytes, which are read faster one by one than a view of them.
    footer, end = read_struct(bytes(data[start : size - _TAIL_NBYTES]))
    if end != nbytes:
        raise _Refused(f"{nbytes - end} bytes behind the footer", "none")
    groups = footer.get(4, [])
    n_rows = [group[3] for group in groups]
    if sum(n_rows) != footer[3] or min(n_rows, default=0) < 0:
        raise _Refused(f"{footer[3]} rows", f"{sum(n_rows)}, as in the row groups")
    columns = []
    for group in groups:
        if group.get(4):
            raise _Refused("columns that the rows are said to be sorted by", "none")
        columns.append([_column(data[:start], chunk, group[3]) for chunk in group[1]])
    return Footer(n_rows, columns)


def _column(data: memoryview, chunk: Struct, n_rows: int) -> tuple[str, Struct]:
    column = chunk[3]
    path = [part.decode() for part in column[3]]
    name = ".".join(path)
    for fields, aside in ((chunk, _ASIDE), (column, _ASIDE_METADATA)):
        for number, what in aside.items():
            if number in fields:
                raise _Refused(f"{what} of column {name}", "pages alone")
    n_values = sum(_page_values(data, column, name))
    # A list has a value per item, and one if it is empty.
    if n_values != column[5] or (n_values < n_rows if len(path) > 1 else n_values != n_rows):
        got = f"{n_rows} rows, {column[5]} values in column {name}"
        raise _Refused(got, f"{n_values}, as its pages have")
    return path[0], column


def _page_values(data: memoryview, column: Struct, name: str) -> Iterator[int]:
    # Without a value there is no data page, and its offset is 0.
    position = min(filter(None, (column.get(11), column[9])), default=0)
    end = position + column[7]
    if not len(_MAGIC) <= position <= end <= len(data):
        raise _Refused(f"pages of column {name} in [{position}, {end})", "pages in the file")
    unpacked = 0
    first = True
    while position < end:
        header, body = read_struct(data[:end], position)
        kind, nbytes = header[1], header[3]
        if kind not in _HEADERS or (kind == _DICTIONARY and not first):
            raise _Refused(f"a page of type {kind} in column {name}", "data, or a dictionary first")
        if 4 not in header:
            raise _Refused(f"a page of column {name} without a checksum", "a CRC-32 in each page")
        if nbytes < 0 or header[2] < 0 or body + nbytes > end:
            raise _Refused(f"a page of {nbytes} bytes in column {name}", f"at most {end - body}")
        n_values = header[_HEADERS[kind]][1]
        if n_values < 0:
            raise _Refused(f"a page of {n_values} values in column {name}", "no less than 0")
        if kind != _DICTIONARY:
            yield n_values
        unpacked += header[2] + body - position
        position, first = body + nbytes, False
    if unpacked != column[6]:
        raise _Refused(f"{column[6]} bytes of column {name}, unpacked", f"{unpacked}, as its pages")


def check_statistics(footer: Footer, table: pa.Table, place: str) -> None:
    """Check that the statistics of a footer are true of the columns that were read.

    A reader leaves out row groups by them without a look at the pages.

    Args:
        footer: that of the file.
        table: the rows of the file, of all columns or some.
        place: what an error names.

    Raises:
        ActdsError: E206 a minimum, maximum or number of nulls is not that of the values.

    Spec: 0.1 section 6.2.
    """
    first = 0
    for n_rows, columns in zip(footer.n_rows, footer.columns, strict=True):
        group = table.slice(first, n_rows)
        first += n_rows
        for name, column in columns:
            if name in table.column_names and 12 in column:
                _check_column(group[name], column[12], f"{place} {name}")


def _check_column(values: pa.ChunkedArray, footer: Struct, place: str) -> None:
    nulls = footer.get(3)
    is_list = pa.types.is_list(values.type)
    if nulls is not None and not is_list and nulls != values.null_count:
        _lie(place, f"null_count {nulls}", f"{values.null_count}")
    # The old pair of fields has the order of signed numbers, and stands beside the new pair.
    for old, new, what in ((1, 5, "max"), (2, 6, "min")):
        if old in footer and footer[old] != footer.get(new, footer[old]):
            _lie(place, f"two values of {what}", "one")
    flat = pc.list_flatten(values) if is_list else values
    kind = flat.type
    bounds = pc.min_max(flat.cast(pa.binary()) if pa.types.is_string(kind) else flat).as_py()
    for new, old, exact, what in ((5, 1, 7, "max"), (6, 2, 8, "min")):
        raw = footer.get(new, footer.get(old))
        real = bounds[what]
        if raw is None or real is None or real != real:
            continue
        claimed = _decoded(raw, kind)
        if claimed is None:
            _lie(place, f"{what} of {len(raw)} bytes", f"a value of {kind}")
        wide = claimed >= real if what == "max" else claimed <= real
        if not wide or (footer.get(exact) is True and claimed != real):
            _lie(place, f"{what} {claimed!r:.60}", f"{real!r:.60}, of the values")


def _decoded(raw: bytes, kind: pa.DataType) -> Any:
    """Return a plain-encoded value of a column, None when the bytes are none."""
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return raw
    if pa.types.is_floating(kind):
        width, form = kind.bit_width // 8, "<f" if kind.bit_width == 32 else "<d"
        return struct.unpack(form, raw)[0] if len(raw) == width else None
    width = max(4, kind.bit_width // 8)
    if len(raw) != width:
        return None
    return int.from_bytes(raw, "little", signed=pa.types.is_signed_integer(kind))


def _lie(place: str, got: str, expected: str) -> None:
    raise ActdsError("E206", place, got=f"statistics with {got}", expected=expected)
