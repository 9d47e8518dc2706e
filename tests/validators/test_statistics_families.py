"""Families of tests against enumeration, and their size where nothing depends on anything."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from actds_validators.statistics.association import (
    JointDraws,
    Turns,
    draws_for,
    least_over_families,
    over_families,
    tail_scores,
)
from actds_validators.statistics.intervals import (
    benjamini_hochberg,
    from_replicates,
    joint_confidence,
    replicates,
)


def at_rate(inside: list[np.ndarray], q: float) -> list[np.ndarray]:
    """Return which tests are rejected at one rate, as Benjamini and Bogomolov write it."""
    selected = benjamini_hochberg([p.min() for p in inside]) <= q
    level = q * selected.sum() / len(inside)
    return [(p <= level) & s for p, s in zip(inside, selected, strict=True)]


def test_adjusted_p_is_the_least_rate_at_which_a_test_is_rejected() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        inside = [rng.random(rng.integers(1, 5)) ** 3 for _ in range(rng.integers(1, 6))]
        tests, families = over_families(inside)
        rates = np.unique(np.concatenate([*tests, families]))
        for q in [*((a + b) / 2 for a, b in pairwise([0.0, *rates])), *rates[rates < 1] + 1e-12]:
            for p, wanted, family in zip(tests, at_rate(inside, q), families, strict=True):
                assert (p <= q).tolist() == wanted.tolist()
                assert (family <= q) == wanted.any()


def test_more_families_cost_power_and_more_tests_of_one_family_none() -> None:
    alone = over_families([[0.01], [0.5]])[0][0][0]
    beside = over_families([[0.01], [0.5, *np.full(500, 0.9)]])[0][0][0]
    assert alone == beside == pytest.approx(0.02)
    assert over_families([[0.01], *[[0.9]] * 9])[0][0][0] == pytest.approx(0.1)
    assert over_families([])[0] == []


def test_the_least_p_of_a_family_depends_on_its_draws_alone() -> None:
    assert least_over_families([0.5, 0.9], 0, 1 / 30) == pytest.approx(2 / 30)
    assert least_over_families([0.5, 0.001], 0, 1 / 30) == pytest.approx(1 / 30)
    assert [draws_for(6, q, 100) for q in (0.05, 0.01, 1e-9)] == [600, 3000, 20_000]


def test_tests_that_say_the_same_are_worth_one() -> None:
    rng = np.random.default_rng(2)
    sizes = np.abs(rng.normal(size=(1, 1000)))
    sizes[0, 0] = np.sort(sizes[0])[-3]
    one, many = JointDraws(), JointDraws()
    one.add(sizes)
    for scale in (1.0, 7.0, 1e-6):  # of any unit
        many.add(np.repeat(scale * sizes, 40, axis=0))
    assert one.adjusted() == pytest.approx([0.004])
    assert many.adjusted() == pytest.approx(np.full(120, 0.004))


def test_noise_beside_it_hides_no_strong_dependence_and_a_heavy_tail_neither() -> None:
    rng = np.random.default_rng(3)
    signal = np.abs(rng.normal(size=(1, 2000)))
    signal[0, 0] = 7.0
    joint = JointDraws()
    joint.add(signal)
    joint.add(np.abs(rng.normal(size=(300, 2000))))
    joint.add(np.abs(rng.standard_t(5, size=(30, 2000))))
    # By ranks alone 330 tests of 2,000 draws could not be below 0.05: each has a largest draw.
    assert joint.adjusted()[0] <= 0.01


def test_adjusted_p_holds_the_family_wise_error() -> None:
    rng = np.random.default_rng(4)
    smallest = []
    for _ in range(400):
        joint = JointDraws()
        joint.add(np.abs(rng.normal(size=(30, 200))))
        joint.add(rng.exponential(size=(10, 200)) ** 3)
        smallest.append(joint.adjusted().min())
    # 400 at 5 %: 33 or more come with a probability of 1 in 300.
    assert 7 < np.sum(np.array(smallest) <= 0.05) < 33
    assert 0.4 < np.mean(np.array(smallest) <= 0.5) < 0.6


def test_a_row_without_a_tail_says_nothing() -> None:
    joint = JointDraws()
    joint.add(np.ones((2, 100)))
    assert joint.adjusted().tolist() == [1.0, 1.0]
    assert np.isneginf(tail_scores(np.zeros((1, 50)))).all()
    assert JointDraws().adjusted().tolist() == [] and JointDraws().n_draws == 0


def test_turns_lose_as_many_of_each_stratum_and_are_uniform() -> None:
    rng = np.random.default_rng(5)
    stratum = np.repeat([7, 3, 9], [6, 5, 1])
    lost = np.array([1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0], bool)
    turns = Turns(stratum, lost, 4000, 1)
    values = np.eye(len(lost))
    assert sorted(turns.units.tolist()) == list(range(11))  # of 9, all lost, there is no turn
    found = turns.sums(values[:, turns.units])
    # Which unit is lost how often: of stratum 7 two of six, of 3 one of five, of 9 none to turn.
    share = found[:, 1:].mean(axis=1)
    assert share == pytest.approx(0, abs=0.03)  # about the mean of the stratum
    observed = found[:, 0] + np.where(stratum == 7, 2 / 6, np.where(stratum == 3, 1 / 5, 0))
    assert observed == pytest.approx(lost.astype(float))
    x = rng.normal(size=(1, len(lost)))
    exact = [x[0, [a, b]].sum() for a in range(6) for b in range(a)]
    mean = 2 * x[0, :6].mean()
    alone = Turns(stratum[:6], lost[:6], 4000, 2)
    only = alone.sums(x[:, alone.units])[0, 1:]
    assert np.isin(only.round(9), (np.array(exact) - mean).round(9)).all()


def test_some_controls_of_many_are_as_exact_as_all() -> None:
    p = []
    for seed in range(300):
        rng = np.random.default_rng([seed, 1])
        stratum = np.repeat(np.arange(20), 60)
        lost = np.zeros(1200, bool)
        lost[np.arange(20) * 60 + rng.integers(0, 60, 20)] = True
        turns = Turns(stratum, lost, 99, seed)
        assert len(turns.units) == 20 * (1 + Turns.CONTROLS)
        sizes = np.abs(turns.sums(rng.standard_t(2, size=(1, len(turns.units)))))[0]
        p.append((sizes >= sizes[0]).mean())
    assert stats.kstest(p, "uniform").pvalue > 0.001


# intervals of what was chosen -------------------------------------------------------------------


def test_intervals_at_once_are_those_of_sidak_where_nothing_goes_together() -> None:
    rng = np.random.default_rng(11)
    apart = rng.normal(size=(20, 4000))
    assert joint_confidence(apart, n_draws=8000) == pytest.approx(0.95 ** (1 / 20), abs=7e-4)
    together = np.repeat(rng.normal(size=(1, 50)), 20, axis=0) * np.arange(1, 21)[:, np.newaxis]
    assert joint_confidence(together) == pytest.approx(0.95, abs=0.01)
    alone = joint_confidence(apart[:1])
    assert alone == 0.95 == joint_confidence([[1.0, 1.0], [np.nan, 2.0]])
    with pytest.raises(ValueError, match="confidence is 1"):
        joint_confidence(apart, 1.0)


def test_the_interval_of_the_farthest_of_sixteen_holds_the_truth() -> None:
    alone, at_once = [], []
    for seed in range(300):
        rng = np.random.default_rng([seed, 12])
        common = rng.normal(size=(1, 40))
        x = rng.normal(size=(16, 40)) + 0.5 * common
        value, without = replicates(np.stack([np.ones((16, 40)), x]), lambda s: s[1] / s[0])
        k = int(np.abs(value).argmax())
        found = from_replicates(value, without)[k]
        assert found is not None
        for held, one in ((alone, found), (at_once, found.at(joint_confidence(without, seed=1)))):
            held.append(one.low <= 0 <= one.high)
    assert np.mean(alone) < 0.75
    # 300 at 95 %: fewer than 275 come with a probability of 1 in 300.
    assert np.sum(at_once) >= 275
