"""What a seal pins: the digest that a consumer keeps, SHA256SUMS, and the statement that is signed.

All of it follows from the ledger alone: no data file is read for it. What may be written again
beside the data (the card, signatures, the list itself) is in neither list nor statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from actds.dataset.reading import Catalog, no_such_seal
from actds.errors import ActdsError
from actds.format import canonical
from actds.format.schema import ReplaceBody, RunBody, ShardBody
from actds.format.shard import data_files
from actds.store import layout


def sums(catalog: Catalog) -> bytes:
    """Return the list of a sealed dataset: one line per file, sorted by path.

    A line is the digest, two blanks and the path. Of a replaced shard only the manifest is there.

    Spec: 0.1 section 15.1.
    """
    digests = {layout.GENESIS: catalog.genesis_sha256, **catalog.pins}
    for n, digest in enumerate(catalog.seal_digests, start=1):
        digests[layout.seal_path(n)] = digest
    for state in catalog.chains.values():
        for record, following in zip(state.records, [*state.records[1:], None], strict=True):
            digest = state.head if following is None else following.prev
            digests[layout.record_path(state.chain, record.seq)] = digest
            body = record.typed_body()
            if isinstance(body, RunBody):
                digests[layout.run_path(body.run)] = body.sha256
            elif isinstance(body, ShardBody | ReplaceBody):
                digests[layout.manifest_path(body.shard)] = body.manifest_sha256
    for manifest in catalog.replaced:
        for path in data_files(manifest):
            digests.pop(path, None)
    return "".join(f"{digests[path]}  {path}\n" for path in sorted(digests)).encode()


def put_sums(catalog: Catalog) -> None:
    catalog.store.replace(layout.SUMS, sums(catalog))


def check_sums(catalog: Catalog) -> None:
    """E806 the list, where there is one, is not that of the seal; E104, E107 no file."""
    store = catalog.store
    if not store.exists(layout.SUMS):
        return
    expected = sums(catalog)
    # By the size first: another one is not read.
    if store.size(layout.SUMS) != len(expected) or store.read(layout.SUMS) != expected:
        seal = f"that of seal {len(catalog.seals)}"
        raise ActdsError("E806", layout.SUMS, got="another list", expected=seal)


PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "actds:seal/0.1"


def statement(catalog: Catalog) -> bytes:
    """Return the statement about the seal of a sealed dataset, canonical JSON.

    Nothing in it is chosen by who signs: every signer of a seal signs the same bytes.

    Spec: 0.1 section 15.2.
    """
    seal = catalog.seal
    assert seal is not None and catalog.is_sealed, "callers refuse what is not sealed"
    subjects = {
        layout.seal_path(seal.n): catalog.digest,
        layout.SUMS: canonical.digest(sums(catalog)),
    }
    return canonical.dump(
        {
            "_type": STATEMENT_TYPE,
            "subject": [
                {"name": name, "digest": {"sha256": digest}} for name, digest in subjects.items()
            ],
            "predicateType": PREDICATE_TYPE,
            "predicate": {
                "dataset": seal.dataset,
                "genesis_sha256": seal.genesis_sha256,
                "hooks": [hook.model_dump(mode="json") for hook in catalog.genesis.hooks],
                "n": seal.n,
                "sealed_ns": seal.sealed_ns,
                "totals": seal.totals,
                "version": seal.version,
            },
        }
    )


def check_statement(payload: bytes, expected: bytes, place: str) -> None:
    """E803 what was signed is not the statement about this seal; E102 no canonical JSON."""
    if payload == expected:
        return
    signed, follows = canonical.parse(payload, f"{place} payload"), canonical.parse(expected, place)
    where, got, wanted = _difference(signed, follows, "payload")
    raise ActdsError("E803", f"{place} {where}", got=_short(got), expected=_short(wanted))


def _difference(got: Any, want: Any, where: str) -> tuple[str, Any, Any]:
    """Where two documents that differ do so first, and what is there in each."""
    keys: Iterable[Any] = ()
    if isinstance(got, dict) and isinstance(want, dict) and got.keys() == want.keys():
        keys = got
    elif isinstance(got, list) and isinstance(want, list) and len(got) == len(want):
        keys = range(len(got))
    for key in keys:
        if got[key] != want[key]:
            return _difference(got[key], want[key], f"{where}.{key}")
    return where, got, want


def _short(value: Any) -> str:
    return canonical.dump(value).decode().strip()[:120]


_PIN = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


def parse_pin(text: str, place: str = "seal") -> str:
    """The digest that ``sha256:HEX`` names; E009 another form. The algorithm may be left out."""
    match = _PIN.fullmatch(text)
    if match is None:
        raise ActdsError("E009", place, got=repr(text)[:100], expected="sha256: and 64 hex digits")
    return match[1]


def check_pin(catalog: Catalog, seal: str) -> int:
    """Return the number of a pinned seal, after a check that the dataset extends it.

    The present seal extends the pinned one when it follows from it by the chain of digests, so that
    each chain that was sealed is there, with the same head. What a catalogue found (a seal that
    contradicts its ledger, a broken chain) is in its findings and not judged here. A record that
    replaces a shard leaves every sealed file's digest as it was, and yet lets other rows be read in
    its place: no digest says that they are the same.

    Raises:
        ActdsError: E804 it is none of the dataset's; E805 rows that it covers were replaced.

    Spec: 0.1 section 15.5.
    """
    if seal not in catalog.seal_digests:
        raise no_such_seal(catalog.seal_digests, seal)
    pinned = catalog.seals[catalog.seal_digests.index(seal)]
    covered: set[str] = set()
    for chain in pinned.heads.keys() & catalog.chains.keys():
        bodies = (record.typed_body() for record in catalog.chains[chain].records)
        covered |= {body.shard for body in bodies if isinstance(body, ShardBody | ReplaceBody)}
    for chain in catalog.chains.keys() - pinned.heads.keys():
        for record in catalog.chains[chain].records:
            body = record.typed_body()
            if isinstance(body, ReplaceBody) and body.replaced in covered:
                place = layout.record_path(chain, record.seq)
                got = f"{body.shard} in place of shard {body.replaced}"
                raise ActdsError("E805", place, got=got, expected=f"the shards of seal {pinned.n}")
    return pinned.n
