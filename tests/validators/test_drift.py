"""Drift between datasets and selections: the same tokens paired, other tokens never."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
from actds_validators.audit.drift import rows as select
from actds_validators.audit.drift.compare import (
    Selection,
    drift,
    drift_against,
    drift_by,
    numeric_sentence,
)
from actds_validators.audit.drift.measures import (
    measure_pairs,
    measure_populations,
    numeric_measures,
    population_measures,
)
from actds_validators.audit.result import Drift, DriftMeasure, Limits
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


def prefix(schedule: Schedule, row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(schedule.token_ids[row["request"]][: row["position"] + 1])


def n_prefixes(dataset: Dataset, *, below: int = 1 << 20, schedule: Schedule | None = None) -> int:
    """Return how many prefixes the rows stand for, those of positions under ``below``."""
    told = simulate(N_REQUESTS, 0, cache=False)
    rows = dataset.tokens().to_pylist()
    return len({prefix(told, row) for row in rows if row["position"] < below})


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


def only(found: list[Drift], kind: str) -> Drift:
    (one,) = [drift for drift in found if drift.kind == kind]
    return one


def measure(one: Drift, name: str, hook: str = "resid_post.0") -> DriftMeasure:
    (found,) = [m for m in one.measures if (m.name, m.hook) == (name, hook)]
    return found


def test_equal_datasets_have_no_drift_and_no_other_population(tmp_path: Path) -> None:
    first, second = made(tmp_path / "a"), made(tmp_path / "b")
    (one,) = drift_against(first, second, LIMITS)
    assert one.kind == "numeric drift" and one.paired
    assert one.n_first == one.n_second == n_prefixes(first)
    assert {m.value for m in one.measures} == {0.0}
    assert measure(one, "channels shifted").adjusted_p == 1.0
    assert measure(one, "relative L2, mean").floor == 0.0
    assert "are equal" in one.sentence and "100% of the rows" in one.sentence


def test_rounding_to_bfloat16_is_a_drift_of_its_size_in_no_channel(tmp_path: Path) -> None:
    first = made(tmp_path / "a")
    one = only(
        drift_against(first, made(tmp_path / "b", dtype="bfloat16"), LIMITS), "numeric drift"
    )
    relative = measure(one, "relative L2, mean")
    assert 2**-10 < relative.value < 2**-8
    assert "rounding to bfloat16 alone moves a row by about 2^-9" in relative.note
    assert measure(one, "relative L2, p99").value < 2**-8
    assert 0 < measure(one, "cosine distance, mean").value < 2**-16
    assert measure(one, "outlier rate").value == 0
    assert measure(one, "channels shifted").value == 0
    largest = measure(one, "largest channel shift")
    assert largest.floor is not None and largest.value < 2 * largest.floor


def test_a_shifted_channel_is_found_in_it_and_in_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = ("resid_post.0", "resid_post.1")
    first = made(tmp_path / "a", hooks=hooks)
    rng = np.random.default_rng(0)
    written: list[int] = []

    def change(values: np.ndarray, tokens: dict[str, Any]) -> np.ndarray:
        written.append(len(values))
        moved = values + rng.normal(0, 0.01, values.shape)
        moved[:, 3] += 0.01 * (len(written) % 2)  # the first of the two hooks
        return moved

    with_values(monkeypatch, change)
    one = only(drift_against(first, made(tmp_path / "b", hooks=hooks), LIMITS), "numeric drift")
    shifted = measure(one, "channels shifted")
    assert shifted.value == 1 / 16 and "channels 3;" in shifted.note
    assert measure(one, "channels shifted", "resid_post.1").value == 0
    largest = measure(one, "largest channel shift")
    assert largest.note.startswith("channel 3,") and largest.floor is not None
    assert largest.value > 3 * largest.floor
    assert "shifted on average: 1 channel of resid_post.0." in one.sentence


def test_a_few_wrong_rows_are_outliers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = made(tmp_path / "a")
    rng = np.random.default_rng(1)

    def change(values: np.ndarray, tokens: dict[str, Any]) -> np.ndarray:
        moved = values + rng.normal(0, 0.001, values.shape)
        moved[tokens["position"] == 4] *= -1
        return moved

    with_values(monkeypatch, change)
    one = only(drift_against(first, made(tmp_path / "b"), LIMITS), "numeric drift")
    wrong = n_prefixes(first, below=5) - n_prefixes(first, below=4)
    assert measure(one, "outlier rate").value == pytest.approx(wrong / n_prefixes(first))
    assert measure(one, "relative L2, p99").value == pytest.approx(2, rel=0.01)


def test_rows_after_another_token_are_never_paired(tmp_path: Path) -> None:
    told = simulate(N_REQUESTS, 0, cache=False)
    first = made(tmp_path / "a", schedule=told)
    second = made(tmp_path / "b", schedule=retold(told, 5))
    found = drift_against(first, second, LIMITS)
    one = only(found, "numeric drift")
    assert one.n_first == n_prefixes(first, below=5)
    assert measure(one, "relative L2, p99").value == 0.0
    assert only(found, "population shift").sentence.endswith(
        "does not show a numerical difference."
    )


def test_other_prompts_under_the_same_names_share_their_first_token_only(tmp_path: Path) -> None:
    found = drift_against(made(tmp_path / "a"), made(tmp_path / "b", seed=1), LIMITS)
    one = only(found, "numeric drift")
    assert one.n_first == 1  # of the same token in all requests, counted once
    assert one.measures == []
    assert one.sentence.startswith("Only 1 token with the same prefix was computed in ")
    assert "too few, 8 are needed" in one.sentence
    result = audited("load", drift=found)
    part = drift_part(result, "numeric drift", 0)
    assert part is not None
    assert "1 against 1 row, paired token by token." in part.lead and "floor" not in part.lead
    assert drift_bars(result, "numeric drift", 0) is None and not part.tables
    assert only(found, "population shift").n_first > N_REQUESTS


def test_a_prefix_with_a_lost_row_is_known_by_its_digest_alone(tmp_path: Path) -> None:
    gaps = retold(simulate(60, 0, cache=False, drops=True), 0, step=1)
    told, silent = (
        made(tmp_path / name, schedule=schedule)
        for name, schedule in (("told", gaps), ("silent", without_digests(gaps)))
    )
    assert only(drift_against(told, told, LIMITS), "numeric drift").n_first == told.n_rows
    before = len(before_a_loss(gaps))
    assert only(drift_against(silent, silent, LIMITS), "numeric drift").n_first == before
    assert before < told.n_rows


def test_a_prefix_from_the_cache_is_known_by_the_rows_it_refers_to(tmp_path: Path) -> None:
    told = without_digests(simulate(N_REQUESTS, 0, cache=True))
    assert "cache_ref" in told.spans["disposition"].to_pylist()
    first, second = made(tmp_path / "a", schedule=told), made(tmp_path / "b", schedule=told)
    (one,) = drift_against(first, second, LIMITS)
    assert one.n_first == len({prefix(told, row) for row in before_a_loss(told)})


def test_phases_are_compared_as_populations_and_the_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_values(monkeypatch, noise)
    (one,) = drift_by(made(tmp_path / "a"), "phase", LIMITS)
    assert (one.kind, one.paired) == ("population shift", False)
    assert (one.first, one.second) == ("phase prefill", "phase decode")
    assert one.n_first > 100 and one.n_second > 100
    assert "does not show a numerical difference" in one.sentence
    assert "different tokens" in one.sentence
    assert one.sentence.startswith(
        "No classifier separates the rows of phase prefill and of phase decode (resid_post.0; AUC"
    )
    names = ["log-variance ratio", "covariance distance", "classifier AUC", "kurtosis"]
    assert [m.name for m in one.measures] == [*names, "outlier rate"]
    assert all(m.floor is not None for m in one.measures)
    assert measure(one, "kurtosis").p is None


def test_a_shift_of_a_phase_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(values: np.ndarray, tokens: dict[str, Any]) -> np.ndarray:
        decode = np.asarray(tokens["phase"]) == "decode"
        values[decode] = values[decode] * 1.5 + 0.5
        return values

    with_values(monkeypatch, change)
    (one,) = drift_by(made(tmp_path / "a"), "phase", LIMITS)
    assert one.sentence.startswith("A classifier separates the rows of phase prefill and of ")
    for name in ("log-variance ratio", "covariance distance", "classifier AUC"):
        found = measure(one, name)
        assert found.adjusted_p is not None and found.adjusted_p <= 0.05
        assert found.floor is not None and found.value > found.floor
    assert measure(one, "log-variance ratio").value == pytest.approx(2 * np.log(1.5), rel=0.1)


def test_rows_of_huge_norm_are_counted_and_kept_out_of_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(values: np.ndarray, tokens: dict[str, Any]) -> np.ndarray:
        values[np.asarray(tokens["position"]) == 0] *= 1000
        return values

    with_values(monkeypatch, change)
    (one,) = drift_by(made(tmp_path / "a", schedule=unlike_prompts()), "phase", LIMITS)
    rate = measure(one, "outlier rate")
    assert rate.value > 0.03 and rate.adjusted_p is not None and rate.adjusted_p < 0.05
    assert "second 0.000%" in rate.note
    apart = measure(one, "log-variance ratio")
    assert apart.value < 0.5 and "outlier rows left out" in apart.note


def test_kernel_modes_are_told_by_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = simulate(N_REQUESTS, 0, cache=False)
    steps = told.steps.to_pydict()
    modes = ["eager" if n % 3 else "cudagraph" for n in range(len(steps["step"]))]
    steps["kernel_mode"] = modes
    told = told.with_(steps=tables.build("steps", steps))
    mode_of = dict(zip(steps["step"], modes, strict=True))

    def change(values: np.ndarray, tokens: dict[str, Any]) -> np.ndarray:
        values[[mode_of[step] == "cudagraph" for step in tokens["step"]], 0] += 2
        return values

    with_values(monkeypatch, change)
    (one,) = drift_by(made(tmp_path / "a", schedule=told), "kernel_mode", LIMITS)
    assert (one.first, one.second) == ("kernel mode eager", "kernel mode cudagraph")
    assert measure(one, "classifier AUC").value > 0.8


def test_runs_of_one_dataset_are_paired_by_their_prompts(tmp_path: Path) -> None:
    make = {"hooks": ONE, "cache": False, "n_requests": 40}
    make_dataset(tmp_path / "a", run="r-a", sealed=False, **make)
    make_dataset(tmp_path / "a", run="r-b", **make)
    (one,) = drift_by(actds.open(tmp_path / "a"), "run", LIMITS)
    assert (one.kind, one.first, one.second) == ("numeric drift", "run r-a", "run r-b")
    assert measure(one, "relative L2, p99").value == 0.0


def test_sources_are_told_by_the_request(tmp_path: Path) -> None:
    told = unlike_prompts()
    requests = told.requests.to_pydict()
    requests["source"] = ["a.jsonl" if n % 4 else "b.jsonl" for n in requests["request"]]
    told = told.with_(requests=tables.build("requests", requests))
    dataset = made(tmp_path / "a", schedule=told)
    (one,) = drift_by(dataset, "source", LIMITS)
    mine = np.array(requests["request"])[[name == "b.jsonl" for name in requests["source"]]]
    assert one.second == "source b.jsonl"
    assert one.n_second == int(np.isin(dataset.tokens()["request"].to_numpy(), mine).sum())


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
    one = only(drift_against(first, second, LIMITS), "numeric drift")
    found = measure(one, "relative L2, mean")
    assert found.n == n_prefixes(first) - broken
    assert f"{broken} pairs with a value that is not finite" in found.note
    (phases,) = drift_by(second, "phase", LIMITS)
    assert "rows with a value that is not finite left out" in measure(phases, "kurtosis").note


def test_canaries_are_the_floor_where_nothing_was_computed_twice(tmp_path: Path) -> None:
    told = retold(simulate(40, 3, cache=False), 0, step=1)
    store = open_store(make_dataset(tmp_path / "a", sealed=False, hooks=ONE, schedule=told))
    second = actds.open(make_dataset(tmp_path / "b", hooks=ONE, schedule=told))
    (unknown,) = drift_against(second, second, LIMITS)
    assert measure(unknown, "relative L2, mean").floor is None
    assert "no floor" in measure(unknown, "relative L2, mean").note
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
    (one,) = drift_against(actds.open(tmp_path / "a"), second, LIMITS)
    found = measure(one, "relative L2, mean")
    assert found.floor == pytest.approx(0.003) and "25 canaries" in found.note
    assert measure(one, "cosine distance, mean").floor == pytest.approx(0.001)


def test_no_more_rows_are_read_than_allowed(tmp_path: Path) -> None:
    first, second = made(tmp_path / "a"), made(tmp_path / "b")
    for rows in (30, 400):
        (one,) = drift_against(first, second, LIMITS, rows=rows)
        assert rows / 2 < one.n_first <= rows
        (shift,) = drift_by(first, "phase", LIMITS, rows=rows)
        assert max(shift.n_first, shift.n_second) <= rows


def test_requests_that_share_a_prompt_are_not_told_apart_for_it(tmp_path: Path) -> None:
    """Values of prefixes, three prompts in 90 requests: their rows are no 90 observations."""
    (one,) = drift_by(made(tmp_path / "a"), "phase", LIMITS)
    assert "repeats left out" in measure(one, "kurtosis").note
    assert all(m.adjusted_p is None or m.adjusted_p > 0.05 for m in one.measures)


def test_the_seed_decides_which_requests_are_drawn(tmp_path: Path) -> None:
    dataset = made(tmp_path / "a", n_requests=60)
    told = [
        drift_by(dataset, "phase", Limits(seed=seed), rows=100)[0].model_dump()
        for seed in (1, 1, 2)
    ]
    assert told[0] == told[1] != told[2]


def test_requests_are_drawn_whole_and_give_both_sides_the_same_number() -> None:
    counts = np.random.default_rng(0).integers(0, 12, (2, 500))
    quota = select.draw(counts, 600, seed=0)
    drawn = quota.sum(axis=0) > 0
    both = drawn & (counts > 0).all(axis=0)
    assert (quota[:, both] == counts[:, both].min(axis=0)).all()
    assert (quota[:, drawn & ~both] == counts[:, drawn & ~both]).all()
    assert 500 < quota.sum(axis=1).max() <= 600


def test_long_requests_give_some_of_their_rows_so_that_there_are_enough() -> None:
    quota = select.draw(np.full((2, 100), 10_000), 20_000, seed=0)
    assert (quota > 0).sum(axis=1).tolist() == [select.MIN_REQUESTS] * 2
    assert quota.max() == 20_000 // select.MIN_REQUESTS
    cluster = np.repeat(np.arange(100), 1000)
    kept = select.thinned(cluster, quota[0] // 10, seed=0)
    assert np.bincount(cluster[kept]).max() == 50
    assert (np.diff(kept) > 0).all()


@pytest.mark.parametrize("length", [50, 5000])
def test_a_side_of_few_requests_gets_rows_however_many_the_other_has(length: int) -> None:
    counts = np.full((2, 2000), length)
    counts[1, 3:] = 0
    for seed in range(5):
        quota = select.draw(counts, 1000, seed=seed)
        assert (quota.sum(axis=1) > 0).all() and (quota.sum(axis=1) <= 1000).all()
        assert (quota > 0).any(axis=0).sum() >= select.MIN_REQUESTS // 2
        assert (quota[0, :3] == quota[1, :3]).all()


@pytest.mark.parametrize("length", [20, 300, 5000])
@pytest.mark.parametrize("n_second", [8, 40, 100, 300, 1000])
def test_enough_requests_are_drawn_of_a_side_that_has_few_of_them(
    n_second: int, length: int
) -> None:
    for seed in range(3):
        rng = np.random.default_rng([seed, n_second, length])
        counts = rng.integers(1, 2 * length, (2, 10_000))
        counts[1, rng.permutation(10_000)[n_second:]] = 0
        quota = select.draw(counts, 20_000, seed)
        assert (quota[1] > 0).sum() >= min(n_second, select.MIN_REQUESTS // 2)
        assert (quota[0] > 0).sum() >= select.MIN_REQUESTS
        assert (quota.sum(axis=1) <= 20_000).all() and (quota <= counts).all()
        shared = (quota > 0).all(axis=0)
        assert (quota[0, shared] == quota[1, shared]).all()


@pytest.mark.parametrize(("n_first", "n_second"), [(7, 30), (30, 7), (8, 30), (30, 8)])
def test_a_side_of_fewer_than_eight_requests_has_no_test_and_no_floor(
    n_first: int, n_second: int
) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.normal(0, 1, (6 * n, 4)).astype(np.float32) for n in (n_first, n_second)]
    rows[0][0] *= 1000  # so that there are outliers to test
    request = (np.repeat(np.arange(n_first), 6), np.repeat(100 + np.arange(n_second), 6))
    hook = measure_populations("resid_post.0", (rows[0], rows[1]), request, LIMITS)
    measures = {m.name: m for m in population_measures([hook])}
    assert len(measures) == 5
    tested = [m for name, m in measures.items() if name != "kurtosis"]
    if min(n_first, n_second) == 7:
        assert all(m.floor is None and m.p is None for m in measures.values())
        assert all("no floor; too few requests to test" in m.note for m in tested)
    else:
        assert all(m.floor is not None for m in measures.values())
        assert all(m.p is not None and m.adjusted_p is not None for m in tested)


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    first = made(tmp_path / "a", n_requests=12)
    other = made(tmp_path / "b", n_requests=12, hooks=("resid_post.1",))
    with pytest.raises(ActdsError, match=r"E014.*resid_post.1 of 16.*resid_post.0 of 16"):
        drift_against(first, other, LIMITS)
    with pytest.raises(ActdsError, match=r"E014.*kernel mode: only eager"):
        drift_by(first, "kernel_mode", LIMITS)
    with pytest.raises(ActdsError, match=r"E014.*column 'position'"):
        drift_by(first, "position", LIMITS)  # type: ignore[arg-type]
    nothing = Selection(first, "run r-none", "run", "r-none")
    with pytest.raises(ActdsError, match=r"E014.*no rows: run r-none"):
        drift(Selection(first, "all"), nothing, LIMITS)


def test_a_dataset_with_few_requests_is_described_and_not_tested(tmp_path: Path) -> None:
    first, second = made(tmp_path / "a", n_requests=6), made(tmp_path / "b", n_requests=6)
    (one,) = drift_against(first, second, LIMITS)
    assert all(m.p is None for m in one.measures)
    assert "too few requests to test" in measure(one, "largest channel shift").note
    (shift,) = drift_by(first, "phase", LIMITS)
    assert all(m.p is None for m in shift.measures)
    assert shift.sentence.startswith("Too few requests to test the rows of phase prefill and of ")


@pytest.mark.parametrize(("n_pairs", "told"), [(0, False), (1, False), (7, False), (8, True)])
def test_fewer_than_eight_pairs_are_counted_and_not_measured(n_pairs: int, told: bool) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(0, 1, (2, n_pairs, 4)).astype(np.float32)
    hook = measure_pairs(
        "resid_post.0", "float32", (rows[0], rows[1]), np.arange(n_pairs), None, ""
    )
    measures = numeric_measures([hook], LIMITS)
    assert bool(measures) == told
    sides = [Selection(None, f"run {name}") for name in "ab"]  # type: ignore[arg-type]
    sentence = numeric_sentence(sides[0], sides[1], [hook], measures, 0.5)
    begin = {
        0: "No pair of rows of run a and run b could be compared.",
        1: "Only 1 token with the same prefix was computed in run a and in run b: too few",
        7: "Only 7 tokens with the same prefix were computed in run a and in run b: too few",
        8: "8 tokens with the same prefix were computed in run a and in run b: their rows differ",
    }
    assert sentence.startswith(begin[n_pairs])


def test_phases_that_are_alike_are_seldom_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 seeded datasets without a difference: at most 3 reject anything (binomial p 0.02)."""
    with_values(monkeypatch, noise)
    rejected = 0
    for seed in range(20):
        (one,) = drift_by(made(tmp_path / f"{seed}", seed=seed, n_requests=40), "phase", LIMITS)
        rejected += any(m.adjusted_p is not None and m.adjusted_p <= 0.05 for m in one.measures)
    assert rejected <= 3
