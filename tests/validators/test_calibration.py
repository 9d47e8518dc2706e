"""The whole audit on runs of known truth: the short version of ``make calibrate``.

Bounds are binomial for these seeds; a tenth of the runs and a twentieth of the steps show a defect
that makes an audit reject what is harmless, or miss what is plain, and not its exact rates.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from statsmodels.stats.proportion import proportion_confint
from test_statistics_calibration import MOST, share
from test_statistics_calibration import harmless as harmless_bursts

from actds_testing.calibration import audit as calibrate_audit
from actds_testing.calibration.audit import (
    SCENARIO_NAMES,
    Task,
    page,
    read_records,
    run_one,
    shares,
    wilson,
)
from actds_validators.statistics.series import circular_shift, count_events, one_per_event

pytestmark = pytest.mark.full


SMALL: dict[str, Any] = {"mean_batch_tokens": 12.0, "max_batch_tokens": 32, "max_num_seqs": 24}


def runs(scenario: str, n: int, steps: int = 1500, **changes: Any) -> list[dict[str, Any]]:
    tasks = [Task(scenario, seed, steps, "test") for seed in range(n)]
    return [run_one(task, **SMALL, **changes) for task in tasks]


@pytest.fixture(scope="module")
def harmless() -> dict[str, list[dict[str, Any]]]:
    names = ("mcar_steps", "mcar_bursts", "few_events")
    return {name: runs(name, 7, rate=0.02) for name in names}


def test_harmless_losses_are_rarely_rejected_and_by_tests_over_tokens_nearly_always(
    harmless: dict[str, list[dict[str, Any]]],
) -> None:
    records = [record for found in harmless.values() for record in found]
    found = shares(records)
    # 21 runs of which 9 % reject: 6 or more come with a probability of 1 in 100.
    assert found.get("rejects", 0) <= 5
    assert found["naive"] >= 19
    assert all(record["tests"] for record in records)


def test_few_bursts_are_never_called_uncorrelated(
    harmless: dict[str, list[dict[str, Any]]],
) -> None:
    for name in ("mcar_bursts", "few_events"):
        assert all(record["events"] < 30 for record in harmless[name])
        assert "uncorrelated" not in shares(harmless[name])


@pytest.mark.parametrize("depends_on", ["rarity", "projection"])
def test_losses_by_what_a_row_holds_are_flagged(depends_on: str) -> None:
    found = runs("mnar_rarity", 2, rate=0.03, depends_on=depends_on)
    assert {record["kind"] for record in found} <= {"values-dependent", "worst-stratum"}
    assert {record["level"] for record in found} <= {"WARN", "FAIL"}


def test_losses_by_load_are_flagged() -> None:
    found = runs("mar_load", 2, 8000, rate=0.03, strength=2.0)
    # The mix of phases changes with the load, and so do the values: the load is named all the same.
    assert {record["kind"] for record in found} == {"load-dependent"}
    assert {record["level"] for record in found} == {"WARN"}
    loads = [min(t[4] for t in record["tests"] if t[2] == "system") for record in found]
    assert max(loads) <= 0.005


def test_full_queues_are_flagged_by_the_load() -> None:
    found = runs("queue", 3, 12_000, rate=0.01, quiet_s=1.0, busy_s=0.3)
    smallest = [
        min(test[4] for test in one["tests"] if test[1].startswith("load_")) for one in found
    ]
    # 2 to 8 events a run: the third has an adjusted p of 0.07.
    assert sum(p <= 0.05 for p in smallest) >= 2
    assert max(smallest) <= 0.1


def test_every_event_weighs_the_same_however_long_it_was() -> None:
    lost = [0, 3, 1, 0, 0, 0, 2, 0, 0, 5, 5]
    run = [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    found = one_per_event(lost, run, gap=2)
    assert found.tolist() == [0, 0.75, 0.25, 0, 0, 0, 1, 0, 0, 0.5, 0.5]
    assert found.sum() == count_events(lost, run, gap=2) == 3


def test_heavy_loss_fails_and_negligible_loss_passes() -> None:
    assert [(r["level"], r["kind"]) for r in runs("heavy", 1)] == [("FAIL", "heavy")]
    assert [(r["level"], r["kind"]) for r in runs("negligible", 1)] == [("PASS", "negligible")]


@pytest.mark.parametrize("n_runs", [1, 4])
def test_events_that_weigh_the_same_are_rejected_at_the_level_of_the_test(n_runs: int) -> None:
    p = []
    for seed, s in enumerate(harmless_bursts(n_runs)):
        lost = s.n * one_per_event(s.lost / s.n, s.run)
        p.append(circular_shift(s.run, s.n, lost, s.sx, n_draws=500, seed=seed).p[0])
    assert 0.015 <= share(p) <= MOST
    assert 0.4 < share(p, 0.5) < 0.6


@pytest.mark.parametrize(("k", "n"), [(0, 10), (3, 40), (200, 200)])
def test_interval_of_a_share_is_wilson_s(k: int, n: int) -> None:
    assert wilson(k, n) == pytest.approx(proportion_confint(k, n, method="wilson"), abs=1e-6)


def record(scenario: str, seed: int, **changes: Any) -> dict[str, Any]:
    made = {"scenario": scenario, "seed": seed, "steps": 9, "code": "c", "level": "WARN",
            "kind": "load-dependent", "loss": 0.01, "events": 3, "naive": True,
            "tests": [["shift", "load_8", "system", 0.001, 0.01, True, 0.0]],
            "simulate_s": 1.0, "audit_s": 2.0, "names_load": True,
            "holds": [False, True]}  # fmt: skip
    return made | changes


def test_page_says_which_goals_are_kept() -> None:
    good = record("few_events", 1, level="INCONCLUSIVE", kind="too-little-evidence", tests=[])
    wrong = record("few_events", 2, level="PASS", kind="uncorrelated")
    lines = page([good, wrong, record("queue", 3)]).splitlines()
    goals = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "| " in line]
    kept = {(cells[0], cells[1]): cells[2:] for cells in goals if len(cells) == 6}
    assert kept["few_events", "at most 9 % reject anything"][:2] == ["2", "50.0%"]
    assert kept["few_events", "at most 9 % reject anything"][-1] == "**no**"
    assert kept["few_events", "at most 5 % PASS (uncorrelated)"][-1] == "**no**"
    assert kept["queue", "at least 95 % WARN or FAIL"][-1] == "yes"
    assert ("mar_load", "at least 95 % WARN or FAIL") not in kept


def test_cut_off_calibration_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate_audit, "code_digest", lambda: "c")
    first = calibrate_audit.FIRST_SEED + 10_000 * SCENARIO_NAMES.index("negligible")
    records = tmp_path / "records.jsonl"
    # One run is known, one was cut off while its line was written, one is of other code.
    known = record("negligible", first, steps=300)
    old = record("negligible", first + 1, steps=300, code="before")
    records.write_text(f'{json.dumps(old)}\n{json.dumps(known)}\n{{"scenario": "negl')
    command = ["calibrate", "--runs", "2", "--steps", "300", "--jobs", "1"]
    command += ["--scenario", "negligible", "--records", str(records)]
    monkeypatch.setattr(sys, "argv", command)
    calibrate_audit.main()
    assert "1 runs are already in" in capsys.readouterr().out
    found = read_records(records)
    assert [(r["seed"], r["code"]) for r in found[1:]] == [(first, "c"), (first + 1, "c")]
    assert found[1] == known and found[2]["level"] == "PASS"
    calibrate_audit.main()
    assert read_records(records) == found
