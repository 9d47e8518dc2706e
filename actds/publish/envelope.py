"""Ed25519 keys in PEM files, as ``openssl genpkey`` writes them, and the DSSE envelopes they sign.

A key comes from who signs or who verifies, and never from the dataset. Envelopes are read within
bounds, and their signatures judged by a list of keys.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from actds.errors import ActdsError, not_installed
from actds.format import canonical
from actds.publish.sealing import PAYLOAD_TYPE
from actds.store import Store, local_folder
from actds.text import one_line

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from securesystemslib.signer import CryptoSigner, SSlibKey

Form = TypeVar("Form", bound=BaseModel)
KEYS_VARIABLE = "ACTDS_TRUSTED_KEYS"
"""Environment variable that names a file of public keys, where none is given."""
PASSWORD_VARIABLE = "ACTDS_KEY_PASSWORD"
"""Environment variable that holds the password of an encrypted private key."""
MAX_ENVELOPE_NBYTES = 8 * 1024 * 1024
MAX_KEYS = MAX_SIGNATURES = 64
_MAX_NBYTES, _SIGNATURE_NBYTES = 1 << 16, 64  # of a key file; of Ed25519
_PUBLIC = re.compile(rb"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)
_MAKE = "Make a pair with openssl genpkey -algorithm ed25519, and keep it outside the dataset."


@dataclass(frozen=True)
class TrustedKey:
    """A public key of the consumer; ``keyid`` is the SHA-256 of its DER form (SPKI), in hex."""

    keyid: str
    file: str
    key: SSlibKey


def trusted_keys(files: Iterable[str | os.PathLike[str]], store: Store) -> list[TrustedKey]:
    """Return the public keys of PEM files (15.4), each once; a file may hold several.

    E021 a file that cannot be read, holds no public key, a private one, one that is not Ed25519,
    or lies inside the dataset; E011 without the extra ``actds[sign]``.
    """
    keys: dict[str, TrustedKey] = {}
    with needs_extra():
        for file in (os.fspath(path) for path in files):
            data = _read(file, store)
            if b"PRIVATE KEY-----" in data:
                step = f"Give the public key: openssl pkey -in {file} -pubout -out {file}.pub."
                raise _bad(file, "a private key", "public keys only", step)
            blocks = _PUBLIC.findall(data)
            if not blocks:
                raise _bad(file, "no PEM block of a public key", "BEGIN PUBLIC KEY")
            from cryptography.hazmat.primitives.serialization import load_pem_public_key

            for block in blocks:
                load = partial(load_pem_public_key, block)
                key = _sslib_key(_ed25519(file, load, "a public key in PEM"))
                keys.setdefault(key.keyid, TrustedKey(key.keyid, file, key))
    if len(keys) > MAX_KEYS:
        raise _bad("keys", f"{len(keys)} keys", f"at most {MAX_KEYS}")
    return list(keys.values())


def signer(file: str | os.PathLike[str], store: Store) -> CryptoSigner:
    """Return what signs with a private key (15.3); a password is read from the environment.

    E021 a file that cannot be read, is no private Ed25519 key, is encrypted and the password is
    missing or wrong, or lies inside the dataset; E011 without the extra ``actds[sign]``.
    """
    file = os.fspath(file)
    with needs_extra():
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
        from securesystemslib.signer import CryptoSigner

        data = _read(file, store)
        if b"PRIVATE KEY-----" not in data:
            raise _bad(file, "no PEM block of a private key", "BEGIN PRIVATE KEY")
        password = os.environ.get(PASSWORD_VARIABLE)
        is_encrypted = b"ENCRYPTED" in data
        if is_encrypted and not password:
            step = f"Set {PASSWORD_VARIABLE}, or sign with a key that is not encrypted."
            raise _bad(file, "an encrypted key", f"its password in {PASSWORD_VARIABLE}", step)
        secret = password.encode() if is_encrypted and password else None
        expected = "the password of the key" if is_encrypted else "a private key in PEM"
        key = _ed25519(file, partial(load_pem_private_key, data, secret), expected)
        return CryptoSigner(key, _sslib_key(key.public_key()))


@contextmanager
def needs_extra() -> Iterator[None]:
    """E011 for a package of the extra that is not installed."""
    try:
        yield
    except ImportError as error:
        name = error.name or "securesystemslib"
        raise not_installed(name, "sign") from None


def _ed25519(file: str, load: Callable[[], Any], expected: str) -> Any:
    """The key that a block holds, private or public."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ed25519

    try:
        key = load()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _bad(file, one_line(error, 120), expected) from None
    if not isinstance(key, ed25519.Ed25519PrivateKey | ed25519.Ed25519PublicKey):
        raise _bad(file, "a key of another algorithm", "an Ed25519 key")
    return key


def _sslib_key(key: Ed25519PublicKey) -> SSlibKey:
    """Under the id that openssl and sha256sum find as well."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from securesystemslib.signer import SSlibKey

    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return SSlibKey.from_crypto(key, keyid=hashlib.sha256(der).hexdigest())


def _read(file: str, store: Store) -> bytes:
    """A key file's bytes; one inside the dataset is refused."""
    folder = local_folder(store.uri)
    path = Path(file).expanduser()
    try:
        inside = folder is not None and path.resolve().is_relative_to(folder.resolve())
        nbytes = path.stat().st_size
        data = path.read_bytes() if nbytes <= _MAX_NBYTES and not inside else b""
    except (OSError, ValueError) as error:
        got = getattr(error, "strerror", None) or one_line(error, 120)
        raise _bad(file, got, "a readable file") from None
    if inside:
        step = "Get the key from who signed, by another way than the dataset."
        raise _bad(file, "a file of the dataset itself", "a key from elsewhere", step)
    if nbytes > _MAX_NBYTES:
        raise _bad(file, f"{nbytes} bytes", f"at most {_MAX_NBYTES}")
    return data


def _bad(file: str, got: str, expected: str, next_step: str = _MAKE) -> ActdsError:
    return ActdsError("E021", file[:400], got=got, expected=expected, next_step=next_step)


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
        """The file: canonical JSON, standard base64."""
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
    """Return the envelope that a file holds (15.3); nothing of it is believed yet.

    E102 too large, too deep, or no canonical JSON; E103 another form, no signature, too many, or
    no standard base64; E803 another payload type.
    """
    if len(data) > MAX_ENVELOPE_NBYTES:
        expected = f"at most {MAX_ENVELOPE_NBYTES} bytes"
        raise ActdsError("E102", place, got=f"{len(data)} bytes", expected=expected)
    document = of_form(_Envelope, canonical.parse(data, place), place, "envelope")
    if document.payloadType != PAYLOAD_TYPE:
        got = repr(document.payloadType)[:120]
        raise ActdsError("E803", f"{place} payloadType", got=got, expected=PAYLOAD_TYPE)
    return Envelope(
        payload=_unb64(document.payload, f"{place} payload"),
        payload_type=document.payloadType,
        signatures=tuple(
            (signature.keyid, _unb64(signature.sig, f"{place} signatures.{i}.sig"))
            for i, signature in enumerate(document.signatures)
        ),
    )


def of_form(model: type[Form], document: Any, place: str, whole: str) -> Form:
    """E103 a document of another form; ``whole`` is its name where no field is at fault."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or whole
        got, expected = repr(first.get("input"))[:120], first["msg"]
        raise ActdsError("E103", f"{place} {field}", got=got, expected=expected) from None


def judge(envelope: Envelope, keys: Sequence[TrustedKey]) -> Judgement:
    """Return which keys of a list have signed (15.4).

    The ``keyid`` of a signature is a hint that anybody can write: each signature is tried with
    every key of the list.
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
    """With one more signature (E009 it is full); None when the key has signed it already."""
    signatures = () if before is None else before.signatures
    envelope = Envelope(payload, PAYLOAD_TYPE, signatures)
    key = TrustedKey(signer.public_key.keyid, "", signer.public_key)
    if judge(envelope, [key]).accepted:
        return None
    # A broken signature under the own id is replaced: it can only be a damaged one.
    signatures = tuple((keyid, sig) for keyid, sig in signatures if keyid != key.keyid)
    if len(signatures) >= MAX_SIGNATURES:
        got, expected = f"{len(signatures)} signatures", f"at most {MAX_SIGNATURES}"
        raise ActdsError("E009", "key", got=got, expected=expected)
    sig = bytes.fromhex(signer.sign(_pae(envelope)).signature)
    return Envelope(payload, PAYLOAD_TYPE, (*signatures, (key.keyid, sig)))


def _pae(envelope: Envelope) -> bytes:
    """What is signed: type and payload, each with its length."""
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
    """Standard base64 in its one form, so that nothing can hide in it."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if not data or _b64(data) != text:
        raise ActdsError("E103", place, got=repr(text[:40]), expected="standard base64")
    return data
