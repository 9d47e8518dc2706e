"""Thrift's compact protocol, read without trust: the headers of Parquet's pages and its footer.

Libraries read these too, and show only a part: whether a page has a checksum at all, or which of
two statistics a footer holds, can be seen here alone.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Struct", "ThriftError", "read_struct"]

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
        found: Struct = {}
        number = 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.integer()
            if number in found:
                raise ThriftError(f"field {number} twice")
            kind = head & 15
            # Most values are integers: a footer has hundreds, and is read for each small table.
            found[number] = self.integer() if kind in _INTEGERS else self.value(kind, depth)
        return found

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
