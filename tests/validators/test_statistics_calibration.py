"""How often the tests of the audit reject harmless losses that come in bursts.

Each band is binomial for the seeds below; a test over tokens misses all of them by far.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from scipy import stats
from scipy.signal import lfilter

from actds_testing.audit_tokens import within
from actds_validators.statistics.association import change, naive_z
from actds_validators.statistics.intervals import (
    benjamini_hochberg,
    blocks,
    difference_sums,
    jackknife_many,
    smd,
)
from actds_validators.statistics.series import circular_shift, lag_correlation

N_STEPS = 2000
N_SERIES = 300
MOST = 0.088
"""Of 300 tests at 5 %, more than this are rejected with a probability of 1 in 400."""


@dataclass(frozen=True)
class Series:
    run: np.ndarray
    n: np.ndarray
    lost: np.ndarray
    sx: np.ndarray
    sxx: np.ndarray

    @property
    def lx(self) -> np.ndarray:
        return self.sx * self.lost / self.n


def autoregressive(random: np.random.Generator, steps: int, time: float, k: int = 1) -> np.ndarray:
    """Return k series of variance 1 whose correlation falls to 1/e in some steps."""
    keep = np.exp(-1 / time)
    noise = random.standard_normal((k, steps + int(10 * time)))
    return lfilter([np.sqrt(1 - keep**2)], [1, -keep], noise)[:, -steps:]


def burst_series(
    seed: int,
    *,
    k: int = 1,
    rate: float = 0.08,
    burst: int = 10,
    time: float = 20,
    n_runs: int = 1,
    effect: float = 0.0,
) -> Series:
    """Return steps that are lost in whole bursts, whatever they hold, or the more the higher it is.

    Covariates go together over ``time`` steps; bursts have ``burst`` steps in the mean.
    """
    random = np.random.default_rng(seed)
    n = np.exp(3 + 0.5 * autoregressive(random, N_STEPS, 10)[0]).round() + 1
    level = autoregressive(random, N_STEPS, time, k)
    mean = level + random.standard_normal((k, N_STEPS)) / np.sqrt(n)
    chance = np.exp(effect * level[0])
    starts = random.choice(N_STEPS, random.poisson(rate * N_STEPS / burst), p=chance / chance.sum())
    gone = np.zeros(N_STEPS, bool)
    for start in starts:
        gone[start : start + random.geometric(1 / burst)] = True
    return Series(
        run=np.arange(N_STEPS) * n_runs // N_STEPS,
        n=n,
        lost=np.where(gone, n, 0.0),
        sx=mean * n,
        sxx=(mean**2 + 1) * n,
    )


@cache
def harmless(n_runs: int = 1) -> tuple[Series, ...]:
    return tuple(burst_series(seed, n_runs=n_runs) for seed in range(N_SERIES))


def share(p: list[float], level: float = 0.05) -> float:
    return float(np.mean(np.array(p) <= level))


def test_tests_over_tokens_reject_harmless_bursts_nearly_always() -> None:
    z = [
        naive_z([s.n.sum(), s.sx.sum(), s.sxx.sum(), s.lost.sum(), s.lx.sum()]) for s in harmless()
    ]
    assert share(z) > 0.75


@pytest.mark.parametrize("n_runs", [1, 4])
def test_shift_rejects_harmless_bursts_at_its_level(n_runs: int) -> None:
    p = [
        circular_shift(s.run, s.n, s.lost, s.sx, n_draws=500, seed=seed).p[0]
        for seed, s in enumerate(harmless(n_runs))
    ]
    assert 0.015 <= share(p) <= MOST
    # 300 tests at 1 %: 9 or more come with a probability of 1 in 270.
    assert share(p, 0.01) < 9 / 300
    # Uniform, not only at the end.
    assert 0.4 < share(p, 0.5) < 0.6


def test_change_rejects_harmless_bursts_at_its_level_and_kolmogorov_hardly_ever() -> None:
    found = [change(s.n, s.lost, s.run, n_draws=300, seed=n) for n, s in enumerate(harmless())]
    assert 0.015 <= share([f.p for f in found]) <= MOST
    # Why the asymptotic p does not decide.
    assert share(stats.kstwobign.sf([f.statistic for f in found])) <= 0.015


def test_jackknife_interval_covers_what_is_true() -> None:
    missed = []
    for s in harmless():
        cut = blocks(N_STEPS, s.run, s.lost / s.n)
        found = jackknife_many(difference_sums(cut, s.n, s.sx, s.sxx, s.lost, s.lx), smd)[0]
        missed.append(not found.low <= 0 <= found.high)
    # About 16 bursts a run: a few more than 5 %. Tokens as blocks would miss in 80 %.
    assert np.mean(missed) <= 0.105


def test_family_of_many_covariates_rarely_rejects_anything() -> None:
    rejected = []
    for seed in range(100):
        s = burst_series(10_000 + seed, k=20)
        adjusted = benjamini_hochberg(circular_shift(s.run, s.n, s.lost, s.sx).p)
        rejected.append(bool(adjusted.min() <= 0.05))
    # 100 at 5 %: 12 or more come with a probability of 1 in 230.
    assert sum(rejected) < 12


def test_bursts_where_a_covariate_is_high_are_found() -> None:
    series = [burst_series(seed, effect=1.2, burst=3) for seed in range(100)]
    shifted = [circular_shift(s.run, s.n, s.lost, s.sx).p[0] for s in series]
    assert share(shifted) > 0.9


def test_loss_rate_that_grows_half_way_is_found() -> None:
    found = []
    for seed in range(60):
        first, second = (burst_series(2 * seed + k, rate=r) for k, r in ((0, 0.05), (1, 0.25)))
        n, lost = (np.concatenate([getattr(first, f), getattr(second, f)]) for f in ("n", "lost"))
        found.append(change(n, lost, np.zeros(2 * N_STEPS), n_draws=300))
    assert share([f.p for f in found]) > 0.7
    assert abs(np.median([f.at for f in found]) - N_STEPS) < N_STEPS * 0.15
    assert np.mean([f.after > f.before for f in found]) > 0.95


def partial_steps(
    seed: int, *, n_steps: int = 150, n_live: int = 8, effect: float = 0.0
) -> tuple[np.ndarray, ...]:
    """Return step, request, x and lost of steps that lose rows side by side, or those of high x."""
    random = np.random.default_rng(seed)
    request = np.arange(n_live)
    step, who, x, lost = [], [], [], []
    for s in range(n_steps):
        ended = random.random(n_live) < 0.03
        request = np.where(ended, request + n_live, request)
        rows = np.repeat(
            request, np.where(random.random(n_live) < 0.2, random.integers(2, 60, n_live), 1)
        )
        level = np.random.default_rng(seed + 7).standard_normal(n_live * (n_steps + 1))[rows]
        value = level + random.standard_normal(len(rows)) / 2
        first = np.argsort(-effect * value + random.standard_normal(len(rows)))
        order = first if effect else np.roll(np.arange(len(rows)), random.integers(len(rows)))
        gone = np.zeros(len(rows), bool)
        gone[order[: random.integers(1, len(rows))]] = True
        step.append(np.full(len(rows), s))
        who.append(rows)
        x.append(value)
        lost.append(gone)
    return tuple(np.concatenate(part) for part in (step, who, x, lost))


def test_selection_within_steps_holds_its_level_where_tokens_do_not() -> None:
    p, tokens = [], []
    for seed in range(200):
        step, request, x, lost = partial_steps(seed)
        p.append(within(step, request, x, lost).p)
        tokens.append(naive_z([len(x), x.sum(), x @ x, lost.sum(), x[lost].sum()]))
    # 200 at 5 %: 20 or more come with a probability of 1 in 350.
    assert share(p) < 20 / 200
    assert share(tokens) > 0.5


def test_selection_of_high_values_within_steps_is_found() -> None:
    found = [within(*partial_steps(seed, effect=1.0)) for seed in range(30)]
    assert share([f.p for f in found]) > 0.9
    assert all(f.difference > 0 for f in found)


@pytest.mark.parametrize(
    ("n_runs", "time", "burst"), [(1, 20.0, 10), (1, 100.0, 10), (1, 20.0, 40), (4, 20.0, 10)]
)
def test_band_of_the_lags_holds_unrelated_series(n_runs: int, time: float, burst: int) -> None:
    inside, white = [], []
    for seed in range(N_SERIES):
        series = burst_series(seed, time=time, burst=burst, n_runs=n_runs)
        load = (series.sx / series.n)[0]
        found = lag_correlation(load, series.lost / series.n, series.run, 64, n_draws=300)
        if found is not None:
            inside.append(
                np.mean((found.low <= found.correlation) & (found.correlation <= found.high))
            )
            white.append(np.mean(np.abs(found.correlation) <= 1.96 / np.sqrt(N_STEPS)))
    # Lags of a series go together: the error of the mean is that between series, at most 0.6 %.
    assert len(inside) > 0.95 * N_SERIES
    assert np.std(inside) / np.sqrt(len(inside)) < 0.006
    assert np.mean(inside) == pytest.approx(0.95, abs=0.017)
    assert np.mean(white) < 0.6  # what ±1.96 / sqrt(n) holds


def test_band_of_the_lags_is_left_where_losses_follow_the_load() -> None:
    above: dict[float, list[bool]] = {0.0: [], 1.0: []}
    for effect, told in above.items():
        for seed in range(100):
            series = burst_series(seed, effect=effect)
            load = (series.sx / series.n)[0]
            found = lag_correlation(load, series.lost / series.n, series.run, 5)
            assert found is not None
            told.append(bool(found.correlation[-1] > found.high))  # half a burst later
    assert np.mean(above[0.0]) <= 0.07 and np.mean(above[1.0]) > 0.7


def test_band_of_the_lags_depends_on_the_seed_alone() -> None:
    series = burst_series(1, n_runs=4)
    load, share = (series.sx / series.n)[0], series.lost / series.n
    first, same, other = (
        lag_correlation(load, share, series.run, 8, n_draws=200, seed=seed) for seed in (1, 1, 2)
    )
    assert first is not None and same is not None and other is not None
    assert (first.low, first.high) == (same.low, same.high) != (other.low, other.high)
    with pytest.raises(ValueError, match="confidence"):
        lag_correlation(load, share, series.run, 8, confidence=1.0)
