"""Signatures without a key of one's own: an OIDC identity, vouched for by Sigstore.

All of it is the library ``sigstore``; here are its calls, and a code for each way to fail. Signing
needs the network. Verifying needs it for the newest root of trust only.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from actds.errors import ActdsError
from actds.format import canonical
from actds.text import one_line
from actds.trust.envelope import needs_extra
from actds.trust.pin import PAYLOAD_TYPE

if TYPE_CHECKING:
    from sigstore.models import TrustedRoot

TOKEN_VARIABLE = "SIGSTORE_IDENTITY_TOKEN"


def sign_statement(payload: bytes) -> bytes:
    """Return a bundle: a certificate for the identity, the signature, its entry in a public log.

    The identity (an e-mail address, or the workflow of a CI) becomes public in that log, and so
    does the digest of what is signed.

    Raises:
        ActdsError: E009 no identity token; E807 a service refuses or does not answer; E011.
    """
    with needs_extra():
        from sigstore.dsse import Statement
        from sigstore.models import ClientTrustConfig
        from sigstore.oidc import IdentityToken, detect_credential
        from sigstore.sign import SigningContext
    try:
        raw = os.environ.get(TOKEN_VARIABLE) or detect_credential()
        token = None if raw is None else IdentityToken(raw)
    except Exception as error:  # its own errors, and those of each CI
        raise _no_token(one_line(error, 200)) from None
    if token is None:
        raise _no_token("no identity token")
    try:
        context = SigningContext.from_trust_config(ClientTrustConfig.production())
        with context.signer(token) as signer:
            bundle = signer.sign_dsse(Statement(payload))
    except Exception as error:  # four services, each with clients of its own
        raise _failed("Sigstore", error) from None
    return canonical.dump(json.loads(bundle.to_json()))


def trust_root(file: str | os.PathLike[str] | None, offline: bool) -> TrustedRoot:
    """Return the certificates and logs to trust: of a file, or of the public instance.

    Raises:
        ActdsError: E009 a file that cannot be read; E807 the newest cannot be had; E011.

    Spec: 0.1 section 15.6.
    """
    with needs_extra():
        from sigstore.models import ClientTrustConfig, TrustedRoot
    if file is not None:
        try:
            return TrustedRoot.from_file(os.fspath(Path(file).expanduser()))
        except Exception as error:  # of the file, of JSON, of the models
            got = one_line(error, 200)
            place = os.fspath(file)
            raise ActdsError("E009", place, got=got, expected="a trusted_root.json") from None
    try:
        return ClientTrustConfig.production(offline=offline).trusted_root
    except Exception as error:  # of the network, of TUF, of the cache folder
        step = "Try again, or take the root that is on this machine: offline=True."
        raise _failed("the root of trust", error, step) from None


def signed_payload(data: bytes, identity: str, issuer: str, root: TrustedRoot, place: str) -> bytes:
    """Return what an identity signed, after all checks of a bundle; no network is used.

    Raises:
        ActdsError: E102 no canonical JSON; E103 no bundle; E802 it does not hold: another identity,
            another certificate, no entry in the log; E803 another payload type; E011.

    Spec: 0.1 section 15.6.
    """
    with needs_extra():
        from sigstore.models import Bundle
        from sigstore.verify import Verifier
        from sigstore.verify.policy import Identity
    canonical.parse(data, place)
    try:
        bundle = Bundle.from_json(data)
    except Exception as error:  # of its models, and of pydantic
        got = one_line(error, 200)
        raise ActdsError("E103", place, got=got, expected="a Sigstore bundle") from None
    try:
        verifier = Verifier(trusted_root=root)
        kind, payload = verifier.verify_dsse(bundle, Identity(identity=identity, issuer=issuer))
    except Exception as error:  # whatever it is, it is not verified
        expected = f"a signature of {identity} by {issuer}"
        raise ActdsError("E802", place, got=one_line(error, 300), expected=expected) from None
    if kind != PAYLOAD_TYPE:
        raise ActdsError("E803", place, got=repr(kind)[:120], expected=PAYLOAD_TYPE)
    return payload


def _no_token(got: str) -> ActdsError:
    step = f"Run it in a CI with an OIDC token, set {TOKEN_VARIABLE}, or sign with a key."
    expected = "an OIDC identity token"
    return ActdsError("E009", TOKEN_VARIABLE, got=got, expected=expected, next_step=step)


def _failed(place: str, error: Exception, next_step: str | None = None) -> ActdsError:
    words = one_line(error, 200)
    if error.__cause__ is not None:
        words = f"{words}: {one_line(error.__cause__, 200)}"
    return ActdsError("E807", place, got=words, expected="an answer", next_step=next_step)
