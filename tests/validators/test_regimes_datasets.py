"""Regimes of real datasets: pairs by token, parts of one dataset, floors, what is left out."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actds
from actds.dataset.commit import commit_part
from actds.dataset.ledger import Chain
from actds.explore.dataset import Dataset
from actds.format import tables
from actds.publish.sealing import seal
from actds.store import open_store
from actds_studies.regimes.api import regimes
from actds_studies.regimes.result import ContrastResult, Value
from actds_testing import synthetic
from actds_testing.schedules import Schedule, simulate
from actds_testing.synthetic import make_dataset

N_REQUESTS = 90
HOOK = "resid_post.0"
_STATES = synthetic.states


def made(path: Path, **options: Any) -> Dataset:
    """Return a dataset of 90 requests, float32 and without a prefix cache unless told."""
    known: dict[str, Any] = {"n_requests": N_REQUESTS, "cache": False, "dtype": "float32"}
    known |= {"hooks": (HOOK,), "rows_per_shard": 512, **options}
    return actds.open(make_dataset(path, **known))


def with_values(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let ``change(values, tokens)`` alter the rows, (n, d_model) float32, that are written."""

    def changed(tokens: dict[str, Any], token_ids: Any, hook: Any) -> np.ndarray:
        values = _STATES(tokens, token_ids, hook).view(np.float32).copy()
        return change(values, tokens).astype(np.float32).view(np.uint32)

    monkeypatch.setattr(synthetic, "states", changed)


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
    whole = simulate(n_requests, seed, cache=False)
    ids = [[10 + token % 4 for token in tokens] for tokens in whole.token_ids]
    rows = whole.rows.to_pydict()
    rows["token_id"] = [10 + token % 4 for token in rows["token_id"]]
    return retold(replace(whole, rows=tables.build("tokens", rows), token_ids=ids), 0, step=1)


def prefix(schedule: Schedule, row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(schedule.token_ids[row["request"]][: row["position"] + 1])


def before_a_loss(schedule: Schedule) -> list[dict[str, Any]]:
    """Return the rows behind the first token and before the first loss of their request."""
    spans = schedule.spans.sort_by([("start", "descending")]).to_pylist()
    lost = {s["request"]: s["start"] for s in spans if s["disposition"] in ("dropped", "aborted")}
    rows = schedule.rows.to_pylist()
    return [row for row in rows if 0 < row["position"] < lost.get(row["request"], 1 << 20)]


def without_digests(schedule: Schedule) -> Schedule:
    requests = schedule.requests.to_pydict()
    requests["token_digest"] = [None] * len(requests["request"])
    return schedule.with_(requests=tables.build("requests", requests))


def compared(*arms: object, **options: Any) -> ContrastResult:
    (contrast,) = regimes(*map(str, arms), **options).contrasts
    return contrast


def measure(contrast: ContrastResult, name: str) -> Value:
    (value,) = [v for v in contrast.values if (v.measure, v.axis) == (name, "all")]
    return value


def test_a_prefix_with_a_lost_row_is_known_by_its_digest_alone(tmp_path: Path) -> None:
    gaps = retold(simulate(60, 0, cache=False, drops=True), 0, step=1)
    known = [made(tmp_path / f"known-{n}", schedule=gaps, run=f"r-{n}") for n in (1, 2)]
    silent = [
        made(tmp_path / f"silent-{n}", schedule=without_digests(gaps), run=f"r-{n}") for n in (1, 2)
    ]
    n_rows = sum(row["position"] > 0 for row in known[0].tokens().to_pylist())
    assert compared(*(one.path for one in known)).n_pairs == n_rows
    before = len(before_a_loss(gaps))
    silent_pairs = compared(*(one.path for one in silent), pairing="token").n_pairs
    assert silent_pairs == before < n_rows


def test_a_prefix_from_the_cache_is_known_by_the_rows_it_refers_to(tmp_path: Path) -> None:
    cached = without_digests(simulate(N_REQUESTS, 0, cache=True))
    assert "cache_ref" in cached.spans["disposition"].to_pylist()
    for n in (1, 2):
        made(tmp_path / str(n), schedule=cached, run=f"r-{n}")
    known = {prefix(cached, row) for row in before_a_loss(cached)}
    assert compared(tmp_path / "1", tmp_path / "2").n_pairs == len(known)


def test_phases_that_differ_in_a_channel_shift_in_it_and_above_their_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)

    def change(values: np.ndarray, tokens: dict[str, Any]) -> np.ndarray:
        values = rng.normal(0, 1, values.shape)
        decode = np.asarray(tokens["phase"]) == "decode"
        values[decode, 2] = values[decode, 2] * 3 + 1
        return values

    with_values(monkeypatch, change)
    contrast = compared(made(tmp_path / "a", schedule=few_words()).path)
    assert (contrast.name, contrast.pairing) == ("G-H", "unpaired")
    for name, expected in (("mean", 1.0), ("variance", np.log(9))):
        value = measure(contrast, name)
        assert (value.outcome, value.element) == ("shifts", "2")
        assert value.value == pytest.approx(expected, abs=0.5)
        assert value.value is not None and value.floor is not None and value.value > value.floor


def test_rows_of_huge_norm_are_counted_and_left_out_of_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)

    def change(values: np.ndarray, tokens: dict[str, Any]) -> np.ndarray:
        values = rng.normal(0, 1, values.shape)
        decode = np.asarray(tokens["phase"]) == "decode"
        values[decode & (rng.random(len(values)) < 0.3)] *= 1000
        return values

    with_values(monkeypatch, change)
    contrast = compared(made(tmp_path / "a", schedule=few_words()).path)
    rate, variance = measure(contrast, "outlier rate of rows"), measure(contrast, "variance")
    assert rate.value == pytest.approx(0.3, abs=0.1) and rate.outcome == "shifts"
    assert variance.value is not None and abs(variance.value) < 1
    assert contrast.first.n_sinks == 0 < contrast.second.n_sinks


def test_kernel_modes_of_one_dataset_are_compared_by_an_expression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = few_words()
    steps = whole.steps.to_pydict()
    modes = ["eager" if n % 3 else "piecewise" for n in range(len(steps["step"]))]
    steps["kernel_mode"] = modes
    mode_of = dict(zip(steps["step"], modes, strict=True))

    def change(values: np.ndarray, tokens: dict[str, Any]) -> np.ndarray:
        values[[mode_of[step] == "piecewise" for step in tokens["step"]], 0] += 2
        return values

    with_values(monkeypatch, change)
    path = made(tmp_path / "a", schedule=whole.with_(steps=tables.build("steps", steps))).path
    contrast = compared(
        f"eager={path}:where=step.kernel_mode == 'eager'",
        f"graph={path}:where=step.kernel_mode == 'piecewise'",
    )
    value = measure(contrast, "mean")
    assert (contrast.name, value.outcome, value.element) == ("graph-eager", "shifts", "0")


def test_runs_of_one_dataset_are_compared_by_an_expression(tmp_path: Path) -> None:
    make: dict[str, Any] = {"hooks": (HOOK,), "cache": False, "n_requests": 40}
    make_dataset(tmp_path / "a", run="r-a", sealed=False, **make)
    path = make_dataset(tmp_path / "a", run="r-b", **make)
    contrast = compared(f"{path}:where=run == 'r-a'", f"{path}:where=run == 'r-b'")
    assert contrast.pairing == "token" and measure(contrast, "equal to the bit").value == 1


def test_sources_of_one_dataset_are_compared_by_an_expression(tmp_path: Path) -> None:
    whole = few_words()
    requests = whole.requests.to_pydict()
    requests["source"] = ["it's" if n % 4 else "b:c, d" for n in requests["request"]]
    dataset = made(
        tmp_path / "a", schedule=whole.with_(requests=tables.build("requests", requests))
    )
    contrast = compared(
        f"""{dataset.path}:where=request.source == "it's\"""",
        f"{dataset.path}:where=request.source == 'b:c, d'",
    )
    fourth = {n for n in requests["request"] if n % 4 == 0}
    rows = dataset.tokens().to_pylist()
    assert contrast.second.n_rows == sum(
        row["request"] in fourth and row["position"] > 0 for row in rows
    )


def test_rows_that_are_not_finite_are_counted_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = few_words()
    first = made(tmp_path / "a", schedule=schedule)

    def change(values: np.ndarray, tokens: dict[str, Any]) -> np.ndarray:
        values[np.asarray(tokens["position"]) == 2, 1] = np.nan
        return values

    with_values(monkeypatch, change)
    second = made(tmp_path / "b", schedule=schedule)
    broken = sum(row["position"] == 2 for row in second.tokens().to_pylist())
    contrast = compared(first.path, second.path)
    assert measure(contrast, "relative L2").value == 0
    assert (contrast.first.n_broken, contrast.second.n_broken) == (0, broken)
    with_values(monkeypatch, lambda values, tokens: values * np.nan)
    nothing = compared(made(tmp_path / "c", schedule=schedule).path, first.path)
    assert all(value.value is None for value in nothing.values)


def test_the_floor_of_equal_tokens_is_that_of_tokens_computed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(2)

    def change(values: np.ndarray, tokens: dict[str, Any]) -> np.ndarray:
        return values * (1 + rng.normal(0, 0.01, (len(values), 1)))

    with_values(monkeypatch, change)
    schedule = simulate(30, 0, cache=False)
    first, second = (made(tmp_path / name, schedule=schedule) for name in "ab")
    away = []
    for dataset in (first, second):
        rows = dataset.array(HOOK)[:].astype(np.float64)
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
    value = measure(compared(first.path, second.path), "relative L2")
    assert f"{len(expected)} tokens that one arm computed twice" in value.note
    assert value.floor == pytest.approx(expected.mean(), rel=1e-4)
    assert value.value == pytest.approx(value.floor, rel=0.25)


def test_canaries_are_the_floor_where_nothing_was_computed_twice(tmp_path: Path) -> None:
    schedule = retold(simulate(40, 3, cache=False), 0, step=1)
    paths = {
        name: make_dataset(
            tmp_path / name, sealed=name != "a", hooks=(HOOK,), schedule=schedule, run=f"r-{name}"
        )
        for name in "abc"
    }
    assert measure(compared(paths["b"], paths["c"]), "relative L2").floor is None
    store = open_store(paths["a"])
    spans = [s for s in schedule.spans.to_pylist() if s["disposition"] == "captured"][:30]
    lines = {
        "request": [span["request"] for span in spans],
        "position": [span["start"] for span in spans],
        "hook": [HOOK] * len(spans),
        "step": [span["step"] for span in spans],
        "token_id": [1] * len(spans),
        "replayed_token_id": [1] * len(spans),
        "relative_l2": [0.003] * len(spans),
        "cosine": [0.999] * len(spans),
        "verdict": ["same"] * (len(spans) - 5) + ["diverged"] * 5,
    }
    dataset = actds.open(paths["b"]).catalog.genesis.dataset
    chain = Chain.begin(store, dataset, "r-a", "tool", "test")
    commit_part(store, chain, "canary", "r-a", 0, tables.build("canary", lines))
    chain.close("finished", {})
    seal(store)
    contrast = compared(paths["a"], paths["b"])
    value = measure(contrast, "relative L2")
    assert value.floor == pytest.approx(0.003) and "25 canaries" in value.note
    assert measure(contrast, "cosine distance").floor == pytest.approx(0.001)
