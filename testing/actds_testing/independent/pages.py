"""Section 6.2, below the columns: the footer of a Parquet file, its pages and its statistics.

The footer and the headers of pages are structures in the compact protocol of Thrift.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

from actds_testing.independent.findings import need

Fields = dict[int, Any]
FORMATS = {"uint16": "<I", "uint32": "<I", "uint64": "<Q", "int64": "<q", "float": "<f"}
FORMATS["float64"] = "<d"


class _Thrift:
    """Reads one structure of the compact protocol, fields by their numbers."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80 or shift > 63:
                return value

    def _integer(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)

    def structure(self, depth: int = 0) -> Fields:
        fields: Fields = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            fields[number] = self._value(head & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > 16:
            raise ValueError("a footer too deep")
        if kind in (1, 2):
            return kind == 1
        if kind in (3, 4, 5, 6):
            return self._byte() if kind == 3 else self._integer()
        if kind == 7:
            self.at += 8
            return struct.unpack("<d", self.data[self.at - 8 : self.at])[0]
        if kind == 8:
            size = self._unsigned()
            self.at += size
            return self.data[self.at - size : self.at]
        if kind in (9, 10):
            head = self._byte()
            size = head >> 4 if head >> 4 < 15 else self._unsigned()
            return [self._item(head & 15, depth) for _ in range(size)]
        if kind == 12:
            return self.structure(depth + 1)
        raise ValueError(f"type {kind} in a footer")

    def _item(self, kind: int, depth: int) -> Any:
        return self._byte() == 1 if kind in (1, 2) else self._value(kind, depth + 1)


def check_file(data: bytes, place: str) -> list[list[Fields]]:
    """Check footer and pages; return the statistics of each column of each row group (E206)."""
    need(len(data) >= 12 and data[-4:] == b"PAR1", "E206", place, "no Parquet file")
    try:
        (size,) = struct.unpack("<I", data[-8:-4])
        footer = _Thrift(data, len(data) - 8 - size).structure()
        groups = footer[4]
        need(sum(g[3] for g in groups) == footer[3], "E206", place, "rows of the groups")
        return [_check_group(data, group, place) for group in groups]
    except (LookupError, ValueError, TypeError, struct.error) as error:
        need(False, "E206", place, f"footer: {error!r}")
        raise AssertionError from error


def _check_group(data: bytes, group: Fields, place: str) -> list[Fields]:
    need(not group.get(4), "E206", place, "sorting columns")
    found = []
    for column in group[1]:
        odd = sorted({1, 4, 5, 6, 7, 8} & column.keys())
        need(not odd, "E206", place, f"an index, another file or a cipher: fields {odd}")
        meta = column[3]
        odd = sorted({10, 14, 15} & meta.keys())
        need(not odd, "E206", place, f"an index page or a Bloom filter: fields {odd}")
        flat = len(meta[3]) == 1
        need(not flat or meta[5] == group[3], "E206", place, "values that are not its rows")
        _check_pages(data, meta, place)
        found.append(meta.get(12, {}))
    return found


def _check_pages(data: bytes, meta: Fields, place: str) -> None:
    # Of no values there may be a dictionary alone, and the offset of the data is 0 then.
    at = min([offset for offset in (meta[9], meta.get(11)) if offset] or [4])
    end, n_values, nbytes = at + meta[7], 0, 0
    need(4 <= at <= end <= len(data) - 8, "E206", place, "pages outside the file")
    while at < end:
        thrift = _Thrift(data, at)
        header = thrift.structure()
        body = data[thrift.at : thrift.at + header[3]]
        need(header[1] in (0, 2, 3), "E206", place, f"a page of type {header[1]}")
        need(4 in header, "E206", place, "a page without a checksum")
        need(zlib.crc32(body) == header[4] & 0xFFFFFFFF, "E206", place, "a page's checksum")
        nbytes += thrift.at - at + header[2]
        n_values += (header.get(5) or header.get(8) or {1: 0})[1]
        at = thrift.at + header[3]
    whole = at == end and n_values == meta[5] and nbytes == meta[6]
    need(whole, "E206", place, "pages that are not what the footer says")


def check_statistics(said: Fields, kind: str, values: list[Any], place: str) -> None:
    """Check what a footer says of the values of a column in a row group (E206)."""
    there = [value for value in values if value is not None and value == value]
    n_nulls = sum(value is None for value in values)
    need(said.get(3, n_nulls) == n_nulls, "E206", place, "nulls that are not so many")
    for old, new, exact, bound in ((1, 5, 7, max), (2, 6, 8, min)):
        pair = said.get(old, said.get(new))
        need(pair == said.get(new, pair), "E206", place, "two statistics that differ")
        if pair is None:
            continue
        need(bool(there), "E206", place, "statistics of no value")
        limit = _decode(pair, kind, place)
        raw = [v.encode() if isinstance(v, str) else v for v in there]
        need(bound([limit, *raw]) == limit, "E206", place, f"a value beyond {limit!r}")
        need(not said.get(exact) or limit in raw, "E206", place, f"{limit!r} is no value")


def _decode(data: bytes, kind: str, place: str) -> Any:
    if kind not in FORMATS:
        return data
    try:
        return struct.unpack(FORMATS[kind], data)[0]
    except struct.error as error:
        need(False, "E206", place, error)
