"""Footers of Parquet files, taken apart and put together again: what no library writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Field", "edit_footer", "field"]

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _STRUCT = 1, 2, 3, 7, 8, 9, 12
Struct = dict[int, "Field"]


@dataclass
class Field:
    """One field of a struct: its type on the wire, and its value.

    The value of a list is the type of its items, and these.
    """

    kind: int
    value: Any


def field(value: Any) -> Field:
    """Return a field for a value: a number, bytes or a struct."""
    if isinstance(value, bool):
        return Field(_TRUE if value else _FALSE, value)
    kinds = {int: 6, bytes: _BINARY, dict: _STRUCT}
    return Field(kinds[type(value)], value)


def edit_footer(data: bytes, edit: Callable[[Struct], Any]) -> bytes:
    """Return a Parquet file with its footer edited; fields are those of ``parquet.thrift``."""
    nbytes = int.from_bytes(data[-8:-4], "little")
    start = len(data) - 8 - nbytes
    footer, _ = _read_struct(data, start)
    edit(footer)
    packed = _struct(footer)
    return data[:start] + packed + len(packed).to_bytes(4, "little") + data[-4:]


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _read_struct(data: bytes, at: int) -> tuple[Struct, int]:
    found: Struct = {}
    number = 0
    while data[at]:
        head = data[at]
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            raw, at = _read_varint(data, at)
            number = raw >> 1 ^ -(raw & 1)
        value, at = _read_value(data, at, head & 15)
        found[number] = Field(head & 15, value)
    return found, at + 1


def _read_value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, at
    if kind == _STRUCT:
        return _read_struct(data, at)
    if kind == _BINARY:
        size, at = _read_varint(data, at)
        return data[at : at + size], at + size
    if kind == _LIST:
        head, at = data[at], at + 1
        n, of = head >> 4, head & 15
        if n == 15:
            n, at = _read_varint(data, at)
        items = []
        for _ in range(n):
            item, at = _read_value(data, at, of)
            items.append(item)
        return (of, items), at
    if kind in (_BYTE, _DOUBLE):
        size = 1 if kind == _BYTE else 8
        return data[at : at + size], at + size
    raw, at = _read_varint(data, at)
    return raw >> 1 ^ -(raw & 1), at


def _varint(value: int) -> bytes:
    packed = bytearray()
    while value > 0x7F:
        packed.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*packed, value])


def _struct(fields: Struct) -> bytes:
    packed, before = b"", 0
    for number, one in sorted(fields.items()):
        step = number - before
        head = step << 4 | one.kind if 0 < step < 16 else one.kind
        packed += bytes([head]) + (b"" if 0 < step < 16 else _varint(number << 1))
        packed += _value(one.kind, one.value)
        before = number
    return packed + b"\0"


def _value(kind: int, value: Any) -> bytes:
    if kind in (_TRUE, _FALSE):
        return b""
    if kind == _STRUCT:
        return _struct(value)
    if kind == _BINARY:
        return _varint(len(value)) + value
    if kind == _LIST:
        of, items = value
        head = bytes([len(items) << 4 | of]) if len(items) < 15 else bytes([0xF0 | of])
        head += b"" if len(items) < 15 else _varint(len(items))
        return head + b"".join(_value(of, item) for item in items)
    if kind in (_BYTE, _DOUBLE):
        return bytes(value)
    return _varint(value << 1 ^ value >> 63)
