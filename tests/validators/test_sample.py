"""Means by design: of rows that were drawn with known probabilities, against all that were not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file
from scipy import stats  # type: ignore[import-untyped]
from scipy.sparse import csr_array  # type: ignore[import-untyped]
from test_regimes_command import dictionary

import actds
from actds.cli import cli
from actds.format.inclusion import Design, salt_of, uniform
from actds.format.readouts import Readouts
from actds.publish.sealing import seal
from actds.store import open_store
from actds_testing.calibration import drawn
from actds_testing.forged_draws import detected
from actds_testing.schedules import Schedule, simulate, thinned
from actds_testing.synthetic import make_dataset
from actds_testing.synthetic_engine import PROMPT_LEN, SyntheticEngine, pipeline_for, writer_stopped
from actds_validators.audit.result import (
    Accounting,
    Audit,
    Estimate,
    FollowUp,
    FollowUpHook,
    Limits,
    Sample,
    SampleCheck,
    SampleHook,
)
from actds_validators.audit.verdict import Evidence, judge
from actds_validators.statistics.design import RateSums, SampleSums, Units, exact_share, wilson
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


# rates ---------------------------------------------------------------------------------------


def ends_of(
    active: np.ndarray, share: np.ndarray, unit: np.ndarray, least: float, n_values: int
) -> tuple[float, float]:
    """Return both ends of the interval of a rate as section 14.13 has them, unit by unit."""
    a = np.sqrt(1 - share) / share
    n, n_active = np.bincount(unit)[unit], np.bincount(unit, active)[unit]
    weight, all_rows = (a**2 * active).sum(), (a**2 * n).sum() / (a**2).sum()
    rows = (a**2 * active * n_active).sum() / weight if weight else all_rows
    u = max(1, (rows * active.sum() + all_rows) / (active.sum() + 1)) / least
    total, size = (active / share).sum(), (1 / share).sum()
    tail = 0.025 / n_values
    t = stats.t.isf(tail, (a**2).sum() ** 2 / (a**4 * n).sum() - 1) / stats.norm.isf(tail)
    ends = []
    for more in (0, 1):
        p = (total + u * more) / (size + u)
        v = (np.bincount(unit, a * (active - p)) ** 2).sum() + (u * (more - p)) ** 2
        v *= (t / (size + u)) ** 2
        n_alike = p * (1 - p) / v - 1 if v else 1.0
        of = stats.beta(p * n_alike, (1 - p) * n_alike)
        ends.append(float(of.isf(tail) if more else of.ppf(tail)) if p else 0.0)
    return ends[0], ends[1]


def rates_of(active: np.ndarray, share: np.ndarray, unit: np.ndarray | None) -> RateSums:
    """Return the sums of drawn rows ``(n, d)`` in three parts."""
    k = 0 if unit is None else 1024
    total = RateSums.of(active.shape[1], k)
    for some in np.array_split(np.arange(len(active)), 3):
        part, units = RateSums.of(active.shape[1], k), None
        if unit is not None:
            number = uniform(salt_of("test"), unit[some])
            sign = np.where(uniform(salt_of("sign"), unit[some]) < 0.5, -1.0, 1.0)
            n = np.bincount(unit)[unit[some]].astype(float)
            units = Units(n, (number * k).astype(np.int64), sign)
        part.add(csr_array(active[some]), share[some], units)
        total.merge(part)
    return total


def test_the_interval_of_a_rate_is_clopper_and_pearsons_where_rows_are_drawn_alike() -> None:
    n, counts = 2000, np.array([0, 1, 3, 40, 1000, 1999, 2000])
    active = (np.arange(n)[:, None] < counts).astype(np.float32)
    _, low, high = rates_of(active, np.full(n, 1e-3), None).rates(0.95, 1, 1e-3)
    for at, k in enumerate(counts.tolist()):
        want = stats.binomtest(k, n).proportion_ci(0.95, method="exact")
        np.testing.assert_allclose([low[at], high[at]], [want.low, want.high], rtol=0.01, atol=3e-5)
    low, high = exact_share(counts, np.full(len(counts), n), 0.95)
    want = [stats.binomtest(k, n).proportion_ci(0.95, method="exact") for k in counts.tolist()]
    np.testing.assert_allclose(low, [w.low for w in want], atol=1e-12)
    np.testing.assert_allclose(high, [w.high for w in want], atol=1e-12)


@pytest.mark.parametrize("n_units", [60, 30_000])  # each its own cluster; thirty in one
def test_the_interval_of_a_rate_is_that_of_the_units_whatever_shares_a_cluster(
    n_units: int,
) -> None:
    rng = np.random.default_rng(1)
    unit = np.repeat(np.arange(n_units), rng.integers(1, 5, n_units))
    share = rng.choice([0.1, 0.3, 1.0], n_units, p=[0.1, 0.3, 0.6])[unit]
    # All certain rows have it and few others: what is uncertain is far from the rate on one side.
    active = (share == 1) | (rng.random(len(unit)) < 0.02)
    _, low, high = rates_of(active[:, None].astype(np.float32), share, unit).rates(0.95, 1, 0.1)
    want = ends_of(active, share, unit, 0.1, 1)
    np.testing.assert_allclose([low[0], high[0]], want, rtol=0.1 if n_units == 60 else 0.01)


@pytest.mark.parametrize("unit", ["row", "request"])
def test_intervals_hold_rates_of_rare_features_that_go_with_probabilities(unit: str) -> None:
    rng = np.random.default_rng(5)
    n = rng.geometric(1 / 12, 2500)
    request = np.repeat(np.arange(2500), n)
    position = np.concatenate([np.arange(k) for k in n])
    hard = rng.normal(size=2500)
    of = hard[request]
    share = np.where(hard > 0.5, 0.05, np.where(hard > -0.5, 0.4, 1.0))[request]
    odds = np.exp(of)
    rates = (0.2, 0.01, 5e-4, 1e-4)
    x = np.stack([(rng.random(len(of)) < p * odds) * rng.gamma(2, size=len(of)) for p in rates], 1)
    in_few = np.isin(request, np.flatnonzero(rng.random(2500) < 4e-3))
    x = np.concatenate([x, in_few[:, None]], axis=1)
    truth, hit, above, n_seeds = (x > 0).mean(axis=0), np.zeros(5), np.zeros(5), 150
    means, of_mean = x.sum(axis=0) / (x > 0).sum(axis=0), 0
    for seed in range(n_seeds):
        design = Design(salt_of("coverage", seed), 0.05, unit)  # type: ignore[arg-type]
        drawn = design.numbers(request, position) < share
        sums = rates_of(x[drawn], share[drawn], request[drawn] if unit == "request" else None)
        _, low, high = sums.rates(0.95, 1, 0.05)
        hit += (low <= truth) & (truth <= high)
        above += high / truth / n_seeds
        mean, half = sums.means(0.95, 1)
        of_mean += int(abs(mean[0] - means[0]) <= half[0])
    assert (hit / n_seeds >= 0.92).all(), hit / n_seeds
    assert above[0] < 1.3  # and say something
    if unit == "row":  # and of too few requests none is given
        assert 0.9 <= of_mean / n_seeds <= 0.99
    assert (above[2:] > 1.2).all(), above


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


def active_of(path: Path, sae: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """Return by NumPy the features of the rows of resid_post.1 ``(n, 24)``, and their tokens."""
    weights, dataset = load_file(sae / "sae_weights.safetensors"), actds.open(path)
    array = dataset.array("resid_post.1")
    rows = array[np.arange(len(array))].astype(np.float32)
    columns = ["request", "position", "inclusion"]
    parts = [shard.tokens(columns).to_pydict() for shard in dataset.shards]
    tokens = {c: np.concatenate([np.array(part[c], float) for part in parts]) for c in columns}
    return np.maximum(rows @ weights["W_enc"] + weights["b_enc"], 0), tokens


def dictionary_of(folder: Path, path: Path) -> Path:
    """Write a dictionary whose features go from common in the rows to one that none has."""
    rows = np.asarray(actds.open(path).array("resid_post.1")[:], np.float32)
    sae = dictionary(folder, rows.shape[1])
    x = rows @ load_file(sae / "sae_weights.safetensors")["W_enc"]
    bias = -np.array(
        [np.quantile(of, q) for of, q in zip(x.T, np.linspace(0.2, 1, 24), strict=True)]
    )
    bias[-1] = -1e6
    rmtree(sae)
    return dictionary(folder, rows.shape[1], weights={"b_enc": bias.astype(np.float32)})


@pytest.mark.parametrize("unit", ["row", "request"])
def test_features_of_a_thinned_dataset_have_the_rates_of_weighted_rows(
    tmp_path: Path, unit: str
) -> None:
    path = drawn_dataset(tmp_path / "acts", unit, simulate(400, seed=58))
    sae = dictionary_of(tmp_path / "sae", path)
    section = actds.audit(path, sae=[sae]).result.sample
    assert section is not None
    [found] = section.features
    x, tokens = active_of(path, sae)
    share, active = tokens["inclusion"], np.asarray(x > 0)
    assert found.hook == "resid_post.1" and found.n_rows == len(x) and found.n_features == 24
    assert found.n_active == active.sum(axis=0).tolist()
    w = 1 / share
    np.testing.assert_allclose(found.rate, w @ active / w.sum(), rtol=1e-5)
    ever = np.asarray(active.any(axis=0))
    np.testing.assert_allclose(
        np.array(found.mean)[ever].astype(float), (w @ x)[ever] / (w @ active)[ever], rtol=1e-4
    )
    assert not ever[-1] and found.mean[-1] is None and found.low[-1] == 0 < found.high[-1]
    key = tokens["request"] if unit == "request" else np.arange(len(x))
    of_unit = np.unique(key, return_inverse=True)[1]
    for feature in range(24):
        low, high = ends_of(active[:, feature], share, of_unit, 0.25, 24)
        room = 1e-4 if unit == "row" else 0.1  # clusters are shared
        assert found.low[feature] == pytest.approx(low, rel=room, abs=room)
        assert found.high[feature] == pytest.approx(high, rel=room, abs=room)
    a2 = (1 - share) / share**2
    with np.errstate(invalid="ignore"):
        n_draws = (a2 @ active) ** 2 / (a2**2 @ active)
    known = np.array([half is not None for half in found.mean_half])
    assert (known <= (n_draws >= 100)).all()
    if unit == "row":
        assert (known == (n_draws >= 100)).all() and 0 < known.sum() < 24
        mean = np.array(found.mean, float)[known]
        residual = x[:, known] - active[:, known] * mean
        error = np.sqrt(a2 @ residual**2) / (w @ active[:, known])
        half = stats.t.isf(0.025 / 24, n_draws[known] - 1) * error
        np.testing.assert_allclose(np.array(found.mean_half, float)[known], half, rtol=1e-4)
    assert actds.audit(path).result.sample == section.model_copy(update={"features": []})


def test_the_command_shows_rates_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    path = drawn_dataset(tmp_path / "acts")
    sae = dictionary_of(tmp_path / "sae", path)
    page, out = tmp_path / "page.html", tmp_path / "audit.json"
    arguments = ["audit", str(path), "--fail-on", "never"]
    files = ["--html", str(page), "--json", str(out)]
    shown = CliRunner().invoke(cli, [*arguments, "--sae", f"resid_post.1={sae}", *files])
    assert shown.exit_code == 0, shown.output
    for text in (shown.output, page.read_text()):
        assert "Features of resid_post.1 whose rate the stored rows" in text
        assert "in none of them, so in at most" in " ".join(text.split())
    [features] = Audit.model_validate_json(out.read_text()).sample.features  # type: ignore[union-attr]
    assert len(features.rate) == 24
    for hook, code in (("resid_post.7", "E009 --sae"), ("resid_post.0", "E015")):
        refused = CliRunner().invoke(cli, [*arguments, "--sae", f"{hook}={sae}"])
        assert code in f"{refused.output}{refused.exception}"
    over = CliRunner().invoke(cli, [*arguments, "--sae", str(sae), "--json", str(sae / "cfg.json")])
    assert "the file of --sae" in f"{over.output}{over.exception}"
    whole = make_dataset(tmp_path / "whole")
    shown = CliRunner().invoke(cli, ["audit", str(whole), "--sae", f"resid_post.1={sae}"])
    assert "features: not counted, because no row was left out by a draw" in shown.output


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


def judged(
    half: float, *, agrees: bool = True, dropped: int = 0, n_drawn: int = 0, again: float = 0
) -> Any:
    """Return the verdict; ``again``: how far a follow-up says that what was lost moves a mean."""
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
    if not again:
        return judge(Evidence(account, sample=section), Limits())
    moved = Estimate(value=0, low=-again, high=again, confidence=0.95)
    followed = FollowUp(
        path="again", digest="0" * 64, fraction=0.5, seed=1, n_missing=dropped, share=0.06,
        n_requests=50, n_drawn=300, n_answered=300, n_shared=0,
        hooks=[
            FollowUpHook(
                hook="h", n_channels=4, n_rows=300, n_clusters=50, variable="norm", bias=moved,
                numerics=None, proven=0.0,
            )
        ],
    )  # fmt: skip
    return judge(Evidence(account, sample=section, follow_up=followed), Limits())


@pytest.mark.parametrize(
    ("of", "level", "kind"),
    [
        ({"half": 0.015}, "PASS", "by-design"),
        ({"half": 0.03}, "INCONCLUSIVE", "too-little-evidence"),
        ({"half": 0.015, "agrees": False}, "FAIL", "biased"),
        ({"half": 0.015, "dropped": 600, "n_drawn": 600}, "PASS", "by-design"),
        ({"half": 0.015, "dropped": 600}, "FAIL", "heavy"),  # lost, and by no draw
        ({"half": 0.03, "dropped": 600, "n_drawn": 600}, "FAIL", "heavy"),  # as without it
        ({"half": 0.015, "dropped": 600, "again": 0.004}, "PASS", "by-design"),  # 0.0199
        ({"half": 0.015, "dropped": 600, "again": 0.0042}, "INCONCLUSIVE", "too-little-evidence"),
        ({"half": 0.015, "dropped": 600, "again": 0.03}, "FAIL", "heavy"),
    ],
)
def test_the_draw_decides_where_it_can(of: dict[str, Any], level: str, kind: str) -> None:
    verdict = judged(**of)
    assert (verdict.level, verdict.kind) == (level, kind)
    assert any(
        number.name.startswith("farthest that a mean by 1/incl") for number in verdict.numbers
    )
    if "again" in of:
        assert "A replay of requests drawn with probability 0.5" in verdict.sentence
    elif kind == "too-little-evidence":  # (0.03 / 0.02)^2 times as many
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
@pytest.mark.parametrize("keep", ["", "decode: 1; 0.5"])
def test_the_lane_says_which_rows_a_drop_policy_kept(tmp_path: Path, keep: str) -> None:
    out = tmp_path / "acts"
    readouts = Readouts(n_projections=2, seed=3)
    with pipeline_for(out, "drop_newest", readouts=readouts, always=0.25, keep=keep) as pipeline:
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
    sae = dictionary_of(tmp_path / "sae", out)
    dataset, section = actds.open(out), actds.audit(out, sae=[sae]).result.sample
    assert section is not None and section.lane is not None
    assert (section.n_thinned > 0, section.minimum) == (bool(keep), 0.125 if keep else 0.25)
    assert section.readouts is not None and section.readouts.agrees
    share = {"prefill": 0.5 if keep else 1.0, "decode": 1.0}
    design = Design.of(dataset.runs["r-test"])
    assert design is not None
    kept, n = Counter[str](), Counter[str]()
    for shard in dataset.shards:
        tokens = shard.tokens(["request", "position", "phase", "inclusion"]).to_pydict()
        u = design.numbers(tokens["request"], tokens["position"])
        for number, phase, inclusion in zip(u, tokens["phase"], tokens["inclusion"], strict=True):
            n[phase] += number < 0.25 * share[phase]
            kept[phase] += number < 0.25 * share[phase] and inclusion == share[phase]
    found = {p.label: p for p in section.lane.points if p.kind == "token class"}
    assert {label: point.n for label, point in found.items()} == {k: v for k, v in n.items() if v}
    for label, point in found.items():
        assert point.kept.value == kept[label] / n[label]
    assert section.lane.n_rows == n.total() and section.lane.n_kept == kept.total()
    assert section.n_dropped == actds.audit(out).result.accounting.dropped > 0
    # A feature that no stored row has: what its highest rate leaves unseen is that improbable.
    features, accounts = section.features[0], actds.audit(out).result.accounting
    unseen = (1 - section.minimum) ** (features.high[-1] * accounts.computed)
    assert features.n_active[-1] == 0 and unseen <= 1.01 * 0.025 / features.n_features
    x, tokens = active_of(out, sae)
    position = tokens["position"].astype(int)
    drawn = np.where(position < PROMPT_LEN, share["prefill"], 1.0)
    in_lane = design.numbers(tokens["request"].astype(int), position) < 0.25 * drawn
    points = [p for p in section.lane.points if p.kind == "feature at resid_post.1"]
    assert len(points) == 10 and "feature at resid_post.1" in section.lane.p
    for point in points:
        of = in_lane & (x[:, int(point.label.split()[1])] > 0)
        k, total = int((of & (tokens["inclusion"] == drawn)).sum()), int(of.sum())
        want = stats.binomtest(k, total).proportion_ci(1 - 0.05 / 24, method="exact")
        assert (point.n, point.kept.value) == (total, k / total)
        np.testing.assert_allclose([point.kept.low, point.kept.high], [want.low, want.high])
    steps = dataset.steps()
    whole = np.array(steps["inclusion"].to_pylist()) == 1
    rows = np.array(steps["batch_tokens"].to_pylist())
    low, high = wilson(section.lane.n_kept, section.lane.n_rows, 0.999)
    # What the lane estimates, where all rows have the same probability to be in it.
    assert keep or low < rows[whole].sum() / rows.sum() < high
    assert (
        Audit.model_validate_json(
            Audit.model_validate(actds.audit(out, sae=[sae]).result.as_json()).model_dump_json()
        ).sample
        == section
    )
