"""What a signature says: an in-toto statement about one seal, which follows from the dataset."""

from __future__ import annotations

from typing import Any

from actds.dataset.reading import Catalog
from actds.errors import ActdsError
from actds.format import canonical
from actds.store import layout
from actds.trust.sums import sums

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
    """Check that what was signed is the statement about this seal.

    Args:
        payload: what was signed.
        expected: the statement that follows from the dataset.
        place: the file of the signature.

    Raises:
        ActdsError: E803 another statement; E102 no canonical JSON.

    Spec: 0.1 section 15.2.
    """
    if payload == expected:
        return
    said, follows = canonical.parse(payload, f"{place} payload"), canonical.parse(expected, place)
    where, got, wanted = _difference(said, follows, "payload")
    raise ActdsError("E803", f"{place} {where}", got=_short(got), expected=_short(wanted))


def _difference(said: Any, follows: Any, where: str) -> tuple[str, Any, Any]:
    """Return where two documents that differ do so first, and what is there in each."""
    if isinstance(said, dict) and isinstance(follows, dict) and said.keys() == follows.keys():
        names = [name for name in said if said[name] != follows[name]]
        return _difference(said[names[0]], follows[names[0]], f"{where}.{names[0]}")
    if isinstance(said, list) and isinstance(follows, list) and len(said) == len(follows):
        places = [i for i, (a, b) in enumerate(zip(said, follows, strict=True)) if a != b]
        return _difference(said[places[0]], follows[places[0]], f"{where}.{places[0]}")
    return where, said, follows


def _short(value: Any) -> str:
    return canonical.dump(value).decode().strip()[:120]
