"""The gate: one line before training, policies that refuse what they say, reports for others."""

from __future__ import annotations

import json
import pickle
import re
import shlex
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pytest
import yaml
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import actds
from actds.cli import cli
from actds.dataset.commit import commit_part
from actds.dataset.info import describe, missing
from actds.dataset.ledger import Chain
from actds.dataset.reading import read_catalog
from actds.errors import CODES, ActdsError, RefusedError
from actds.format import tables
from actds.publish.sealing import seal
from actds.store import open_store
from actds_testing.forge import edit, relink
from actds_testing.places import DOCS
from actds_testing.schedules import busy_shares
from actds_testing.schedules import simulate as tables_of_run
from actds_testing.simulate import SCENARIOS, simulate, write_dataset
from actds_testing.synthetic import make_dataset, make_thinned
from actds_validators.audit.result import Limits
from actds_validators.audit.run import audit_dataset
from actds_validators.policy import Policy, read_policy

Copy = Callable[[], Path]


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["validate", *(str(arg) for arg in args)], prog_name="actds")


def policy(folder: Path, text: str) -> Path:
    path = folder / "team.toml"
    path.write_text(text)
    return path


def with_fields(path: Path, **fields: Any) -> Path:
    """Let the run record say something else, as if a harvest had."""
    record = next(path.glob("runs/*.json"))

    def change(document: dict[str, Any]) -> None:
        for name, value in fields.items():
            origin = "declared" if isinstance(value, tuple) else "observed"
            given = value[0] if isinstance(value, tuple) else value
            document["fields"][name.replace("__", ".")] = {
                "value": given, "origin": origin, "reason": None,
            }  # fmt: skip

    edit(record, change)
    relink(path)
    return path


def with_canary(path: Path, verdict: str = "same") -> Path:
    dataset = actds.open(path)
    shard = dataset.shards[0]
    token = shard.tokens().slice(0, 1).to_pylist()[0]
    line = {name: token[name] for name in ("request", "position", "step", "token_id")}
    line |= {"hook": shard.hooks[0], "replayed_token_id": token["token_id"]}
    line |= {"relative_l2": 0.01, "cosine": 0.99, "verdict": verdict}
    store = open_store(path)
    chain = Chain.begin(store, dataset.catalog.genesis.dataset, shard.run, "tool", "test")
    table = tables.build("canary", {name: [value] for name, value in line.items()})
    commit_part(store, chain, "canary", shard.run, 0, table)
    chain.close("finished", {})
    seal(store)
    return path


# ---- one line before training


def test_require_returns_the_opened_dataset(dataset_path: Path) -> None:
    dataset = actds.require(dataset_path)
    assert isinstance(dataset, actds.Dataset) and dataset.n_rows > 100
    assert actds.require(str(dataset_path), level="quick").digest == dataset.digest
    assert actds.require(dataset_path, policy={}).digest == dataset.digest


def test_require_lists_every_reason_in_one_error(copy_dataset: Copy) -> None:
    path = copy_dataset()
    for file in sorted(path.glob("shards/*/acts.zarr/*/c/0/0"))[:2]:
        data = bytearray(file.read_bytes())
        data[40] ^= 1
        file.write_bytes(data)
    with pytest.raises(RefusedError, match=r"E701 .*2 reasons against it") as caught:
        actds.require(path)
    error = caught.value
    assert [one.code for one in error.reasons] == ["E202", "E202"]
    assert all(one.line() in str(error) for one in error.reasons)
    assert str(error).splitlines()[-1] == CODES["E202"].next_step
    came = pickle.loads(pickle.dumps(error))
    assert (str(came), came.reasons, type(came)) == (str(error), error.reasons, RefusedError)


def test_require_raises_what_there_is_for_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="E101"):
        actds.require(tmp_path / "nowhere")
    with pytest.raises(ActdsError, match="E009 level"):
        actds.require(tmp_path, level="thorough")  # type: ignore[arg-type]


def test_require_refuses_what_is_not_sealed(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", n_requests=2, sealed=False)
    with pytest.raises(RefusedError) as caught:
        actds.require(path)
    assert {one.code for one in caught.value.reasons} == {"E306"}


# ---- every rule, refused and passed

GOOD = {
    "numerics__dtype": "bfloat16", "numerics__deterministic": True, "capture__check": '{"a":1}',
    "engine__version": "1.2.3", "serving__prefix_caching": False,
}  # fmt: skip
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    # Rule: what a policy says, and what a dataset that complies has beside what all have.
    "provenance.known": ('provenance.known = ["numerics.dtype", "machine.torch"]',
                         {"machine__torch": "2.13"}),
    "provenance.observed": ('provenance.observed = ["engine.version"]', GOOD),
    "losses.max_dropped": ('losses.max_dropped = "0.1 %"', {}),
    "losses.max_aborted": ("losses.max_aborted = 0", {}),
    "losses.max_filtered": ("losses.max_filtered = 0.001", {}),
    "losses.max_thinned": ("losses.max_thinned = 0.3\nlosses.max_dropped = 0", {}),
    "losses.min_effective": ('losses.min_effective = "95 %"', {}),
    "prefix_cache.allowed": ("prefix_cache.allowed = false", GOOD),
    "prefix_cache.max_unresolved": ("prefix_cache.max_unresolved = 0", {}),
    "numerics.dtype": ('numerics.dtype = ["bfloat16"]', GOOD),
    "numerics.stored": ('numerics.stored = ["bfloat16", "float16"]', {}),
    "numerics.quantization": ('numerics.quantization = ["none"]', {}),
    "numerics.deterministic": ("numerics.deterministic = true", GOOD),
    "harvest.check": ("harvest.check = true", GOOD),
    "harvest.canary": ("harvest.canary = true", {}),
    "harvest.max_age_days": ("harvest.max_age_days = 30", {}),
    "harvest.writers": ('harvest.writers = ["actds synth*"]', {}),
    "harvest.engines": ('harvest.engines = ["synthetic 1.2.*"]', GOOD),
    "harvest.models": ('harvest.models = ["synthetic-*"]', {}),
}  # fmt: skip


def _bad(rule: str, folder: Path, copy: Copy) -> Path:
    """Return a valid dataset that does not comply with a rule."""
    match rule:
        case "provenance.observed":
            return with_fields(copy(), engine__version=("1.2.3",))
        case "losses.max_dropped" | "losses.max_aborted" | "losses.max_filtered":
            return copy()
        case "losses.max_thinned" | "losses.min_effective":
            return _thinned(folder / "bad", 0.25)
        case "prefix_cache.max_unresolved":
            # Rows that later requests refer to were dropped.
            return make_dataset(folder / "bad", n_requests=16, seed=3, drops=True)
        case "numerics.dtype":
            return make_dataset(folder / "bad", dtype="float32", n_requests=3)
        case "numerics.stored":
            return make_dataset(folder / "bad", dtype="float32", n_requests=3)
        case "numerics.quantization":
            return with_fields(copy(), model__quantization="awq")
        case "harvest.writers":
            scenario = replace(SCENARIOS["none"], n_steps=20)
            return write_dataset(simulate(scenario, 1), folder / "bad")
        case "harvest.models":
            return with_fields(copy(), model__name="another")
        case _:
            return copy()


def _thinned(path: Path, share: float) -> Path:
    schedule = tables_of_run(20, 3, cache=False)
    return make_thinned(path, schedule, busy_shares(schedule, share))


def _good(rule: str, folder: Path, copy: Copy, fields: dict[str, Any]) -> Path:
    if rule in ("losses.max_dropped", "losses.max_aborted", "losses.max_filtered"):
        return make_dataset(folder / "good", n_requests=3, seed=3, cache=False)
    if rule in ("losses.max_thinned", "losses.min_effective"):
        return _thinned(folder / "good", 0.75)
    path = copy()
    if rule == "harvest.canary":
        return with_canary(path)
    if rule == "harvest.max_age_days":
        edit(next(path.glob("runs/*.json")), lambda one: one.update(started_ns=time.time_ns()))
        relink(path)
        return path
    return with_fields(path, **fields) if fields else path


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_refuses_what_it_says_and_nothing_else(
    rule: str, tmp_path: Path, copy_dataset: Copy
) -> None:
    text, fields = RULES[rule]
    file = policy(tmp_path, text)
    bad, good = _bad(rule, tmp_path, copy_dataset), _good(rule, tmp_path, copy_dataset, fields)
    with pytest.raises(RefusedError) as caught:
        actds.require(bad, policy=file)
    assert {one.code for one in caught.value.reasons} == {"E701"}, str(caught.value)
    assert {one.place.split(" ")[0] for one in caught.value.reasons} == {rule}
    assert run(bad, "--policy", file).exit_code == 5
    assert actds.require(good, policy=file).n_rows
    assert run(good, "--policy", file).exit_code == 0


def test_shares_of_what_was_not_drawn_are_those_of_the_tables(tmp_path: Path) -> None:
    path = _thinned(tmp_path / "acts", 0.25)
    with pytest.raises(RefusedError) as caught:
        actds.require(path, policy={"losses": {"max_thinned": 0, "min_effective": 1}})
    spans, tokens = (getattr(actds.open(path), name)().to_pylist() for name in ("spans", "tokens"))
    thinned = sum(s["stop"] - s["start"] for s in spans if s["disposition"] == "thinned")
    weights = [1 / row["inclusion"] for row in tokens]
    kish = sum(weights) ** 2 / sum(w * w for w in weights)
    effective, share = [reason.got for reason in caught.value.reasons]
    whole = thinned + sum(
        span["stop"] - span["start"]
        for span in spans
        if span["disposition"] in ("captured", "dropped", "aborted") and span["step"] is not None
    )
    assert share == f"{thinned / whole:.4%} of {whole:,} computed positions thinned"
    drawn = f"{len(tokens):,} rows drawn with probability 0.25 to 1, which represent about"
    expected = f"{kish / len(tokens):.4%}: {drawn} {sum(weights):,.0f}: {kish:,.0f}"
    assert effective.startswith(expected)


def test_every_rule_of_the_policy_is_tested() -> None:
    sections = {
        name: field.annotation for name, field in Policy.model_fields.items()
        if hasattr(field.annotation, "model_fields")
    }  # fmt: skip
    rules = {f"{s}.{rule}" for s, model in sections.items() for rule in model.model_fields}  # type: ignore[union-attr]
    # tests/format/test_import.py has imported runs.
    elsewhere = {
        "audit.worst",
        "audit.accept",
        "provenance.imported",
        *(r for r in rules if r.startswith(("signature.", "attestation."))),
    }
    assert rules == RULES.keys() | elsewhere


def test_a_rule_that_cannot_be_judged_refuses(dataset_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"losses\.max_dropped .*not accounted for"):
        actds.require(dataset_path, level="quick", policy={"losses": {"max_dropped": 1.0}})
    with pytest.raises(RefusedError, match=r"harvest\.engines .*synthetic unknown"):
        actds.require(dataset_path, policy={"harvest": {"engines": ["synthetic 1.*"]}})


DECLARED: dict[str, tuple[str, Any]] = {
    "numerics.dtype": ('numerics.dtype = ["bfloat16"]', "bfloat16"),
    "model.quantization": ('numerics.quantization = ["none"]', "none"),
    "numerics.deterministic": ("numerics.deterministic = true", True),
    "capture.check": ("harvest.check = true", '{"a":1}'),
    "engine.version": ('harvest.engines = ["*.*"]', "1.2.3"),
    "model.name": ('harvest.models = ["synthetic-*"]', "synthetic-1"),
    "serving.prefix_caching": ("prefix_cache.allowed = false", False),
}


@pytest.mark.parametrize("name", DECLARED)
def test_what_was_only_declared_satisfies_no_rule_about_a_fact(
    name: str, tmp_path: Path, copy_dataset: Copy
) -> None:
    text, value = DECLARED[name]
    field, file = name.replace(".", "__"), policy(tmp_path, text)
    fields = {"engine__name": "toy", field: value}
    assert actds.require(with_fields(copy_dataset(), **fields), policy=file).n_rows
    with pytest.raises(RefusedError, match=r"declared|unknown"):
        actds.require(with_fields(copy_dataset(), **(fields | {field: (value,)})), policy=file)


@pytest.mark.parametrize(("ahead_s", "passes"), [(-3600, True), (60, True), (3600, False)])
def test_a_run_from_the_future_is_not_a_young_one(
    ahead_s: int, passes: bool, tmp_path: Path, copy_dataset: Copy
) -> None:
    path, file = copy_dataset(), policy(tmp_path, "harvest.max_age_days = 30")
    began = time.time_ns() + ahead_s * 1_000_000_000
    edit(next(path.glob("runs/*.json")), lambda one: one.update(started_ns=began))
    relink(path)
    assert (run(path, "--policy", file).exit_code == 0) is passes


def test_the_first_line_says_what_nobody_looked_at(tmp_path: Path, copy_dataset: Copy) -> None:
    path, file = copy_dataset(), policy(tmp_path, 'level = "quick"')
    array = next(path.glob("shards/*/acts.zarr/*/c/**/*"))
    while array.is_dir():
        array = next(array.iterdir())
    data = bytearray(array.read_bytes())
    data[len(data) // 2] ^= 1
    array.write_bytes(data)
    for level, words in (("quick", "no table and no array was read"),
                         ("standard", "no array was read")):  # fmt: skip
        told = run(path, "--level", level, "--policy", file)
        assert told.exit_code == 0 and words in told.output.splitlines()[0]
        assert words in told.output.splitlines()[-1]
    told = run(path, "--level", "full", "--policy", file)
    assert told.exit_code == 1 and "was read" not in told.output


def test_aborted_positions_are_the_same_share_in_audit_info_and_policy(
    dataset_path: Path, tmp_path: Path
) -> None:
    account = audit_dataset(dataset_path, Limits()).result.accounting
    assert account.computed == account.captured + account.dropped + account.aborted
    share = account.aborted / account.computed
    assert share > 0
    told = describe(read_catalog(open_store(dataset_path)))
    words = f"aborted ({100 * share:.2f} % of the computed)"
    assert any(words in line.text for line in missing(told))
    limits = {"losses": {"max_aborted": share * 0.999}}
    with pytest.raises(
        RefusedError, match=rf"{share:.4%} of {account.computed} computed .*aborted"
    ):
        actds.require(dataset_path, policy=limits)
    assert actds.require(dataset_path, policy={"losses": {"max_aborted": share}})


def test_positions_that_no_step_computed_are_no_aborted_ones(tmp_path: Path) -> None:
    """A client that leaves the queue costs no row: neither audit, info nor policy counts it."""
    found = simulate(replace(SCENARIOS["none"], n_steps=60), 1)
    last = found.requests.slice(0, 1).to_pylist()[0]
    last |= {"request": len(found.requests), "prompt_len": 5000, "generated_len": 0,
             "cached_tokens": 0, "finish_reason": "abort", "token_digest": None}  # fmt: skip
    span = {"request": last["request"], "start": 0, "stop": 5000, "disposition": "aborted",
            "reason": "client_abort", "step": None, "ref_request": None}  # fmt: skip
    left = {
        name: pa.concat_tables([table, pa.Table.from_pylist([line], table.schema)])
        for name, table, line in (("requests", found.requests, last), ("spans", found.spans, span))
    }
    path = write_dataset(replace(found, **left), tmp_path / "left")
    assert actds.require(path, policy={"losses": {"max_aborted": 0}})
    account = audit_dataset(path, Limits()).result.accounting
    assert (account.aborted, account.never_computed, account.loss_share) == (0, 5000, 0)
    told = [line.text for line in missing(describe(read_catalog(open_store(path))))]
    assert any("5,000 positions never computed" in text and "of all" in text for text in told)


def _pair(folder: Path, name: str) -> Path:
    """Write a pair of keys; return the private one."""
    key = Ed25519PrivateKey.generate()
    none = serialization.NoEncryption()
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / f"{name}.pem").write_bytes(key.private_bytes(pem, form, none))
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / f"{name}.pub").write_bytes(public)
    return folder / f"{name}.pem"


def test_an_unsigned_dataset_is_refused_where_a_signature_is_asked_for(
    copy_dataset: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from actds.publish.signing import sign

    path = copy_dataset()
    mine, other = _pair(tmp_path, "mine"), _pair(tmp_path, "other")
    file = policy(tmp_path, "[signature]\nkeys = ['mine.pub']")  # beside the policy
    with pytest.raises(RefusedError, match=r"E701 signature\.keys: E801"):
        actds.require(path, policy=file)
    sign(path, other)
    with pytest.raises(RefusedError, match=r"E701 signature\.keys: E802"):
        actds.require(path, policy=file)
    sign(path, mine)
    assert actds.require(path, policy=file).n_rows
    required = {"signature": {"required": True}}
    with pytest.raises(ActdsError, match="E009"):
        actds.require(path, policy=required)
    monkeypatch.setenv("ACTDS_TRUSTED_KEYS", str(tmp_path / "mine.pub"))
    assert actds.require(path, policy=required).n_rows
    with pytest.raises(ActdsError, match="E021"):
        actds.require(path, policy={"signature": {"keys": [str(tmp_path / "none.pub")]}})


def test_a_follow_up_of_the_losses_counts_for_a_policy_and_the_check(tmp_path: Path) -> None:
    lossy = make_dataset(
        tmp_path / "acts", schedule=tables_of_run(20, 12, drops=True), hooks=["resid_post.0"],
        d_model=2,
    )  # fmt: skip
    whole = tables_of_run(20, 12)
    source, numbers = actds.open(lossy), whole.requests["request"].to_pylist()
    columns: dict[str, Any] = {
        "request": numbers,
        "source_dataset": [source.catalog.genesis.dataset] * len(numbers),
        "source_seal": [source.digest] * len(numbers),
        "source_run": list(source.runs) * len(numbers),
        "source_request": numbers,
        "n_given": whole.requests["prompt_len"].to_pylist(),
    }
    again = make_dataset(
        tmp_path / "again", seed=1, schedule=whole, hooks=["resid_post.0"], d_model=2, run="r-b",
        origins=tables.build("origins", columns),
        facts={"replay.only": "all", "replay.fraction": "1.0", "replay.seed": 0},
    )  # fmt: skip
    rules = {"audit": {"worst": "WARN", "accept": ["source", "cache"]}}
    with pytest.raises(RefusedError, match=r"audit\.worst \(queues\): FAIL"):
        actds.require(lossy, policy=rules)
    assert actds.require(lossy, policy=rules, follow_up=again).n_rows
    text = "[audit]\nworst = 'WARN'\naccept = ['source', 'cache']\n"
    options = (lossy, "--policy", policy(tmp_path, text))
    assert run(*options).exit_code == 5
    assert run(*options, "--follow-up", again).exit_code == 0
    assert "E009 --follow-up" in run(lossy, "--follow-up", again).stderr
    check = ["check", str(lossy), "--accept", "source", "--accept", "cache"]
    assert CliRunner().invoke(cli, check).exit_code == 1
    told = CliRunner().invoke(cli, [*check, "--follow-up", str(again)])
    assert told.exit_code == 0 and "means of the stored rows are off" in told.output
    two = CliRunner().invoke(cli, [*check, str(again), "--follow-up", str(again)])
    assert two.exit_code == 2 and "of one dataset" in two.output


def test_a_policy_bounds_the_audit(tmp_path: Path) -> None:
    heavy = write_dataset(simulate(replace(SCENARIOS["heavy"], n_steps=150), 1), tmp_path / "heavy")
    none = replace(SCENARIOS["none"], n_steps=150)
    cached = write_dataset(simulate(none, 1), tmp_path / "cached")
    whole = write_dataset(simulate(replace(none, prefix_share=0.0), 1), tmp_path / "whole")
    rules = {"audit": {"worst": "WARN"}}
    dropped = r"audit\.worst \(queues\): FAIL: 14\.17 % of .*; expected WARN or better"
    with pytest.raises(RefusedError, match=dropped):
        actds.require(heavy, policy=rules)
    with pytest.raises(RefusedError, match=r"audit\.worst \(prefix cache\): WARN: .* PASS or"):
        actds.require(cached, policy={"audit": {"worst": "PASS"}})
    assert actds.require(cached, policy={"audit": {"worst": "PASS", "accept": ["cache"]}}).n_rows
    assert actds.require(heavy, policy={"audit": {"worst": "FAIL"}}).n_rows
    assert actds.require(whole, policy=rules).n_rows
    done = run(whole, "--policy", policy(tmp_path, '[audit]\nworst = "PASS"'), "--json")
    told = json.loads(done.stdout)
    assert told["policy"] == {"name": "team", "verdict": "PASS", "refused": []}


def test_warnings_may_be_refused_by_a_policy(copy_dataset: Copy, tmp_path: Path) -> None:
    path = copy_dataset()
    (path / "stray.txt").write_text("x")
    assert run(path).exit_code == 0
    assert run(path, "--policy", policy(tmp_path, "warnings = false")).exit_code == 1


# ---- policies that cannot be used


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("level = 'full'\n[losses]\nmax_droped = 0.1", r"line 3 losses\.max_droped: an unknown "
         r"rule; expected one of max_dropped, max_aborted, max_filtered, max_thinned, min_eff"),
        ("\n\nlosess = 3", r"line 3 losess: an unknown rule"),
        ("[losses]\n\nmax_dropped = 1.5", r"line 3 losses\.max_dropped: 1\.5; expected .*share"),
        ("[losses]\nmax_dropped = '100.1 %'", r"line 2 .*share"),
        ("[losses]\nmax_dropped = 'few'", r"line 2 .*share"),
        ("[losses]\nmax_dropped = true", r"line 2 .*share"),
        ("[losses]\nmax_dropped = nan", r"line 2 .*share"),
        ("[losses]\nmax_dropped = -0.1", r"line 2 .*share"),
        ("losses.max_dropped = 2", r"line 1 losses\.max_dropped"),
        ("losses = 3", r"line 1 losses: 3"),
        ("[harvest]\ncheck = 'yes'", r"line 2 harvest\.check: 'yes'; expected .*boolean"),
        ("[harvest]\nmax_age_days = 0", r"line 2 harvest\.max_age_days"),
        ("[harvest]\nmax_age_days = inf", r"line 2 harvest\.max_age_days"),
        ("[numerics]\ndtype = 'bfloat16'", r"line 2 numerics\.dtype: 'bfloat16'; expected .*list"),
        ("[numerics]\ndtype = ['bf16']", r"line 2 numerics\.dtype\.0: 'bf16'"),
        ("[provenance]\nknown = ['numerics.dtpye']", r"line 2 .*field of the run record"),
        ("[audit]\nworst = 'OK'", r"line 2 audit\.worst: 'OK'"),
        ("level = 'thorough'", r"line 1 level: 'thorough'"),
        ("version = '2'", r"line 1 version: '2'"),
        ("a = 1\nb = 2", r"line 1 a \(and 1 more\): an unknown rule"),
        ("[losses\n", r"\(at line 1, column"),
        ("level = 'full'\nlevel = 'full'", r"Cannot overwrite"),
        ("x = " + "[" * 3000, r"a TOML file"),
    ],
)  # fmt: skip
def test_a_bad_policy_is_an_error_with_its_line(text: str, words: str, tmp_path: Path) -> None:
    file = policy(tmp_path, text)
    with pytest.raises(ActdsError, match=rf"E020 {re.escape(str(file))}.*{words}"):
        read_policy(file)


def test_a_policy_that_is_no_text_is_an_error(tmp_path: Path, dataset_path: Path) -> None:
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "big.toml").write_bytes(b"#" * (1 << 21))
    for name in ("b.toml", "big.toml", "none.toml", "."):
        done = run(dataset_path, "--policy", tmp_path / name)
        assert done.exit_code == 2 and done.stderr.startswith("E020"), done.output
    with pytest.raises(ActdsError, match=r"E020 policy losses\.max"):
        actds.require(dataset_path, policy={"losses": {"max": 1}})


def test_policies_keep_their_schema() -> None:
    schema = json.loads(CliRunner().invoke(cli, ["schema", "policy"]).stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    valid = jsonschema.Draft202012Validator(schema).is_valid
    assert valid({"losses": {"max_dropped": "0.1 %"}, "audit": {"worst": "WARN"}})
    for bad in ({"losses": {"max": 1}}, {"losses": {"max_dropped": 2}}, {"x": 1}):
        assert not valid(bad)


def test_the_policies_of_the_guide_are_policies(tmp_path: Path, dataset_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (DOCS / "gate.md").read_text("utf-8"), re.S)
    assert len(blocks) >= 3
    for block in blocks:
        read_policy(policy(tmp_path, block))


def test_the_yaml_of_the_guide_parses_and_its_commands_run_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy_dataset: Copy
) -> None:
    text = (DOCS / "gate.md").read_text("utf-8")
    hooks, workflow = (yaml.safe_load(b) for b in re.findall(r"```yaml\n(.*?)```", text, re.S))
    [hook] = hooks["repos"][0]["hooks"]
    assert {"id", "name", "entry", "language"} <= hook.keys()
    steps = workflow["jobs"]["gate"]["steps"]
    told = [step["run"] for step in steps if "run" in step]
    commands = [hook["entry"], *(one for one in told if one.startswith("actds"))]
    commands += re.findall(r"^    (actds .*)$", text, re.M)
    assert len(commands) >= 8
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    copy_dataset().rename(tmp_path / "data" / "acts")
    (tmp_path / "runs").mkdir()
    for name in ("acts", "runs/a", "runs/b", "hidden_states"):
        (tmp_path / name).symlink_to(tmp_path / "data" / "acts")
    (tmp_path / "policy.toml").write_text("losses.max_dropped = 1")
    _pair(tmp_path, "key")
    for command in commands:
        words, _, _ = command.partition(" > ")
        done = CliRunner().invoke(cli, shlex.split(words)[1:], prog_name="actds")
        assert done.exit_code == 0, (command, done.output)


# ---- several datasets, exit codes, reports for other programs


def test_exit_codes_are_distinct_and_the_severest_counts(
    dataset_path: Path, copy_dataset: Copy, tmp_path: Path
) -> None:
    broken, none = copy_dataset(), tmp_path / "none"
    next(iter(broken.glob("shards/*/acts.zarr/*/c/0/0"))).write_bytes(b"")
    file = policy(tmp_path, "harvest.canary = true")
    codes = {
        (dataset_path,): 0,
        (broken,): 1,
        (none,): 3,
        (dataset_path, broken): 1,
        (broken, none): 3,
    }
    for paths, code in codes.items():
        assert run(*paths).exit_code == code
    assert run(dataset_path, "--policy", file).exit_code == 5
    assert run(dataset_path, broken, "--policy", file).exit_code == 1
    assert run(dataset_path, "--policy", tmp_path / "no.toml").exit_code == 2
    assert run().exit_code == 2 and run(dataset_path, "--format", "csv").exit_code == 2
    assert run(dataset_path, none, "--watch").exit_code == 2


@pytest.fixture
def three(dataset_path: Path, copy_dataset: Copy, tmp_path: Path) -> list[Path]:
    """Return a dataset that is valid, one that is not, and a path without one."""
    broken = copy_dataset()
    data = bytearray((array := next(iter(broken.glob("shards/*/acts.zarr/*/c/0/0")))).read_bytes())
    data[40] ^= 1
    array.write_bytes(data)
    (broken / "a,b:100%.txt").write_text("x")
    return [dataset_path, broken, tmp_path / "none"]


def test_json_of_one_and_of_several(three: list[Path]) -> None:
    one = json.loads(run(three[0], "--format", "json").stdout)
    assert one["format"] == "actds.validate" and "policy" not in one
    told = json.loads(run(*three, "--json").stdout)
    assert (told["format"], told["version"]) == ("actds.validations", "1")
    assert [found["exit_code"] for found in told["datasets"]] == [0, 1, 3]
    assert told["datasets"][0] | {"duration_s": 0} == {
        **{k: v for k, v in one.items() if k not in ("format", "version")}, "duration_s": 0,
    }  # fmt: skip


def test_junit_counts_are_those_of_its_cases(three: list[Path], tmp_path: Path) -> None:
    file = policy(tmp_path, "harvest.canary = true")
    done = run(*three, "--policy", file, "--format", "junit")
    root = ET.fromstring(done.stdout)
    assert root.tag == "testsuites" and len(root) == 3
    for element in (root, *root):
        cases = list(element.iter("testcase"))
        for name, tag in (("tests", None), ("failures", "failure"), ("errors", "error"),
                          ("skipped", "skipped")):  # fmt: skip
            n = len(cases) if tag is None else sum(case.find(tag) is not None for case in cases)
            assert element.get(name) == str(n)
        assert float(element.get("time", "")) >= 0
    valid, broken, unreadable = root
    refused = [case for case in valid if case.find("failure") is not None]
    assert [case.get("name") for case in refused] == ["policy team"]
    assert "E701 harvest.canary" in (refused[0].find("failure").text or "")  # type: ignore[union-attr]
    assert [f.get("type") for f in broken.iter("failure")] == ["E202"]
    assert [f.get("type") for f in unreadable.iter("error")] == ["E101"]


# What the standard (SARIF 2.1.0, sections 3.13 to 3.49) asks of the fields that are written here.
SARIF: dict[str, Any] = {
    "type": "object",
    "required": ["version", "runs"],
    "additionalProperties": False,
    "properties": {
        "$schema": {"type": "string", "pattern": "sarif-schema-2\\.1\\.0\\.json$"},
        "version": {"const": "2.1.0"},
        "runs": {"type": "array", "items": {
            "type": "object", "required": ["tool", "results"], "additionalProperties": False,
            "properties": {
                "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                "invocations": {"type": "array", "items": {
                    "type": "object", "required": ["executionSuccessful"],
                    "additionalProperties": False,
                    "properties": {"executionSuccessful": {"type": "boolean"}}}},
                "tool": {"type": "object", "required": ["driver"], "additionalProperties": False,
                    "properties": {"driver": {
                        "type": "object", "required": ["name"], "additionalProperties": False,
                        "properties": {"name": {"type": "string"}, "version": {"type": "string"},
                            "rules": {"type": "array", "uniqueItems": True, "items": {
                                "type": "object", "required": ["id"],
                                "additionalProperties": False,
                                "properties": {
                                    "id": {"type": "string"}, "name": {"type": "string"},
                                    "shortDescription": {"$ref": "#/$defs/text"},
                                    "fullDescription": {"$ref": "#/$defs/text"},
                                    "help": {"$ref": "#/$defs/text"},
                                    "properties": {"type": "object"}}}}}}}},
                "results": {"type": "array", "items": {
                    "type": "object", "required": ["message"], "additionalProperties": False,
                    "properties": {
                        "ruleId": {"type": "string"},
                        "ruleIndex": {"type": "integer", "minimum": 0},
                        "level": {"enum": ["none", "note", "warning", "error"]},
                        "message": {"$ref": "#/$defs/text"},
                        "partialFingerprints": {"type": "object",
                                                "additionalProperties": {"type": "string"}},
                        "locations": {"type": "array", "items": {
                            "type": "object", "additionalProperties": False, "properties": {
                                "physicalLocation": {
                                    "type": "object", "required": ["artifactLocation"],
                                    "additionalProperties": False, "properties": {
                                        "artifactLocation": {
                                            "type": "object", "additionalProperties": False,
                                            "required": ["uri"], "properties": {"uri": {
                                                "type": "string", "pattern": "^[!-~]+$"}}}}},
                                "logicalLocations": {"type": "array", "items": {
                                    "type": "object", "additionalProperties": False,
                                    "properties": {
                                        "fullyQualifiedName": {"type": "string"}}}}}}}}}}}}},
    },
    "$defs": {"text": {"type": "object", "required": ["text"], "additionalProperties": False,
                       "properties": {"text": {"type": "string", "minLength": 1}}}},
}  # fmt: skip


def test_sarif_keeps_the_standard(three: list[Path], tmp_path: Path) -> None:
    file = policy(tmp_path, "harvest.canary = true")
    log = json.loads(run(*three, "--policy", file, "--format", "sarif").stdout)
    jsonschema.Draft202012Validator(SARIF).validate(log)
    [one] = log["runs"]
    rules = [rule["id"] for rule in one["tool"]["driver"]["rules"]]
    assert rules == ["E101", "E105", "E202", "E701"]
    for result in one["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
    levels = {result["ruleId"]: result["level"] for result in one["results"]}
    assert levels == {"E101": "error", "E105": "warning", "E202": "error", "E701": "error"}
    [changed] = [r for r in one["results"] if r["ruleId"] == "E202"]
    uri = changed["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert Path(uri).is_file() and Path(uri).is_relative_to(three[1])
    assert one["invocations"] == [{"executionSuccessful": False}]
    again = json.loads(run(three[0], "--format", "sarif").stdout)
    assert again["runs"][0]["results"] == []


def test_annotations_cannot_be_broken_by_a_name(three: list[Path]) -> None:
    done = run(*three, "--format", "github")
    lines = done.stdout.splitlines()
    notes = [line for line in lines if line.startswith("::")]
    parsed = [re.fullmatch(r"::(error|warning) file=([^,:]+),title=([^,:]+)::(.*)", line)
              for line in notes]  # fmt: skip
    assert all(parsed) and len(notes) == 3
    assert {match[1] for match in parsed if match} == {"error", "warning"}
    assert any("a,b:100%25.txt" in match[4] for match in parsed if match)
    assert lines[-3:] == [f"{three[0]}: passes", f"{three[1]}: exit 1", f"{three[2]}: exit 3"]


def test_a_page_of_the_policy_says_each_rule(dataset_path: Path, tmp_path: Path) -> None:
    file = policy(tmp_path, 'name = "our gate"\nharvest.canary = true\nharvest.check = true')
    lines = run(dataset_path, "--policy", file).stdout.splitlines()
    assert lines[0].startswith("VALID")
    assert "REFUSED by the policy our gate: 2 rules" in lines
    assert [line[:20] for line in lines[-2:]] == ["E701 harvest.check (", "E701 harvest.canary "]
    passed = run(dataset_path, "--policy", policy(tmp_path, 'name = "x"')).stdout
    assert passed.splitlines()[-1] == "PASSES the policy x"
