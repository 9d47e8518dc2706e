"""Pins: the digest of a seal that a consumer got from elsewhere, and keeps."""

from __future__ import annotations

import re

from actds.dataset.reading import Catalog, no_such_seal
from actds.errors import ActdsError
from actds.format.schema import ReplaceBody, ShardBody
from actds.store import layout

_PIN = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


def parse_pin(text: str, place: str = "seal") -> str:
    """Return the digest that ``sha256:HEX`` names; the name of the algorithm may be left out.

    Raises:
        ActdsError: E009 another form.
    """
    found = _PIN.fullmatch(text)
    if found is None:
        raise ActdsError("E009", place, got=repr(text)[:100], expected="sha256: and 64 hex digits")
    return found[1]


def check_pin(catalog: Catalog, seal: str) -> int:
    """Return the number of a pinned seal, after a check that the dataset extends it.

    The present seal extends the pinned one when it follows from it by the chain of digests, so that
    each chain that was sealed is there, with the same head. What a catalogue found (a seal that
    contradicts its ledger, a broken chain) is in its findings and not judged here. A record that
    replaces a shard leaves every sealed file's digest as it was, and yet lets other rows be read in
    its place: no digest says that they are the same.

    Args:
        catalog: the dataset as it is.
        seal: digest of the pinned seal.

    Raises:
        ActdsError: E804 it is none of the dataset's; E805 rows that it covers were replaced.

    Spec: 0.1 section 15.5.
    """
    if seal not in catalog.seal_digests:
        raise no_such_seal(catalog.seal_digests, seal)
    pinned = catalog.seals[catalog.seal_digests.index(seal)]
    covered: set[str] = set()
    for chain in pinned.heads.keys() & catalog.chains.keys():
        for record in catalog.chains[chain].records:
            body = record.typed_body()
            if isinstance(body, ShardBody | ReplaceBody):
                covered.add(body.shard)
    for chain in catalog.chains.keys() - pinned.heads.keys():
        for record in catalog.chains[chain].records:
            body = record.typed_body()
            if isinstance(body, ReplaceBody) and body.replaced in covered:
                raise ActdsError(
                    "E805",
                    layout.record_path(chain, record.seq),
                    got=f"{body.shard} in place of shard {body.replaced}",
                    expected=f"the shards of seal {pinned.n}",
                )
    return pinned.n
