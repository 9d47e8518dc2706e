"""Verdicts of validations and audits beside a seal: what was said, and who vouches for it."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

import actds
from actds.cli import cli
from actds.errors import ActdsError, RefusedError
from actds.format import canonical
from actds.publish.signing import Attested
from actds_testing.places import ROOT
from actds_testing.synthetic import make_dataset
from actds_validators.gate import Attester, judge
from actds_validators.policy import read_policy
from actds_validators.validate.validation import validate

Pair = tuple[Path, Path]
Pairs = Callable[[str], Pair]
FILE = "seal/0001.intoto.jsonl"
SCHEMA = json.loads((ROOT / "spec" / "0.1" / "schemas" / "verdict.json").read_text())


def command(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def attest(acts: Path, key: Path, *words: object, name: str = "validate") -> Result:
    result = command(name, acts, "--key", key, *words)
    assert "attested: " in result.stderr, result.output
    return result


def statements(acts: Path) -> list[dict[str, Any]]:
    lines = (acts / FILE).read_bytes().splitlines()
    return [json.loads(base64.b64decode(json.loads(line)["payload"])) for line in lines]


def verified(acts: Path, public: Path) -> list[Attested]:
    return list(actds.verify(acts, [public]).attestations)


@pytest.fixture
def signed(acts: Path, pair: Pairs) -> tuple[Path, Path, Path]:
    """Return a dataset whose seal is signed, the private key and the public one."""
    private, public = pair("a")
    actds.sign(acts, private)
    return acts, private, public


def test_a_valid_dataset_is_attested_and_whoever_trusts_the_key_reads_it(
    signed: tuple[Path, Path, Path],
) -> None:
    acts, private, public = signed
    sums, files = (acts / "SHA256SUMS").read_bytes(), set(acts.rglob("*"))
    assert attest(acts, private).exit_code == 0
    (statement,) = statements(acts)
    digest = actds.open(acts).digest
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "actds:verdict/0.1"
    assert statement["subject"] == [{"name": "seal/0001.json", "digest": {"sha256": digest}}]
    said = statement["predicate"]
    jsonschema.validate(said, SCHEMA)
    assert (said["kind"], said["verdict"], said["software"]) == (
        "validation", "valid", f"actds {actds.__version__}",
    )  # fmt: skip
    assert said["validation"] == {
        "level": "full", "strict": False, "pinned": None, "policy": None, "findings": [],
    }  # fmt: skip
    (line,) = verified(acts, public)
    assert (line.kind, line.verdict, line.predicate) == ("validation", "valid", said)
    assert [key.file for key in line.keys] == [str(public)]
    shown = command("verify", acts, "--key", public)
    assert f"{line.keys[0].keyid} ({public}): valid (validation at level full" in shown.stdout
    told = json.loads(command("verify", acts, "--key", public, "--json").stdout)
    assert told["attestations"][0]["predicate"] == said
    assert set(acts.rglob("*")) - files == {acts / FILE}
    assert (acts / "SHA256SUMS").read_bytes() == sums
    assert validate(acts).findings == [], "it is no stray file"


def test_a_level_that_does_not_read_everything_says_no_more_than_it_saw(
    signed: tuple[Path, Path, Path],
) -> None:
    acts, private, public = signed
    digest = actds.open(acts).digest
    attest(acts, private, "--level", "quick", "--strict", "--seal", f"sha256:{digest}")
    (line,) = verified(acts, public)
    assert line.verdict == "no error" and line.predicate is not None
    facts = line.predicate["validation"]
    assert (facts["level"], facts["strict"], facts["pinned"]) == ("quick", True, 1)
    assert "no table and no array was read" in (line.reason or "")


def test_every_verdict_is_one_more_line(signed: tuple[Path, Path, Path]) -> None:
    acts, private, public = signed
    attest(acts, private)
    first = (acts / FILE).read_bytes()
    attest(acts, private)
    attest(acts, private, "--limit", "max-loss=0.5", "--accept", "source", name="audit")
    attest(acts, private, "--json", name="check")
    assert (acts / FILE).read_bytes().startswith(first)
    lines = verified(acts, public)
    assert [line.kind for line in lines] == ["validation", "validation", "audit", "check"]
    audit, check = (line.predicate for line in lines[2:])
    assert audit is not None and check is not None
    result = actds.audit(acts, limits={"max_loss": 0.5}, accept=["source"]).result
    assert lines[2].verdict == result.answer.level and audit["validation"] is None
    facts = audit["audit"]
    assert facts["limits"] == {"max_loss": 0.5} and facts["given"] == {}
    assert facts["answer"]["words"] == result.answer.words
    assert {p["name"]: (p["level"], p["accepted"], p["headline"]) for p in facts["places"]} == {
        place.name: (place.level, place.accepted, place.headline) for place in result.places
    }
    assert "limit max_loss 0.5, source accepted" in (lines[2].looked_at or "")
    assert lines[3].verdict == actds.check(acts).verdict
    assert check["validation"]["level"] == "full" and check["audit"]["limits"] == {}
    for statement in statements(acts)[:2]:
        jsonschema.validate(statement["predicate"], SCHEMA)


def test_a_dataset_that_is_not_valid_is_attested_as_such(signed: tuple[Path, Path, Path]) -> None:
    acts, private, public = signed
    array = next(acts.glob("shards/*/acts.zarr/*/c/0/0"))
    data = array.read_bytes()
    array.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    assert attest(acts, private).exit_code == 1
    attest(acts, private, name="check")
    validation, check = verified(acts, public)
    assert validation.verdict == check.verdict == "not valid"
    assert validation.predicate is not None and check.predicate is not None
    assert validation.predicate["validation"]["findings"] == [
        {"code": "E202", "severity": "error", "n": 1}
    ]
    assert check.predicate["audit"] is None and check.reason == "No: it is not valid"


def test_a_dataset_with_a_broken_document_is_attested_as_well(acts: Path, pair: Pairs) -> None:
    record = next(acts.glob("runs/*.json"))
    record.write_bytes(record.read_bytes().replace(b"actds", b"actdz"))
    assert attest(acts, pair("a")[0]).exit_code == 1
    (statement,) = statements(acts)
    codes = [each["code"] for each in statement["predicate"]["validation"]["findings"]]
    assert statement["predicate"]["verdict"] == "not valid" and codes == ["E202"]


def test_a_refusal_names_the_policy_by_its_digest_and_its_rules(
    signed: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    acts, private, public = signed
    policy = tmp_path / "team.toml"
    policy.write_text('level = "quick"\n[harvest]\ncheck = true\n[audit]\nworst = "PASS"\n')
    assert attest(acts, private, "--policy", policy).exit_code == 5
    (line,) = verified(acts, public)
    assert line.verdict == "refused" and line.predicate is not None
    facts = line.predicate["validation"]
    assert facts["policy"]["name"] == "team"
    assert facts["policy"]["sha256"] == hashlib.sha256(policy.read_bytes()).hexdigest()
    assert facts["policy"]["audit"] == actds.check(acts).verdict
    refused = judge(acts, policy=read_policy(policy)).refused
    assert facts["policy"]["refused"] == sorted({finding.place for finding in refused})
    assert facts["findings"] == [{"code": "E701", "severity": "error", "n": len(refused)}]


def test_an_altered_verdict_counts_for_nothing(signed: tuple[Path, Path, Path]) -> None:
    acts, private, public = signed
    attest(acts, private, "--limit", "max-loss=0.001", "--fail-on", "never", name="audit")
    (statement,) = statements(acts)
    assert statement["predicate"]["verdict"] == "FAIL"
    statement["predicate"]["verdict"] = "PASS"
    envelope = json.loads((acts / FILE).read_bytes())
    payload = base64.b64encode(canonical.dump(statement)).decode()
    (acts / FILE).write_bytes(canonical.dump(envelope | {"payload": payload}))
    (line,) = verified(acts, public)
    assert (line.kind, line.verdict, line.predicate, line.keys) == (None, None, None, ())
    assert [r.why for r in line.rejected] == ["does not hold under the trusted key of this id"]
    shown = command("verify", acts, "--key", public)
    assert "not counted: attestation signed by" in shown.stderr and "PASS" not in shown.output


def test_a_verdict_of_a_stranger_counts_for_nothing(
    signed: tuple[Path, Path, Path], pair: Pairs
) -> None:
    acts, _, public = signed
    stranger, stranger_public = pair("stranger")
    attest(acts, stranger)
    (line,) = verified(acts, public)
    assert line.verdict is None and [r.why for r in line.rejected] == ["of no trusted key"]
    both = actds.verify(acts, [public, stranger_public]).attestations
    assert [(each.verdict, each.keys[0].file) for each in both] == [("valid", str(stranger_public))]


def test_a_verdict_is_of_its_seal_alone(signed: tuple[Path, Path, Path], tmp_path: Path) -> None:
    acts, private, public = signed
    attest(acts, private)
    other = make_dataset(tmp_path / "other", n_requests=4, seed=9)
    actds.sign(other, private)
    shutil.copy(acts / FILE, other / FILE)
    with pytest.raises(ActdsError, match=r"E803 seal/0001\.intoto\.jsonl line 1"):
        verified(other, public)
    attester = Attester([str(other)], str(private))
    with pytest.raises(ActdsError, match="E804"):  # it is another dataset by now
        attester.put(str(other), judge(acts))


def test_a_signed_document_of_another_form_is_refused(
    signed: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from actds.publish import attestation

    acts, private, public = signed
    made = attestation.statement

    def other(document: attestation.Document) -> bytes:
        statement = canonical.parse(made(document), "statement")
        statement["predicate"]["verdict"] = "splendid"
        return canonical.dump(statement)

    monkeypatch.setattr(attestation, "statement", other)
    attest(acts, private)
    monkeypatch.undo()
    with pytest.raises(ActdsError, match=r"E103 .* verdict"):
        verified(acts, public)


def test_no_policy_takes_a_verdict_for_a_replay(signed: tuple[Path, Path, Path]) -> None:
    acts, private, public = signed
    attest(acts, private)
    with pytest.raises(RefusedError, match="attestations of 0 trusted keys; expected"):
        actds.require(acts, policy={"attestation": {"keys": [str(public)]}})


def test_what_no_seal_covers_is_not_attested_and_that_is_said(acts: Path, pair: Pairs) -> None:
    (acts / "seal" / "0001.json").unlink()
    result = command("validate", acts, "--key", pair("a")[0])
    assert result.exit_code == 1
    assert f"not attested: no seal covers the whole of {acts}" in result.stderr
    assert not (acts / FILE).exists()


@pytest.mark.parametrize("name", ["validate", "audit", "check"])
def test_a_key_that_cannot_be_used_is_refused_before_the_work(
    acts: Path, pair: Pairs, name: str
) -> None:
    private, public = pair("a")
    inside = Path(shutil.copy(private, acts / "key.pem"))
    for key in (public, inside, acts.parent / "none.pem"):
        result = command(name, acts, "--key", key)
        assert result.exit_code == 2 and result.stdout == ""
        assert f"E021 {key}" in result.stderr
    assert not (acts / FILE).exists()
