"""Signatures of a seal: who signed is known, and nothing else passes for it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

import actds
from actds.cli import cli
from actds.errors import ActdsError, UntrustedError
from actds.format import canonical
from actds.publish.envelope import MAX_SIGNATURES
from actds.store import open_store
from actds_testing.synthetic import make_dataset
from actds_validators.validate.validation import validate

Pair = tuple[Path, Path]
Pairs = Callable[[str], Pair]
Json = dict[str, Any]
ENVELOPE = "seal/0001.dsse.json"


def code_of(function: Callable[..., object], *args: Any, **options: Any) -> str:
    with pytest.raises(ActdsError) as caught:
        function(*args, **options)
    assert len(str(caught.value)) < 2000
    return caught.value.code


def read(acts: Path, path: str = ENVELOPE) -> Json:
    document: Json = json.loads((acts / path).read_bytes())
    return document


def write(acts: Path, document: Json, path: str = ENVELOPE) -> None:
    (acts / path).write_bytes(canonical.dump(document))


def pae(document: Json) -> bytes:
    """Return what DSSE signs, from its own text: no line of ours is used."""
    payload, kind = base64.b64decode(document["payload"]), document["payloadType"].encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def signed_by_hand(document: Json, private: Path) -> Json:
    """Return an envelope with one signature that a key makes, whatever it says."""
    key: Any = serialization.load_pem_private_key(private.read_bytes(), None)
    sig = base64.b64encode(key.sign(pae(document))).decode()
    return document | {"signatures": [{"keyid": "", "sig": sig}]}


def test_a_signature_says_who_signed_which_seal(acts: Path, pair: Pairs) -> None:
    private, public = pair("a")
    done = actds.sign(acts, private)
    assert (done.seal, done.file, done.is_new) == (1, ENVELOPE, True)
    found = actds.verify(acts, [public])
    assert found.digest == done.digest == actds.open(acts).digest
    assert [key.keyid for key in found.keys] == [done.keyid]
    assert found.rejected == () and found.dataset == read(acts, "actds.json")["dataset"]
    assert validate(acts).warnings == [], "a signature is no stray file"


def test_cryptography_alone_verifies_an_envelope(acts: Path, pair: Pairs) -> None:
    private, public = pair("a")
    actds.sign(acts, private)
    key = serialization.load_pem_public_key(public.read_bytes())
    assert isinstance(key, Ed25519PublicKey)
    document = read(acts)
    sig = base64.b64decode(document["signatures"][0]["sig"])
    key.verify(sig, pae(document))
    with pytest.raises(InvalidSignature):
        key.verify(sig, pae(document) + b" ")
    statement = json.loads(base64.b64decode(document["payload"]))
    digests = {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
    assert digests == {
        path: canonical.digest((acts / path).read_bytes())
        for path in ("seal/0001.json", "SHA256SUMS")
    }
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    genesis, seal = read(acts, "actds.json"), read(acts, "seal/0001.json")
    predicate = statement["predicate"]
    assert predicate["hooks"] == genesis["hooks"]
    assert {name: predicate[name] for name in ("dataset", "n", "totals", "sealed_ns")} == {
        name: seal[name] for name in ("dataset", "n", "totals", "sealed_ns")
    }


def test_the_library_of_in_toto_and_tuf_verifies_an_envelope(acts: Path, pair: Pairs) -> None:
    dsse = pytest.importorskip("securesystemslib.dsse")
    from securesystemslib.signer import SSlibKey

    private, public = pair("a")
    keyid = actds.sign(acts, private).keyid
    crypto: Any = serialization.load_pem_public_key(public.read_bytes())
    envelope = dsse.Envelope.from_dict(read(acts))
    assert list(envelope.verify([SSlibKey.from_crypto(crypto, keyid=keyid)], 1)) == [keyid]


def test_signing_again_changes_nothing_and_another_key_adds_its_own(
    acts: Path, pair: Pairs
) -> None:
    (a, a_pub), (b, b_pub), (_, c_pub) = pair("a"), pair("b"), pair("c")
    actds.sign(acts, a)
    once = (acts / ENVELOPE).read_bytes()
    assert not actds.sign(acts, a).is_new and (acts / ENVELOPE).read_bytes() == once
    assert actds.sign(acts, b).is_new
    assert len(actds.verify(acts, [a_pub, b_pub], need=2).keys) == 2
    assert len(actds.verify(acts, [b_pub, c_pub]).keys) == 1
    assert code_of(actds.verify, acts, [a_pub, c_pub], need=2) == "E802"
    # The same key twice, or in a bundle with others, is one key.
    bundle = acts.parent / "keys.pub"
    bundle.write_bytes(a_pub.read_bytes() + b"\n# Bob\n" + b_pub.read_bytes() + a_pub.read_bytes())
    assert len(actds.verify(acts, [bundle, a_pub], need=2).keys) == 2
    assert code_of(actds.verify, acts, [a_pub, a_pub], need=2) == "E009"


def test_of_two_signatures_the_bad_one_counts_for_nothing_and_is_named(
    acts: Path, pair: Pairs
) -> None:
    (a, a_pub), (b, b_pub) = pair("a"), pair("b")
    actds.sign(acts, a)
    bad = actds.sign(acts, b).keyid
    document = read(acts)
    document["signatures"][1]["sig"] = document["signatures"][0]["sig"]
    write(acts, document)
    found = actds.verify(acts, [a_pub, b_pub])
    assert [key.file for key in found.keys] == [str(a_pub)]
    # The copy of a's signature holds under a's key: b has not signed all the same.
    assert code_of(actds.verify, acts, [b_pub]) == "E802"
    assert code_of(actds.verify, acts, [a_pub, b_pub], need=2) == "E802"
    document["signatures"][1]["sig"] = base64.b64encode(b"\1" * 64).decode()
    write(acts, document)
    found = actds.verify(acts, [a_pub, b_pub])
    assert [one.keyid for one in found.rejected] == [bad]
    assert "does not hold" in found.rejected[0].why
    assert actds.sign(acts, b).is_new, "a damaged signature of a key is replaced by the key"
    assert actds.verify(acts, [a_pub, b_pub], need=2).rejected == ()


def test_a_key_id_is_a_hint_that_nobody_believes(acts: Path, pair: Pairs) -> None:
    (a, a_pub), (mallory, m_pub) = pair("a"), pair("mallory")
    keyid = actds.sign(acts, a).keyid
    document = read(acts)
    document["signatures"][0]["keyid"] = "expired-2019"
    write(acts, document)
    assert [key.keyid for key in actds.verify(acts, [a_pub]).keys] == [keyid]
    shutil.rmtree(acts / "seal" / "x", ignore_errors=True)
    (acts / ENVELOPE).unlink()
    actds.sign(acts, mallory)
    document = read(acts)
    document["signatures"][0]["keyid"] = keyid  # says that it is a's
    write(acts, document)
    assert code_of(actds.verify, acts, [a_pub]) == "E802"
    assert actds.verify(acts, [m_pub]).keys


def edit_payload(document: Json, **changes: Any) -> Json:
    statement = json.loads(base64.b64decode(document["payload"]))
    statement["predicate"] |= changes
    payload = base64.b64encode(canonical.dump(statement)).decode()
    return document | {"payload": payload}


def swap_key(acts: Path, pair: Pairs) -> None:
    (acts / ENVELOPE).unlink()
    actds.sign(acts, pair("mallory")[0])


def strip_signature(acts: Path, pair: Pairs) -> None:
    (acts / ENVELOPE).unlink()


def empty_signatures(acts: Path, pair: Pairs) -> None:
    write(acts, read(acts) | {"signatures": []})


def change_payload(acts: Path, pair: Pairs) -> None:
    write(acts, edit_payload(read(acts), dataset="f" * 32))


def change_payload_type(acts: Path, pair: Pairs) -> None:
    write(acts, read(acts) | {"payloadType": "application/json"})


def sign_another_statement(acts: Path, pair: Pairs) -> None:
    """The right key signs, but something else than this seal's statement."""
    totals = read(acts, "seal/0001.json")["totals"]
    document = edit_payload(read(acts), totals=totals | {"dropped": totals["dropped"] + 1})
    write(acts, signed_by_hand(document, acts.parent / "a.pem"))


def sign_no_statement(acts: Path, pair: Pairs) -> None:
    document = read(acts) | {"payload": base64.b64encode(b"trust me").decode()}
    write(acts, signed_by_hand(document, acts.parent / "a.pem"))


def foreign_envelope(acts: Path, pair: Pairs) -> None:
    """The right key signed it: for another dataset."""
    other = make_dataset(acts.parent / "other", n_requests=3, seed=8)
    actds.sign(other, acts.parent / "a.pem")
    shutil.copy(other / ENVELOPE, acts / ENVELOPE)


def cut_envelope(acts: Path, pair: Pairs) -> None:
    (acts / ENVELOPE).write_bytes((acts / ENVELOPE).read_bytes()[:-40])


def huge_envelope(acts: Path, pair: Pairs) -> None:
    (acts / ENVELOPE).write_bytes(b'{"payload":"' + b"A" * (9 << 20) + b'"}\n')


def deep_envelope(acts: Path, pair: Pairs) -> None:
    (acts / ENVELOPE).write_bytes(b"[" * 5000 + b"]" * 5000 + b"\n")


def key_twice(acts: Path, pair: Pairs) -> None:
    data = (acts / ENVELOPE).read_bytes()
    (acts / ENVELOPE).write_bytes(data.replace(b'{"payload"', b'{"payload":"AA==","payload"', 1))


def unknown_field(acts: Path, pair: Pairs) -> None:
    write(acts, read(acts) | {"cert": "x"})


def many_signatures(acts: Path, pair: Pairs) -> None:
    one = read(acts)["signatures"][0]
    write(acts, read(acts) | {"signatures": [one] * (MAX_SIGNATURES + 1)})


def loose_base64(acts: Path, pair: Pairs) -> None:
    document = read(acts)
    document["signatures"][0]["sig"] += "\n"
    write(acts, document)


def short_signature(acts: Path, pair: Pairs) -> None:
    document = read(acts)
    document["signatures"][0]["sig"] = base64.b64encode(b"x").decode()
    write(acts, document)


def linked_envelope(acts: Path, pair: Pairs) -> None:
    (acts / ENVELOPE).rename(acts.parent / "elsewhere.json")
    (acts / ENVELOPE).symlink_to(acts.parent / "elsewhere.json")


def changed_seal(acts: Path, pair: Pairs) -> None:
    """Ledger and seal hold together, and say something else than what was signed."""
    document = read(acts, "seal/0001.json")
    write(acts, document | {"sealed_ns": document["sealed_ns"] + 1}, "seal/0001.json")


def changed_sums(acts: Path, pair: Pairs) -> None:
    data = (acts / "SHA256SUMS").read_bytes()
    (acts / "SHA256SUMS").write_bytes(data.replace(b"0", b"1", 1))


def changed_manifest(acts: Path, pair: Pairs) -> None:
    manifest = next(acts.glob("shards/*/shard.json"))
    manifest.write_bytes(manifest.read_bytes().replace(b'"n_rows":', b'"n_rows":1', 1))


ATTACKS = {
    swap_key: "E802",
    strip_signature: "E801",
    empty_signatures: "E103",
    change_payload: "E802",
    change_payload_type: "E803",
    sign_another_statement: "E803",
    sign_no_statement: "E102",
    foreign_envelope: "E803",
    cut_envelope: "E102",
    huge_envelope: "E102",
    deep_envelope: "E102",
    key_twice: "E102",
    unknown_field: "E103",
    many_signatures: "E103",
    loose_base64: "E103",
    short_signature: "E802",
    linked_envelope: "E107",
    changed_seal: "E803",
    changed_sums: "E806",
    changed_manifest: "E202",
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_on_a_signed_dataset_is_refused_with_its_code(
    attack: Callable[[Path, Pairs], None], acts: Path, pair: Pairs
) -> None:
    private, public = pair("a")
    actds.sign(acts, private)
    actds.verify(acts, [public])
    attack(acts, pair)
    assert code_of(actds.verify, acts, [public]) == ATTACKS[attack]
    result = CliRunner().invoke(cli, ["verify", str(acts), "--key", str(public)])
    assert result.exit_code == 3 and result.stderr.startswith(ATTACKS[attack])
    assert result.stdout == ""


def test_what_nobody_trusted_signed_is_an_error_of_its_own_class(acts: Path, pair: Pairs) -> None:
    with pytest.raises(UntrustedError, match="E801"):
        actds.verify(acts, [pair("a")[1]])


def private_in(path: Path, **options: Any) -> bytes:
    key: Any = serialization.load_pem_private_key(path.read_bytes(), None)
    data: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, **options
    )
    return data


def bad_keys(folder: Path, good: Path, public: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield files that are no key to sign with."""
    yield folder / "missing.pem", b""
    yield folder / "empty.pem", b""
    lines = good.read_text().splitlines()
    yield folder / "cut.pem", "\n".join([lines[0], lines[1][:20], lines[-1]]).encode()
    yield folder / "garbage.pem", b"-----BEGIN PRIVATE KEY-----\n%%%%\n-----END PRIVATE KEY-----\n"
    yield folder / "binary.pem", bytes(range(256))
    yield folder / "public.pem", public.read_bytes()
    yield folder / "large.pem", good.read_bytes() + b"\n" * (1 << 17)
    curve = ec.generate_private_key(ec.SECP256R1())
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    yield folder / "ecdsa.pem", curve.private_bytes(serialization.Encoding.PEM, form, plain)
    locked = serialization.BestAvailableEncryption(b"open sesame")
    yield folder / "locked.pem", private_in(good, encryption_algorithm=locked)


def test_a_key_that_cannot_sign_is_refused_and_nothing_is_written(
    acts: Path, pair: Pairs, tmp_path: Path
) -> None:
    good, public = pair("a")
    n = 0
    for path, data in bad_keys(tmp_path, good, public):
        if path.name != "missing.pem":
            path.write_bytes(data)
        assert code_of(actds.sign, acts, path) == "E021", path.name
        n += 1
    assert n == 9 and code_of(actds.sign, acts, tmp_path) == "E021"
    assert not (acts / ENVELOPE).exists()


def test_an_encrypted_key_signs_with_its_password_alone(
    acts: Path, pair: Pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, public = pair("a")
    locked = serialization.BestAvailableEncryption(b"open sesame")
    (tmp_path / "locked.pem").write_bytes(private_in(good, encryption_algorithm=locked))
    with pytest.raises(ActdsError, match="an encrypted key; expected its password in ACTDS_KEY"):
        actds.sign(acts, tmp_path / "locked.pem")
    monkeypatch.setenv("ACTDS_KEY_PASSWORD", "open barley")
    assert code_of(actds.sign, acts, tmp_path / "locked.pem") == "E021"
    monkeypatch.setenv("ACTDS_KEY_PASSWORD", "open sesame")
    actds.sign(acts, tmp_path / "locked.pem")
    assert actds.verify(acts, [public]).keys
    assert not actds.sign(acts, good).is_new, "a password does not disturb a key without one"


def test_a_public_key_that_cannot_verify_is_refused(
    acts: Path, pair: Pairs, tmp_path: Path
) -> None:
    private, public = pair("a")
    actds.sign(acts, private)
    bad = tmp_path / "bad.pub"
    curve = ec.generate_private_key(ec.SECP256R1()).public_key()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    for data in (
        b"",
        b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        public.read_bytes()[:40],
        private.read_bytes(),
        curve.public_bytes(serialization.Encoding.PEM, form),
        public.read_bytes() + b"\n" * (1 << 17),
    ):
        bad.write_bytes(data)
        assert code_of(actds.verify, acts, [public, bad]) == "E021", data[:60]
    assert code_of(actds.verify, acts, [tmp_path / "none.pub"]) == "E021"
    assert code_of(actds.verify, acts, ["\0"]) == "E021"
    with pytest.raises(ActdsError, match="openssl pkey -in"):
        actds.verify(acts, [private])


def test_a_key_inside_the_dataset_is_refused_however_it_is_named(
    acts: Path, pair: Pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = pair("mallory")
    actds.sign(acts, private)
    shutil.copy(public, acts / "trust-me.pub")
    (tmp_path / "link.pub").symlink_to(acts / "trust-me.pub")
    (tmp_path / "alias").symlink_to(acts)
    for where, key in (
        (acts, acts / "trust-me.pub"),
        (acts, tmp_path / "link.pub"),
        (tmp_path / "alias", acts / "trust-me.pub"),
        (acts, acts / "seal" / ".." / "trust-me.pub"),
        (acts, tmp_path / "alias" / "trust-me.pub"),
    ):
        assert code_of(actds.verify, where, [key]) == "E021"
    monkeypatch.chdir(acts)
    assert code_of(actds.verify, ".", ["trust-me.pub"]) == "E021"
    monkeypatch.setenv("ACTDS_TRUSTED_KEYS", "trust-me.pub")
    assert code_of(actds.verify, acts) == "E021"
    shutil.copy(private, acts / "key.pem")
    assert code_of(actds.sign, acts, acts / "key.pem") == "E021"


def test_whom_to_trust_comes_from_the_consumer_alone(
    acts: Path, pair: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = pair("a")
    actds.sign(acts, private)
    assert code_of(actds.verify, acts) == "E009"
    monkeypatch.setenv("ACTDS_TRUSTED_KEYS", str(public))
    assert actds.verify(acts).keys
    monkeypatch.setenv("ACTDS_TRUSTED_KEYS", str(pair("b")[1]))
    assert code_of(actds.verify, acts) == "E802"
    assert actds.verify(acts, [public]).keys, "what is given counts, and not the environment"
    for options in ({"need": 0}, {"need": 2}, {"identity": "me@example.org"}, {"issuer": "x"}):
        assert code_of(actds.verify, acts, [public], **options) == "E009"
    assert code_of(actds.sign, acts) == code_of(actds.sign, acts, private, keyless=True) == "E009"


def test_a_signature_stays_one_of_its_seal_when_the_dataset_is_sealed_again(
    acts: Path, pair: Pairs
) -> None:
    private, public = pair("a")
    first = actds.sign(acts, private).digest
    make_dataset(acts, n_requests=4, seed=9, run="r-second", sealed=False)
    assert code_of(actds.verify, acts, [public]) == "E306"
    assert actds.verify(acts, [public], seal=f"sha256:{first}").seal == 1
    actds.seal(acts)
    with pytest.raises(UntrustedError, match=f"seal 1 has one.*\n.*seal=.sha256:{first}") as caught:
        actds.verify(acts, [public])
    assert caught.value.code == "E801"
    assert actds.verify(acts, [public], seal=first).seal == 1
    assert validate(acts).warnings == [], "an older signature is no stray file"
    second = actds.sign(acts, private)
    assert (second.seal, second.file) == (2, "seal/0002.dsse.json")
    assert actds.verify(acts, [public]).digest == second.digest != first
    shutil.copy(acts / ENVELOPE, acts / "seal/0002.dsse.json")
    assert code_of(actds.verify, acts, [public]) == "E803"
    assert code_of(actds.sign, acts, private) == "E803", "no signature is added to a foreign one"


def test_what_is_not_sealed_cannot_be_signed(tmp_path: Path, pair: Pairs) -> None:
    unsealed = make_dataset(tmp_path / "d", n_requests=3, sealed=False)
    assert code_of(actds.sign, unsealed, pair("a")[0]) == "E306"
    assert code_of(actds.sign, tmp_path / "none", pair("a")[0]) == "E101"
    assert not (tmp_path / "none").exists()


def test_who_signs_waits_for_nobody_and_undoes_nobody(acts: Path, pair: Pairs) -> None:
    from actds.store.local import lock_dataset

    lock = lock_dataset(acts)
    try:
        assert code_of(actds.sign, acts, pair("a")[0]) == "E010"
    finally:
        os.close(lock)


def test_without_the_extra_the_code_says_which(
    acts: Path, pair: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = pair("a")
    actds.sign(acts, private)
    monkeypatch.setitem(sys.modules, "securesystemslib.signer", None)
    assert code_of(actds.sign, acts, private) == "E011"
    with pytest.raises(ImportError, match=r"the extra sign of actds"):
        actds.verify(acts, [public])


def test_the_commands_say_what_they_did(acts: Path, pair: Pairs) -> None:
    (a, a_pub), (_, b_pub) = pair("a"), pair("b")
    run = CliRunner().invoke
    signed = run(cli, ["sign", str(acts), "--key", str(a), "--json"])
    assert signed.exit_code == 0
    told = json.loads(signed.stdout)
    assert (told["format"], told["seal"], told["is_new"]) == ("actds.sign", 1, True)
    again = run(cli, ["sign", str(acts), "--key", str(a)])
    assert "signed before by key" in again.stdout and told["digest"] in again.stdout
    keys = ["--key", str(a_pub), "--key", str(b_pub)]
    found = run(cli, ["verify", str(acts), *keys, "--json"])
    said = json.loads(found.stdout)
    assert said["format"] == "actds.verify" and said["digest"] == told["digest"]
    assert said["keys"] == [{"keyid": told["keyid"], "file": str(a_pub)}]
    shown = run(cli, ["verify", str(acts), *keys])
    assert f"signed by key {told['keyid']}" in shown.stdout and shown.exit_code == 0
    assert f"validate PATH --seal sha256:{told['digest']}" in shown.stderr
    assert run(cli, ["verify", str(acts), *keys, "--need", "2"]).exit_code == 3


@pytest.mark.standard
def test_a_dataset_in_an_object_store_is_signed_and_verified_where_it_is(
    acts: Path, pair: Pairs, s3_root: str
) -> None:
    store = open_store(s3_root)
    for file in sorted(path for path in acts.rglob("*") if path.is_file()):
        store.put_new(file.relative_to(acts).as_posix(), [file.read_bytes()])
    (a, a_pub), (b, b_pub) = pair("a"), pair("b")
    actds.sign(s3_root, a)
    done = actds.sign(s3_root, b)
    found = actds.verify(s3_root, [a_pub, b_pub], need=2, seal=done.digest)
    assert found.digest == actds.open(s3_root, seal=done.digest).digest
    assert code_of(actds.verify, s3_root, [pair("c")[1]]) == "E802"
