"""Paired and two-sample statistics equal independent computations, and hold their size."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.metrics import roc_auc_score

from actds_validators.statistics import samples as paired
from actds_validators.statistics import samples as two


def clustered(
    seed: int, n_requests: int, n_rows: int, d_model: int, effect: float = 2.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows ``(n, d_model)`` with a strong effect of their request, and their requests."""
    rng = np.random.default_rng(seed)
    request = np.repeat(np.arange(n_requests), n_rows)
    own = rng.normal(0, effect, (n_requests, d_model))
    rows = own[request] + rng.normal(0, 1, (len(request), d_model))
    return rows.astype(np.float32), request


def one_label(units: two.Units) -> np.ndarray:
    return units.side[None]


def test_distances_equal_a_direct_computation() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 5000, 7)).astype(np.float32)
    relative = np.linalg.norm((second - first).astype(float), axis=1)
    relative /= np.linalg.norm(first.astype(float), axis=1)
    assert np.allclose(paired.relative_l2(first, second), relative, rtol=1e-6)
    cosine = [1 - np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b)
              for a, b in zip(first.astype(float), second.astype(float), strict=True)]  # fmt: skip
    assert np.allclose(paired.cosine_distance(first, second), cosine, atol=1e-12)
    assert not paired.cosine_distance(first, first).any()


def test_the_shift_of_a_row_does_not_depend_on_its_norm() -> None:
    first = np.array([[3, 4, 0, 0]], np.float32)
    shift = paired.relative_shift(first, first + np.float32(1))
    assert np.allclose(shift, 1 / 2.5)
    assert np.allclose(paired.relative_shift(first * 8, first * 8 + np.float32(8)), shift)


def test_channel_shift_is_the_t_test_of_scipy_over_request_means() -> None:
    rows, request = clustered(1, 30, 5, 6)
    shuffled = np.random.default_rng(2).permutation(len(rows))
    means = paired.request_means(rows[shuffled], request[shuffled])
    assert np.allclose(means, rows.reshape(30, 5, 6).mean(axis=1), atol=1e-6)
    expected = scipy.stats.ttest_1samp(means, 0.0)
    assert np.allclose(paired.channel_shift(means).p, expected.pvalue)


def test_a_channel_without_spread_is_equal_or_different() -> None:
    means = np.zeros((9, 2))
    means[:, 1] = 0.25
    assert paired.channel_shift(means).p.tolist() == [1.0, 0.0]


def test_sign_flips_set_one_half_against_the_other() -> None:
    signs = paired.sign_flips(11, 50, seed=3)
    assert set(np.unique(signs)) == {-1.0, 1.0}
    assert (signs.sum(axis=1) == 1).all()
    assert len({tuple(line) for line in signs.tolist()}) > 40


def test_clustered_channel_test_holds_its_size_where_a_row_level_test_does_not() -> None:
    """No true difference, strong request effects: 200 channels, nominal 5 %."""
    rows, request = clustered(4, 40, 50, 200)
    ours = paired.channel_shift(paired.request_means(rows, request)).p
    naive = scipy.stats.ttest_1samp(rows, 0.0).pvalue
    assert (ours <= 0.05).mean() <= 0.10  # binomial(200, 0.05): 0.10 has p 0.002
    assert (naive <= 0.05).mean() > 0.7


def test_units_are_the_requests_of_each_side() -> None:
    request = np.array([5, 5, 7, 5, 9])
    units = two.make_units(request, np.array([False, True, True, True, False]))
    assert units.request.tolist() == [5, 5, 7, 9]
    assert units.side.tolist() == [False, True, True, False]
    assert units.of_row.tolist() == [0, 1, 2, 1, 3]
    mine, own = units.on_side(True)
    assert mine.tolist() == [False, True, True, True, False]
    assert own.request.tolist() == [5, 7] and own.of_row.tolist() == [0, 1, 0]


def test_exchanges_swap_a_request_on_both_sides_and_permute_the_others() -> None:
    request = np.array([0, 0, 1, 1, 2, 3, 4])
    second = np.array([False, True, False, True, False, False, True])
    units = two.make_units(request, second)
    labels = two.exchanges(units, 400, seed=0)
    assert (labels[:, 0] != labels[:, 1]).all() and (labels[:, 2] != labels[:, 3]).all()
    assert (labels[:, 4:].sum(axis=1) == 1).all()
    assert np.allclose(labels[:, 0].mean(), 0.5, atol=0.1)
    assert np.allclose(labels[:, 4:].mean(axis=0), 1 / 3, atol=0.1)


def test_log_variance_ratio_equals_a_direct_computation() -> None:
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(300, 4)).astype(np.float32)
    rows[120:] *= np.array([1, 2, 3, 1], np.float32)
    units = two.make_units(np.arange(300) // 10, np.arange(300) >= 120)
    got = two.log_variance_ratio(rows, units, one_label(units))[0]
    ratio = np.log(rows[120:].var(axis=0) / rows[:120].var(axis=0))
    assert np.isclose(got, np.sqrt(np.mean(ratio**2)), rtol=1e-5)


def test_covariance_distance_equals_generalised_eigenvalues_and_ignores_axes() -> None:
    rng = np.random.default_rng(6)
    rows = rng.normal(size=(4000, 3)).astype(np.float32)
    rows[2000:] = rows[2000:] @ np.array([[1, 0.5, 0], [0, 2, 0], [0, 0, 1]], np.float32)
    units = two.make_units(np.arange(4000) // 20, np.arange(4000) >= 2000)
    got = two.covariance_distance(rows, units, one_label(units))[0]
    one, other = (np.cov(part.T.astype(float), bias=True) for part in (rows[:2000], rows[2000:]))
    values = scipy.linalg.eigh(other, one, eigvals_only=True)
    assert np.isclose(got, np.sqrt(np.mean(np.log(values) ** 2)), rtol=1e-4)
    turned = rows @ np.array([[3, 1, 0], [0, 1, 2], [1, 0, 5]], np.float32)
    assert np.isclose(two.covariance_distance(turned, units, one_label(units))[0], got, rtol=1e-3)


def test_kurtosis_gap_equals_scipy() -> None:
    rng = np.random.default_rng(7)
    rows = np.concatenate([rng.normal(size=(500, 3)), rng.laplace(size=(700, 3)) + 1])
    rows = rows.astype(np.float32)
    units = two.make_units(np.arange(1200) // 10, np.arange(1200) >= 500)
    gap, (first, second) = two.kurtosis_gap(rows, units, one_label(units))
    expected = [np.median(scipy.stats.kurtosis(part)) for part in (rows[:500], rows[500:])]
    assert np.allclose([first, second], expected, atol=1e-3)
    assert np.isclose(gap[0], abs(expected[1] - expected[0]), atol=1e-3)


def test_leading_subspace_equals_the_principal_components() -> None:
    rng = np.random.default_rng(8)
    rows = (rng.normal(size=(500, 40)) * np.geomspace(10, 0.1, 40)).astype(np.float32)
    rows -= rows.mean(axis=0)
    got = two.leading_subspace(rows, 5, seed=0).var(axis=0)
    expected = np.sort(np.linalg.eigvalsh(np.cov(rows.T.astype(float), bias=True)))[::-1][:5]
    assert np.allclose(got, expected, rtol=1e-3)


def test_standardised_leaves_constant_channels_out() -> None:
    rows = np.random.default_rng(9).normal(3, 4, (200, 3)).astype(np.float32)
    rows[:, 1] = 7
    got = two.standardised(rows)
    assert got.shape == (200, 2)
    assert np.allclose(got.mean(axis=0), 0, atol=1e-5) and np.allclose(
        got.std(axis=0), 1, atol=1e-5
    )


def test_classifier_finds_what_the_linear_discriminant_of_sklearn_finds() -> None:
    """The same folds are not needed: both estimate the area of the same direction."""
    rng = np.random.default_rng(10)
    rows = rng.normal(size=(4000, 8)).astype(np.float32)
    rows[2000:, 2] += 1
    second = np.arange(4000) >= 2000
    units = two.make_units(np.arange(4000) // 20, second)
    got = two.grouped_auc(two.standardised(rows), units, one_label(units), seed=0)[0]
    train = np.arange(4000) % 2 == 0
    model = LinearDiscriminantAnalysis().fit(rows[train], second[train])
    expected = roc_auc_score(second[~train], model.decision_function(rows[~train]))
    assert abs(got - expected) < 0.02


def test_areas_count_ties_half_as_sklearn_does() -> None:
    rng = np.random.default_rng(11)
    scores = rng.integers(0, 5, (200, 3)).astype(np.float32)
    labels = rng.random((3, 200)) < 0.4
    got, _ = two.ranked_areas(scores, labels)
    expected = [roc_auc_score(label, scores[:, i]) for i, label in enumerate(labels)]
    assert np.allclose(got, expected)


def test_folds_hold_whole_requests() -> None:
    """With requests told by their values, random folds would reach an area near 1."""
    rows, request = clustered(12, 40, 30, 30, effect=5.0)
    units = two.make_units(request, request % 2 == 1)
    area = two.grouped_auc(two.standardised(rows), units, one_label(units), seed=0)[0]
    assert area < 0.75
    alone = two.make_units(np.arange(len(request)), request % 2 == 1)
    assert two.grouped_auc(two.standardised(rows), alone, one_label(alone), seed=0)[0] > 0.95


@pytest.mark.parametrize("shared", [True, False])
def test_classifier_holds_its_size_under_strong_request_effects(shared: bool) -> None:
    """60 seeded runs without a difference: at most 13 % rejected at 5 % (binomial p 0.01)."""
    rejected = naive = 0
    for seed in range(60):
        rows, request = clustered(100 + seed, 24, 20, 6)
        rng = np.random.default_rng(seed)
        second = np.tile([False, True], len(request) // 2)
        if not shared:
            second = (rng.permutation(24) < 12)[request]
        units = two.make_units(request, second)
        labels = np.concatenate([one_label(units), two.exchanges(units, 99, seed)])
        areas = two.grouped_auc(two.standardised(rows), units, labels, seed)
        rejected += two.permutation_p(areas[0], areas[1:]) <= 0.05
        naive += scipy.stats.ttest_ind(rows[second], rows[~second]).pvalue.min() <= 0.05 / 6
    assert rejected <= 7
    assert shared or naive >= 50


@pytest.mark.parametrize("shared", [True, False])
def test_a_shift_on_one_side_is_found(shared: bool) -> None:
    rows, request = clustered(13, 40, 20, 6, effect=0.5)
    second = np.tile([False, True], 400) if shared else request % 2 == 1
    rows[second, 3] += 1
    units = two.make_units(request, second)
    labels = np.concatenate([one_label(units), two.exchanges(units, 199, 0)])
    areas = two.grouped_auc(two.standardised(rows), units, labels, seed=0)
    assert areas[0] > 0.65
    assert two.permutation_p(areas[0], areas[1:]) == 1 / 200


def test_a_permutation_p_counts_the_observed_labelling() -> None:
    assert two.permutation_p(2.0, np.array([1.0, 2.0, 3.0])) == 0.75
    assert two.permutation_p(9.0, np.zeros(99)) == 0.01


def test_rate_gap_is_the_difference_of_shares() -> None:
    flag = np.array([True, False, False, False, True, True])
    units = two.make_units(np.array([0, 0, 1, 1, 2, 3]), np.arange(6) >= 4)
    assert two.rate_gap(flag, units, one_label(units)).tolist() == [0.75]
