"""The vectors of section 15: one dataset with signatures of it, good ones and bad ones.

The keys follow from fixed seeds, and Ed25519 signatures are a function of key and message: the
files are the same each time.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from actds.dataset.reading import read_catalog
from actds.format import canonical
from actds.publish.sealing import PAYLOAD_TYPE, statement, sums
from actds.store import layout
from actds.store.local import LocalStore

__all__ = ["write_signatures"]

BASE = "minimal"
ENVELOPE = layout.envelope_path(1)
Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One vector: what is put over the base, and what who verifies answers."""

    name: str
    what: str
    code: str | None
    make: Callable[[Json], dict[str, bytes]]
    keys: tuple[str, ...] = ("trusted.pub",)
    need: int = 1


def write_signatures(root: Path) -> None:
    """Write ``signatures`` below the folder of the vectors, from its valid ones."""
    folder = root / "signatures"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "keys").mkdir(parents=True)
    for name in ("trusted", "other"):
        pem = _key(name).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (folder / "keys" / f"{name}.pub").write_bytes(pem)
    catalog = read_catalog(LocalStore(root / "valid" / BASE))
    payload = statement(catalog)
    good = {"payload": _b64(payload), "payloadType": PAYLOAD_TYPE, "signatures": []}
    for case in _cases(sums(catalog)):
        for path, data in case.make(_signed(good, "trusted")).items():
            (folder / case.name / "files" / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / case.name / "files" / path).write_bytes(data)
        (folder / case.name).mkdir(exist_ok=True)
        expect = {
            "base": f"valid/{BASE}",
            "what": case.what,
            "code": case.code,
            "keys": list(case.keys),
            "need": case.need,
        }
        text = json.dumps(expect, indent=2) + "\n"
        (folder / case.name / "expect.json").write_text(text, encoding="utf-8")


def _cases(listed: bytes) -> list[Case]:
    both = ("trusted.pub", "other.pub")
    one_bad = "Two signatures, of which one does not hold"
    return [
        Case("signed", "One signature by the trusted key.", None, _as_it_is),
        Case("signed-by-both", "Both keys have signed.", None,
             lambda good: _envelope(_signed(good, "other")), both, 2),
        Case("one-of-two-bad", f"{one_bad}; one is asked for.", None, _one_bad, both),
        Case("one-of-two-bad-both-needed", f"{one_bad}; both are asked for.", "E802", _one_bad,
             both, 2),
        Case("key-id-unknown", "The key id names no key; the signature holds.", None,
             lambda good: _envelope(_keyid(good, "2019"))),
        Case("list-beside", "SHA256SUMS is there, and that of the seal.", None,
             lambda good: _envelope(good) | {layout.SUMS: listed}),
        Case("no-signature", "There is no envelope.", "E801", lambda good: {}),
        Case("other-key", "A key that nobody trusts has signed.", "E802",
             lambda good: _envelope(_signed(good | {"signatures": []}, "other"))),
        Case("key-id-of-the-trusted-key", "Another key has signed under the trusted key's id.",
             "E802", lambda good: _envelope(
                 _keyid(_signed(good | {"signatures": []}, "other"), _keyid_of("trusted")))),
        Case("payload-changed", "The payload is another one than was signed.", "E802",
             lambda good: _envelope(_with_dropped(good))),
        Case("payload-type-changed", "The type of the payload is another one.", "E803",
             lambda good: _envelope(good | {"payloadType": "application/json"})),
        Case("other-statement", "The trusted key has signed other totals.", "E803",
             lambda good: _envelope(_signed(_with_dropped(good) | {"signatures": []}, "trusted"))),
        Case("other-dataset", "The trusted key has signed the seal of another dataset.", "E803",
             lambda good: _envelope(_signed(_elsewhere(good), "trusted"))),
        Case("list-of-another-seal", "SHA256SUMS is not that of the seal.", "E806",
             lambda good: _envelope(good) | {layout.SUMS: listed[65:]}),
        Case("no-signatures", "The envelope has no signature.", "E103",
             lambda good: _envelope(good | {"signatures": []})),
        Case("unknown-field", "The envelope has an unknown field.", "E103",
             lambda good: _envelope(good | {"cert": ""})),
        Case("loose-base64", "The base64 of the payload is broken into lines.", "E103",
             lambda good: _envelope(good | {"payload": good["payload"] + "\n"})),
        Case("not-canonical", "The envelope is JSON with blanks.", "E102",
             lambda good: {ENVELOPE: json.dumps(good).encode() + b"\n"}),
    ]  # fmt: skip


def _as_it_is(good: Json) -> dict[str, bytes]:
    return _envelope(good)


def _one_bad(good: Json) -> dict[str, bytes]:
    bad = {"keyid": _keyid_of("other"), "sig": _b64(bytes(64))}
    return _envelope(good | {"signatures": [*good["signatures"], bad]})


def _with_dropped(good: Json) -> Json:
    return _edited(good, lambda said: said["predicate"]["totals"].update(dropped=0))


def _elsewhere(good: Json) -> Json:
    def edit(said: Json) -> None:
        said["predicate"]["dataset"] = "f" * 32
        said["subject"][0]["digest"]["sha256"] = "f" * 64

    return _edited(good, edit) | {"signatures": []}


def _edited(good: Json, edit: Callable[[Json], None]) -> Json:
    said = json.loads(base64.b64decode(good["payload"]))
    edit(said)
    return good | {"payload": _b64(canonical.dump(said))}


def _keyid(good: Json, keyid: str) -> Json:
    return good | {"signatures": [one | {"keyid": keyid} for one in good["signatures"]]}


def _signed(document: Json, name: str) -> Json:
    """Return an envelope with one more signature."""
    kind, payload = document["payloadType"].encode(), base64.b64decode(document["payload"])
    pae = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
    one = {"keyid": _keyid_of(name), "sig": _b64(_key(name).sign(pae))}
    return document | {"signatures": [*document["signatures"], one]}


def _envelope(document: Json) -> dict[str, bytes]:
    return {ENVELOPE: canonical.dump(document)}


def _key(name: str) -> Ed25519PrivateKey:
    seed = hashlib.sha256(f"actds vectors, {name}".encode()).digest()
    return Ed25519PrivateKey.from_private_bytes(seed)


def _keyid_of(name: str) -> str:
    public = _key(name).public_key()
    der = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
