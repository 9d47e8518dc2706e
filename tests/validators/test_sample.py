"""Means by design: of rows that were drawn with known probabilities, against all that were not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import actds
from actds.format.inclusion import Design, salt_of, uniform
from actds.format.readouts import Readouts
from actds.publish.sealing import seal
from actds.store import open_store
from actds_testing.calibration import drawn
from actds_testing.forged_draws import detected
from actds_testing.schedules import Schedule, simulate, thinned
from actds_testing.synthetic import make_dataset
from actds_testing.synthetic_engine import SyntheticEngine, pipeline_for, writer_stopped
from actds_validators.audit.result import (
    Accounting,
    Audit,
    Estimate,
    Limits,
    Sample,
    SampleCheck,
    SampleHook,
)
from actds_validators.audit.verdict import Evidence, judge
from actds_validators.statistics.design import SampleSums, wilson
from actds_writers.ipc.messages import ClientFacts

SALT = 0x5EED5EED5EED5EED

# the estimate --------------------------------------------------------------------------------


def sums_of(rows: np.ndarray, inclusion: np.ndarray, unit: np.ndarray, k: int = 1024) -> SampleSums:
    """Return the sums of drawn rows in three parts, as shards have them."""
    n_unit = np.bincount(unit)[unit].astype(float)
    cluster = (uniform(salt_of("test"), unit) * k).astype(np.int64)
    total = SampleSums.of(rows.shape[1], k)
    for some in np.array_split(np.arange(len(rows)), 3):
        part = SampleSums.of(rows.shape[1], k)
        part.add(rows[some], inclusion[some], cluster[some], n_unit[some])
        total.merge(part)
    return total


@pytest.mark.parametrize("n_units", [60, 30_000])  # each its own cluster; thirty in one
def test_the_error_is_that_of_the_textbook_whatever_shares_a_cluster(n_units: int) -> None:
    rng = np.random.default_rng(1)
    unit = np.repeat(np.arange(n_units), rng.integers(1, 5, n_units))
    share = rng.choice([0.02, 0.3, 1.0], n_units)[unit]
    rows = rng.normal(size=(len(unit), 3)) + 5 * share[:, None]  # load moves what rows are like
    k = 1 << 16 if n_units == 60 else 1024
    found = sums_of(rows, share, unit, k).mean()
    w = 1 / share
    mean = (w @ rows) / w.sum()
    residual = np.zeros((n_units, 3))
    np.add.at(residual, unit, rows - mean)
    share_of_unit = np.zeros(n_units)
    share_of_unit[unit] = share
    leverage = np.bincount(unit, w) / w.sum()  # HC3
    each = residual / share_of_unit[:, None] / (1 - leverage)[:, None]
    error = np.sqrt(((1 - share_of_unit)[:, None] * each**2).sum(axis=0)) / w.sum()
    np.testing.assert_allclose(found.mean, mean)
    np.testing.assert_allclose(found.error, error, rtol=0.04 if n_units == 60 else 0.1)


@pytest.mark.parametrize("unit", ["row", "request"])
def test_intervals_hold_the_mean_of_all_rows_though_probabilities_go_with_them(unit: str) -> None:
    rng = np.random.default_rng(3)
    n = rng.geometric(1 / 12, 2500)
    request = np.repeat(np.arange(2500), n)
    position = np.concatenate([np.arange(k) for k in n])
    hard = rng.normal(size=2500)
    of = hard[request]
    rows = np.stack([of + rng.normal(size=len(of)), rng.random(len(of)) < 0.02], axis=1)
    share = np.where(hard > 0.5, 0.05, np.where(hard > -0.5, 0.4, 1.0))[request]
    truth, hit, n_seeds = rows.mean(axis=0), np.zeros(2), 150
    plain = []
    for seed in range(n_seeds):
        design = Design(salt_of("coverage", seed), 0.05, unit)  # type: ignore[arg-type]
        drawn = design.numbers(request, position) < share
        units = request if unit == "request" else np.arange(len(request))
        sums = sums_of(rows[drawn], share[drawn], units[drawn])
        low, high = sums.mean().interval(0.95, 1)
        hit += (low <= truth) & (truth <= high)
        plain.append(sums.plain[0] / sums.n - truth[0])
    assert np.mean(plain) < -0.3  # what weights are for
    assert ((hit / n_seeds >= 0.9) & (hit / n_seeds <= 0.995)).all(), hit / n_seeds


def test_all_rows_have_no_error_and_one_row_has_every() -> None:
    rows = np.arange(12.0).reshape(6, 2)
    whole = sums_of(rows, np.ones(6), np.arange(6)).mean()
    assert whole.mean.tolist() == [5, 6] and whole.error.tolist() == [0, 0]
    share = np.array([0.5, 1, 1, 1, 1, 1])
    assert np.isinf(sums_of(rows, share, np.arange(6)).mean().error).all()


def test_the_interval_of_a_share_is_wilsons() -> None:
    from scipy.stats import binomtest  # type: ignore[import-untyped]

    for k, n in [(0, 5), (3, 40), (40, 40), (500, 1000)]:
        want = binomtest(k, n).proportion_ci(0.95, method="wilson")
        np.testing.assert_allclose(wilson(k, n, 0.95), (want.low, want.high), atol=1e-9)


# the section ---------------------------------------------------------------------------------


def drawn_dataset(path: Path, unit: str = "row", schedule: Schedule | None = None) -> Path:
    schedule = schedule or simulate(40, seed=58)  # nothing of it is aborted after a step
    steps = schedule.steps["step"].to_pylist()
    by_step = {step: (1.0, 0.5, 0.25)[k * 3 // len(steps)] for k, step in enumerate(steps)}
    field = f'{{"keep":[],"minimum":"0.25","salt":"{SALT:016x}","unit":"{unit}"}}'
    facts = {"capture.inclusion": field, "capture.overflow_policy": "thin"}
    return make_dataset(
        path,
        schedule=thinned(schedule, SALT, by_step, unit),
        readouts=Readouts(2, seed=4),
        facts=facts,
    )


@pytest.mark.parametrize("unit", ["row", "request"])
def test_a_thinned_dataset_is_judged_by_its_draw(tmp_path: Path, unit: str) -> None:
    path = drawn_dataset(tmp_path / "acts", unit)
    result = actds.audit(path).result
    section, account = result.sample, result.accounting
    assert section is not None and section.units == [unit] and section.minimum == 0.25
    assert section.n_thinned == account.thinned > 50 and account.loss_share == account.dropped == 0
    assert account.computed == account.captured + account.thinned + account.aborted
    dataset = actds.open(path)
    w = 1 / np.concatenate([shard.tokens()["inclusion"].to_numpy() for shard in dataset.shards])
    assert section.effective_rows == pytest.approx(w.sum() ** 2 / (w**2).sum())
    for hook in section.hooks:
        array = dataset.array(hook.hook)
        rows = array[np.arange(len(array))].astype(np.float64)
        rows = np.concatenate([rows, np.linalg.norm(rows, axis=1)[:, None]], axis=1)
        mean, plain = (w @ rows) / w.sum(), rows.mean(axis=0)
        sd = np.sqrt((w @ rows**2) / w.sum() - mean**2)
        at = -1 if hook.plain_variable == "norm" else int(hook.plain_variable.split()[1])
        assert hook.plain is not None and hook.n_rows == len(rows)
        assert hook.plain.value == pytest.approx(((plain - mean) / sd)[at], abs=1e-6)
    check = section.readouts
    assert check is not None and check.agrees and section.lane is None
    assert check.n_drawn <= section.n_stored and check.n_rows > check.n_drawn
    assert result.verdict.kind == "too-little-evidence" and "effective" in result.verdict.lacks[0]
    place = next(place for place in result.places if place.name == "queues")
    assert "not drawn" in place.headline and place.n == account.thinned
    assert not any("direction" in words for words in result.would_not_notice)


def test_coverage_of_a_thinned_dataset_is_that_of_all_its_rows(tmp_path: Path) -> None:
    """References to rows that were not drawn are no references without a row."""
    schedule = simulate(200, seed=4)
    whole = make_dataset(tmp_path / "whole", schedule=schedule, readouts=Readouts(2, seed=4))
    part = drawn_dataset(tmp_path / "part", schedule=schedule)
    want, got = (actds.audit(path).result.coverage for path in (whole, part))
    assert want is not None and got is not None
    sides = []
    for section in (want, got):
        by_class = Counter[str]()
        for cell in section.cells:
            by_class[cell.token_class] += cell.stored + cell.reused
        sides.append({name: n / by_class.total() for name, n in by_class.items()})
    assert sides[0].keys() == sides[1].keys()  # no class of references that lead nowhere
    for name, share in sides[0].items():
        assert sides[1][name] == pytest.approx(share, abs=0.05), name
    assert got.reused_share == pytest.approx(want.reused_share, abs=0.05)


def test_rows_that_are_no_such_draw_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored rows have norms half as large again as what all readouts say of the same hash."""
    path = drawn_dataset(tmp_path / "acts", schedule=simulate(400, seed=4))
    assert actds.audit(path).result.verdict.kind != "biased"
    from actds_validators.audit import data

    numbers = data.TablePart.batches

    stored = {
        key
        for shard in actds.open(path).shards
        for key in zip(
            *(shard.tokens()[c].to_pylist() for c in ("request", "position")), strict=True
        )
    }

    def biased(part: data.TablePart, columns: list[str]) -> Any:
        for batch in numbers(part, columns):
            if part.of == "readouts" and {"norm", "position"} <= set(columns):
                at = columns.index("norm")
                keys = zip(batch["request"].to_pylist(), batch["position"].to_pylist(), strict=True)
                more = np.array([key in stored for key in keys])
                norm = batch["norm"].to_numpy() * np.where(more, 1.5, 1)
                batch = batch.set_column(at, batch.schema.field(at), pa.array(norm, pa.float32()))
            yield batch

    monkeypatch.setattr(data.TablePart, "batches", biased)
    verdict = actds.audit(path).result.verdict
    assert (verdict.level, verdict.kind) == ("FAIL", "biased")
    assert "not such a draw" in verdict.sentence


# the verdict ---------------------------------------------------------------------------------


def judged(half: float, *, agrees: bool = True, dropped: int = 0, n_drawn: int = 0) -> Any:
    account = Accounting(
        positions=10_000, computed=10_000, captured=6000, thinned=4000 - dropped, cache_ref=0,
        dropped=dropped, aborted=0, filtered=0, recomputed=0, unresolved=0, requests=100, steps=100,
        loss_share=dropped / 10_000, waterfall=[], findings=[],
    )  # fmt: skip
    bias = Estimate(value=0.1, low=0.1 - half, high=0.1 + half, confidence=0.95)
    hook = SampleHook(
        hook="h", n_channels=4, n_rows=6000, variable="norm", half_width=half,
        plain_variable="norm", plain=bias,
    )  # fmt: skip
    check = SampleCheck(
        n_rows=10_000, n_drawn=6000, n_values=3, hook="h", variable="norm at h", deviation=0.01,
        room=0.02, agrees=agrees,
    )  # fmt: skip
    section = Sample(
        units=["row"], minimum=0.1, n_stored=6000, n_thinned=4000 - dropped, n_dropped=n_drawn,
        effective_rows=5000, hooks=[hook], readouts=check, lane=None,
    )  # fmt: skip
    return judge(Evidence(account, sample=section), Limits())


@pytest.mark.parametrize(
    ("of", "level", "kind"),
    [
        ({"half": 0.015}, "PASS", "by-design"),
        ({"half": 0.03}, "INCONCLUSIVE", "too-little-evidence"),
        ({"half": 0.015, "agrees": False}, "FAIL", "biased"),
        ({"half": 0.015, "dropped": 600, "n_drawn": 600}, "PASS", "by-design"),
        ({"half": 0.015, "dropped": 600}, "FAIL", "heavy"),  # lost, and by no draw
        ({"half": 0.03, "dropped": 600, "n_drawn": 600}, "FAIL", "heavy"),  # as without it
    ],
)
def test_the_draw_decides_where_it_can(of: dict[str, Any], level: str, kind: str) -> None:
    verdict = judged(**of)
    assert (verdict.level, verdict.kind) == (level, kind)
    assert any(
        number.name.startswith("farthest that a mean by 1/incl") for number in verdict.numbers
    )
    if kind == "too-little-evidence":  # (0.03 / 0.02)^2 times as many
        assert "about 11,250 would decide" in verdict.lacks[0]


# forged rows ---------------------------------------------------------------------------------


def test_every_forged_row_is_noted() -> None:
    """Rows too many, too few, of other probabilities and of another salt, in all tables alike."""
    made, noted = detected(100, seed=7)
    assert made == noted and len(made) == 5 and made.total() == 100


# the short version of the calibration ---------------------------------------------------------


@pytest.mark.parametrize(("case", "kind"), [("thinned", "by-design"), ("followed_up", "biased")])
def test_what_the_draw_says_is_so_in_runs_of_known_truth(case: str, kind: str) -> None:
    """Of 20 seeds 5 % miss: 4 or more with a probability of 1.6 in 100."""
    runs = [getattr(drawn, case)(seed) for seed in range(20)]
    assert sum(verdict.kind == kind for verdict, _, _ in runs) >= 19
    assert sum(holds for _, holds, _ in runs) >= 17


def test_a_run_of_which_nothing_was_drawn_does_not_pass() -> None:
    account = Accounting(
        positions=100, computed=100, captured=0, thinned=100, cache_ref=0, dropped=0, aborted=0,
        filtered=0, recomputed=0, unresolved=0, requests=1, steps=1, loss_share=0, waterfall=[],
        findings=[],
    )  # fmt: skip
    verdict = judge(Evidence(account), Limits())
    assert (verdict.level, verdict.kind) == ("INCONCLUSIVE", "too-little-evidence")


# a drop policy with a lane -------------------------------------------------------------------


@pytest.mark.standard
def test_the_lane_says_which_rows_a_drop_policy_kept(tmp_path: Path) -> None:
    out = tmp_path / "acts"
    readouts = Readouts(n_projections=2, seed=3)
    with pipeline_for(out, "drop_newest", readouts=readouts, always=0.25) as pipeline:
        worker = SyntheticEngine(pipeline)
        with writer_stopped(pipeline):
            for request in range(60):
                worker.request(request)
                worker.finished = (request,)
        for request in range(60, 120):
            worker.request(request)
            worker.finished = (request,)
        worker.drain(pipeline)
        worker.close()
        pipeline.send_client_facts(ClientFacts())
        pipeline.finish("finished")
    seal(open_store(out))
    dataset, section = actds.open(out), actds.audit(out).result.sample
    assert section is not None and section.lane is not None and section.n_thinned == 0
    design = Design.of(dataset.runs["r-test"])
    assert design is not None
    kept, n = Counter[str](), Counter[str]()
    for shard in dataset.shards:
        tokens = shard.tokens(["request", "position", "phase", "inclusion"]).to_pydict()
        u = design.numbers(tokens["request"], tokens["position"])
        for number, phase, inclusion in zip(u, tokens["phase"], tokens["inclusion"], strict=True):
            n[phase] += number < 0.25
            kept[phase] += number < 0.25 and inclusion == 1
    found = {p.label: p for p in section.lane.points if p.kind == "token class"}
    assert {label: point.n for label, point in found.items()} == {k: v for k, v in n.items() if v}
    for label, point in found.items():
        assert point.kept.value == kept[label] / n[label]
    assert section.lane.n_rows == n.total() and section.lane.n_kept == kept.total()
    assert section.n_dropped == actds.audit(out).result.accounting.dropped > 0
    steps = dataset.steps()
    whole = np.array(steps["inclusion"].to_pylist()) == 1
    rows = np.array(steps["batch_tokens"].to_pylist())
    share = rows[whole].sum() / rows.sum()  # what the lane estimates
    low, high = wilson(section.lane.n_kept, section.lane.n_rows, 0.999)
    assert low < share < high
    assert (
        Audit.model_validate_json(
            Audit.model_validate(actds.audit(out).result.as_json()).model_dump_json()
        ).sample
        == section
    )
