"""Strata: losses made by hand that no mean shows, on simulated runs and on written datasets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from click.testing import CliRunner
from scipy import stats

import actds
from actds.cli import cli
from actds.format import tables
from actds.format.readouts import Readouts, matrix
from actds_testing.audit_losses import Chooses, Tables, lose, rows_of
from actds_testing.audit_tokens import arrow_source, audited, changed, tables_of
from actds_testing.harvest import validated
from actds_testing.schedules import simulate as scheduled
from actds_testing.simulate import SCENARIOS, simulate
from actds_testing.synthetic import make_dataset
from actds_validators.audit.api import audit
from actds_validators.audit.result import Limits, StratumLoss, Verdict
from actds_validators.audit.run import Sections, audit_sources
from actds_validators.audit.verdict import judge
from actds_validators.statistics.strata import poisson_binomial_tail, stratum_p

READOUTS = Readouts(n_projections=8, seed=7)


@pytest.fixture(scope="module")
def sound() -> Tables:
    """Return a run that lost nothing, of forty users."""
    rng = np.random.default_rng(5)

    def users(frame: pd.DataFrame) -> pd.DataFrame:
        return frame.assign(source=[f"user-{k}" for k in rng.zipf(1.3, len(frame)) % 40])

    run = simulate(replace(SCENARIOS["none"], n_steps=3000), 77)
    return changed(tables_of(run), "requests", users)


def some(rows: pd.DataFrame, rate: float = 0.001, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).random(len(rows)) < rate


def one_id(rows: pd.DataFrame) -> np.ndarray:
    counts = rows["token_id"].value_counts()
    return (rows["token_id"] == counts.index[counts < 150][0]).to_numpy()


def one_user(rows: pd.DataFrame) -> np.ndarray:
    counts = rows.groupby("source")["request"].nunique()
    return (rows["source"] == counts.index[counts >= 8][-1]).to_numpy()


def largest(rows: pd.DataFrame) -> np.ndarray:
    return (rows["norm"] > rows["norm"].quantile(0.99)).to_numpy()


def first(rows: pd.DataFrame) -> np.ndarray:
    return (rows["position"] == 0).to_numpy()


def last(rows: pd.DataFrame) -> np.ndarray:
    return (rows["position"] == rows["own"] - 1).to_numpy() & some(rows, 0.6)


def special(rows: pd.DataFrame) -> np.ndarray:
    # Not all: that an id is special is known from the rows that are stored.
    return (rows["flags"] % 2 == 1).to_numpy() & some(rows, 0.8, 2)


def verdict_of(found: Tables, limits: Limits | None = None) -> tuple[Verdict, list[StratumLoss]]:
    sections = audited(found, limits=limits)
    assert sections.accounting.findings == [] and sections.missingness is not None
    return judge(sections, limits or Limits()), sections.missingness.worst_strata


@pytest.mark.parametrize(
    ("choose", "kind", "tolerance"),
    [(one_id, "token id", 0), (one_user, "source", 0), (largest, "tail of a value", 0.05),
     (first, "position", 0), (last, "position from the end", 0), (special, "special tokens", 0)],
)  # fmt: skip
def test_a_kind_of_token_that_is_lost_fails_and_is_counted(
    sound: Tables, choose: Chooses, kind: str, tolerance: float
) -> None:
    rows = rows_of(sound)
    chosen = np.asarray(choose(rows), bool)
    gone = chosen | some(rows)
    verdict, worst = verdict_of(lose(sound, lambda _: gone))
    assert (verdict.level, verdict.kind) == ("FAIL", "worst-stratum")
    assert verdict.deciding.value >= 0.2 and "lost" in verdict.sentence
    named = next(s for s in worst if s.kind == kind)
    members = {"position from the end": rows["position"] == rows["own"] - 1,
               "special tokens": rows["flags"] % 2 == 1}.get(kind, pd.Series(chosen))  # fmt: skip
    assert named.n == pytest.approx(members.sum(), rel=tolerance or 1e-12)
    assert named.n_lost == pytest.approx(gone[members].sum(), rel=tolerance or 1e-12)
    assert named.rate == pytest.approx(named.n_lost / named.n)


def test_a_stratum_between_the_limits_warns(sound: Tables) -> None:
    rows = rows_of(sound)
    middling = first(rows) & some(rows, 0.12, 3)
    verdict, worst = verdict_of(lose(sound, lambda _: middling | some(rows)))
    assert verdict.level == "WARN" and "of the rows of" in verdict.sentence
    assert {s.label for s in worst} == {"0"} and 0.05 <= worst[0].rate < 0.2
    strict = Limits(worst_stratum_fail=0.05)
    assert verdict_of(lose(sound, lambda _: middling | some(rows)), strict)[0].level == "FAIL"
    lax = Limits(worst_stratum_warn=0.3, worst_stratum_fail=0.3)
    assert verdict_of(lose(sound, lambda _: middling | some(rows)), lax)[1] == []


def test_one_request_is_one_loss_however_long(sound: Tables) -> None:
    rows = rows_of(sound)
    longest = rows.groupby("request").size().idxmax()
    found = audited(lose(sound, lambda r: (r["request"] == longest).to_numpy() | some(r)))
    assert found.missingness is not None
    assert found.missingness.worst_strata == [] and found.missingness.whole_requests == 1


def whole_steps(rows: pd.DataFrame, rng: np.random.Generator) -> np.ndarray:
    steps = rows["step"].unique()
    return rows["step"].isin(steps[rng.random(len(steps)) < 0.02]).to_numpy()


def bursts(rows: pd.DataFrame, rng: np.random.Generator) -> np.ndarray:
    steps = np.sort(rows["step"].unique())
    lost = np.zeros(len(steps), bool)
    for start in rng.integers(0, len(steps) - 10, 6):
        lost[start : start + rng.geometric(1 / 8)] = True
    return rows["step"].isin(steps[lost]).to_numpy()


def single_tokens(rows: pd.DataFrame, rng: np.random.Generator) -> np.ndarray:
    return rng.random(len(rows)) < 0.005


def whole_requests(rows: pd.DataFrame, rng: np.random.Generator) -> np.ndarray:
    requests = rows["request"].unique()
    return rows["request"].isin(requests[rng.random(len(requests)) < 0.02]).to_numpy()


@pytest.mark.parametrize("kind", [whole_steps, bursts, single_tokens, whole_requests])
def test_harmless_losses_name_no_stratum(
    kind: Callable[[pd.DataFrame, np.random.Generator], np.ndarray], sound: Tables
) -> None:
    """Seeds 0 to 4; expected at most 1 % a kind of stratum, measured 0 of 100 runs each."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        found = lose(sound, lambda rows, rng=rng: kind(rows, rng))  # type: ignore[misc]
        assert verdict_of(found)[1] == []


# the test behind it ---------------------------------------------------------------------------


def test_the_tail_is_that_of_scipy_and_of_counting() -> None:
    chance = np.full((3, 20), 0.1)
    wanted = stats.binom.sf(np.array([0, 3, 19]) - 1, 20, 0.1)
    assert poisson_binomial_tail(chance, [0, 3, 19]) == pytest.approx(wanted, rel=1e-10)
    uneven = np.random.default_rng(4).random((1, 9))
    outcomes = (np.arange(2**9)[:, np.newaxis] >> np.arange(9)) & 1
    weights = np.where(outcomes, uneven, 1 - uneven).prod(axis=1)
    for hits in range(10):
        counted = weights[outcomes.sum(axis=1) >= hits].sum()
        assert poisson_binomial_tail(uneven, [hits])[0] == pytest.approx(counted, rel=1e-10)


@pytest.mark.parametrize("cluster", [1, 10, 40])
def test_the_test_keeps_its_level_however_losses_cluster(cluster: int) -> None:
    """Clusters of tokens lost together; 4,000 strata, level 5 %, expected far fewer rejections."""
    rng = np.random.default_rng(cluster)
    rate, n_blocks = 0.02, 30
    n_clusters = rng.integers(0, 4, (4000, n_blocks))
    lost = rng.binomial(n_clusters, rate) * cluster
    p = stratum_p(n_clusters * cluster, lost, np.full(n_blocks, rate))
    assert (p <= 0.05).mean() <= 0.05
    assert stratum_p(n_clusters[:50] * cluster, n_clusters[:50] * cluster, np.full(n_blocks, rate)
                     ).max() < 1e-8  # fmt: skip


def test_fewer_than_three_blocks_are_never_enough() -> None:
    n, lost = np.full((1, 20), 50.0), np.zeros((1, 20))
    lost[0, :2] = 50
    assert stratum_p(n, lost, np.full(20, 1e-4)).tolist() == [1.0]
    lost[0, 2] = 50
    assert stratum_p(n, lost, np.full(20, 1e-4))[0] < 1e-8
    with pytest.raises(ValueError, match="between 0 and the computed"):
        stratum_p(n, n + 1, np.full(20, 0.1))


# written datasets -----------------------------------------------------------------------------


def dataset(path: Path, choose: Callable[[pd.DataFrame], np.ndarray] | None, **more: int) -> Path:
    """Write a dataset of many requests; of its rows the chosen ones were dropped."""
    told = scheduled(260, 3, budget=64)
    if choose is not None:
        found = {name: getattr(told, name) for name in ("requests", "steps", "spans", "drops")}
        found["tokens"] = told.rows
        cut = lose(found, choose)
        told = replace(told, rows=cut["tokens"], steps=cut["steps"], spans=cut["spans"],
                       drops=cut["drops"])  # fmt: skip
    return make_dataset(path, schedule=told, readouts=READOUTS, rows_per_shard=4096, **more)


@pytest.mark.standard
def test_all_first_rows_lost_is_told_of_a_dataset_on_page_and_terminal(tmp_path: Path) -> None:
    path = dataset(tmp_path / "d", lambda rows: first(rows) & some(rows, 0.5))
    validated(path)  # what was made by hand is what a writer may write
    page, out = tmp_path / "audit.html", tmp_path / "audit.json"
    command = ["audit", str(path), "--html", str(page), "--json", str(out)]
    done = CliRunner().invoke(cli, [*command, "--limit", "max_loss=0.5"])
    assert done.exit_code == 1, done.output
    assert re.match(
        r"✗ No: \d+\.\d+ % of the rows of the tokens at position 0 were dropped", done.output
    )
    assert "FAIL (worst-stratum)" in done.output
    found = json.loads(out.read_text())
    worst = found["missingness"]["worst_strata"][0]
    rows = actds.open(path).tokens().to_pandas()
    stored = int((rows["position"] == 0).sum())
    assert worst["n"] - worst["n_lost"] == stored and worst["rate"] >= 0.2
    for text in (done.output, page.read_text()):
        assert "Strata (kinds of token) with excess loss" in text
        assert all(words[:40] in text for words in found["would_not_notice"][1:3])
    limits = ("max_loss=0.5", "worst_stratum_warn=1", "worst-stratum-fail=1")
    given = [word for limit in limits for word in ("--limit", limit)]
    quiet = CliRunner().invoke(cli, [*command, *given])
    assert "worst-stratum)" not in quiet.output


# what it would not notice ---------------------------------------------------------------------


def test_it_would_not_notice_a_direction_that_no_readout_sees(tmp_path: Path) -> None:
    whole = dataset(tmp_path / "whole", None, d_model=16)
    hook = "resid_post.1"
    packed = matrix(READOUTS, None, 1, 16)[0]
    seen = np.linalg.qr(np.asarray(packed, np.float64).reshape(16, -1)[:, :8])[0]
    unseen = np.eye(16) - seen @ seen.T
    direction = unseen[:, 0] / np.linalg.norm(unseen[:, 0])
    values = {}
    for shard in actds.open(whole).shards:
        bits = shard.array(hook).read_all()
        x = bits.view(np.uint16).astype(np.uint32) << 16
        along = x.view(np.float32).astype(np.float64) @ direction
        keys = shard.tokens(["request", "position"]).to_pydict()
        values |= dict(zip(zip(keys["request"], keys["position"], strict=True), along.tolist(),
                           strict=True))  # fmt: skip
    top = np.quantile(list(values.values()), 0.99)

    def choose(rows: pd.DataFrame) -> np.ndarray:
        pairs = zip(rows["request"].tolist(), rows["position"].tolist(), strict=True)
        return np.array([values[pair] > top for pair in pairs])

    result = audit(dataset(tmp_path / "cut", choose, d_model=16)).result
    assert result.missingness is not None and result.missingness.worst_strata == []
    assert result.mechanism is not None
    assert not any(t.rejected and t.covariate.group == "values" for t in result.mechanism.tests)
    assert "a direction of the activations that no readout has" in result.would_not_notice[0]


def test_it_would_not_notice_tokens_that_never_reached_the_engine(sound: Tables) -> None:
    def skipped(frame: pd.DataFrame) -> pd.DataFrame:
        more = frame.iloc[:200].assign(request=frame["request"].max() + 1 + np.arange(200),
                                       finish_reason="skipped", prompt_len=5,
                                       generated_len=0)  # fmt: skip
        return pd.concat([frame, more.astype(frame.dtypes.to_dict())])

    found = audited(changed(sound, "requests", skipped))
    assert found.accounting.findings == [] and found.accounting.loss_share == 0
    assert judge(found, Limits()).kind == "complete"


def test_it_would_not_notice_what_a_text_means_nor_who_sent_it(sound: Tables) -> None:
    def unnamed(frame: pd.DataFrame) -> pd.DataFrame:
        return frame.assign(source=None)

    nobody = changed(sound, "requests", unnamed)
    about = rows_of(sound).groupby("request")["source"].first()
    # All of one user: with sources it is told, without them only as so many requests.
    user = about.value_counts().index[5]
    gone = about.index[about == user]
    verdict, worst = verdict_of(lose(sound, lambda r: r["request"].isin(gone).to_numpy()))
    assert verdict.level == "FAIL" and worst[0].kind == "source"
    unseen = audited(lose(nobody, lambda r: r["request"].isin(gone).to_numpy())).missingness
    assert unseen is not None and unseen.worst_strata == []
    assert unseen.whole_requests == len(gone) >= 8


def test_it_would_not_notice_a_kind_of_too_few_tokens(sound: Tables) -> None:
    rows = rows_of(sound)
    counts = rows["token_id"].value_counts()
    rare = (rows["token_id"] == counts.index[counts < 20][0]).to_numpy()
    assert verdict_of(lose(sound, lambda _: rare | some(rows, 0.002)))[1] == []


def test_it_would_not_notice_rows_that_are_wrong(tmp_path: Path) -> None:
    path = dataset(tmp_path / "d", None)
    before = audit(path).result
    arrays = [p for p in path.rglob("*") if "/c/" in p.as_posix() and p.is_file()]
    assert arrays
    for one in arrays:
        data = bytearray(one.read_bytes())
        data[len(data) // 2] ^= 1
        one.write_bytes(data)
    after = audit(path).result
    assert after.verdict == before.verdict and "stored but wrong" in after.would_not_notice[-1]


def test_it_says_what_it_could_not_see_without_readouts(tmp_path: Path) -> None:
    blind = audit(make_dataset(tmp_path / "d", n_requests=30, drops=True)).result
    assert blind.would_not_notice[0].startswith("losses that depend on the values of the rows or")


# probes ---------------------------------------------------------------------------------------


def test_the_users_probes_are_tested_and_those_beyond_sixteen_are_named(sound: Tables) -> None:
    rng = np.random.default_rng(2)
    lines = sound["readouts"].to_pandas().sort_values(["request", "position"])
    own = rng.normal(size=(len(lines), 20)).astype(np.float32)
    probed = lines.assign(probes=list(own))
    made = pa.Table.from_pandas(probed, tables.bare_schema("readouts"), preserve_index=False)
    of = {(r, p): x for r, p, x in zip(lines["request"], lines["position"], own[:, 3], strict=True)}
    rows = rows_of(sound)
    x = np.array([of[key] for key in zip(rows["request"], rows["position"], strict=True)])
    gone = np.abs(x) > 2.6  # both tails: the mean of what is lost is that of all
    found = audited(lose({**sound, "readouts": made}, lambda _: gone))
    assert found.missingness is not None and found.mechanism is not None
    by_name = {d.covariate.name: d for d in found.missingness.differences}
    assert {n for n in by_name if "probe" in n} == {
        f"resid_post.0 probe {k}{square}" for k in range(16) for square in ("", " squared")
    }
    assert abs(by_name["resid_post.0 probe 3"].smd.value) < 0.5
    square = (own[:, 3].astype(np.float64) - own[:, 3].astype(np.float64).mean()) ** 2
    lost = np.abs(own[:, 3]) > 2.6
    wanted = (square[lost].mean() - square.mean()) / square.std()
    assert by_name["resid_post.0 probe 3 squared"].smd.value == pytest.approx(wanted, rel=0.02)
    rejected = {t.covariate.name for t in found.mechanism.tests if t.rejected}
    assert "resid_post.0 probe 3 squared" in rejected
    kinds = {s.label for s in found.missingness.worst_strata}
    assert {f"{side} 1% of the probe 3 at resid_post.0" for side in ("lowest", "highest")} <= kinds


# what multiplicity weights see ----------------------------------------------------------------


def test_the_cell_that_multiplicity_weights_see_most_of_is_that_of_pandas(sound: Tables) -> None:
    sink = (sound["readouts"]["position"].to_numpy() == 0) * 1000.0
    norm = sound["readouts"]["norm"].to_numpy() + sink.astype(np.float32)
    at = sound["readouts"].schema.get_field_index("norm")
    field = sound["readouts"].schema.field(at)
    large = {**sound, "readouts": sound["readouts"].set_column(at, field, pa.array(norm))}
    seen = audited(large).coverage
    assert seen is not None and seen.dominant is not None
    rows = rows_of(large)
    spans = large["spans"].to_pandas()
    again = spans[spans["disposition"] == "cache_ref"]
    served = np.ones(len(rows))
    place = {pair: k for k, pair in enumerate(zip(rows["request"], rows["position"], strict=True))}
    for _, one in again.iterrows():
        for position in range(int(one["start"]), int(one["stop"])):
            served[place[int(one["ref_request"]), position]] += 1
    x = rows["norm"].to_numpy(np.float64)
    square = served * (x - np.average(x, weights=served)) ** 2
    cells = pd.Series(square).groupby([rows["token_id"], rows["position"]]).sum() / square.sum()
    assert (seen.dominant.token_id, seen.dominant.position) == cells.idxmax()
    assert seen.dominant.share == pytest.approx(cells.max(), rel=1e-6) and cells.max() > 0.5
    mine = (rows["token_id"] == cells.idxmax()[0]) & (rows["position"] == 0)
    assert seen.dominant.n_rows == mine.sum()
    assert seen.dominant.n_served == served[mine].sum()
    assert seen.dominant.exclude == ["first_position", "sink"]


def test_requests_that_begin_alike_are_a_stratum_without_a_source(sound: Tables) -> None:
    about = rows_of(sound).groupby("request")["source"].first()
    user = about.value_counts().index[5]
    mine = set(about.index[about == user])

    def blocks(frame: pd.DataFrame) -> pd.DataFrame:
        digests = [[b"\x07" * 16] if r in mine else [int(r).to_bytes(16, "big")]
                   for r in frame["request"]]  # fmt: skip
        return frame.assign(source=None, block_digests=digests)

    alike = changed(sound, "requests", blocks)
    _, worst = verdict_of(lose(alike, lambda r: r["request"].isin(mine).to_numpy()))
    assert (worst[0].kind, worst[0].label) == ("first prompt block", "0707070707070707…")
    assert worst[0].n == worst[0].n_lost == rows_of(sound)["request"].isin(mine).sum()


# runs, replicas, policies -----------------------------------------------------------------------


def harvested(*labels: dict[str, str], without: int | None = None) -> Sections:
    """Return what an audit finds of runs with labels; one of them lost every row of every step."""
    sources = []
    for k, of_run in enumerate(labels):
        found = tables_of(simulate(replace(SCENARIOS["none"], n_steps=300), 40 + k))
        found = lose(found, lambda rows, k=k: np.arange(len(rows)) % 200 == 0) if (
            k != without) else lose(found, lambda rows: np.ones(len(rows), bool))  # fmt: skip
        sources.append(arrow_source(f"r-{k}", found, of_run))
    return audit_sources(sources, Limits())


def test_a_replica_that_stored_nothing_is_named_with_what_to_do() -> None:
    found = harvested(*({"replica": str(k)} for k in range(4)), without=2)
    assert found.missingness is not None
    worst = found.missingness.worst_strata[0]
    assert (worst.kind, worst.label, worst.n_lost) == ("replica", "2", worst.n)
    assert not [s for s in found.missingness.worst_strata if s.kind == "run"]
    verdict = judge(found, Limits())
    assert verdict.level == "FAIL" and f"All {worst.n:,} rows of replica 2 were lost" in (
        verdict.sentence)  # fmt: skip
    for limits in (Limits(), Limits(max_loss=0.5)):  # where it is heavy, and where it decides
        steps = judge(found, limits).next_steps
        assert any("Replica 2 stored nothing: look at its log" in step for step in steps)


def test_a_run_is_named_where_no_replica_tells_it_apart_and_none_where_all_lost_alike() -> None:
    found = harvested({}, {}, {}, without=0).missingness
    assert found is not None and (found.worst_strata[0].kind, found.worst_strata[0].label) == (
        "run", "r-0")  # fmt: skip
    alike = harvested({}, {}, {}).missingness
    assert alike is not None and not [s for s in alike.worst_strata if s.kind == "run"]


def test_two_overflow_policies_of_one_dataset_are_named() -> None:
    policies = {"overflow policy": "block"}, {"overflow policy": "drop_newest"}
    found = harvested(*policies)
    assert found.policies == ("block", "drop_newest")
    steps = judge(found, Limits()).next_steps
    assert any("2 overflow policies (block, drop_newest)" in step for step in steps)
    same = judge(harvested(policies[0], policies[0]), Limits()).next_steps
    assert not any("overflow policies" in step for step in same)
