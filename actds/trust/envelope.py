"""DSSE envelopes: reading them within bounds, and judging their signatures by a list of keys."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from actds.errors import ActdsError
from actds.format import canonical
from actds.trust.keys import TrustedKey, needs_extra
from actds.trust.statement import PAYLOAD_TYPE

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

MAX_ENVELOPE_NBYTES = 8 * 1024 * 1024
MAX_SIGNATURES = 64
_SIGNATURE_NBYTES = 64  # of Ed25519


class _Signature(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    keyid: Annotated[str, Field(max_length=256)]
    sig: Annotated[str, Field(min_length=1, max_length=256)]


class _Envelope(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    payload: str
    payloadType: Annotated[str, Field(max_length=256)]
    signatures: Annotated[list[_Signature], Field(min_length=1, max_length=MAX_SIGNATURES)]


@dataclass(frozen=True)
class Envelope:
    """What was signed, and the signatures: a hint at the key and the bytes of each."""

    payload: bytes
    payload_type: str
    signatures: tuple[tuple[str, bytes], ...]

    def to_bytes(self) -> bytes:
        """Return the file: canonical JSON, standard base64."""
        signatures = [{"keyid": k, "sig": _b64(sig)} for k, sig in self.signatures]
        document = {"payload": _b64(self.payload), "payloadType": self.payload_type}
        return canonical.dump({**document, "signatures": signatures})


@dataclass(frozen=True)
class Rejected:
    """A signature that counts for nothing, and why."""

    keyid: str
    why: str


@dataclass(frozen=True)
class Judgement:
    """The keys whose signatures are good, each once, and the signatures that count for nothing."""

    accepted: tuple[TrustedKey, ...]
    rejected: tuple[Rejected, ...]


def parse(data: bytes, place: str) -> Envelope:
    """Return the envelope that a file holds; nothing of it is believed yet.

    Raises:
        ActdsError: E102 too large, too deep, or no canonical JSON; E103 another form, no signature,
            too many, or no standard base64; E803 another payload type.

    Spec: 0.1 section 15.3.
    """
    if len(data) > MAX_ENVELOPE_NBYTES:
        expected = f"at most {MAX_ENVELOPE_NBYTES} bytes"
        raise ActdsError("E102", place, got=f"{len(data)} bytes", expected=expected)
    try:
        document = _Envelope.model_validate(canonical.parse(data, place))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "envelope"
        got, expected = repr(first.get("input"))[:120], first["msg"]
        raise ActdsError("E103", f"{place} {field}", got=got, expected=expected) from None
    if document.payloadType != PAYLOAD_TYPE:
        got = repr(document.payloadType)[:120]
        raise ActdsError("E803", f"{place} payloadType", got=got, expected=PAYLOAD_TYPE)
    return Envelope(
        payload=_unb64(document.payload, f"{place} payload"),
        payload_type=document.payloadType,
        signatures=tuple(
            (one.keyid, _unb64(one.sig, f"{place} signatures.{i}.sig"))
            for i, one in enumerate(document.signatures)
        ),
    )


def judge(envelope: Envelope, keys: Sequence[TrustedKey]) -> Judgement:
    """Return which keys of a list have signed.

    The ``keyid`` of a signature is a hint that anybody can write: each signature is tried with
    every key of the list.

    Spec: 0.1 section 15.4.
    """
    data = _pae(envelope)
    accepted: dict[str, TrustedKey] = {}
    rejected: list[Rejected] = []
    listed = {key.keyid for key in keys}
    for keyid, sig in envelope.signatures:
        good = next((key for key in keys if _holds(key, sig, data)), None)
        if good is not None:
            accepted.setdefault(good.keyid, good)
        elif keyid in listed:
            rejected.append(Rejected(keyid, "does not hold under the trusted key of this id"))
        else:
            rejected.append(Rejected(keyid, "of no trusted key"))
    return Judgement(tuple(accepted.values()), tuple(rejected))


def with_signature(
    payload: bytes, before: Envelope | None, signer: CryptoSigner
) -> Envelope | None:
    """Return an envelope with one more signature; None when the key has signed it already.

    Args:
        payload: what is signed.
        before: the envelope that is there, with the same payload.
        signer: the private key.

    Raises:
        ActdsError: E009 the envelope is full.
    """
    signatures = () if before is None else before.signatures
    envelope = Envelope(payload, PAYLOAD_TYPE, signatures)
    own = TrustedKey(signer.public_key.keyid, "", signer.public_key)
    if judge(envelope, [own]).accepted:
        return None
    # A broken signature under the own id is replaced: it can only be a damaged one.
    signatures = tuple(one for one in signatures if one[0] != own.keyid)
    if len(signatures) >= MAX_SIGNATURES:
        got, expected = f"{len(signatures)} signatures", f"at most {MAX_SIGNATURES}"
        raise ActdsError("E009", "key", got=got, expected=expected)
    sig = bytes.fromhex(signer.sign(_pae(envelope)).signature)
    return Envelope(payload, PAYLOAD_TYPE, (*signatures, (own.keyid, sig)))


def _pae(envelope: Envelope) -> bytes:
    """Return the bytes that are signed: type and payload, each with its length."""
    with needs_extra():
        from securesystemslib import dsse

    return dsse.Envelope(envelope.payload, envelope.payload_type, {}).pae()


def _holds(key: TrustedKey, sig: bytes, data: bytes) -> bool:
    from securesystemslib.exceptions import UnverifiedSignatureError
    from securesystemslib.signer import Signature

    if len(sig) != _SIGNATURE_NBYTES:
        return False
    try:
        key.key.verify_signature(Signature(key.keyid, sig.hex()), data)
    except UnverifiedSignatureError:
        return False
    return True


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _unb64(text: str, place: str) -> bytes:
    """Return the bytes of standard base64; the one form of them, so that nothing can hide in it."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if not data or _b64(data) != text:
        raise ActdsError("E103", place, got=repr(text[:40]), expected="standard base64")
    return data
