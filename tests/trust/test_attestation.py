"""Attestations beside a seal: who attests is known, and a policy can ask for one."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

import actds
from actds.cli import cli
from actds.dataset.reading import read_catalog
from actds.errors import ActdsError, RefusedError
from actds.format import canonical
from actds.publish.attestation import (
    MAX_ATTESTATIONS,
    Attestation,
    HookScore,
    attestations,
    attester,
    put_attestation,
)
from actds.publish.envelope import trusted_keys
from actds.store import open_store
from actds_validators.validate.validation import validate

Pair = tuple[Path, Path]
Pairs = Callable[[str], Pair]
FILE = "seal/0001.intoto.jsonl"


def attested(acts: Path, **changes: Any) -> Attestation:
    catalog = read_catalog(open_store(acts))
    assert catalog.seal is not None
    hook = HookScore(
        hook="resid_post.1", n_pairs=40, distance=0.01, floor=0.01, ratio=1.02, low=0.9, high=1.1,
        n_far=0,
    )  # fmt: skip
    result = Attestation(
        dataset=catalog.genesis.dataset, seal=catalog.seal.n, digest=catalog.digest,
        verdict="same", reason="near", fraction=0.01, seed=3, n_requests=5, n_skipped=0,
        far_requests=[], served={"model.name": "small"}, hooks=[hook], power=[], not_seen=[],
    )  # fmt: skip
    return result.model_copy(update=changes)


def sign(acts: Path, attestation: Attestation, private: Path) -> str:
    return put_attestation(str(acts), attestation, attester(str(acts), private))


def read(acts: Path, *keys: Path) -> list[tuple[Attestation, list[str]]]:
    store = open_store(acts)
    pairs = attestations(read_catalog(store), trusted_keys(keys, store))
    return [(result, [key.file for key in by]) for result, by in pairs]


def test_an_attestation_is_a_line_of_an_in_toto_bundle(acts: Path, pair: Pairs) -> None:
    (private, public), (other, _) = pair("a"), pair("b")
    assert sign(acts, attested(acts), private) == FILE
    sign(acts, attested(acts, seed=4), other)
    lines = [json.loads(line) for line in (acts / FILE).read_bytes().splitlines()]
    assert [set(line) for line in lines] == [{"payload", "payloadType", "signatures"}] * 2
    payload = base64.b64decode(lines[0]["payload"])
    kind = lines[0]["payloadType"].encode()
    key = serialization.load_pem_public_key(public.read_bytes())
    assert isinstance(key, Ed25519PublicKey)
    sig = base64.b64decode(lines[0]["signatures"][0]["sig"])
    key.verify(sig, b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload))
    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "actds:replay/0.1"
    assert statement["subject"] == [
        {"name": "seal/0001.json", "digest": {"sha256": actds.open(acts).digest}}
    ]
    assert statement["predicate"]["fraction"] == "0.01"  # canonical JSON has no point
    assert read(acts, public) == [(attested(acts), [str(public)])]
    assert read(acts, pair("stranger")[1]) == []
    assert validate(acts).warnings == [] and validate(acts).errors == [], "it is no stray file"


def test_another_statement_or_a_changed_one_is_not_believed(acts: Path, pair: Pairs) -> None:
    private, public = pair("a")
    sign(acts, attested(acts), private)
    good = (acts / FILE).read_bytes()
    envelope = json.loads(good)
    statement = json.loads(base64.b64decode(envelope["payload"]))
    statement["predicate"]["verdict"] = "another"
    payload = base64.b64encode(canonical.dump(statement)).decode()
    (acts / FILE).write_bytes(canonical.dump(envelope | {"payload": payload}))
    assert read(acts, public) == []  # the signature does not hold
    for bytes_, code in ((b"{}\n", "E103"), (good.rstrip() + b" \n", "E102"), (b"\n", "E102"),
                         (good * (MAX_ATTESTATIONS + 1), "E102")):  # fmt: skip
        (acts / FILE).write_bytes(bytes_)
        with pytest.raises(ActdsError, match=code):
            read(acts, public)


def test_an_attestation_is_of_its_seal_alone(acts: Path, pair: Pairs) -> None:
    private, public = pair("a")
    with pytest.raises(ActdsError, match="E804"):
        sign(acts, attested(acts, digest="0" * 64), private)
    forged = attested(acts)
    sign(acts, forged, private)
    data = (acts / FILE).read_bytes()
    other = acts.parent / "other"
    from actds_testing.synthetic import make_dataset

    make_dataset(other, n_requests=4, seed=9)
    (other / FILE).write_bytes(data)
    with pytest.raises(ActdsError, match="E803"):
        read(other, public)
    with pytest.raises(RefusedError, match=r"E701 attestation\.keys: E803"):
        actds.require(other, policy={"attestation": {"keys": [str(public)]}})


def test_a_policy_asks_for_an_attestation(
    acts: Path, pair: Pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (private, public), (second, second_public), (stranger, _) = map(pair, ("a", "b", "c"))
    policy = tmp_path / "policy.toml"
    policy.write_text("[attestation]\nkeys = ['a.pub']\nmin_fraction = '1 %'\nmin_requests = 5\n")

    def refused(words: str, rules: object = policy) -> None:
        with pytest.raises(RefusedError, match=words):
            actds.require(acts, policy=rules)  # type: ignore[arg-type]

    refused(r"E701 attestation\.keys: attestations of 0 trusted keys")
    sign(acts, attested(acts), stranger)
    refused("attestations of 0 trusted keys")
    for lack, words in (
        ({"verdict": "cannot tell"}, "cannot tell"),
        ({"fraction": 0.005}, "a fraction of 0.005"),
        ({"n_requests": 4}, "4 requests"),
    ):
        (acts / FILE).unlink()
        sign(acts, attested(acts, **lack), private)
        refused(f"of 0 trusted keys; that of key [0-9a-f]{{16}}: {words}")
    sign(acts, attested(acts), private)
    assert actds.require(acts, policy=policy).n_rows
    two = {"attestation": {"keys": [str(public), str(second_public)], "need": 2}}
    refused("attestations of 1 trusted keys", two)
    sign(acts, attested(acts), second)
    assert actds.require(acts, policy=two).n_rows
    sign(acts, attested(acts, verdict="another", reason="4 bits"), second)
    refused("attests: 4 bits", two)
    assert actds.require(acts, policy=policy).n_rows, "it trusts the first alone"

    required = {"attestation": {"required": True}}
    for rules in (required, {"attestation": {"min_fraction": 0.01}}):
        with pytest.raises(ActdsError, match="E009"):  # nobody to trust
            actds.require(acts, policy=rules)
    monkeypatch.setenv("ACTDS_TRUSTED_KEYS", str(public))
    assert actds.require(acts, policy=required).n_rows


def test_verify_lists_attestations_with_who_signed_them(acts: Path, pair: Pairs) -> None:
    (private, public), (other, _) = pair("a"), pair("b")
    actds.sign(acts, private)
    assert actds.verify(acts, [public]).attestations == ()
    sign(acts, attested(acts, verdict="cannot tell", reason="few"), private)
    sign(acts, attested(acts, verdict="same"), other)
    first, second = actds.verify(acts, [public]).attestations
    assert (first.verdict, first.reason, first.n_requests) == ("cannot tell", "few", 5)
    assert [key.file for key in first.keys] == [str(public)] and first.rejected == ()
    assert second.verdict is None and second.keys == ()  # whatever it says
    assert [rejected.why for rejected in second.rejected] == ["of no trusted key"]
    shown = CliRunner().invoke(cli, ["verify", str(acts), "--key", str(public)])
    assert shown.exit_code == 0
    assert f"attested by key {first.keys[0].keyid} ({public}): cannot tell" in shown.stdout
    assert "not counted: attestation signed by" in shown.stderr and "same" not in shown.output
    told = CliRunner().invoke(cli, ["verify", str(acts), "--key", str(public), "--json"])
    lines = json.loads(told.stdout)["attestations"]
    assert [line["verdict"] for line in lines] == ["cannot tell", None]
    assert lines[0]["keys"] == [{"keyid": first.keys[0].keyid, "file": str(public)}]
