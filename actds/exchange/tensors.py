"""Safetensors files: named arrays, written in pieces and read in ranges.

The format is 8 bytes of length, a JSON header, and the bytes of the tensors one after the other.
The library of that name has no bfloat16 for NumPy, and wants a whole file in memory to write it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.format import canonical

MAX_HEADER_NBYTES = 100_000_000  # that of the format
_CODES = {
    "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "uint16": "U16", "uint32": "U32", "uint64": "U64",
}  # fmt: skip
_NAMES = {code: name for name, code in _CODES.items()}


def foreign(place: object, got: str, expected: str) -> ActdsError:
    """Return the error of a set that cannot be imported."""
    return ActdsError("E019", str(place), got=got, expected=expected)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file.

    Args:
        path: the file.
        dtype: its type by the name that torch has for it; the format's own code for others.
        shape: its shape.
        offset: first byte in the file.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def map(self) -> npt.NDArray[Any]:
        """Return its values, mapped; bfloat16 as bit patterns in ``uint16``."""
        kind = np.dtype(np.uint16 if self.dtype == "bfloat16" else self.dtype)
        if 0 in self.shape:
            return np.empty(self.shape, kind)
        return np.memmap(self.path, kind.newbyteorder("<"), "r", self.offset, self.shape)


@dataclass(frozen=True)
class NewTensor:
    """One tensor to write.

    Args:
        dtype: its type by the name that torch has for it.
        shape: its shape.
        pieces: its values, cut along the first axis; bfloat16 as bit patterns.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: Iterable[npt.NDArray[Any]]


def write_tensors(
    path: Path, tensors: Mapping[str, NewTensor], metadata: Mapping[str, str]
) -> None:
    """Write a file of tensors, a piece at a time.

    Args:
        path: the new file.
        tensors: the tensors by name.
        metadata: words of the header.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, one in tensors.items():
        end = at + math.prod(one.shape) * itemsize(one.dtype)
        header[name] = {
            "dtype": _CODES[one.dtype], "shape": list(one.shape), "data_offsets": [at, end],
        }  # fmt: skip
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for one in tensors.values():
            for piece in one.pieces:
                file.write(np.ascontiguousarray(piece).data)


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors of a file and the words of its header; no values are read.

    Raises:
        ActdsError: E019 it is truncated, or no such file.
    """
    nbytes = path.stat().st_size
    if not path.is_file():
        raise foreign(path, "no regular file", "a safetensors file")
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_NBYTES, nbytes - 8):
            raise foreign(path, f"{nbytes} bytes", f"a header of {length} bytes, and tensors")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_once)
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(word, str) for word in metadata.values()):
            raise TypeError("metadata that are no words")
        found = {
            name: StoredTensor(
                path,
                _NAMES.get(entry["dtype"], entry["dtype"]),
                tuple(int(size) for size in entry["shape"]),
                8 + length + int(entry["data_offsets"][0]),
            )
            for name, entry in header.items()
        }
        ends = {name: 8 + length + int(header[name]["data_offsets"][1]) for name in header}
    except (
        ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError,
    ):  # fmt: skip
        raise foreign(path, "a header that cannot be read", "a safetensors file") from None
    for name, tensor in found.items():
        if ends[name] > nbytes:
            raise foreign(f"{path} {name}", f"{nbytes} bytes", f"{ends[name]}: it is truncated")
        known = tensor.dtype in _CODES
        size = math.prod(tensor.shape) * (itemsize(tensor.dtype) if known else 0)
        if (
            min(tensor.shape, default=1) < 0
            or tensor.offset < 8 + length
            or (known and ends[name] - tensor.offset != size)
        ):
            got = f"{ends[name] - tensor.offset} bytes of {tensor.dtype} {tensor.shape}"
            raise foreign(f"{path} {name}", got, f"{size} bytes")
    at = 8 + length
    for name, tensor in sorted(found.items(), key=lambda one: (one[1].offset, ends[one[0]])):
        if tensor.offset != at:
            got = f"a tensor from byte {tensor.offset}"
            raise foreign(f"{path} {name}", got, f"from {at}: tensors one after the other")
        at = ends[name]
    if at != nbytes:
        raise foreign(path, f"{nbytes} bytes", f"{at}, where its tensors end")
    return found, metadata


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a name that an object has twice: of two arrays one would be left out in silence."""
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a name twice")
    return members


def read_document(path: Path) -> dict[str, Any]:
    """Return the object of a small JSON file that a stranger made.

    Raises:
        ActdsError: E019 it is no regular file, larger than 16 MiB, or no JSON object.
    """
    try:
        document = json.loads(canonical.read_bounded(path), object_pairs_hook=_once)
    except OSError as error:
        raise foreign(path, error.strerror or str(error), "a JSON object") from None
    except (ValueError, RecursionError):
        raise foreign(path, "a document that cannot be read", "a JSON object") from None
    if not isinstance(document, dict):
        raise foreign(path, "a document that cannot be read", "a JSON object")
    return document


def itemsize(dtype: str) -> int:
    """Return the bytes of a value."""
    return 2 if dtype == "bfloat16" else int(np.dtype(dtype).itemsize)
