"""What the audit's statistics say when there is little or nothing to say: no NaN, no warning."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actds_testing.audit_tokens import within
from actds_validators.statistics.association import change, naive_z
from actds_validators.statistics.intervals import (
    benjamini_hochberg,
    blocks,
    difference_sums,
    jackknife_many,
    smd,
    smd_of_stored,
)
from actds_validators.statistics.series import (
    circular_shift,
    correlation_steps,
    count_events,
    ewma,
    isotonic,
    lag_correlation,
    slices,
)
from actds_validators.statistics.strata import inverse_probability, nested_rates, shrunken_rates


def assert_finite(value: Any) -> None:
    if is_dataclass(value):
        for field in fields(value):
            assert_finite(getattr(value, field.name))
    elif isinstance(value, list):
        for item in value:
            assert_finite(item)
    elif value is not None and not isinstance(value, str):
        assert np.isfinite(value).all()


def everything(run: np.ndarray, n: np.ndarray, lost: np.ndarray, x: np.ndarray) -> dict[str, Any]:
    """Return every test and interval of a series of steps that all hold x."""
    computed = n > 0
    share = np.divide(lost, n, out=np.zeros_like(n), where=computed)
    cut = blocks(len(n), run, share)
    sums = difference_sums(cut, n, [x * n], [x * x * n], lost, [x * lost])
    return {
        "shift": circular_shift(run, n, lost, x * n, n_draws=50),
        "change": change(n, lost, run, n_draws=50),
        "smd": jackknife_many(sums, smd)[0],
        "stored": jackknife_many(sums, smd_of_stored)[0],
        "lag": lag_correlation(x, share, run, 5),
        "naive": naive_z(sums[:, 0].sum(axis=1)),
        "events": count_events(lost, run),
        "blocks": cut,
        "ewma": ewma(x, run, 8),
    }


def a_run(n_steps: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(seed)
    n = random.integers(1, 30, n_steps).astype(float)
    lost = np.where(random.random(n_steps) < 0.2, n, 0.0)
    return np.zeros(n_steps), n, lost, random.standard_normal(n_steps)


def test_nothing_lost_has_no_test() -> None:
    run, n, _, x = a_run(200)
    found = everything(run, n, np.zeros(200), x)
    assert_finite(list(found.values()))
    tests = ("shift", "change", "smd", "naive", "lag")
    assert [found[name] for name in tests] == [None] * len(tests)
    assert found["events"] == 0
    assert found["stored"].value == found["stored"].error == 0


def test_everything_lost_has_no_test() -> None:
    run, n, _, x = a_run(200)
    found = everything(run, n, n, x)
    assert_finite(list(found.values()))
    tests = ("shift", "change", "stored", "naive", "lag")
    assert [found[name] for name in tests] == [None] * len(tests)
    assert found["events"] == 1
    assert found["smd"].value == pytest.approx(0, abs=1e-12)


def test_covariate_without_variation_says_nothing() -> None:
    run, n, lost, _ = a_run(200)
    for level in (0.0, 0.1, 1e9):
        found = everything(run, n, lost, np.full(200, level))
        assert_finite(list(found.values()))
        tests = ("smd", "stored", "naive", "lag")
        assert [found[name] for name in tests] == [None] * len(tests)
        # Every shift is as far from the mean as the observed one: not at all.
        assert (found["shift"].p[0], found["shift"].difference[0]) == (1.0, 0.0)


def test_one_step_is_one_block_and_no_test() -> None:
    for lost in (0.0, 3.0, 7.0):
        found = everything(np.zeros(1), np.array([7.0]), np.array([lost]), np.array([1.0]))
        assert_finite(list(found.values()))
        assert found["blocks"].n_blocks == 1
        tests = ("shift", "change", "smd", "stored", "lag")
        assert [found[name] for name in tests] == [None] * len(tests)


def test_run_of_three_steps_cannot_have_a_small_p() -> None:
    found = everything(
        np.zeros(3), np.array([4.0, 5, 6]), np.array([0.0, 5, 0]), np.array([0.0, 9, 1])
    )
    assert_finite(list(found.values()))
    assert found["shift"].p[0] == 1 / found["shift"].n_shifts == 1 / 3
    assert found["shift"].n_effective[0] <= 3
    assert found["change"] is None
    assert found["smd"] is None


def test_steps_without_tokens_are_no_loss() -> None:
    run, n, lost, x = a_run(300)
    n[::3] = lost[::3] = 0
    found = everything(run, n, lost, x)
    assert_finite(list(found.values()))
    assert found["shift"] is not None


@given(
    st.integers(1, 60),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.booleans(),
    st.integers(0, 10**6),
)
@settings(max_examples=150, deadline=None)
def test_no_series_makes_a_nan_or_a_warning(
    n_steps: int, n_runs: int, rate: float, partial: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    n = random.integers(0, 5, n_steps).astype(float)
    gone = random.random(n_steps) < rate
    lost = np.where(gone, random.integers(0, n.astype(int) + 1) if partial else n, 0.0)
    x = random.integers(0, 3, n_steps).astype(float)
    found = everything(np.sort(random.integers(0, n_runs, n_steps)), n, lost, x)
    assert_finite(list(found.values()))
    for name in ("shift", "change"):
        if found[name] is not None:
            assert np.all((found[name].p > 0) & (np.asarray(found[name].p) <= 1))


def test_within_has_no_test_without_two_requests_in_a_partial_step() -> None:
    assert within([], [], [], []) is None
    assert within([0, 0, 1], [0, 1, 0], [1, 2, 3], [False] * 3) is None
    assert within([0, 0, 1], [0, 1, 0], [1, 2, 3], [True] * 3) is None
    assert within([0, 0, 0], [4, 4, 4], [1, 2, 3], [True, False, False]) is None
    assert within([0, 0, 0], [4, 5, 6], [2.1, 2.1, 2.1], [True, False, False]) is None
    found = within([0, 0], [4, 5], [1, 2], [True, False])
    assert found is not None
    assert found.p > 0.3
    assert_finite(found)


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_within_makes_no_nan_of_any_tokens(
    n: int, n_steps: int, n_requests: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    found = within(
        random.integers(0, n_steps, n), random.integers(0, n_requests, n),
        random.integers(0, 3, n), random.random(n) < 0.5,
    )  # fmt: skip
    if found is not None:
        assert_finite(found)
        assert 0 <= found.p <= 1


def test_empty_and_single_families() -> None:
    assert benjamini_hochberg([]).shape == (0,)
    assert benjamini_hochberg([0.03]).tolist() == [0.03]


def test_weights_of_cells_without_a_stored_row() -> None:
    found = inverse_probability([10, 5, 0], [2, 5, 0], [0.2, 1, 0.5])
    assert found is not None
    assert found[1] == found[2] == 0
    assert found[0] == pytest.approx(1)
    assert inverse_probability([10, 5], [10, 5], [1, 1]) is None
    assert inverse_probability([10, 5], [0, 0], [0, 0]) == pytest.approx(np.ones(2))
    for rates in ([1, 0], [-0.1, 0]):
        with pytest.raises(ValueError, match="rates must lie"):
            inverse_probability([10, 5], [2, 0], rates)
    with pytest.raises(ValueError, match="no cell"):
        shrunken_rates([0, 0], [0, 0])


def test_rates_of_rows_that_lost_nothing_or_everything() -> None:
    n = np.array([[10.0, 20], [10, 20], [0, 0]])
    lost = np.array([[0.0, 0], [10, 20], [0, 0]])
    rates = nested_rates(n, lost)
    assert np.isfinite(rates).all() and rates[0, 0] == rates[0, 1] < 0.5 < rates[1, 0]
    assert rates[2] == pytest.approx(0.5)
    with pytest.raises(ValueError, match="no cell"):
        nested_rates(n * 0, n * 0)


def test_runs_are_stretches_of_equal_labels() -> None:
    assert slices(["a", "a", "b", "a"]) == [slice(0, 2), slice(2, 3), slice(3, 4)]
    assert slices([]) == []
    with pytest.raises(ValueError, match="n_steps"):
        slices([[1]])


def test_wrong_arguments_are_named() -> None:
    run, n, lost, x = a_run(20)
    with pytest.raises(ValueError, match="between 0 and the computed"):
        circular_shift(run, n, n + 1, x)
    with pytest.raises(ValueError, match="lost has shape"):
        circular_shift(run, n, lost[:3], x)
    with pytest.raises(ValueError, match="value_sum has a value that is not finite"):
        circular_shift(run, n, lost, np.full(20, math.nan))
    with pytest.raises(ValueError, match="value_sum has shape"):
        circular_shift(run, n, lost, x[:5])
    with pytest.raises(ValueError, match="weight has a negative"):
        circular_shift(run, n, lost, x, weight=-n)
    with pytest.raises(ValueError, match="20 steps, 30 to 20 blocks"):
        blocks(20, run, lost, 20, 30)
    (found,) = jackknife_many(np.ones((2, 1, 4)), lambda sums: sums[1] / sums[0])
    assert found is not None
    with pytest.raises(ValueError, match="confidence is 1"):
        found.at(1)
    with pytest.raises(ValueError, match="weight is not above 0"):
        isotonic([1, 2], [1, 0])
    with pytest.raises(ValueError, match="series has shape"):
        correlation_steps(x, run[:5])
    with pytest.raises(ValueError, match="p-values"):
        benjamini_hochberg([1.5])
