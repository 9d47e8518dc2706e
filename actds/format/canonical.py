"""Canonical JSON: the one byte form of every document in a dataset."""

from __future__ import annotations

import errno
import hashlib
import json
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from actds.errors import ActdsError

MAX_DOCUMENT_NBYTES = 16 * 1024 * 1024
MAX_VALUES = 2**17
"""Bytes ``{``, ``[`` and ``,`` of a document: they bound the values that a parser makes of it."""
MAX_DEPTH = 16
MAX_INTEGER = 2**63 - 1
_NO_SIGNS = bytes(set(range(256)) - set(b'{}[]"'))


def read_bounded(path: Path) -> bytes:
    """Return the bytes of a document that a person gave, which need not be of this format.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than a document may be.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "no regular file", str(path))
    if status.st_size > MAX_DOCUMENT_NBYTES:
        words = f"{status.st_size} bytes, more than {MAX_DOCUMENT_NBYTES}"
        raise OSError(errno.EFBIG, words, str(path))
    with path.open("rb") as file:
        return file.read(MAX_DOCUMENT_NBYTES)


def dump(document: Any) -> bytes:
    """Return the canonical bytes of a document.

    Sorted keys, no white space, ASCII only, no floats, one trailing newline.

    Raises:
        TypeError: the document holds a float, a non-string key or a foreign type.

    Spec: 0.1 section 2.2.
    """
    _refuse_floats(document)
    return _encoded(document)


def _encoded(document: Any) -> bytes:
    text = json.dumps(
        document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return text.encode("ascii") + b"\n"


def parse(data: bytes, place: str) -> Any:
    """Return the document that canonical bytes hold; hostile bytes are refused before use.

    Args:
        data: the file's bytes.
        place: what an error names, for example ``shards/x/shard.json``.

    Raises:
        ActdsError: E102 when the bytes are too large, too many values or too deep, repeat a key,
            hold a float, an integer outside 64 bits or a lone surrogate, or are not the canonical
            form of what they say.

    Spec: 0.1 section 2.2.
    """
    if len(data) > MAX_DOCUMENT_NBYTES:
        raise _malformed(place, f"{len(data)} bytes", f"at most {MAX_DOCUMENT_NBYTES} bytes")
    # Counted before parsing: what a parser makes of a byte can be 200 bytes, and a microsecond.
    if sum(data.count(sign) for sign in (b"{", b"[", b",")) > MAX_VALUES:
        raise _malformed(place, f"more than {MAX_VALUES} values", f"at most {MAX_VALUES} values")
    if _depth(data) > MAX_DEPTH:
        raise _malformed(place, "deeper nesting", f"nesting of at most {MAX_DEPTH}")
    try:
        document = json.loads(
            data.decode("ascii"),
            object_pairs_hook=_unique,
            parse_float=_no_float,
            parse_constant=_no_float,
            parse_int=_bounded_int,
        )
        if b"\\ud" in data:  # a lone surrogate is no character, and cannot be encoded
            json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise _malformed(place, str(error)[:200], "canonical JSON") from None
    if _encoded(document) != data:
        raise _malformed(place, "bytes that differ from their canonical form", "canonical JSON")
    return document


def digest(data: bytes) -> str:
    """Return the lowercase hexadecimal SHA-256 of bytes.

    Spec: 0.1 section 2.3.
    """
    return hashlib.sha256(data).hexdigest()


def merkle_root(leaves: list[bytes]) -> str:
    """Return the RFC 6962 tree hash of the leaves, hexadecimal; of none, the hash of nothing.

    Spec: 0.1 section 2.3.
    """
    if not leaves:
        return digest(b"")
    return _tree([hashlib.sha256(b"\0" + leaf).digest() for leaf in leaves]).hex()


def _tree(hashes: list[bytes]) -> bytes:
    if len(hashes) == 1:
        return hashes[0]
    split = 1 << ((len(hashes) - 1).bit_length() - 1)
    return hashlib.sha256(b"\1" + _tree(hashes[:split]) + _tree(hashes[split:])).digest()


def _refuse_floats(value: Any) -> None:
    if isinstance(value, float):
        raise TypeError("canonical JSON holds no float; write an integer or a string")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"canonical JSON has string keys only, got {key!r}")
            _refuse_floats(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_floats(item)


def _depth(data: bytes) -> int:
    """Return how deep objects and arrays nest, without a loop over the bytes of strings."""
    # Escapes go from the left, so that what quotes are left begin and end the strings.
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    signs = plain.translate(None, _NO_SIGNS)
    if signs.count(b'"') > 4 * MAX_VALUES:  # two strings for a value, two quotes for a string
        return MAX_DEPTH + 1
    deepest = depth = 0
    for sign in b"".join(signs.split(b'"')[::2]):
        depth += 1 if sign in b"{[" else -1
        deepest = max(deepest, depth)
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {repeated!r} appears twice")
    return document


def _no_float(text: str) -> Any:
    raise ValueError(f"the float {text}")


def _bounded_int(text: str) -> int:
    if len(text) > 20 or abs(int(text)) > MAX_INTEGER:
        raise ValueError(f"the integer {text[:24]} outside 64 bits")
    return int(text)


def _malformed(place: str, got: str, expected: str) -> ActdsError:
    return ActdsError("E102", place, got=got, expected=expected)
