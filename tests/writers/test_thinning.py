"""Rows drawn with known probabilities: the right ones, with an exact account, in every setting.

The expected sets are computed here, with a SplitMix64 in Python's integers and the recorded
probabilities of the steps; writer, census and validator are real processes and the real code.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

import actds
from actds.errors import ActdsError
from actds.format.inclusion import Design, KeepRule, about_request
from actds.format.readouts import Readouts
from actds.format.schema import ProvenanceField
from actds.publish.sealing import seal
from actds.store import open_store
from actds_testing.independent import validator as independent
from actds_testing.independent.draw import number
from actds_testing.synthetic_engine import (
    GENERATED,
    PROMPT_LEN,
    StagedEngine,
    SyntheticEngine,
    pipeline_for,
    writer_stopped,
)
from actds_validators.validate.validation import validate
from actds_writers.capture.hooks import plan_readouts
from actds_writers.capture.thinning import Reserve, Thin
from actds_writers.config import HarvestSettings, LiveSettings
from actds_writers.ipc.messages import ClientFacts, HookSpec, LeftOut, PromptFact
from actds_writers.monitor.progress import take_snapshot
from actds_writers.sampling import Regime, keep_rules

N_POSITIONS = PROMPT_LEN + GENERATED - 1


def harvest(out: Path, policy: str = "thin", engine: Any = SyntheticEngine, **of_draw: Any) -> Any:
    """Serve 60 requests while the writer stands still at first, and 60 when it does not."""
    readouts = Readouts(n_projections=2, seed=3)
    live, stalls = bool(of_draw.pop("live", False)), bool(of_draw.pop("stalls", True))
    client, regimes = of_draw.pop("client", ClientFacts()), of_draw.pop("regimes", {})
    with pipeline_for(out, policy, readouts=readouts, live=live, **of_draw) as pipeline:
        worker = engine(pipeline)
        with writer_stopped(pipeline) if stalls else nullcontext():
            for request in range(60):
                worker.request(request, of_draw.get("left_out", LeftOut()), regimes.get(request))
                worker.finished = (request,)
        for request in range(60, 120):
            worker.request(request, regime=regimes.get(request))
            worker.finished = (request,)
        worker.drain(pipeline)
        worker.close()
        pipeline.send_client_facts(client)
        totals = pipeline.finish("finished")
    # Rows that shares leave out without any load are in no counter.
    if not of_draw.get("keep"):
        count = {"elapsed_s": 1.0, "requests_done": 120, "requests_total": 120}
        last = take_snapshot(pipeline.written, pipeline.counted, **count)
        assert last.thinned == totals["census"]["thinned"]
        assert last.dropped_tokens == totals["census"]["dropped"]
        assert last.filtered_tokens == totals["census"]["filtered"]
    seal(open_store(out))
    return totals


def refused(path: Path) -> set[str]:
    """Return the codes that the two validators note, of which there should be one set."""
    codes = {finding.code for finding in validate(path, level="deep").errors}
    found = independent.validate(path, deep=True)
    assert codes == {finding.code for finding in found if finding.severity == "error"}
    return codes


@pytest.mark.standard
@pytest.mark.parametrize("engine", [SyntheticEngine, StagedEngine])
@pytest.mark.parametrize("unit", ["row", "request"])
def test_the_rows_are_those_that_hash_and_probability_say(
    tmp_path: Path, unit: str, engine: Any
) -> None:
    out = tmp_path / "acts"
    totals = harvest(out, engine=engine, thin_unit=unit, thin_min=1 / 64)
    dataset = actds.open(out)
    assert not refused(out)
    steps = dataset.steps()
    share = dict(zip(steps["step"].to_pylist(), steps["inclusion"].to_pylist(), strict=True))
    assert min(share.values()) < 0.5 and max(share.values()) == 1
    design = Design.of(dataset.runs["r-test"])
    assert design is not None and (design.unit, design.minimum) == (unit, 1 / 64)
    n_steps = 1 + GENERATED - 1
    expected = set()
    for request in range(120):
        for position in range(N_POSITIONS):
            step = request * n_steps + max(0, position - PROMPT_LEN + 1)
            if unit == "request":
                step, u = request * n_steps, number(int(design.salt), request, 0)
            else:
                u = number(int(design.salt), request, position)
            if u < share[step]:
                expected.add((request, position, share[step]))
    rows = {
        row
        for shard in dataset.shards
        for row in zip(
            *(shard.tokens([c])[c].to_pylist() for c in ("request", "position", "inclusion")),
            strict=True,
        )
    }
    assert rows == expected
    assert 0 < len(rows) < 120 * N_POSITIONS
    assert totals["census"]["thinned"] == 120 * N_POSITIONS - len(rows)
    assert totals["census"]["captured"] == totals["writer"]["rows"] == len(rows)
    assert not totals["writer"]["dropped_tokens"]


@pytest.mark.standard
def test_readouts_stay_complete_and_rows_are_whose_they_are(tmp_path: Path) -> None:
    out = tmp_path / "acts"
    harvest(out)
    dataset = actds.open(out)
    readouts = dataset.readouts()
    at_hook = readouts.filter(pc.equal(readouts["hook"], "resid_post.1"))
    places = Counter(
        zip(at_hook["request"].to_pylist(), at_hook["position"].to_pylist(), strict=True)
    )
    assert len(places) == 120 * N_POSITIONS and set(places.values()) == {1}
    for shard in dataset.shards:
        tokens = shard.tokens(["request", "position"])
        label = tokens["request"].to_numpy() * 100 + tokens["position"].to_numpy() + 1
        rows = shard.array("resid_post.1").read_all()
        assert np.array_equal(rows, np.repeat(label[:, None], rows.shape[1], axis=1))


@pytest.mark.standard
@pytest.mark.parametrize("engine", [SyntheticEngine, StagedEngine])
def test_a_reserve_keeps_its_share_of_the_dropped_steps(tmp_path: Path, engine: Any) -> None:
    out = tmp_path / "acts"
    totals = harvest(out, "drop_newest", engine=engine, always=0.25)
    assert not refused(out)
    dataset = actds.open(out)
    assert totals["census"]["thinned"] == 0
    assert totals["census"]["dropped"] == totals["writer"]["dropped_tokens"] > 0
    steps = dataset.steps()
    assert set(steps["inclusion"].to_pylist()) == {0.25, 1.0}
    inclusion = np.concatenate([shard.tokens()["inclusion"].to_numpy() for shard in dataset.shards])
    assert set(inclusion) == {0.25, 1.0}
    lost = pc.sum(steps["batch_tokens"].filter(pc.equal(steps["inclusion"], 0.25))).as_py()
    assert (inclusion == 0.25).sum() + totals["census"]["dropped"] == lost


@pytest.mark.standard
def test_served_traffic_is_thinned_and_never_dropped(tmp_path: Path) -> None:
    totals = harvest(tmp_path / "acts", live=True)
    assert totals["census"]["thinned"] and not totals["census"]["dropped"]
    assert not refused(tmp_path / "acts")


@pytest.mark.standard
def test_served_traffic_does_not_wait_for_a_reserve_that_is_full(tmp_path: Path) -> None:
    """Half of the rows are more than the ring takes while the writer stands still."""
    out = tmp_path / "acts"
    totals = harvest(out, "drop_newest", always=0.5, live=True)
    assert not refused(out)
    lost = actds.open(out).spans().filter(pc.field("disposition") == "dropped")
    # While the ring still had room, a transfer behind the engine is the reason.
    assert {"queue_full"} <= set(lost["reason"].to_pylist()) <= {"queue_full", "dma_backpressure"}
    assert set(lost["inclusion"].to_pylist()) == {0.5, None}  # None: drawn, and had no room
    census = totals["census"]
    assert census["captured"] + census["dropped"] == 120 * N_POSITIONS and not census["thinned"]


def test_the_probability_falls_evenly_and_never_below_its_least() -> None:
    thin, minimum = Thin(1 / 64), 1 / 64
    shares = [thin(fill / 100, 0.001) for fill in range(111)]
    assert shares[:50] == [1.0] * 50 and shares[100:] == [minimum] * 11
    ratios = np.array(shares[51:101]) / np.array(shares[50:100])
    assert (ratios <= 1).all() and ratios.min() > 0.85
    # A step that is larger than the room: what is expected of it has room.
    assert thin(0.2, 4.0) * 4.0 <= 0.8
    reserve = Reserve(1 / 256)
    assert (reserve(0.5, 0.2), reserve(0.7, 0.2)) == (1.0, 1 / 256)


@pytest.mark.parametrize("period", [20, 200, 2000])
def test_bursts_of_ten_times_the_mean_are_thinned_without_a_wait(period: int) -> None:
    """A ring of 400 mean steps; the writer takes 1.2 times the mean; a tenth of the time bursts."""
    thin, minimum = Thin(1 / 64), 1 / 64
    fill, waits, kept, weights = 0.0, 0, 0.0, 0.0
    rng = np.random.default_rng(3)
    loads = np.where(np.arange(40_000) % period < period / 10, 10.0, 1.0) / 1.9
    for load in loads / 400:
        share = thin(fill, load)
        n = rng.binomial(1000, share) / 1000 * load
        waits += fill + n > 1
        fill = max(0.0, min(1.0, fill + n) - 1.2 / 400)
        kept, weights = kept + n, weights + n / share
        assert minimum <= share <= 1
    assert not waits
    assert weights == pytest.approx(loads.sum() / 400, rel=0.05)


@pytest.mark.standard
@pytest.mark.parametrize(
    ("policy", "of_draw"), [("block", {}), ("thin", {}), ("drop_newest", {"always": 0.25})]
)
def test_rules_keep_rare_positions_whole_and_thin_the_rest(
    tmp_path: Path, policy: str, of_draw: dict[str, Any]
) -> None:
    out = tmp_path / "acts"
    keep = "decode and position 14-: 1; decode: 0.5; position 0-2: 1; 0.125"
    totals = harvest(out, policy, keep=keep, stalls=policy != "block", **of_draw)
    assert not refused(out)
    dataset = actds.open(out)
    design = Design.of(dataset.runs["r-test"])
    assert design is not None
    steps = dataset.steps()
    share = dict(zip(steps["step"].to_pylist(), steps["inclusion"].to_pylist(), strict=True))
    expected = set()
    for request in range(120):
        for p in range(N_POSITIONS):
            of = (1 if p >= 14 else 0.5) if p >= PROMPT_LEN else (1 if p < 2 else 0.125)
            inclusion = of * share[request * GENERATED + max(0, p - PROMPT_LEN + 1)]
            if number(int(design.salt), request, p) < inclusion:
                expected.add((request, p, inclusion))
    names = ("request", "position", "inclusion")
    tables = [shard.tokens(list(names)) for shard in dataset.shards]
    rows = {row for t in tables for row in zip(*(t[n].to_pylist() for n in names), strict=True)}
    assert rows == expected
    # The rule is a choice and no loss: only what the rule would have stored is dropped.
    lost = totals["census"]["thinned"] + totals["census"]["dropped"]
    assert lost == 120 * N_POSITIONS - len(rows) and totals["census"]["thinned"]
    assert bool(totals["census"]["dropped"]) == (policy == "drop_newest")


@pytest.mark.standard
@pytest.mark.parametrize(
    ("policy", "engine"),
    [("block", StagedEngine), ("thin", SyntheticEngine), ("drop_newest", SyntheticEngine)],
)
def test_rules_by_role_label_and_id_keep_rare_regimes_whole(
    tmp_path: Path, policy: str, engine: Any
) -> None:
    out = tmp_path / "acts"
    keep = (
        "label topic=ma* and role user: 1; id p?: 0.75; role assistant: 0.5; "
        "label n=3 and position 0-4: 0.375; role template: 0.25; 0.125"
    )
    text = f"t2u3t{PROMPT_LEN - 6}"  # of the last position nothing is known
    prompts = tuple(
        PromptFact(
            f"p{n}", f"p{n}", "s", n, prompt_len=PROMPT_LEN, roles=text if n % 4 else "",
            labels=('{"topic":"maths"}', '{"n":3,"topic":"code"}', None)[n % 3],
        )
        for n in range(120)
    )  # fmt: skip
    regimes = {
        n: Regime.of(keep_rules(keep), p.roles, about_request(p.external_id, p.labels, None))
        for n, p in enumerate(prompts)
    }
    totals = harvest(
        out, policy, engine, keep=keep, stalls=policy != "block", client=ClientFacts(prompts),
        regimes=regimes, **({"always": 0.25} if policy == "drop_newest" else {}),
    )  # fmt: skip
    assert not refused(out)
    dataset = actds.open(out)
    design = Design.of(dataset.runs["r-test"])
    assert design is not None
    steps = dataset.steps()
    share = dict(zip(steps["step"].to_pylist(), steps["inclusion"].to_pylist(), strict=True))

    def of_rules(n: int, p: int) -> float:
        role = "" if p == PROMPT_LEN - 1 or not n % 4 else "user" if 2 <= p < 5 else "template"
        if n % 3 == 0 and p < PROMPT_LEN and role == "user":
            return 1
        if n < 10:
            return 0.75
        if p >= PROMPT_LEN:
            return 0.5
        if n % 3 == 1 and p < 4:
            return 0.375
        return 0.25 if role == "template" else 0.125

    expected = set()
    for n in range(120):
        for p in range(N_POSITIONS):
            inclusion = of_rules(n, p) * share[n * GENERATED + max(0, p - PROMPT_LEN + 1)]
            if number(int(design.salt), n, p) < inclusion:
                expected.add((n, p, inclusion))
    names = ("request", "position", "inclusion")
    tables = [shard.tokens(list(names)) for shard in dataset.shards]
    rows = {row for t in tables for row in zip(*(t[n].to_pylist() for n in names), strict=True)}
    assert rows == expected
    assert {0.125, 0.25, 0.375, 0.5, 0.75, 1} <= {inclusion for *_, inclusion in rows}
    lost = totals["census"]["thinned"] + totals["census"]["dropped"]
    assert lost == 120 * N_POSITIONS - len(rows)
    section = actds.audit(out).result.sample
    assert section is not None and section.readouts is not None and section.readouts.agrees
    check, inclusion = section.readouts, {(n, p): share for n, p, share in expected}
    lines = [line for line in dataset.readouts().to_pylist() if line["hook"] == check.hook]
    kind, nth = check.variable.split()[:2]
    x = np.array([line["norm"] if kind == "norm" else line["projections"][int(nth)]
                  for line in lines])  # fmt: skip
    drawn = [inclusion.get((line["request"], line["position"]), np.inf) for line in lines]
    w = 1 / np.array(drawn)
    mean = w @ x / w.sum()
    sd = np.sqrt(w @ (x - mean) ** 2 / w.sum())
    assert check.deviation == pytest.approx((mean - x.mean()) / sd, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("often: 1", "'often'"), ("decode: 0", "above 0"), ("decode: x", "above 0"),
        ("decode: 2", "at most"),
        ("role pilot: 1", "role NAME"), ("label topic: 1", "NAME=GLOB"), ("1;" * 65, "64 rules"),
    ],
)  # fmt: skip
def test_rules_that_are_none_are_refused(text: str, word: str) -> None:
    with pytest.raises(ActdsError, match=word) as refusal:
        HarvestSettings.of({"out": "acts", "hooks": "resid_post:1", "keep": text})
    assert refusal.value.code == "E009"


def test_rules_for_entropies_need_entropies() -> None:
    fields = {"out": "acts", "hooks": "resid_post:1", "keep": "entropy 2.5-: 1; 0.1"}
    with pytest.raises(ActdsError, match="entropy"):
        HarvestSettings.of(fields)
    design = HarvestSettings.of({**fields, "entropy": True}).design("r")
    assert design is not None and design.reads_sampled
    entropy = np.array([np.nan, 2.4, 2.5])
    assert design.shares(np.arange(3), np.zeros(3, int), entropy).tolist() == [0.1, 0.1, 1.0]
    field = ProvenanceField(value=design.as_field(), origin="declared", reason=None)
    record: Any = SimpleNamespace(run="r", fields={"capture.inclusion": field})
    assert Design.of(record) == design


def test_rules_for_scores_need_probes_and_read_those_of_their_own() -> None:
    keep = "probe resid_post.1 2 >= -0.5 and probe resid_post.1 2 < 1.5: 1; "
    keep += "probe resid_post.0 0 >= 2: 0.5; 0.25"
    fields: dict[str, Any] = {"out": "acts", "hooks": "resid_post:0,1", "keep": keep}
    for missing in ({}, {"entropy": True}, {"probes": "probes.npy"},
                    {"entropy": True, "probes": "probes.npy", "readouts": False}):  # fmt: skip
        with pytest.raises(ActdsError, match=r"E009 .*known with"):
            HarvestSettings.of({**fields, **missing})
    design = HarvestSettings.of({**fields, "entropy": True, "probes": "p.npy"}).design("r")
    assert design is not None and design.probes == (("resid_post.1", 2), ("resid_post.0", 0))
    scores = np.array([[np.nan, -0.6, -0.5, 1.4, 1.5], [np.nan, 2.0, 2.0, 1.9, 1.9]])
    shares = design.shares(np.arange(5), np.zeros(5, int), scores=scores)
    assert shares.tolist() == [0.25, 0.5, 1.0, 1.0, 0.25]
    field = ProvenanceField(value=design.as_field(), origin="declared", reason=None)
    record: Any = SimpleNamespace(run="r", fields={"capture.inclusion": field})
    assert Design.of(record) == design
    hooks = [HookSpec(f"resid_post.{i}", "resid_post", i, 4, "float32") for i in range(2)]
    for rule in ("probe resid_post.0 3 < 1: 1", "probe resid_post.2 0 < 1: 1"):
        with pytest.raises(ActdsError, match="E009 keep: a rule for probe"):
            plan_readouts(0, None, hooks, rule)


@pytest.mark.parametrize(
    ("text", "labels", "sampling", "takes"),
    [
        ("label topic=ma*", '{"topic":"maths"}', None, True),
        ("label topic=ma*", '{"other":"maths"}', None, False),
        ("label topic=[m]aths", '{"topic":"maths"}', None, False),
        ("label n=1? and label b=true", '{"b":true,"n":12}', None, True),
        ("xarg regime=rare", None, '{"extra_args":{"regime":"rare"}}', True),
        ("xarg regime=rare", None, "no JSON", False),
        ("id q-*", None, None, True),
        ("id q-", None, None, False),
    ],
)
def test_a_rule_for_requests_takes_those_that_match_all_of_it(
    text: str, labels: str | None, sampling: str | None, takes: bool
) -> None:
    (rule,) = keep_rules(f"{text}: 0.5")
    assert KeepRule.from_json(rule.as_json()) == rule
    assert rule.takes(about_request("q-7", labels, sampling)) == takes


def test_served_requests_have_no_labels_and_no_roles_without_roles() -> None:
    fields: dict[str, Any] = {"out": "acts", "hooks": "resid_post:1"}
    assert LiveSettings.of({**fields, "keep": "xarg a=b and role user: 1; 0.1"}).keep
    with pytest.raises(ActdsError, match="no labels"):
        LiveSettings.of({**fields, "keep": "label a=b: 1"})
    with pytest.raises(ActdsError, match="roles are known with roles only"):
        LiveSettings.of({**fields, "keep": "role user: 1", "roles": False})
