"""Ed25519 keys in PEM files, as ``openssl genpkey -algorithm ed25519`` writes them.

A key comes from who signs or who verifies, and never from the dataset.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from actds.errors import ActdsError, not_installed
from actds.store import Store, local_folder
from actds.text import one_line

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from securesystemslib.signer import CryptoSigner, SSlibKey

KEYS_VARIABLE = "ACTDS_TRUSTED_KEYS"
"""Environment variable that names a file of public keys, where none is given."""
PASSWORD_VARIABLE = "ACTDS_KEY_PASSWORD"
"""Environment variable that holds the password of an encrypted private key."""
MAX_KEYS = 64
_MAX_NBYTES = 1 << 16
_PUBLIC = re.compile(rb"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)
_MAKE = "Make a pair with openssl genpkey -algorithm ed25519, and keep it outside the dataset."


@dataclass(frozen=True)
class TrustedKey:
    """A public key that the consumer trusts.

    Args:
        keyid: SHA-256 of its DER form (SubjectPublicKeyInfo), hexadecimal.
        file: where it was read.
        key: the key.
    """

    keyid: str
    file: str
    key: SSlibKey


def trusted_keys(files: Iterable[str | os.PathLike[str]], store: Store) -> list[TrustedKey]:
    """Return the public keys of PEM files, each once; a file may hold several.

    Args:
        files: the consumer's files.
        store: the dataset that is to be verified; a key inside it is refused.

    Raises:
        ActdsError: E021 a file that cannot be read, holds no public key, a private one, one that
            is not Ed25519, or lies inside the dataset; E011 without the extra ``actds[sign]``.

    Spec: 0.1 section 15.4.
    """
    found: dict[str, TrustedKey] = {}
    with needs_extra():
        for file in (os.fspath(one) for one in files):
            data = _read(file, store)
            if b"PRIVATE KEY-----" in data:
                step = f"Give the public key: openssl pkey -in {file} -pubout -out {file}.pub."
                raise _bad(file, "a private key", "public keys only", step)
            blocks = _PUBLIC.findall(data)
            if not blocks:
                raise _bad(file, "no PEM block of a public key", "BEGIN PUBLIC KEY")
            for block in blocks:
                key = _trusted(block, file)
                found.setdefault(key.keyid, key)
    if len(found) > MAX_KEYS:
        raise _bad("keys", f"{len(found)} keys", f"at most {MAX_KEYS}")
    return list(found.values())


def signer(file: str | os.PathLike[str], store: Store) -> CryptoSigner:
    """Return what signs with a private key; the password of one is read from the environment.

    Args:
        file: PEM file (PKCS #8).
        store: the dataset that is to be signed; a key inside it is refused.

    Raises:
        ActdsError: E021 a file that cannot be read, is no private Ed25519 key, is encrypted and
            the password is missing or wrong, or lies inside the dataset; E011 without the extra
            ``actds[sign]``.

    Spec: 0.1 section 15.3.
    """
    file = os.fspath(file)
    with needs_extra():
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
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
        try:
            key = load_pem_private_key(
                data, password.encode() if is_encrypted and password else None
            )
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            expected = "the password of the key" if is_encrypted else "a private key in PEM"
            raise _bad(file, one_line(error, 120), expected) from None
        if not isinstance(key, Ed25519PrivateKey):
            raise _bad(file, "a key of another algorithm", "an Ed25519 key")
        return CryptoSigner(key, _sslib_key(key.public_key()))


@contextmanager
def needs_extra() -> Iterator[None]:
    """Run what needs the packages of the extra.

    Raises:
        ActdsError: E011 one is not installed.
    """
    try:
        yield
    except ImportError as error:
        name = error.name or "securesystemslib"
        raise not_installed(name, "sign") from None


def _trusted(block: bytes, file: str) -> TrustedKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(block)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _bad(file, one_line(error, 120), "a public key in PEM") from None
    if not isinstance(key, Ed25519PublicKey):
        raise _bad(file, "a key of another algorithm", "an Ed25519 key")
    found = _sslib_key(key)
    return TrustedKey(found.keyid, file, found)


def _sslib_key(key: Ed25519PublicKey) -> SSlibKey:
    """Return a key under the id that openssl and sha256sum find as well."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from securesystemslib.signer import SSlibKey

    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return SSlibKey.from_crypto(key, keyid=hashlib.sha256(der).hexdigest())


def _read(file: str, store: Store) -> bytes:
    """Return a key file's bytes; one inside the dataset is refused."""
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
