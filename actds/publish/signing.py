"""Signing the seal of a dataset, and verifying who signed it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actds.dataset.catalog import Catalog
from actds.dataset.reading import read_catalog
from actds.errors import ActdsError
from actds.format import canonical
from actds.publish.attestation import Document, judged
from actds.publish.envelope import (
    KEYS_VARIABLE,
    MAX_ENVELOPE_NBYTES,
    Envelope,
    Judgement,
    Rejected,
    TrustedKey,
    judge,
    needs_extra,
    parse,
    signer,
    trusted_keys,
    with_signature,
)
from actds.publish.sealing import (
    PAYLOAD_TYPE,
    check_statement,
    check_sums,
    parse_pin,
    put_sums,
    statement,
)
from actds.store import Store, layout, local_folder, open_for_writing, open_store
from actds.store.local import lock_dataset
from actds.text import one_line

if TYPE_CHECKING:
    from sigstore.models import TrustedRoot


@dataclass(frozen=True)
class Signed:
    """What a signature covers, and where it is.

    Args:
        file: path of the signature in the dataset.
        keyid: id of the key; None of an identity.
        is_new: whether this call added it; a key signs a seal once.
    """

    path: str
    seal: int
    digest: str
    file: str
    keyid: str | None
    is_new: bool


@dataclass(frozen=True)
class Identity:
    """Who signed without a key: a name, and who vouched for it."""

    identity: str
    issuer: str


@dataclass(frozen=True)
class Attested:
    """A line of attestations: what a replay, a validation or an audit said, and who signed it.

    All but ``keys`` and ``rejected`` is None of a line of no trusted key.

    Args:
        kind: ``replay``, ``validation``, ``audit`` or ``check``.
        verdict: of a replay ``same``, ``another`` or ``cannot tell``; else as of the command.
        looked_at: how much, how and when, in words.
        predicate: the whole document (15.7, 15.8).
        keys: the trusted keys that signed it.
        rejected: signatures that count for nothing.
    """

    kind: str | None
    verdict: str | None
    looked_at: str | None
    reason: str | None
    fraction: float | None
    n_requests: int | None
    predicate: dict[str, Any] | None
    keys: tuple[TrustedKey, ...]
    rejected: tuple[Rejected, ...]


@dataclass(frozen=True)
class Verified:
    """Who signed a seal, of those whom the consumer trusts.

    Args:
        dataset: its id.
        digest: of the seal: what ``actds.open`` and ``actds validate`` take as a pin.
        keys: the trusted keys that signed it.
        identity: the identity that signed it, where one was asked for.
        rejected: signatures that count for nothing.
        attestations: what replays, validations and audits said, signed beside the seal.
    """

    path: str
    dataset: str
    seal: int
    digest: str
    keys: tuple[TrustedKey, ...]
    identity: Identity | None
    rejected: tuple[Rejected, ...]
    attestations: tuple[Attested, ...]


def sign(
    path: str | os.PathLike[str],
    key: str | os.PathLike[str] | None = None,
    *,
    keyless: bool = False,
) -> Signed:
    """Sign the seal of a dataset, with a key or with the identity of this machine.

    The signature is of the present seal alone, and stays one of it when the dataset is sealed
    again. Several keys may sign a seal, one call each; one identity may.

    Args:
        path: the dataset's folder, or its ``s3://`` URI.
        key: PEM file of an Ed25519 private key; ``ACTDS_KEY_PASSWORD`` has the password of an
            encrypted one.
        keyless: sign with an OIDC token instead, through Sigstore: that of
            ``SIGSTORE_IDENTITY_TOKEN`` or of the CI that this runs in.

    Raises:
        ActdsError: E306 not sealed; E021 a key that cannot be used; E803 the signature that is
            there is of something else; E009 both or neither of the two, or no token; E807 Sigstore
            refuses or does not answer; E008 an identity has signed this seal; E011; E010; E503.

    Spec: 0.1 sections 15.3 and 15.6.
    """
    if (key is None) == (not keyless):
        raise ActdsError("E009", "key", got="both or neither", expected="a key, or an identity")
    store = open_for_writing(os.fspath(path))
    private = None if key is None else signer(key, store)
    with ExitStack() as stack:
        folder = local_folder(store.uri)
        if folder is not None and folder.is_dir():
            # Two who sign at once would undo each other.
            stack.callback(os.close, lock_dataset(folder))
        catalog = _sealed(store, None)
        assert catalog.seal is not None
        n, payload = catalog.seal.n, statement(catalog)
        put_sums(catalog)
        file = layout.bundle_path(n) if private is None else layout.envelope_path(n)
        if private is None:
            if store.exists(file):
                step = "Remove it to sign again: no reader needs it."
                raise ActdsError("E008", file, got="a signature", expected="none", next_step=step)
            store.put_new(file, [sign_statement(payload)])
            return Signed(store.uri, n, catalog.digest, file, None, True)
        before = _envelope(store, file)
        if before is not None:
            check_statement(before.payload, payload, file)
        envelope = with_signature(payload, before, private)
        if envelope is not None:
            store.replace(file, envelope.to_bytes())
        keyid = private.public_key.keyid
        return Signed(store.uri, n, catalog.digest, file, keyid, envelope is not None)


def verify(
    path: str | os.PathLike[str],
    keys: Sequence[str | os.PathLike[str]] = (),
    *,
    need: int = 1,
    identity: str | None = None,
    issuer: str | None = None,
    trusted_root: str | os.PathLike[str] | None = None,
    offline: bool = False,
    seal: str | None = None,
) -> Verified:
    """Check that somebody whom the consumer trusts signed the seal of a dataset.

    Ledger and documents are checked as ``actds.open`` does. The data files are not read:
    ``actds validate`` with the digest as its pin compares every byte with the seal.

    Args:
        path: the dataset's folder or URI.
        keys: PEM files of public keys, each with one or several; those that
            ``ACTDS_TRUSTED_KEYS`` names when there is neither a key nor an identity.
        need: how many of the keys must have signed.
        identity: who must have signed without a key: an e-mail address or a URI.
        issuer: who must have vouched for the identity, as a URL.
        trusted_root: file of the Sigstore instance to trust; the public one's when None.
        offline: take the public instance's root as it is on this machine.
        seal: digest of the seal, ``sha256:HEX``; the present one when None.

    Raises:
        ActdsError: E801 the seal is not signed; E802 not by enough of the trusted, or a signature
            that does not hold; E803 what was signed is another statement; E806 ``SHA256SUMS`` is
            not that of the seal; E102, E103 attestations that are none; E021 a key that cannot be
            used; E009 nobody to trust; E804 no such seal; E807 the trust root cannot be had; E306
            not sealed; E011; as ``read_catalog``.

    Spec: 0.1 sections 15.4, 15.6, 15.7 and 15.8.
    """
    store = open_store(os.fspath(path))
    who = _identity(identity, issuer)
    trusted = trusted_of(keys, store, need) if keys or who is None else []
    catalog = _sealed(store, seal)
    assert catalog.seal is not None
    n, expected_payload = catalog.seal.n, statement(catalog)
    judgement = Judgement((), ())
    if trusted:
        judgement = _by_keys(catalog, trusted, need, expected_payload)
    if who is not None:
        file = layout.bundle_path(n)
        if not catalog.store.exists(file):
            raise _unsigned(catalog, file, layout.bundle_path)
        data = catalog.store.read(file, MAX_ENVELOPE_NBYTES)
        payload = signed_payload(data, who, trust_root(trusted_root, offline), file)
        check_statement(payload, expected_payload, file)
    if seal is None:
        check_sums(catalog)
    return Verified(
        path=store.uri,
        dataset=catalog.genesis.dataset,
        seal=n,
        digest=catalog.digest,
        keys=judgement.accepted,
        identity=who,
        rejected=judgement.rejected,
        attestations=tuple(_attested(*line) for line in judged(catalog, trusted)),
    )


def _attested(of: Document | None, by: Judgement) -> Attested:
    document = {} if of is None else of.model_dump()
    names = ("kind", "verdict", "looked_at", "reason", "fraction", "n_requests")
    facts = {name: getattr(of, name, None) for name in names}
    return Attested(**facts, predicate=document or None, keys=by.accepted, rejected=by.rejected)


def trusted_of(keys: Sequence[str | os.PathLike[str]], store: Store, need: int) -> list[TrustedKey]:
    """Return the public keys of files, of ``ACTDS_TRUSTED_KEYS`` where there are none.

    E009 nobody to trust, or fewer than must have signed; E021 a key that cannot be used; E011.
    """
    named = os.environ.get(KEYS_VARIABLE)
    trusted = trusted_keys(keys or ([named] if named else []), store)
    if not trusted:
        expected = f"a public key, {KEYS_VARIABLE}, or an identity and its issuer"
        raise ActdsError("E009", "key", got="nobody to trust", expected=expected)
    if not 1 <= need <= len(trusted):
        raise ActdsError("E009", "need", got=str(need), expected=f"1 to {len(trusted)} keys")
    return trusted


def _by_keys(
    catalog: Catalog, trusted: Sequence[TrustedKey], need: int, expected: bytes
) -> Judgement:
    """What the envelope says is looked at last."""
    file = layout.envelope_path(len(catalog.seals))
    envelope = _envelope(catalog.store, file)
    if envelope is None:
        raise _unsigned(catalog, file, layout.envelope_path)
    judgement = judge(envelope, trusted)
    if len(judgement.accepted) < need:
        why = "; ".join(f"{r.keyid[:16] or 'no id'} {r.why}" for r in judgement.rejected)
        got = f"good signatures of {len(judgement.accepted)} trusted keys ({why or 'no other'})"
        raise ActdsError("E802", file, got=got[:400], expected=f"{need} of {len(trusted)}")
    check_statement(envelope.payload, expected, file)
    return judgement


def _unsigned(catalog: Catalog, file: str, path_of: Callable[[int], str]) -> ActdsError:
    """Names the seals that are signed."""
    n = len(catalog.seals)
    signed = [i for i in range(1, n) if catalog.store.exists(path_of(i))]
    got = f"no signature of seal {n}"
    step = None
    if signed:
        older = catalog.seal_digests[signed[-1] - 1]
        got += f"; seal {signed[-1]} has one"
        step = f'Ask who signs to sign seal {n}, or verify the older one: seal="sha256:{older}".'
    return ActdsError("E801", file, got=got, expected="a signature", next_step=step)


def _sealed(store: Store, seal: str | None) -> Catalog:
    catalog = read_catalog(store, seal=None if seal is None else parse_pin(seal))
    if not catalog.is_sealed:
        raise catalog.not_sealed()
    return catalog


def _envelope(store: Store, file: str) -> Envelope | None:
    if not store.exists(file):
        return None
    return parse(store.read(file, MAX_ENVELOPE_NBYTES), file)


def _identity(identity: str | None, issuer: str | None) -> Identity | None:
    if identity is None and issuer is None:
        return None
    if not identity or not issuer:
        # An identity is a name that an issuer vouches for: another issuer may vouch for the same.
        got = "an identity without its issuer" if identity else "an issuer without an identity"
        raise ActdsError("E009", "identity", got=got, expected="both")
    return Identity(identity, issuer)


# Sigstore: an identity instead of a key of one's own. All of it is the library ``sigstore``; here
# are its calls, and a code for each way to fail. Signing needs the network, and verifying needs it
# for the newest root of trust only.

TOKEN_VARIABLE = "SIGSTORE_IDENTITY_TOKEN"


def sign_statement(payload: bytes) -> bytes:
    """Return a bundle: a certificate for the identity, the signature, its entry in a public log.

    The identity (an e-mail address, or the workflow of a CI) becomes public in that log, and so
    does the digest of what is signed. E009 no identity token; E807 a service fails; E011.
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
    """Return the certificates and logs to trust: of a file, or of the public instance (15.6).

    E009 a file that cannot be read; E807 the newest cannot be had; E011.
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


def signed_payload(data: bytes, who: Identity, root: TrustedRoot, place: str) -> bytes:
    """Return what an identity signed, after all checks of a bundle (15.6); no network is used.

    E102 no canonical JSON; E103 no bundle; E802 it does not hold: another identity, another
    certificate, no entry in the log; E803 another payload type; E011.
    """
    with needs_extra():
        from sigstore.models import Bundle
        from sigstore.verify import Verifier
        from sigstore.verify import policy as policies
    canonical.parse(data, place)
    try:
        bundle = Bundle.from_json(data)
    except Exception as error:  # of its models, and of pydantic
        got = one_line(error, 200)
        raise ActdsError("E103", place, got=got, expected="a Sigstore bundle") from None
    try:
        policy = policies.Identity(identity=who.identity, issuer=who.issuer)
        kind, payload = Verifier(trusted_root=root).verify_dsse(bundle, policy)
    except Exception as error:  # whatever it is, it is not verified
        expected = f"a signature of {who.identity} by {who.issuer}"
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
