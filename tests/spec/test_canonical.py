"""Canonical JSON: one byte form, and nothing hostile gets past the parser."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actds.errors import ActdsError
from actds.format import canonical

INTEGERS = st.integers(-canonical.MAX_INTEGER, canonical.MAX_INTEGER)
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(DOCUMENTS)
def test_every_document_survives_its_bytes(document: object) -> None:
    data = canonical.dump(document)
    assert data.isascii() and data.endswith(b"\n")
    assert canonical.parse(data, "x") == document


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":1,"a":1}\n',
        b'{"b":1,"a":1}\n',
        b'{"a": 1}\n',
        b'{"a":1}',
        b'{"a":1.0}\n',
        b'{"a":1e3}\n',
        b'{"a":NaN}\n',
        b'{"a":-Infinity}\n',
        b'{"a":9223372036854775808}\n',
        b'{"a":' + b"9" * 5000 + b"}\n",
        b'{"a":-0}\n',
        '{"a":"é"}\n'.encode(),
        b'{"a":"\\u00E9"}\n',
        b'\xef\xbb\xbf{"a":1}\n',
        b"[" * 17 + b"]" * 17 + b"\n",
        b"[" * 200_000,
        b'{"a":1}\n\n',
        b"",
        b"\xff\n",
    ],
)
def test_refuses_bytes_that_are_not_canonical(data: bytes) -> None:
    with pytest.raises(ActdsError) as caught:
        canonical.parse(data, "shards/x/shard.json")
    assert caught.value.code == "E102"
    assert caught.value.place == "shards/x/shard.json"


def test_brackets_inside_strings_are_no_depth() -> None:
    document = {"a": '[[[[[[[[[[[[[[[[[[[[{\\"'}
    assert canonical.parse(canonical.dump(document), "x") == document


@pytest.mark.parametrize("document", [1.5, {"a": [float("nan")]}, {1: 2}, {"a": {2, 3}}])
def test_writes_no_float_and_no_foreign_type(document: object) -> None:
    with pytest.raises(TypeError):
        canonical.dump(document)


def test_merkle_root_is_that_of_rfc_6962() -> None:
    def leaf(data: bytes) -> bytes:
        return hashlib.sha256(b"\0" + data).digest()

    def node(left: bytes, right: bytes) -> bytes:
        return hashlib.sha256(b"\1" + left + right).digest()

    a, b, c = leaf(b"a"), leaf(b"b"), leaf(b"c")
    assert canonical.merkle_root([]) == hashlib.sha256(b"").hexdigest()
    assert canonical.merkle_root([b"a"]) == a.hex()
    assert canonical.merkle_root([b"a", b"b", b"c"]) == node(node(a, b), c).hex()
