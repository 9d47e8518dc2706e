"""Drift between datasets and selections: the same tokens paired, other tokens never."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

import actds
from actds.commit import commit_part
from actds.errors import ActdsError
from actds.format import tables
from actds.ledger import Chain
from actds.load.dataset import Dataset
from actds.sealing import seal
from actds.store import open_store
from actds_testing import synthetic
from actds_testing.audit_results import audit as audited
from actds_testing.schedules import Schedule, simulate
from actds_testing.synthetic import make_dataset
from actds_validators.audit import drift
from actds_validators.audit.api import audit
from actds_validators.audit.drift import Column, drifts
from actds_validators.audit.result import Drift, DriftMeasure, Limits
from actds_validators.regimes.api import regimes
from actds_validators.regimes.arms import Arm, read_arm
from actds_validators.regimes.contrast import Contrast, plan
from actds_validators.regimes.thinning import MANY, some_requests, thinned
from actds_validators.report.drift import drift_bars, drift_part

LIMITS = Limits()
N_REQUESTS = 90
ONE = ("resid_post.0",)
_STATES = synthetic.states


def made(path: Path, **options: Any) -> Dataset:
    """Return a dataset of 90 requests, float32 and without a prefix cache unless told."""
    told: dict[str, Any] = {"n_requests": N_REQUESTS, "cache": False, "dtype": "float32"}
    told |= {"hooks": ONE, "rows_per_shard": 512, **options}
    return actds.open(make_dataset(path, **told))


def with_values(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let ``change(values, tokens)`` alter the rows, (n, d_model) float32, that are written."""

    def changed(tokens: dict[str, Any], token_ids: Any, hook: Any) -> np.ndarray:
        values = _STATES(tokens, token_ids, hook).view(np.float32).copy()
        return change(values, tokens).astype(np.float32).view(np.uint32)

    monkeypatch.setattr(synthetic, "states", changed)


def noise(values: np.ndarray, tokens: dict[str, Any]) -> np.ndarray:
    """Return values of no row's prefix, with a strong effect of the request."""
    own = np.random.default_rng(0).normal(0, 1, (N_REQUESTS, values.shape[1]))
    rng = np.random.default_rng([int(values.view(np.uint32)[0, 0]), len(values)])
    return own[np.asarray(tokens["request"], int)] + rng.normal(0, 1, values.shape)


def retold(schedule: Schedule, position: int, step: int = 0) -> Schedule:
    """Return the schedule with another token at one position, by request where ``step`` is 1."""
    ids = [
        [token + (7 + step * r) * (at == position) for at, token in enumerate(tokens)]
        for r, tokens in enumerate(schedule.token_ids)
    ]
    rows = schedule.rows.to_pydict()
    rows["token_id"] = [ids[r][p] for r, p in zip(rows["request"], rows["position"], strict=True)]
    requests = schedule.requests.to_pydict()
    for row, (p, g) in enumerate(
        zip(requests["prompt_len"], requests["generated_len"], strict=True)
    ):
        if requests["token_digest"][row] is not None:
            fed = np.asarray(ids[requests["request"][row]][: p + max(g - 1, 0)], "<u4")
            requests["token_digest"][row] = hashlib.sha256(fed.tobytes()).hexdigest()
    return replace(
        schedule,
        rows=tables.build("tokens", rows),
        requests=tables.build("requests", requests),
        token_ids=ids,
    )


def few_words(seed: int = 0, n_requests: int = N_REQUESTS) -> Schedule:
    """Return a schedule of four words behind a first token of each request's own.

    Prompts and answers have the same words at the same positions, and no prefix comes twice.
    """
    told = simulate(n_requests, seed, cache=False)
    ids = [[10 + token % 4 for token in tokens] for tokens in told.token_ids]
    rows = told.rows.to_pydict()
    rows["token_id"] = [10 + token % 4 for token in rows["token_id"]]
    return retold(replace(told, rows=tables.build("tokens", rows), token_ids=ids), 0, step=1)


def prefix(schedule: Schedule, row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(schedule.token_ids[row["request"]][: row["position"] + 1])


def n_prefixes(dataset: Dataset, *, below: int = 1 << 20, schedule: Schedule | None = None) -> int:
    """Return how many prefixes the rows stand for, those of positions from 1 to ``below``."""
    told = schedule or simulate(N_REQUESTS, 0, cache=False)
    rows = dataset.tokens().to_pylist()
    return len({prefix(told, row) for row in rows if 0 < row["position"] < below})


def before_a_loss(schedule: Schedule) -> list[dict[str, Any]]:
    """Return the rows before the first position of their request whose row was lost."""
    spans = schedule.spans.sort_by([("start", "descending")]).to_pylist()
    lost = {s["request"]: s["start"] for s in spans if s["disposition"] in ("dropped", "aborted")}
    rows = schedule.rows.to_pylist()
    return [row for row in rows if row["position"] < lost.get(row["request"], 1 << 20)]


def unlike_prompts() -> Schedule:
    """Return a schedule in which no two requests begin with the same token."""
    return retold(simulate(N_REQUESTS, 0, cache=False), 0, step=1)


def without_digests(schedule: Schedule) -> Schedule:
    requests = schedule.requests.to_pydict()
    requests["token_digest"] = [None] * len(requests["request"])
    return schedule.with_(requests=tables.build("requests", requests))


def against(first: Dataset, second: Dataset, limits: Limits = LIMITS, **more: int) -> list[Drift]:
    return drifts(drift.drift_against(first, second, limits, **more), limits)


def by(dataset: Dataset, column: Column, limits: Limits = LIMITS, **more: int) -> list[Drift]:
    return drifts(drift.drift_by(dataset, column, limits, **more), limits)


def only(found: list[Drift], kind: str) -> Drift:
    (one,) = [drift for drift in found if drift.kind == kind]
    return one


def measure(one: Drift, name: str, hook: str = "resid_post.0") -> DriftMeasure:
    (found,) = [m for m in one.measures if (m.name, m.hook) == (name, hook)]
    return found


def test_equal_datasets_have_no_drift_and_no_other_population(tmp_path: Path) -> None:
    first, second = made(tmp_path / "a"), made(tmp_path / "b")
    (one,) = against(first, second)
    assert one.kind == "numeric drift" and one.paired and one.coverage == 1
    assert one.n_first == one.n_second == n_prefixes(first)
    assert measure(one, "equal to the bit").value == 1
    assert {m.value for m in one.measures if m.name != "equal to the bit"} == {0.0}
    assert {m.outcome for m in one.measures} == {"carries over", None}
    assert measure(one, "mean").adjusted_p == 1.0
    assert measure(one, "relative L2").floor == 0.0
    assert "are equal" in one.sentence and "100% of the rows" in one.sentence


def test_rounding_to_bfloat16_is_a_drift_of_its_size_in_no_channel(tmp_path: Path) -> None:
    first = made(tmp_path / "a")
    one = only(against(first, made(tmp_path / "b", dtype="bfloat16")), "numeric drift")
    relative = measure(one, "relative L2")
    assert 2**-10 < relative.value < 2**-8 and relative.outcome == "carries over"
    assert relative.low is not None and relative.low < relative.value
    assert "tokens that one arm computed twice" in relative.note
    assert measure(one, "relative L2, p99").value < 2**-8
    assert 0 < measure(one, "cosine distance").value < 2**-16
    mean = measure(one, "mean")
    assert mean.outcome == "carries over" and abs(mean.value) < 0.01


def test_a_shifted_channel_is_found_in_it_and_in_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = ("resid_post.0", "resid_post.1")
    first = made(tmp_path / "a", hooks=hooks)
    rng = np.random.default_rng(0)
    written: list[int] = []

    def change(values: np.ndarray, tokens: dict[str, Any]) -> np.ndarray:
        written.append(len(values))
        moved = values + rng.normal(0, 0.001, values.shape)
        moved[:, 3] += 0.5 * (len(written) % 2)  # the first of the two hooks
        return moved

    with_values(monkeypatch, change)
    one = only(against(first, made(tmp_path / "b", hooks=hooks)), "numeric drift")
    shifted = measure(one, "mean")
    sd = first.array("resid_post.0")[:][:, 3].std()
    assert shifted.outcome == "shifts" and shifted.note.startswith("channel 3;")
    assert shifted.value == pytest.approx(0.5 / sd, rel=0.1)
    assert shifted.value_unit == "standard deviations of the reference"
    assert measure(one, "mean", "resid_post.1").outcome == "carries over"
    assert "Moments shifts at resid_post.0: mean of channel 3 +" in one.sentence


def test_a_few_wrong_rows_are_told_by_the_largest_distances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made(tmp_path / "a")
    rng = np.random.default_rng(1)

    def change(values: np.ndarray, tokens: dict[str, Any]) -> np.ndarray:
        moved = values + rng.normal(0, 0.001, values.shape)
        moved[tokens["position"] == 4] *= -1
        return moved

    with_values(monkeypatch, change)
    one = only(against(first, made(tmp_path / "b")), "numeric drift")
    wrong = (n_prefixes(first, below=5) - n_prefixes(first, below=4)) / n_prefixes(first)
    assert wrong > 0.01
    assert measure(one, "relative L2").value == pytest.approx(2 * wrong, rel=0.05)
    assert measure(one, "relative L2, p99").value == pytest.approx(2, rel=0.02)


def test_rows_after_another_token_are_never_paired_by_token(tmp_path: Path) -> None:
    told = simulate(N_REQUESTS, 0, cache=False)
    first = made(tmp_path / "a", schedule=told)
    second = made(tmp_path / "b", schedule=retold(told, 5))
    found = against(first, second)
    one = only(found, "numeric drift")
    assert one.n_first == n_prefixes(first, below=5)
    assert measure(one, "relative L2, p99").value == 0.0
    other = only(found, "population shift")
    assert other.pairing == "position" and not other.paired
    assert other.n_first == n_prefixes(first) - n_prefixes(first, below=5)
    assert other.sentence.endswith("does not show a numerical difference.")


def test_too_few_equal_tokens_are_counted_and_not_measured(tmp_path: Path) -> None:
    """One request has the same tokens, and the others not one in common."""
    told = simulate(N_REQUESTS, 0, cache=False)
    first = made(tmp_path / "a", schedule=retold(told, 1, step=1))
    changed = retold(told, 1, step=3)
    found = against(first, made(tmp_path / "b", schedule=changed))
    one = only(found, "numeric drift")
    assert one.n_first > 0 and one.measures == []
    assert one.sentence.startswith("Only ") and "those of 8 requests are needed" in one.sentence
    result = audited("load", drift=found)
    part = drift_part(result, "numeric drift", 0)
    assert part is not None and "paired token by token." in part.lead and "floor" not in part.lead
    assert drift_bars(result, "numeric drift", 0) is None and not part.tables
    assert only(found, "population shift").n_first > N_REQUESTS


def test_a_prefix_with_a_lost_row_is_known_by_its_digest_alone(tmp_path: Path) -> None:
    gaps = retold(simulate(60, 0, cache=False, drops=True), 0, step=1)
    told, silent = (
        made(tmp_path / name, schedule=schedule)
        for name, schedule in (("told", gaps), ("silent", without_digests(gaps)))
    )
    n_rows = sum(row["position"] > 0 for row in told.tokens().to_pylist())
    again = actds.open(told.path)
    assert only(against(told, again), "numeric drift").n_first == n_rows
    before = len([row for row in before_a_loss(gaps) if row["position"] > 0])
    again = actds.open(silent.path)
    assert only(against(silent, again), "numeric drift").n_first == before
    assert before < n_rows


def test_a_prefix_from_the_cache_is_known_by_the_rows_it_refers_to(tmp_path: Path) -> None:
    told = without_digests(simulate(N_REQUESTS, 0, cache=True))
    assert "cache_ref" in told.spans["disposition"].to_pylist()
    first, second = made(tmp_path / "a", schedule=told), made(tmp_path / "b", schedule=told)
    one = only(against(first, second), "numeric drift")
    known = {prefix(told, row) for row in before_a_loss(told) if row["position"] > 0}
    assert one.n_first == len(known)


def test_phases_are_compared_as_populations_and_the_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_values(monkeypatch, noise)
    (one,) = by(made(tmp_path / "a", schedule=few_words()), "phase")
    assert (one.kind, one.paired, one.pairing) == ("population shift", False, "unpaired")
    assert (one.first, one.second) == ("phase prefill", "phase decode")
    assert one.n_first > 100 and one.n_second > 100 and one.coverage > 0.5
    assert "does not show a numerical difference" in one.sentence
    assert "different tokens" in one.sentence
    assert f"equal tokens and positions, which {one.coverage:.0%} of the second" in one.sentence
    names = ["mean", "variance", "kurtosis", "outlier rate of rows"]
    assert [m.name for m in one.measures if m.p is not None] == names
    assert all(m.floor is not None for m in one.measures)
    assert all(m.outcome == "undecided" for m in one.measures if m.p is not None)
    assert measure(one, "KL divergence of a channel").p is None


def test_a_shift_of_a_phase_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)

    def change(values: np.ndarray, tokens: dict[str, Any]) -> np.ndarray:
        values = rng.normal(0, 1, values.shape)
        decode = np.asarray(tokens["phase"]) == "decode"
        values[decode, 2] = values[decode, 2] * 3 + 1
        return values

    with_values(monkeypatch, change)
    (one,) = by(made(tmp_path / "a", schedule=few_words()), "phase")
    for name, value in (("mean", 1.0), ("variance", np.log(9))):
        found = measure(one, name)
        assert found.outcome == "shifts" and found.note.startswith("channel 2")
        assert found.value == pytest.approx(value, abs=0.5)
        assert found.floor is not None and abs(found.value) > found.floor
    assert "moments shifts at resid_post.0" in one.sentence


def test_rows_of_huge_norm_are_counted_and_kept_out_of_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)

    def change(values: np.ndarray, tokens: dict[str, Any]) -> np.ndarray:
        values = rng.normal(0, 1, values.shape)
        decode = np.asarray(tokens["phase"]) == "decode"
        values[decode & (rng.random(len(values)) < 0.3)] *= 1000
        return values

    with_values(monkeypatch, change)
    (one,) = by(made(tmp_path / "a", schedule=few_words()), "phase")
    rate = measure(one, "outlier rate of rows")
    assert rate.value == pytest.approx(0.3, abs=0.1) and rate.outcome == "shifts"
    apart = measure(one, "variance")
    assert abs(apart.value) < 1 and "rows above 10 median norms left out" in apart.note


def test_kernel_modes_are_told_by_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = few_words()
    steps = told.steps.to_pydict()
    modes = ["eager" if n % 3 else "cudagraph" for n in range(len(steps["step"]))]
    steps["kernel_mode"] = modes
    told = told.with_(steps=tables.build("steps", steps))
    mode_of = dict(zip(steps["step"], modes, strict=True))

    def change(values: np.ndarray, tokens: dict[str, Any]) -> np.ndarray:
        values[[mode_of[step] == "cudagraph" for step in tokens["step"]], 0] += 2
        return values

    with_values(monkeypatch, change)
    (one,) = by(made(tmp_path / "a", schedule=told), "kernel_mode")
    assert (one.first, one.second) == ("kernel mode eager", "kernel mode cudagraph")
    found = measure(one, "mean")
    assert found.outcome == "shifts" and found.note.startswith("channel 0")


def test_runs_of_one_dataset_are_paired_by_their_prompts(tmp_path: Path) -> None:
    make = {"hooks": ONE, "cache": False, "n_requests": 40}
    make_dataset(tmp_path / "a", run="r-a", sealed=False, **make)
    make_dataset(tmp_path / "a", run="r-b", **make)
    (one,) = by(actds.open(tmp_path / "a"), "run")
    assert (one.kind, one.first, one.second) == ("numeric drift", "run r-a", "run r-b")
    assert measure(one, "relative L2, p99").value == 0.0


@pytest.mark.parametrize("names", [("a.jsonl", "b.jsonl"), ("it's", 'a "b" \\ or True')])
def test_sources_are_told_by_the_request(tmp_path: Path, names: tuple[str, str]) -> None:
    told = few_words()
    requests = told.requests.to_pydict()
    requests["source"] = [names[n % 4 == 0] for n in requests["request"]]
    told = told.with_(requests=tables.build("requests", requests))
    dataset = made(tmp_path / "a", schedule=told)
    (one,) = by(dataset, "source")
    mine = {n for n in requests["request"] if n % 4 == 0}
    assert one.second == f"source {names[1]}"
    rows = dataset.tokens().to_pylist()
    assert one.n_second == sum(row["request"] in mine and row["position"] > 0 for row in rows)


def test_rows_that_are_not_finite_are_counted_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made(tmp_path / "a")

    def change(values: np.ndarray, tokens: dict[str, Any]) -> np.ndarray:
        values[np.asarray(tokens["position"]) == 2, 1] = np.nan
        return values

    with_values(monkeypatch, change)
    second = made(tmp_path / "b")
    broken = n_prefixes(first, below=3) - n_prefixes(first, below=2)
    one = only(against(first, second), "numeric drift")
    found = measure(one, "relative L2")
    assert found.value == 0 and f"{broken} rows with a value that is not finite" in found.note
    assert "are equal" in one.sentence


def test_a_reference_without_a_finite_row_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = made(tmp_path / "b")
    with_values(monkeypatch, lambda values, tokens: values * np.nan)
    (one,) = against(made(tmp_path / "a"), second)
    assert one.measures == [] and one.sentence.startswith("No pair of rows of ")


def test_the_floor_of_equal_tokens_is_that_of_tokens_computed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(2)

    def change(values: np.ndarray, tokens: dict[str, Any]) -> np.ndarray:
        return values * (1 + rng.normal(0, 0.01, (len(values), 1)))

    with_values(monkeypatch, change)
    schedule = simulate(30, 0, cache=False)
    first, second = (made(tmp_path / name, schedule=schedule) for name in "ab")
    one = only(against(first, second), "numeric drift")
    away = []
    for dataset in (first, second):
        rows = dataset.array("resid_post.0")[:].astype(np.float64)
        known: dict[tuple[int, ...], list[int]] = {}
        for n, row in sorted(
            enumerate(dataset.tokens().to_pylist()), key=lambda r: r[1]["request"]
        ):
            if row["position"] > 0:
                known.setdefault(prefix(schedule, row), []).append(n)
        twice = [which for which in known.values() if len(which) > 1]
        counted = np.array([which[0] for which in twice])
        # Of a third computation the row that is stored first stands for all of them.
        other = np.array([min(which[1:]) for which in twice])
        gap = np.linalg.norm(rows[other] - rows[counted], axis=1)
        away.append(gap / np.linalg.norm(rows[counted], axis=1))
    expected = np.concatenate(away)
    assert len(expected) > 40
    found = measure(one, "relative L2")
    assert f"{len(expected)} tokens that one arm computed twice" in found.note
    assert found.floor == pytest.approx(expected.mean(), rel=1e-4)
    assert measure(one, "relative L2, p99").floor == pytest.approx(
        np.percentile(expected, 99), rel=1e-4
    )
    assert found.value == pytest.approx(found.floor, rel=0.25)


def test_canaries_are_the_floor_where_nothing_was_computed_twice(tmp_path: Path) -> None:
    told = retold(simulate(40, 3, cache=False), 0, step=1)
    store = open_store(make_dataset(tmp_path / "a", sealed=False, hooks=ONE, schedule=told))
    second = actds.open(make_dataset(tmp_path / "b", hooks=ONE, schedule=told))
    (unknown,) = against(second, actds.open(second.path))
    assert measure(unknown, "relative L2").floor is None
    assert "no floor is known" in unknown.sentence
    spans = [s for s in told.spans.to_pylist() if s["disposition"] == "captured"][:30]
    lines = {
        "request": [span["request"] for span in spans],
        "position": [span["start"] for span in spans],
        "hook": ["resid_post.0"] * len(spans),
        "step": [span["step"] for span in spans],
        "token_id": [1] * len(spans),
        "replayed_token_id": [1] * len(spans),
        "relative_l2": [0.003] * len(spans),
        "cosine": [0.999] * len(spans),
        "verdict": ["same"] * (len(spans) - 5) + ["diverged"] * 5,
    }
    chain = Chain.begin(store, second.catalog.genesis.dataset, "r-synthetic", "tool", "test")
    commit_part(store, chain, "canary", "r-synthetic", 0, tables.build("canary", lines))
    chain.close("finished", {})
    seal(store)
    (one,) = against(actds.open(tmp_path / "a"), second)
    found = measure(one, "relative L2")
    assert found.floor == pytest.approx(0.003) and "25 canaries" in found.note
    assert measure(one, "cosine distance").floor == pytest.approx(0.001)
    told_by = regimes(str(tmp_path / "a"), second.path).contrasts[0].values
    (value,) = [v for v in told_by if v.measure == "relative L2" and v.axis == "all"]
    assert value.floor == found.floor


def test_no_more_rows_are_read_than_allowed(tmp_path: Path) -> None:
    first, second = (
        made(tmp_path / "a", schedule=few_words()),
        made(tmp_path / "b", schedule=few_words()),
    )
    for rows in (100, 400):
        (one,) = against(first, second, rows=rows)
        assert rows / 2 < one.n_first == one.n_second <= rows and one.coverage == 1
        (shift,) = by(first, "phase", rows=rows)
        assert rows / 2 < shift.n_first <= rows and shift.n_second <= rows


def test_the_seed_decides_which_requests_are_drawn(tmp_path: Path) -> None:
    dataset = made(tmp_path / "a", schedule=few_words())
    told = [by(dataset, "phase", Limits(seed=seed), rows=200)[0] for seed in (1, 1, 2)]
    assert told[0] == told[1] != told[2]


def contrast_of(tmp_path: Path, kind: Any) -> Contrast:
    """Return datasets of few words, all rows together, paired one way."""
    schedule = few_words()
    changed = retold(schedule, 1) if kind == "position" else schedule
    arms = [
        Arm(name, made(tmp_path / name, schedule=own))
        for name, own in (("a", schedule), ("b", changed))
    ]
    rows = read_arm(arms[0], ONE[0]), read_arm(arms[1], ONE[0])
    return plan(*rows, pairing=kind, divided=False)


@pytest.mark.parametrize("kind", ["token", "position", "unpaired"])
def test_a_thinned_contrast_keeps_pairs_whole_requests_and_groups(
    tmp_path: Path, kind: Any
) -> None:
    whole = contrast_of(tmp_path, kind)
    odd = whole.first.row[whole.pairs[0]] % 2 == 1  # so that it is known of which pair each is
    whole = replace(whole, parted=odd.astype(np.int8))
    told = thinned(whole, 1000)
    assert thinned(whole, len(whole.first)) is whole
    sides = ((whole.first, told.first), (whole.second, told.second))
    for before, after in sides:
        assert 500 < len(after) <= 1000 and (np.diff(after.row) > 0).all()
        assert set(after.row.tolist()) <= set(before.row.tolist())
        for cluster in np.unique(after.cluster).tolist():  # whole: at least 40 fit
            mine = before.row[(before.cluster == cluster) & (before.layers[0].stratum >= 0)]
            assert set(mine.tolist()) == set(after.row[after.cluster == cluster].tolist())
        assert len(np.unique(after.group)) == told.n_groups
    assert (np.unique(told.first.cluster) == np.unique(told.second.cluster)).mean() > 0.5
    if kind != "unpaired":
        one, other = whole.pairs
        rows = whole.first.row[one].tolist(), whole.second.row[other].tolist()
        known = dict(zip(*rows, strict=True))
        for one, other in zip(*told.pairs, strict=True):
            assert known[int(told.first.row[one])] == told.second.row[other]
            assert told.first.group[one] == told.second.group[other]
        assert told.parted is not None
        assert told.parted.tolist() == (told.first.row[told.pairs[0]] % 2).tolist()


@pytest.mark.parametrize("names", ["ab", "aa"])
def test_some_requests_are_whole_and_the_same_ones_on_both_sides(
    tmp_path: Path, names: str
) -> None:
    sets = {name: made(tmp_path / name, schedule=few_words()) for name in sorted(set(names))}
    arms = [
        Arm(name, sets[name], phase=phase)
        for name, phase in zip(names, ("prefill", "decode"), strict=True)
    ]
    rows = read_arm(arms[0], ONE[0]), read_arm(arms[1], ONE[0])
    assert some_requests(*rows, max(map(len, rows))) == rows
    same = names == "aa"
    fewer = some_requests(*rows, len(rows[1]) * 2 // 3, same_dataset=same)
    kept = [set(own.request.tolist()) for own in fewer]
    assert MANY <= len(kept[0]) < len(kept[1]) < rows[1].n_requests
    assert kept[0] & set(rows[1].request.tolist()) <= kept[1]
    for before, after in zip(rows, fewer, strict=True):
        mine = np.isin(before.request, after.request)
        assert before.row[mine].tolist() == after.row.tolist()
        assert before.prefix[mine].tolist() == after.prefix.tolist()
    other = some_requests(*rows, len(rows[1]) * 2 // 3, 1, same_dataset=same)
    assert set(other[1].request.tolist()) != kept[1]
    few = some_requests(*rows, 1)
    assert [own.n_requests for own in few] == [MANY, MANY]


@pytest.mark.parametrize("kind", ["token", "unpaired"])
def test_long_requests_give_some_of_their_rows_so_that_there_are_enough(
    tmp_path: Path, kind: Any
) -> None:
    told = thinned(contrast_of(tmp_path, kind), 200)
    for side in (told.first, told.second):
        _, counts = np.unique(side.cluster, return_counts=True)
        assert len(counts) >= 40 and counts.max() == 5 and len(side) <= 200


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    first = made(tmp_path / "a", n_requests=12)
    other = made(tmp_path / "b", n_requests=12, hooks=("resid_post.1",))
    with pytest.raises(ActdsError, match=r"E014.*resid_post.1 of 16.*resid_post.0 of 16"):
        against(first, other)
    with pytest.raises(ActdsError, match=r"E014.*kernel mode: only eager"):
        by(first, "kernel_mode")
    with pytest.raises(ActdsError, match=r"E014.*column 'position'"):
        by(first, "position")  # type: ignore[arg-type]


def test_a_dataset_with_few_requests_is_not_measured(tmp_path: Path) -> None:
    first, second = made(tmp_path / "a", n_requests=6), made(tmp_path / "b", n_requests=6)
    (one,) = against(first, second)
    assert one.measures == [] and "those of 8 requests are needed" in one.sentence
    (shift,) = by(first, "phase")
    assert shift.measures == []
    assert shift.sentence.startswith("Too few rows of phase prefill and of phase decode")


def test_the_audit_of_two_arms_equals_regimes_of_the_same_two(tmp_path: Path) -> None:
    """Pairs by token of two datasets, and the phases of one, which have no pairs."""
    hooks = ("resid_post.0", "resid_post.1")
    schedule = few_words()
    a, b = (tmp_path / name for name in "ab")
    made(a, schedule=schedule, hooks=hooks)
    made(b, schedule=schedule, hooks=hooks, dtype="bfloat16")
    numeric, phases = audit(a, against=b, by=["phase"]).result.drift
    told = {
        "token": regimes(str(a), str(b)),
        "unpaired": regimes(f"H={a}:phase=prefill", f"G={a}:phase=decode"),
    }
    n = 0
    for one in (numeric, phases):
        values = {
            (value.hook, value.measure): value
            for contrast in told[one.pairing].contrasts
            for value in contrast.values
            if value.axis == "all"
        }
        lines = {
            (line.hook, f"{line.measure}, p99"): line.p99
            for contrast in told[one.pairing].contrasts
            for line in contrast.quantiles
            if line.axis == "all"
        }
        assert {contrast.pairing for contrast in told[one.pairing].contrasts} == {one.pairing}
        for m in one.measures:
            n += 1
            if (m.hook, m.name) in lines:
                assert m.value == lines[m.hook, m.name]
                continue
            value = values.pop((m.hook, m.name))
            shared = ("value", "low", "high", "floor", "limit", "p", "detectable")
            for field in shared:
                assert getattr(m, field) == getattr(value, field), (m.name, field)
            assert m.n == min(value.n_requests) and m.value_unit == value.unit
        assert all(value.value is None for value in values.values())
    assert n == 2 * (5 + 4) + 2 * 5


def test_all_comparisons_are_one_family_of_tests(tmp_path: Path) -> None:
    told = few_words()
    made(tmp_path / "a", schedule=told)
    made(tmp_path / "b", schedule=told, dtype="bfloat16")
    result = audit(tmp_path / "a", against=tmp_path / "b", by=["phase"]).result
    tested = [m for one in result.drift for m in one.measures if m.p is not None]
    assert {m.name for m in tested} >= {"relative L2", "mean"}
    expected = scipy.stats.false_discovery_control([m.p for m in tested])
    assert [m.adjusted_p for m in tested] == pytest.approx(expected.tolist())


def test_phases_that_are_alike_are_seldom_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 seeded datasets without a difference: at most 3 shift anywhere (binomial p 0.02)."""
    with_values(monkeypatch, noise)
    shifted = 0
    for seed in range(20):
        schedule = few_words(seed, 40)
        (one,) = by(made(tmp_path / f"{seed}", schedule=schedule), "phase")
        assert len(one.measures) == 5
        shifted += any(m.outcome == "shifts" for m in one.measures)
    assert shifted <= 3
