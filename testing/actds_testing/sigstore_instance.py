"""A whole instance of Sigstore in memory: certificate authority, both logs, and what they sign.

Its bundles are verified by the library ``sigstore`` as those of the public instance are: a chain of
certificates, a timestamp of the certificate log, an entry of the signature log with its proof. Only
the keys are its own, and no network is used.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

__all__ = ["PAYLOAD_TYPE", "Instance"]

PAYLOAD_TYPE = "application/vnd.in-toto+json"
_ISSUER = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
_TIMESTAMPS = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
_USES = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
         "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")  # fmt: skip
_LOG = "log.example.org"


class Instance:
    """An instance with keys of its own, made anew."""

    def __init__(self) -> None:
        self._authority, self._certificates, self._signatures = (
            ec.generate_private_key(ec.SECP256R1()) for _ in range(3)
        )
        self._now = datetime.now(UTC).replace(microsecond=0)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "example authority")])
        self._root = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self._authority.public_key())
            .serial_number(1)
            .not_valid_before(self._now - timedelta(days=1))
            .not_valid_after(self._now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(self._authority.public_key()), False
            )
            .sign(self._authority, SHA256())
        )

    @property
    def trusted_root(self) -> bytes:
        """Return what a consumer has to trust: ``trusted_root.json``."""
        since = (self._now - timedelta(days=2)).strftime("%Y-%m-%dT%H:%M:%SZ")

        def log(key: ec.EllipticCurvePrivateKey, url: str) -> dict[str, Any]:
            return {
                "baseUrl": url,
                "hashAlgorithm": "SHA2_256",
                "publicKey": {
                    "rawBytes": _b64(_spki(key)),
                    "keyDetails": "PKIX_ECDSA_P256_SHA_256",
                    "validFor": {"start": since},
                },
                "logId": {"keyId": _b64(_key_id(key))},
            }

        root = self._root.public_bytes(Encoding.DER)
        authority = {
            "subject": {"organization": "example", "commonName": "example authority"},
            "uri": "https://authority.example.org",
            "certChain": {"certificates": [{"rawBytes": _b64(root)}]},
            "validFor": {"start": since},
        }
        document = {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [log(self._signatures, f"https://{_LOG}")],
            "certificateAuthorities": [authority],
            "ctlogs": [log(self._certificates, "https://ct.example.org")],
        }
        return json.dumps(document).encode()

    def bundle(
        self, payload: bytes, identity: str, issuer: str, payload_type: str = PAYLOAD_TYPE
    ) -> dict[str, Any]:
        """Return the bundle of an identity that signs a payload now.

        Args:
            payload: what is signed.
            identity: an e-mail address.
            issuer: who vouches for it, a URL.
            payload_type: what the payload is said to be.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._certificate(key, identity, issuer)
        kind = payload_type.encode()
        pae = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
        signature = _b64(_sign(key, pae))
        envelope = {"payload": _b64(payload), "payloadType": payload_type}
        return {
            "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "verificationMaterial": {
                "certificate": {"rawBytes": _b64(certificate.public_bytes(Encoding.DER))},
                "tlogEntries": [self._entry(payload, signature, certificate)],
            },
            "dsseEnvelope": {**envelope, "signatures": [{"sig": signature}]},
        }

    def _certificate(
        self, key: ec.EllipticCurvePrivateKey, identity: str, issuer: str
    ) -> x509.Certificate:
        """Return a certificate for ten minutes, with the timestamp of the certificate log."""
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self._root.subject)
            .public_key(key.public_key())
            .serial_number(2)
            .not_valid_before(self._now - timedelta(minutes=5))
            .not_valid_after(self._now + timedelta(minutes=5))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage("digital_signature"), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), False)
            .add_extension(x509.SubjectAlternativeName([x509.RFC822Name(identity)]), True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._authority.public_key()),
                False,
            )
            .add_extension(x509.UnrecognizedExtension(_ISSUER, issuer.encode()), False)
        )
        before = builder.sign(self._authority, SHA256()).tbs_certificate_bytes
        stamped = x509.UnrecognizedExtension(_TIMESTAMPS, self._timestamps(before))
        return builder.add_extension(stamped, False).sign(self._authority, SHA256())

    def _timestamps(self, certificate: bytes) -> bytes:
        """Return the list with the one timestamp of a certificate (RFC 6962, section 3.3)."""
        at = int(self._now.timestamp() * 1000)
        entry = _key_id(self._authority) + len(certificate).to_bytes(3, "big") + certificate
        signed = struct.pack("!BBQH", 0, 0, at, 1) + entry + struct.pack("!H", 0)
        signature = _sign(self._certificates, signed)
        stamp = struct.pack("!B32sQH", 0, _key_id(self._certificates), at, 0)
        stamp += struct.pack("!BBH", 4, 3, len(signature)) + signature
        found = struct.pack("!HH", len(stamp) + 2, len(stamp)) + stamp
        length = bytes([len(found)]) if len(found) < 128 else bytes([0x81, len(found)])
        return b"\x04" + length + found

    def _entry(
        self, payload: bytes, signature: str, certificate: x509.Certificate
    ) -> dict[str, Any]:
        """Return the entry of the signature log, the only one of its tree."""
        verifier = _b64(certificate.public_bytes(Encoding.PEM))
        body = _json(
            {
                "apiVersion": "0.0.1",
                "kind": "dsse",
                "spec": {
                    "envelopeHash": {"algorithm": "sha256", "value": "0" * 64},
                    "payloadHash": {
                        "algorithm": "sha256",
                        "value": hashlib.sha256(payload).hexdigest(),
                    },
                    "signatures": [{"signature": signature, "verifier": verifier}],
                },
            }
        )
        key_id, at = _key_id(self._signatures), int(time.time())
        promised = {"body": _b64(body), "integratedTime": at, "logID": key_id.hex(), "logIndex": 0}
        root = _b64(hashlib.sha256(b"\0" + body).digest())
        note = f"{_LOG}\n1\n{root}\n"
        noted = _b64(key_id[:4] + _sign(self._signatures, note.encode()))
        return {
            "logIndex": "0",
            "logId": {"keyId": _b64(key_id)},
            "kindVersion": {"kind": "dsse", "version": "0.0.1"},
            "integratedTime": str(at),
            "inclusionPromise": {
                "signedEntryTimestamp": _b64(_sign(self._signatures, _json(promised)))
            },
            "inclusionProof": {
                "logIndex": "0",
                "rootHash": root,
                "treeSize": "1",
                "hashes": [],
                "checkpoint": {"envelope": f"{note}\n\u2014 {_LOG} {noted}\n"},
            },
            "canonicalizedBody": _b64(body),
        }


def _usage(*names: str) -> x509.KeyUsage:
    used = {name: name in names for name in ("digital_signature", *_USES)}
    return x509.KeyUsage(**used)


def _sign(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    return key.sign(data, ec.ECDSA(SHA256()))


def _spki(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _key_id(key: ec.EllipticCurvePrivateKey) -> bytes:
    return hashlib.sha256(_spki(key)).digest()


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
