"""The audit's statistics against other implementations, and against what can be done by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.signal import lfilter
from scipy.spatial.distance import jensenshannon
from sklearn.isotonic import IsotonicRegression
from statsmodels.discrete.conditional_models import ConditionalLogit
from statsmodels.stats.multitest import multipletests
from statsmodels.tsa.stattools import acovf, ccf

from actds_testing.audit_tokens import within
from actds_validators.statistics.association import (
    block_score,
    change,
    long_run_variance,
    naive_z,
)
from actds_validators.statistics.intervals import (
    Interval,
    at_least,
    benjamini_hochberg,
    block_sums,
    blocks,
    detectable,
    difference_sums,
    error_of_draws,
    jackknife,
    jackknife_many,
    loss_rate,
    loss_that_allows,
    smd,
    smd_of_stored,
    worst_case,
)
from actds_validators.statistics.series import (
    circular_shift,
    correlation_steps,
    count_events,
    effective_events,
    ewma,
    isotonic,
    lag_correlation,
    load_groups,
)
from actds_validators.statistics.strata import (
    effective_rows,
    inverse_probability,
    jensen_shannon,
    nested_rates,
    prior_strength,
    shrunken_rates,
    total_variation,
)


def tokens_of(seed: int, n: int = 500) -> tuple[np.ndarray, np.ndarray]:
    """Return a covariate and whether each token was lost."""
    random = np.random.default_rng(seed)
    x = random.gamma(2.0, 3.0, n) - 5
    return x, random.random(n) < 1 / (1 + np.exp(2 - 0.2 * x))


def sums_of(x: np.ndarray, lost: np.ndarray) -> np.ndarray:
    return np.array([len(x), x.sum(), x @ x, lost.sum(), x[lost].sum()], float)


# intervals ------------------------------------------------------------------------------------


def test_smd_is_the_difference_of_means_in_deviations_of_all() -> None:
    x, lost = tokens_of(0)
    assert smd(sums_of(x, lost)) == pytest.approx((x[lost].mean() - x.mean()) / x.std(), rel=1e-12)
    stored = (x[~lost].mean() - x.mean()) / x.std()
    assert smd_of_stored(sums_of(x, lost)) == pytest.approx(stored, rel=1e-12)
    rate = lost.mean()
    assert stored == pytest.approx(-rate / (1 - rate) * smd(sums_of(x, lost)))


def test_smd_takes_weighted_sums_of_the_stored_rows() -> None:
    x, lost = tokens_of(1)
    w = np.random.default_rng(2).random(len(x)) * ~lost
    sums = np.array([len(x), x.sum(), x @ x, w.sum(), w @ x])
    assert smd(sums) == pytest.approx((np.average(x, weights=w) - x.mean()) / x.std(), rel=1e-12)


@given(st.integers(0, 10**6), st.floats(0.1, 50), st.floats(-50, 50))
@settings(max_examples=25, deadline=None)
def test_smd_does_not_know_the_unit(seed: int, scale: float, offset: float) -> None:
    x, lost = tokens_of(seed)
    assert smd(sums_of(x * scale + offset, lost)) == pytest.approx(
        float(smd(sums_of(x, lost))), rel=1e-6, abs=1e-8
    )


def test_jackknife_of_a_mean_is_the_student_interval_of_the_blocks() -> None:
    y = np.random.default_rng(0).standard_normal(40)
    found = jackknife(np.stack([np.ones(40), y]), lambda s: s[1] / s[0])
    error = y.std(ddof=1) / math.sqrt(40)
    assert found is not None
    assert (found.value, found.error) == pytest.approx((y.mean(), error), rel=1e-12)
    expected = stats.t.interval(0.95, found.freedom, y.mean(), error)
    assert (found.low, found.high) == pytest.approx(expected, rel=1e-9)
    assert 30 < found.freedom <= 39
    wider = found.at(0.99)
    assert (wider.low, wider.high) == pytest.approx(
        stats.t.interval(0.99, found.freedom, y.mean(), error)
    )


def test_jackknife_has_few_degrees_of_freedom_when_few_blocks_lost_anything() -> None:
    sums = np.stack([np.full(50, 100.0), np.where(np.arange(50) % 17 == 0, 40.0, 0.0)])
    found = jackknife(sums, loss_rate)
    assert found is not None
    assert found.n_blocks == 50
    # Three of fifty lost something: 3 k - 1, a little more for the empty ones.
    assert 7 < found.freedom < 11


def test_jackknife_of_many_covariates_is_that_of_each() -> None:
    random = np.random.default_rng(1)
    run = np.repeat([0, 1], 300)
    n = random.integers(1, 20, 600).astype(float)
    lost = np.where(random.random(600) < 0.2, n, 0)
    sx = random.standard_normal((3, 600)) * n
    sxx = sx**2 / n + n
    cut = blocks(600, run, lost / n)
    sums = difference_sums(cut, n, sx, sxx, lost, sx * lost / n)
    together = jackknife_many(sums, smd)
    for c in range(3):
        alone = jackknife(sums[:, c], smd)
        assert alone is not None
        assert together[c] == alone
        left_out = [float(smd(np.delete(sums[:, c], b, 1).sum(1))) for b in range(cut.n_blocks)]
        k = cut.n_blocks
        assert alone.error == pytest.approx(
            math.sqrt((k - 1) ** 2 / k * np.var(left_out, ddof=1)), rel=1e-9
        )


def test_jackknife_has_no_interval_for_a_loss_in_one_block() -> None:
    sums = np.zeros((5, 20))
    sums[0], sums[2] = 10, 10
    sums[3, 4], sums[4, 4] = 5, 2
    assert jackknife(sums, smd) is None
    assert jackknife(sums[:, :1], smd) is None
    assert jackknife(sums[[0, 3]], loss_rate) is not None


def test_blocks_are_long_against_bursts_and_stay_within_runs() -> None:
    run = np.repeat([3, 1, 3], [4000, 2000, 30])
    loss = np.zeros(6030)
    for start in range(100, 5900, 500):
        loss[start : start + 20] = 1
    cut = blocks(6030, run, loss)
    assert cut.long_enough
    assert cut.steps >= 10 * cut.correlation_steps > 100
    assert np.array_equal(np.unique(cut.labels), np.arange(cut.n_blocks))
    assert np.all(np.diff(cut.labels) >= 0)
    begins = np.flatnonzero(np.diff(cut.labels)) + 1
    assert {4000, 6000} <= set(begins.tolist())
    sizes = np.bincount(cut.labels)
    assert sizes[:-1].min() >= cut.steps
    assert sizes[-1] == 30
    short = blocks(600, np.zeros(600), loss[:600])
    assert short.n_blocks == 20
    assert not short.long_enough


def test_block_sums_add_up_and_refuse_labels_with_a_gap() -> None:
    values = np.arange(12.0).reshape(2, 6)
    labels = np.array([0, 0, 1, 2, 2, 2])
    assert block_sums(values, labels, 3).tolist() == [[1, 2, 12], [13, 8, 30]]
    for wrong in ([0, 0, 2, 2, 2, 3], [1, 1, 1, 2, 2, 2], [0, 1, 0, 1, 2, 2]):
        with pytest.raises(ValueError, match="rise from 0"):
            block_sums(values, np.array(wrong), 3)


# events ---------------------------------------------------------------------------------------


def test_correlation_time_of_an_autoregression_is_known() -> None:
    random = np.random.default_rng(0)
    x = lfilter([1], [1, -0.9], random.standard_normal(400_000))
    # (1 + 0.9) / (1 - 0.9); the standard error of the estimate is 3 %.
    assert correlation_steps(x, np.zeros(400_000)) == pytest.approx(19, rel=0.1)
    assert correlation_steps(random.permutation(x), np.zeros(400_000)) == pytest.approx(1, abs=0.1)
    # A different level of each run is no correlation within them.
    noise = random.standard_normal(2000) + np.repeat([0, 100], 1000)
    assert correlation_steps(noise, np.repeat([0, 1], 1000)) < 1.5


def test_correlation_time_agrees_with_statsmodels() -> None:
    x = np.repeat(np.random.default_rng(5).standard_normal(400), 4)
    rho = acovf(x, fft=True) / x.var()
    tau, m = 1.0, 0
    while m < 5 * tau:
        m += 1
        tau = 1 + 2 * rho[1 : m + 1].sum()
    assert correlation_steps(x, np.zeros(1600)) == pytest.approx(tau, rel=1e-9)


def test_events_are_bursts_apart() -> None:
    lost = np.zeros(1000)
    lost[[10, 11, 14, 200, 600, 601]] = 1
    run = np.zeros(1000)
    assert count_events(lost, run, gap=1) == 4
    assert count_events(lost, run, gap=3) == 3
    assert count_events(lost, run, gap=400) == 1
    # A run that ends between two lost steps parts them.
    assert count_events(lost, np.arange(1000) > 10, gap=3) == 4
    assert count_events(np.zeros(5), np.zeros(5)) == 0
    assert count_events(np.ones(5), np.zeros(5)) == 1
    with pytest.raises(ValueError, match="gap is 0"):
        count_events(lost, run, gap=0)


# tests ----------------------------------------------------------------------------------------


def brute_shift(n: np.ndarray, lost: np.ndarray, sx: np.ndarray) -> tuple[float, float]:
    share, away = lost / n, sx - sx.sum() / n.sum() * n
    found = np.array([np.roll(share, -k) @ away for k in range(len(n))])
    p = float(np.mean(np.abs(found) >= abs(found[0]) * (1 - 1e-12)))
    return found[0] / (share @ n), p


@pytest.mark.parametrize("n_steps", [3, 8, 97, 256])
def test_shift_is_the_count_over_all_shifts(n_steps: int) -> None:
    random = np.random.default_rng(n_steps)
    n = random.integers(1, 9, n_steps).astype(float)
    lost = np.where(np.arange(n_steps) % 5 == 1, n, 0)
    sx = random.standard_normal((2, n_steps)).cumsum(axis=1) * n
    found = circular_shift(np.zeros(n_steps), n, lost, sx)
    assert found is not None
    for c in range(2):
        difference, p = brute_shift(n, lost, sx[c])
        assert found.difference[c] == pytest.approx(difference)
        assert found.p[c] == pytest.approx(p)
    share = lost / n
    assert found.difference[0] == pytest.approx(
        (share @ sx[0]) / (share @ n) - sx[0].sum() / n.sum()
    )
    assert found.n_shifts == n_steps


def test_shift_of_a_prime_length_is_near_that_without_the_empty_steps() -> None:
    random = np.random.default_rng(3)
    n = random.integers(1, 9, 2003).astype(float)
    lost = np.where(random.random(2003) < 0.03, n, 0)
    sx = random.standard_normal(2003).cumsum() * n
    found = circular_shift(np.zeros(2003), n, lost, sx)
    difference, p = brute_shift(n, lost, sx)
    assert found is not None
    assert found.difference[0] == pytest.approx(difference)
    assert found.p[0] == pytest.approx(p, abs=0.03)
    assert 2003 <= found.n_shifts <= 2003 * 1.022


def test_shift_knows_neither_unit_nor_order_of_covariates_nor_where_the_circle_begins() -> None:
    random = np.random.default_rng(4)
    n = random.integers(1, 9, 400).astype(float)
    lost = np.where(random.random(400) < 0.1, n, 0)
    sx = random.standard_normal((3, 400)).cumsum(axis=1) * n
    run = np.zeros(400)
    base = circular_shift(run, n, lost, sx)
    unit = circular_shift(run, n, lost, 7 * sx[::-1] + 1000 * n)
    turned = circular_shift(run, *(np.roll(v, 123, axis=-1) for v in (n, lost, sx)))
    assert base is not None and unit is not None and turned is not None
    assert unit.p[::-1] == pytest.approx(base.p)
    assert unit.difference[::-1] == pytest.approx(7 * base.difference)
    assert turned.p == pytest.approx(base.p)


def test_shift_counts_independent_shifts_by_how_long_covariates_last() -> None:
    random = np.random.default_rng(5)
    n = np.ones(4000)
    lost = (random.random(4000) < 0.05).astype(float)
    noise = random.standard_normal(4000)
    slow = ewma(noise, np.zeros(4000), 50)
    found = circular_shift(np.zeros(4000), n, lost, np.stack([noise, slow]))
    assert found is not None
    assert found.n_effective[0] > 2000
    # An average over 50 steps has a correlation time of 99.
    assert 25 < found.n_effective[1] < 70


def test_shift_is_within_runs_and_the_same_for_a_seed() -> None:
    random = np.random.default_rng(6)
    run = np.repeat([0, 1], 200)
    n = np.ones(400)
    # The second run loses more and lies higher: nothing of that is within a run.
    lost = (random.random(400) < np.where(run == 0, 0.02, 0.3)).astype(float)
    high = random.standard_normal(400) + 10 * run
    found = circular_shift(run, n, lost, high, seed=1)
    one = circular_shift(np.zeros(400), n, lost, high)
    assert found is not None and one is not None
    assert abs(found.difference[0]) < 0.5 < one.difference[0]
    again = circular_shift(run, n, lost, high, seed=1)
    assert again is not None and again.p[0] == found.p[0]
    assert found.n_shifts == 2001


def test_shift_takes_weights_of_each_covariate() -> None:
    random = np.random.default_rng(7)
    n = random.integers(2, 9, 300).astype(float)
    known = n - random.integers(0, 2, 300)
    lost = np.where(random.random(300) < 0.1, n, 0)
    sx = random.standard_normal((2, 300)) * n
    both = circular_shift(np.zeros(300), n, lost, sx, weight=np.stack([n, known]))
    plain = circular_shift(np.zeros(300), n, lost, sx[0])
    part = circular_shift(np.zeros(300), n, lost, sx[1], weight=known)
    assert both is not None and plain is not None and part is not None
    assert both.p.tolist() == [plain.p[0], part.p[0]]


@pytest.mark.parametrize("weighted", [True, False])
def test_score_over_blocks_is_student_s_t_of_scipy(weighted: bool) -> None:
    random = np.random.default_rng(8)
    n = random.integers(2, 300, 2000).astype(float)
    lost = np.minimum(random.poisson(0.02 * n), n).astype(float)
    m = random.standard_normal(2000).cumsum() / 20
    run, weight = np.zeros(2000), n if weighted else np.ones(2000)
    cut = blocks(2000, run, lost / n)
    found = block_score(cut, run, n, lost, np.stack([m * weight, weight * 3]), weight=weight)
    rate = np.average(lost / n, weights=weight)
    score = (lost / n - rate) * weight * (m - np.average(m, weights=weight))
    by_block = [score[cut.labels == b].sum() for b in range(cut.n_blocks)]
    # scipy's t is about the mean of the sample, this one about 0: t0 = t / sqrt(1 + t² / (n - 1)).
    t, k = stats.ttest_1samp(by_block, 0).statistic, len(by_block)
    u = np.array(by_block)
    freedom = min(k - 1, 3 * (u @ u) ** 2 / (u**4).sum() - 1)
    expected = 2 * stats.t.sf(abs(t) / np.sqrt((k - 1 + t**2) / k), freedom)
    assert found[0] == pytest.approx(expected)
    assert found[1] == 1  # no variation


def test_floor_of_an_interval_is_what_events_of_one_row_each_would_vary() -> None:
    random = np.random.default_rng(9)
    x = random.lognormal(size=4000)
    n_lost, off = 40, []
    for _ in range(3000):
        gone = random.choice(4000, n_lost, replace=False)
        off.append((np.delete(x, gone).mean() - x.mean()) / x.std())
    assert error_of_draws(4000, n_lost, n_lost) == pytest.approx(np.std(off), rel=0.05)
    narrow = Interval(0.001, 0.0, 0.002, 0.0005, 20, 19.0, 0.95)
    floored = at_least(narrow, 0.01, 0.9)
    assert floored.high - 0.001 == pytest.approx(stats.t.ppf(0.95, 19) * 0.01)
    assert at_least(narrow, 0.0001, 0.95).high == pytest.approx(narrow.at(0.95).high)


def test_events_of_unequal_size_are_worth_fewer_of_equal_size() -> None:
    run = np.zeros(12)
    assert effective_events([0, 3, 3, 0, 0, 6, 0, 0, 6, 0, 0, 0], run, gap=1) == pytest.approx(3)
    assert effective_events([0, 1, 0, 0, 1, 0, 0, 98, 0, 0, 0, 0], run, gap=1) < 1.05
    assert effective_events(np.zeros(12), run, gap=1) == 0


@given(st.integers(0, 10**6), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_isotonic_is_that_of_scikit_learn(seed: int, g: int) -> None:
    random = np.random.default_rng(seed)
    y, w = random.standard_normal(g).round(1), random.random(g) + 0.1
    expected = IsotonicRegression().fit(np.arange(g), y, w).predict(np.arange(g))
    assert isotonic(y, w) == pytest.approx(expected, abs=1e-9)


def test_load_groups_are_deciles_and_equal_edges_fall_together() -> None:
    x = np.random.default_rng(0).permutation(1000.0 + np.arange(1000))
    assert np.bincount(load_groups(x)).tolist() == [100] * 10
    mostly_empty = np.where(np.arange(1000) < 850, 0.0, np.arange(1000))
    sizes = np.bincount(load_groups(mostly_empty))
    assert sizes.min() > 0
    assert len(sizes) == 3
    assert load_groups([5, 5, 5]).tolist() == [0, 0, 0]


def test_change_is_where_the_loss_began() -> None:
    random = np.random.default_rng(2)
    n = random.integers(1, 20, 4000).astype(float)
    lost = np.where(random.random(4000) < np.where(np.arange(4000) < 3000, 0.01, 0.1), n, 0)
    found = change(n, lost, np.zeros(4000))
    assert found is not None
    assert found.p < 0.005 and found.long_enough
    assert abs(found.at - 3000) <= 160
    assert found.before == pytest.approx(lost[: found.at].sum() / n[: found.at].sum())
    assert found.after > 3 * found.before
    back = change(n[::-1], lost[::-1], np.zeros(4000))
    assert back is not None and back.before == pytest.approx(found.after, rel=0.2)


def test_long_run_variance_of_an_autoregression_is_known() -> None:
    x = lfilter([1], [1, -0.5], np.random.default_rng(3).standard_normal(20_000))
    assert long_run_variance(x) == pytest.approx(1 / (1 - 0.5) ** 2, rel=0.15)
    assert long_run_variance([1, 1, 1]) == long_run_variance([2]) == 0


def test_within_is_the_score_of_a_conditional_logistic_regression() -> None:
    random = np.random.default_rng(4)
    step = np.repeat(np.arange(40), 3)
    x = random.standard_normal(120)
    # One of three lost in each step: there both conditional and unconditional scores are the same.
    lost = np.zeros(120, bool)
    lost[np.arange(40) * 3 + random.integers(0, 3, 40)] = True
    found = within(step, np.arange(120), x, lost)
    model = ConditionalLogit(lost.astype(float), x[:, None], groups=step)
    score = float(np.asarray(model.score(np.zeros(1)))[0])
    assert found is not None
    # n rate (1 - rate) of a step of three is 2 / 3.
    assert found.difference * 40 * 2 / 3 == pytest.approx(score)
    # Every token a request of its own: the variance is that of permutations within steps.
    by_step = x.reshape(40, 3)
    variance = 2 / 3 / 2 * ((by_step - by_step.mean(1, keepdims=True)) ** 2).sum()
    assert found.t == pytest.approx(score / math.sqrt(variance), rel=0.2)
    assert (found.n_requests, found.n_steps, found.freedom) == (120, 40, 39)
    assert found.p == pytest.approx(2 * stats.t.sf(abs(found.t), 39))


def test_within_tells_the_same_in_any_order_and_unit() -> None:
    random = np.random.default_rng(5)
    step, request = random.integers(0, 20, 900), random.integers(0, 9, 900)
    x = random.standard_normal(900) + request
    lost = random.random(900) < 0.3
    found = within(step, request, x, lost)
    assert found is not None
    order = random.permutation(900)
    turned = within(step[order] + 70, -request[order], x[order] * -3 + 8, lost[order])
    assert turned is not None
    assert turned.t == pytest.approx(-found.t)
    assert turned.difference == pytest.approx(-3 * found.difference)
    # Steps that lost nothing or all say nothing.
    more = within(
        np.concatenate([step, [50, 50, 51, 51]]), np.concatenate([request, [70, 71, 70, 71]]),
        np.concatenate([x, [1e3, 2, 3, 4e3]]), np.concatenate([lost, [True, True, False, False]]),
    )  # fmt: skip
    assert more == found


# numbers --------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_benjamini_hochberg_is_that_of_statsmodels(p: list[float]) -> None:
    expected = multipletests(p, method="fdr_bh")[1]
    assert benjamini_hochberg(p) == pytest.approx(expected, abs=1e-12)


@given(st.integers(0, 10**6), st.integers(1, 50))
@settings(max_examples=40, deadline=None)
def test_distances_are_those_of_scipy(seed: int, bins: int) -> None:
    random = np.random.default_rng(seed)
    p, q = random.gamma(0.3, size=(2, bins)) + 1e-9
    p[random.random(bins) < 0.2] = 0
    p[0] = 1
    assert jensen_shannon(p, q) == pytest.approx(jensenshannon(p, q, base=2), abs=1e-7)
    expected = np.abs(p / p.sum() - q / q.sum()).sum() / 2
    assert total_variation(p, 9 * q) == pytest.approx(expected)


def test_distances_are_0_for_equal_and_1_for_disjoint_histograms() -> None:
    for distance in (total_variation, jensen_shannon):
        assert distance([1, 2, 3], [10, 20, 30]) == pytest.approx(0, abs=1e-7)
        assert distance([1, 2, 0], [0, 0, 5]) == pytest.approx(1)
        assert distance([0, 0], [1, 1]) is None
        with pytest.raises(ValueError, match="negative"):
            distance([1, -1], [1, 1])
        with pytest.raises(ValueError, match="shape"):
            distance([1, 2], [1, 2, 3])


def test_equivalence_is_two_one_sided_tests() -> None:
    for value in (-0.09, 0.02, 0.045, 0.05, 0.051, 0.11):
        estimate = at_least(Interval(value, 0, 0, 0.03, 30, 29, 0.95), 0, 0.9)
        above = stats.t.sf((value + 0.1) / 0.03, 29)
        below = stats.t.cdf((value - 0.1) / 0.03, 29)
        assert (max(-estimate.low, estimate.high) < 0.1) == (max(above, below) < 0.05)


def test_detectable_difference_is_found_with_that_power() -> None:
    difference = detectable(0.5, power=0.8, alpha=0.05)
    assert difference == pytest.approx(0.5 * 2.8016, rel=1e-4)
    assert stats.norm.sf(1.959964 - difference / 0.5) == pytest.approx(0.8, abs=1e-4)
    with pytest.raises(ValueError, match="power"):
        detectable(1, power=1)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_bound_holds_for_any_loss_and_is_attained(n: int, n_lost: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    lost = np.arange(n + n_lost) < n_lost
    bound = worst_case(float(lost.mean()))
    for x in (random.standard_cauchy(n + n_lost), np.sort(random.standard_normal(n + n_lost))):
        assert abs(x[~lost].mean() - x.mean()) <= x.std() * bound * (1 + 1e-9)
    worst = lost * 3.5
    assert abs(worst[~lost].mean() - worst.mean()) == pytest.approx(worst.std() * bound)
    assert loss_that_allows(bound) == pytest.approx(lost.mean())


def test_bound_has_no_value_when_all_was_lost() -> None:
    assert worst_case(0) == loss_that_allows(0) == 0
    for wrong in (1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="loss share"):
            worst_case(wrong)
    for wrong in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="bias"):
            loss_that_allows(wrong)


def test_moving_average_restarts_at_a_run() -> None:
    x = np.random.default_rng(0).random(50)
    run = np.repeat([0, 1], 25)
    level, expected = 0.0, []
    for at, value in enumerate(x):
        level = 0.0 if at == 25 else level
        level = 0.75 * level + 0.25 * value
        expected.append(level)
    assert ewma(x, run, 4) == pytest.approx(np.array(expected))
    assert ewma(x, run, 1) == pytest.approx(x)
    assert ewma(np.stack([x, 2 * x]), run, 4)[1] == pytest.approx(2 * np.array(expected))
    with pytest.raises(ValueError, match="steps"):
        ewma(x, run, 0.5)


def test_lag_correlation_is_that_of_statsmodels_and_finds_the_lag() -> None:
    random = np.random.default_rng(1)
    load = ewma(random.random(500), np.zeros(500), 3)
    loss = np.roll(load, 4) + random.standard_normal(500) * 0.05
    found = lag_correlation(load, loss, np.zeros(500), 10)
    assert found is not None
    assert found.lags.tolist() == list(range(-10, 11))
    expected = ccf(loss, load, adjusted=False)[:11]
    assert found.correlation[10:] == pytest.approx(expected, abs=1e-9)
    assert found.lags[found.correlation.argmax()] == 4
    # The band is that of every circular shift of the loss: 12 of 500 lie outside at either end.
    a, b = load - load.mean(), loss - loss.mean()
    every = np.sort([np.roll(b, k) @ a for k in range(500)]) / np.sqrt((a @ a) * (b @ b))
    assert (found.low, found.high) == pytest.approx((every[12], every[-13]))
    assert found.n_shifts == 500 and 1 <= found.n_effective < 500
    assert found.correlation.max() > 2 * found.high
    # Pairs of two runs do not count.
    run = np.arange(500) // 2
    apart = lag_correlation(load, loss, run, 3)
    assert apart is not None and apart.correlation[[0, 1, 5, 6]] == pytest.approx(0, abs=1e-12)


def test_naive_test_is_that_of_the_textbook() -> None:
    x, lost = tokens_of(8)
    z = np.corrcoef(x, lost)[0, 1] * math.sqrt(len(x))
    assert naive_z(sums_of(x, lost)) == pytest.approx(2 * stats.norm.sf(abs(z)))


def test_effective_rows() -> None:
    assert effective_rows([2.0, 2.0, 2.0]) == pytest.approx(3)
    assert effective_rows([1.0, 0.0, 0.0]) == 1
    assert effective_rows([]) == effective_rows([0.0]) == 0
    w, rows = np.array([1.0, 3.0]), np.array([10, 2])
    assert effective_rows(w, rows) == pytest.approx(effective_rows(np.repeat(w, rows)))


def test_prior_strength_is_that_of_a_beta_binomial() -> None:
    random = np.random.default_rng(2)
    n = random.integers(20, 400, 4000)
    lost = random.binomial(n, random.beta(3, 27, 4000))
    assert prior_strength(n, lost) == pytest.approx(30, rel=0.1)
    assert prior_strength([100, 100, 100], [10, 10, 10]) == math.inf
    found = shrunken_rates(n, lost)
    strength = prior_strength(n, lost)
    assert found == pytest.approx((lost + strength * lost.sum() / n.sum()) / (n + strength))


def test_shrunken_rates_lie_between_the_cells_and_the_whole() -> None:
    n, lost = np.array([[4.0, 1000], [0, 500]]), np.array([[4.0, 100], [0, 200]])
    rates = shrunken_rates(n, lost)
    common = lost.sum() / n.sum()
    assert rates[1, 0] == pytest.approx(common)
    assert common < rates[0, 0] < 1
    alike = np.array([[100.0, 100], [0, 50]])
    assert shrunken_rates(alike, alike / 10) == pytest.approx(np.full((2, 2), 0.1))


def test_weights_put_back_what_cells_lost() -> None:
    n, lost = np.array([100.0, 300, 600]), np.array([50.0, 30, 0])
    weights = inverse_probability(n, lost, lost / n)
    stored = n - lost
    assert weights is not None
    assert (weights * stored).sum() == pytest.approx(stored.sum())
    assert weights * stored / stored.sum() == pytest.approx(n / n.sum())
    assert inverse_probability(n, lost, np.full(3, 0.08)) == pytest.approx(np.ones(3))


def test_rows_of_cells_share_the_strength_of_their_beta_binomial() -> None:
    random = np.random.default_rng(3)
    n = random.integers(20, 400, (400, 10))
    p = random.beta(*(np.array([[1.0, 9.0], [27.0, 11.0]])[random.integers(0, 2, 400)].T * 2)
                    [..., np.newaxis], (400, 10))  # fmt: skip
    lost = random.binomial(n, p)
    found = prior_strength(n, lost)  # of 20 and of 76
    apart = [
        prior_strength(n[few], lost[few]) for few in (p.mean(axis=1) < 0.4, p.mean(axis=1) > 0.4)
    ]
    assert apart == [pytest.approx(20, rel=0.15), pytest.approx(76, rel=0.15)]
    assert apart[0] < found < apart[1]
    one = n[:1], lost[:1]
    assert prior_strength(*one) == pytest.approx(prior_strength(one[0][0], one[1][0]))


def test_nested_rates_keep_what_differs_between_rows_of_small_cells() -> None:
    # Rows lose 1, 5 and 20 in a hundred; their cells do not differ.
    random = np.random.default_rng(4)
    p = np.repeat([[0.01], [0.05], [0.2]], 6, axis=1)
    n = np.full((3, 6), 200)
    lost = random.binomial(n, p)
    rates = nested_rates(n, lost)
    flat = shrunken_rates(n, lost)
    rows = shrunken_rates(n.sum(axis=1), lost.sum(axis=1))
    raw = lost.sum(axis=1) / n.sum(axis=1)
    common = lost.sum() / n.sum()
    assert np.all(np.abs(rows - raw) < np.abs(raw - common) * 0.1)
    assert np.all((rates - rows[:, np.newaxis]) * (lost / n - rates) >= -1e-15)  # drawn to the row
    assert np.abs(rates - p).max() < np.abs(flat - p).max()


def test_within_takes_two_requests_in_many_steps_for_one_observation() -> None:
    # The same one of two is lost in every step: one draw, not fifty, and t is 1 whatever it holds.
    step, request = np.repeat(np.arange(50), 2), np.tile([3, 8], 50)
    found = within(step, request, np.tile([1.0, 5.0], 50), request == 8)
    assert found is not None
    assert (found.t, found.difference, found.freedom) == (pytest.approx(1), pytest.approx(4), 1)
