"""Signatures by identity: those of an instance of Sigstore that is made here, without a network."""

from __future__ import annotations

import base64
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import actds
from actds.cli import cli
from actds.errors import ActdsError
from actds.format import canonical
from actds.publish.sealing import statement
from actds_testing.sigstore_instance import Instance
from actds_testing.synthetic import make_dataset
from actds_validators.validate.validation import validate

pytest.importorskip("sigstore")

BUNDLE = "seal/0001.sigstore.json"
WHO = {"identity": "ann@example.org", "issuer": "https://login.example.org"}
Json = dict[str, Any]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("SIGSTORE_IDENTITY_TOKEN", "GITHUB_ACTIONS", "GITLAB_CI", "BUILDKITE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def instance() -> Instance:
    return Instance()


@pytest.fixture
def signed(acts: Path, instance: Instance, tmp_path: Path) -> Path:
    """Return a dataset that ann has signed; the root to trust is beside it."""
    (tmp_path / "root.json").write_bytes(instance.trusted_root)
    put(acts, instance.bundle(statement(actds.open(acts).catalog), **WHO))
    return acts


def put(acts: Path, document: Json) -> None:
    (acts / BUNDLE).write_bytes(canonical.dump(document))


def bundle(acts: Path) -> Json:
    document: Json = json.loads((acts / BUNDLE).read_bytes())
    return document


def verify(acts: Path, **options: Any) -> Any:
    return actds.verify(acts, trusted_root=acts.parent / "root.json", **(WHO | options))


def code_of(function: Callable[..., object], *args: Any, **options: Any) -> str:
    with pytest.raises(ActdsError) as caught:
        function(*args, **options)
    return caught.value.code


def test_who_signed_is_known_by_name_without_a_network(signed: Path) -> None:
    found = verify(signed)
    assert (found.identity.identity, found.identity.issuer) == tuple(WHO.values())
    assert found.keys == () and found.digest == actds.open(signed).digest
    assert validate(signed).warnings == [], "a bundle is no stray file"
    options = ["--identity", WHO["identity"], "--issuer", WHO["issuer"]]
    root = ["--trusted-root", str(signed.parent / "root.json")]
    shown = CliRunner().invoke(cli, ["verify", str(signed), *options, *root])
    assert shown.exit_code == 0
    assert "signed by ann@example.org, vouched for by https://login.example.org" in shown.stdout


def test_another_name_another_issuer_or_another_root_has_not_signed(
    signed: Path, tmp_path: Path
) -> None:
    assert code_of(verify, signed, identity="bob@example.org") == "E802"
    assert code_of(verify, signed, issuer="https://login.example.com") == "E802"
    (tmp_path / "root.json").write_bytes(Instance().trusted_root)
    assert code_of(verify, signed) == "E802"
    assert code_of(actds.verify, signed, **WHO, offline=True) == "E802", "the public instance"
    for data in (b"", b"{}", b'{"mediaType":"x"}', b"\xff"):
        (tmp_path / "root.json").write_bytes(data)
        assert code_of(verify, signed) == "E009"
    (tmp_path / "root.json").unlink()
    assert code_of(verify, signed) == "E009"


def strip(acts: Path, _: Instance) -> None:
    (acts / BUNDLE).unlink()


def change_payload(acts: Path, _: Instance) -> None:
    document = bundle(acts)
    payload = base64.b64decode(document["dsseEnvelope"]["payload"]).replace(b'"n":1', b'"n":2')
    document["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    put(acts, document)


def change_signature(acts: Path, _: Instance) -> None:
    document = bundle(acts)
    document["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(b"x" * 70).decode()
    put(acts, document)


def leave_the_log_out(acts: Path, _: Instance) -> None:
    document = bundle(acts)
    document["verificationMaterial"]["tlogEntries"] = []
    put(acts, document)


def entry_of_another(acts: Path, instance: Instance) -> None:
    document, other = bundle(acts), instance.bundle(b"{}\n", **WHO)
    entries = other["verificationMaterial"]["tlogEntries"]
    document["verificationMaterial"]["tlogEntries"] = entries
    put(acts, document)


def certificate_of_another(acts: Path, instance: Instance) -> None:
    document, other = bundle(acts), instance.bundle(b"{}\n", **WHO)
    document["verificationMaterial"]["certificate"] = other["verificationMaterial"]["certificate"]
    put(acts, document)


def change_the_promise(acts: Path, _: Instance) -> None:
    """Say that it was signed at another time, as who uses an expired certificate would."""
    document = bundle(acts)
    document["verificationMaterial"]["tlogEntries"][0]["integratedTime"] = "1700000000"
    put(acts, document)


def another_dataset(acts: Path, instance: Instance) -> None:
    other = make_dataset(acts.parent / "other", n_requests=3, seed=8)
    put(acts, instance.bundle(statement(actds.open(other).catalog), **WHO))


def another_type(acts: Path, instance: Instance) -> None:
    payload = statement(actds.open(acts).catalog)
    put(acts, instance.bundle(payload, **WHO, payload_type="application/json"))


def no_statement(acts: Path, instance: Instance) -> None:
    put(acts, instance.bundle(b"trust me", **WHO))


def cut(acts: Path, _: Instance) -> None:
    (acts / BUNDLE).write_bytes((acts / BUNDLE).read_bytes()[:-9])


def deep(acts: Path, _: Instance) -> None:
    (acts / BUNDLE).write_bytes(b"[" * 5000 + b"]" * 5000 + b"\n")


def no_bundle(acts: Path, _: Instance) -> None:
    put(acts, {"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json"})


def huge(acts: Path, _: Instance) -> None:
    (acts / BUNDLE).write_bytes(b'"' + b"x" * (9 << 20) + b'"\n')


ATTACKS = {
    strip: "E801",
    change_payload: "E802",
    change_signature: "E802",
    leave_the_log_out: "E103",
    entry_of_another: "E802",
    certificate_of_another: "E802",
    change_the_promise: "E802",
    another_dataset: "E803",
    another_type: "E803",
    no_statement: "E102",
    cut: "E102",
    deep: "E102",
    no_bundle: "E103",
    huge: "E102",
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_on_a_bundle_is_refused_with_its_code(
    attack: Callable[[Path, Instance], None], signed: Path, instance: Instance
) -> None:
    attack(signed, instance)
    assert code_of(verify, signed) == ATTACKS[attack]


def test_key_and_identity_must_both_hold_where_both_are_asked_for(
    signed: Path, pair: Callable[[str], tuple[Path, Path]]
) -> None:
    private, public = pair("a")
    assert code_of(verify, signed, keys=[public]) == "E801"
    actds.sign(signed, private)
    both = verify(signed, keys=[public])
    assert len(both.keys) == 1 and both.identity is not None
    (signed / BUNDLE).unlink()
    assert code_of(verify, signed, keys=[public]) == "E801"


def test_signing_without_a_token_or_a_network_says_what_is_missing(
    acts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ActdsError, match=r"E009 SIGSTORE_IDENTITY_TOKEN.*\n.*with a key"):
        actds.sign(acts, keyless=True)
    monkeypatch.setenv("SIGSTORE_IDENTITY_TOKEN", "no token")
    assert code_of(actds.sign, acts, keyless=True) == "E009"

    def part(claims: Json) -> str:
        return base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()

    claims = {"aud": "sigstore", "iss": "https://accounts.google.com", "iat": 0, "nbf": 0}
    claims |= {"exp": 1 << 40, "sub": "1", "email": "ann@example.org", "email_verified": True}
    token = f"{part({'alg': 'RS256'})}.{part(claims)}.c2ln"
    monkeypatch.setenv("SIGSTORE_IDENTITY_TOKEN", token)
    with pytest.raises(ActdsError) as caught:
        actds.sign(acts, keyless=True)
    assert caught.value.code == "E807" and caught.value.exit_code == 3
    assert token not in str(caught.value)
    assert not (acts / BUNDLE).exists()


def test_verifying_without_a_network_points_at_the_root_on_this_machine(signed: Path) -> None:
    with pytest.raises(ActdsError, match=r"E807.*\n.*offline=True"):
        actds.verify(signed, **WHO)


def test_one_identity_signs_a_seal(
    signed: Path, monkeypatch: pytest.MonkeyPatch, instance: Instance
) -> None:
    """The services are this instance's; the bundle is stored and verified as it came."""
    from actds.publish import signing

    def sign_statement(payload: bytes) -> bytes:
        return canonical.dump(instance.bundle(payload, **WHO))

    monkeypatch.setattr(signing, "sign_statement", sign_statement)
    assert code_of(actds.sign, signed, keyless=True) == "E008"
    make_dataset(signed, n_requests=3, seed=4, run="r-second")
    done = actds.sign(signed, keyless=True)
    assert (done.seal, done.file, done.keyid) == (2, "seal/0002.sigstore.json", None)
    assert verify(signed).seal == 2
    shutil.copy(signed / BUNDLE, signed / done.file)
    assert code_of(verify, signed) == "E803"
