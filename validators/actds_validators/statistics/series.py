"""Losses along a run: how many independent events, and whether they lie where a covariate is high.

That is held against losses moved along the run. A full queue is the work of many steps, so the
load is a moving average: the tokens of the same step miss it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike
from scipy.fft import next_fast_len  # type: ignore[import-untyped]

from actds_validators.arrays import Floats, Ints


def slices(run: ArrayLike) -> list[slice]:
    """Return the stretches of equal labels, in order.

    Args:
        run: ``(n_steps,)``, any labels. One that comes back after another is a new stretch.
    """
    labels = np.asarray(run)
    if labels.ndim != 1:
        raise ValueError(f"run labels have shape {labels.shape}; expected (n_steps,)")
    if not len(labels):
        return []
    cuts = np.flatnonzero(labels[1:] != labels[:-1]) + 1
    edges = [0, *cuts.tolist(), len(labels)]
    return [slice(a, b) for a, b in pairwise(edges)]


def as_floats(values: ArrayLike, name: str, shape: tuple[int, ...] | None = None) -> Floats:
    """Return values as float64, checked.

    Raises:
        ValueError: a value is not finite, or the shape is not the expected one.
    """
    array = np.asarray(values, dtype=np.float64)
    if shape is not None and array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; expected {shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has a value that is not finite")
    return array


_WINDOW = 5.0
"""Sokal's c: the sum stops at the first lag of at least c correlation times."""


def integrated_time(correlation: Floats) -> float:
    """Return the integrated autocorrelation time of an autocorrelation function, at least 1.

    ``1 + 2 sum_{h=1}^{M} rho(h)``, M the smallest with ``M >= 5 tau(M)`` (A. Sokal, Monte Carlo
    Methods in Statistical Mechanics, 1989, section 3): n values of such a series tell as much of
    their mean as n / tau independent ones.

    Args:
        correlation: ``(n_lags,)``, from lag 0, which is 1.
    """
    sums = 2 * np.cumsum(correlation) - 1
    stop = np.flatnonzero(np.arange(len(sums)) >= _WINDOW * np.maximum(sums, 1.0))
    return max(1.0, float(sums[stop[0]] if len(stop) else sums.max()))


def correlation_steps(series: ArrayLike, run: ArrayLike) -> float:
    """Return the integrated autocorrelation time of a series, in steps, at least 1.

    Autocovariances are taken within runs, about each run's own mean, and added over runs; the
    window is Sokal's (see `integrated_time`). 1 for a series without variation.
    """
    x = as_floats(series, "series")
    parts = slices(run)
    if x.shape != np.asarray(run).shape:
        raise ValueError(f"series has shape {x.shape}, run labels {np.asarray(run).shape}")
    longest = max((part.stop - part.start for part in parts), default=0)
    covariance = np.zeros(longest)
    for part in parts:
        centred = x[part] - x[part].mean()
        n = len(centred)
        size = next_fast_len(2 * n - 1, real=True)
        power = np.abs(np.fft.rfft(centred, size)) ** 2
        covariance[:n] += np.fft.irfft(power, size)[:n]
    if longest < 2 or covariance[0] <= 1e-18 * max(1.0, float(x @ x)):
        return 1.0
    return integrated_time(covariance / covariance[0])


def count_events(lost: ArrayLike, run: ArrayLike, gap: int | None = None) -> int:
    """Return the number of independent loss events.

    Lost steps of one run that lie at most ``gap`` steps apart are one event, as clusters of
    exceedances are declustered in the theory of extremes (runs declustering, Smith & Weissman
    1994).

    Args:
        lost: ``(n_steps,)``, lost tokens or the share lost; a step with more than 0 is a lost one.
        gap: steps, at least 1; by default the correlation time of the series.
    """
    return len(_events(as_floats(lost, "lost"), run, gap))


def effective_events(lost: ArrayLike, run: ArrayLike, gap: int | None = None) -> float:
    """Return how many events of equal size a mean over the lost tokens rests on.

    ``(sum of sizes)² / sum of their squares`` (Kish 1965), 0 without an event: thirty events of
    which one has nearly all that was lost are worth little more than one.
    """
    x = as_floats(lost, "lost")
    sizes = np.array([x[at].sum() for at in _events(x, run, gap)])
    return float(sizes.sum() ** 2 / (sizes @ sizes)) if len(sizes) else 0.0


def one_per_event(lost: ArrayLike, run: ArrayLike, gap: int | None = None) -> Floats:
    """Return the series divided by its sum over each event, so that every event weighs 1."""
    x = as_floats(lost, "lost")
    weights = np.zeros_like(x)
    for at in _events(x, run, gap):
        weights[at] = x[at] / x[at].sum()
    return weights


def _events(x: Floats, run: ArrayLike, gap: int | None) -> list[Ints]:
    if gap is None:
        gap = math.ceil(correlation_steps(x, run))
    if gap < 1:
        raise ValueError(f"gap is {gap}; expected at least 1 step")
    events: list[Ints] = []
    for part in slices(run):
        at = part.start + np.flatnonzero(x[part] > 0)
        if len(at):
            events += np.split(at, np.flatnonzero(np.diff(at) > gap) + 1)
    return events


N_DRAWS = 2000
"""Random tuples of shifts, where there are several runs."""
_SHORT = 1000
"""Steps up to which a transform of any length is cheap."""


@dataclass(frozen=True)
class Shift:
    """The circular-shift test of several covariates.

    Args:
        difference: ``(n_covariates,)``, mean of what the lost steps held less the mean of all,
            about each run's own mean, in the covariate's unit. What is ranked is its numerator.
        n_effective: ``(n_covariates,)``, effectively independent shifts (`effective_shifts`). A
            p below ``1 / n_effective`` may come, but an effect that lasts as long as the
            correlation cannot count on one.
        sizes: ``(n_covariates, n_shifts)``, what is ranked, the observed one first.
    """

    difference: Floats
    p: Floats
    n_effective: Floats
    sizes: Floats

    @property
    def n_shifts(self) -> int:
        return int(self.sizes.shape[1])


def circular_shift(
    run: ArrayLike,
    n: ArrayLike,
    lost: ArrayLike,
    value_sum: ArrayLike,
    *,
    weight: ArrayLike | None = None,
    n_draws: int = N_DRAWS,
    seed: int = 0,
) -> Shift | None:
    """Return whether the share lost of a step goes with what the step held.

    With ``share = lost / n`` and m the step's mean of the covariate, of weight w, the statistic is
    ``|sum_s share[s+k] w[s] (m[s] - mean)|`` at k = 0, held against every circular shift k. Both
    series keep their own correlation in time, bursts and all; only where one lies against the other
    is changed. Under stationarity the shifts are a group, and
    ``p = #{k: statistic(k) >= statistic(0)} / #k``, k = 0 among them, is exact but for the seam
    where a run is closed to a circle (Politis & Romano 1992 on circular blocks; Davison & Hinkley
    1997, section 4.4, on group randomisation).

    It is not divided by ``sum_s share[s+k] w[s]``: where steps hold 15 to 512 tokens, shifts that
    put the losses on a few narrow steps make that small and the ratio large, whatever the losses go
    with, and the ratio of a true dependence is not among the largest.

    Weights of 1 (with the steps' means for sums) make every step count the same: for a covariate of
    the step itself, which has one value however many tokens share it.

    All shifts count, near ones too. Leaving out those nearer than the correlation time would let a
    p come out near ``1 / n_steps`` although only ``n_effective`` shifts are independent: with 25
    of them, p <= 0.002 came in 2 % of harmless runs.

    Each run is shifted by itself about its own mean. One run: all shifts, by Fourier transform (of
    a length without large prime factors: at most 2 % of empty steps are added). Several:
    ``n_draws`` seeded tuples of one shift a run, ``p = (1 + #) / (1 + n_draws)``.

    None when the share lost varies within no run: nothing lost, all lost, or one step a run.

    Args:
        value_sum: ``(n_steps,)`` or ``(n_covariates, n_steps)``, sums over the computed tokens.
        weight: tokens that the sums are over, as ``value_sum`` or ``(n_steps,)``; by default ``n``.
    """
    share, values, weights = shares_and_sums(n, lost, value_sum, weight)
    if weights.min(initial=0.0) < 0:
        raise ValueError("weight has a negative value")
    parts = slices(run)
    if all(np.ptp(share[part]) == 0 for part in parts):
        return None
    about = about_mean(values, weights, parts)
    sums = shifted_sums(run, share, about, n_draws=n_draws, seed=seed)
    mass = np.broadcast_to(weights @ share, len(values))
    size = np.abs(sums)
    # Sums by Fourier transform: equal ones differ by rounding.
    reached = size >= size[:, :1] - 1e-9 * size.max(axis=1, keepdims=True)
    n_shifts = size.shape[1]
    return Shift(
        difference=np.divide(sums[:, 0], mass, out=np.zeros(len(values)), where=mass > 0),
        p=reached.sum(axis=1) / n_shifts,
        n_effective=np.minimum(effective_shifts(run, share, about), n_shifts),
        sizes=size,
    )


def shares_and_sums(
    n: ArrayLike, lost: ArrayLike, value_sum: ArrayLike, weight: ArrayLike | None
) -> tuple[Floats, Floats, Floats]:
    """Return share lost ``(n_steps,)``, sums and weights ``(n_covariates or 1, n_steps)``."""
    share = loss_share(n, lost)
    values = np.atleast_2d(as_floats(value_sum, "value_sum"))
    weights = np.atleast_2d(as_floats(n if weight is None else weight, "weight"))
    if values.shape[1] != len(share) or weights.shape not in {values.shape, (1, len(share))}:
        raise ValueError(
            f"value_sum has shape {values.shape}, weight {weights.shape}; {len(share)} steps"
        )
    return share, values, weights


def loss_share(n: ArrayLike, lost: ArrayLike) -> Floats:
    """Return the share lost of each step, 0 for a step without a token."""
    computed = as_floats(n, "n")
    lost_tokens = as_floats(lost, "lost", computed.shape)
    if computed.ndim != 1 or np.any(lost_tokens < 0) or np.any(lost_tokens > computed):
        raise ValueError("lost tokens must lie between 0 and the computed tokens of each step")
    return np.divide(lost_tokens, computed, out=np.zeros_like(lost_tokens), where=computed > 0)


def shifted_sums(
    run: ArrayLike, share: Floats, values: Floats, *, n_draws: int = N_DRAWS, seed: int = 0
) -> Floats:
    """Return ``sum_s share[s+k] values[s]``, ``(n_values, n_shifts)``, each run shifted by itself.

    The first shift is none.

    Args:
        share: ``(n_steps,)``, what is moved.
        values: ``(n_values, n_steps)``, what stays.
        seed: of the shifts; the same seed gives the same shifts for other values.
    """
    parts = slices(run)
    if len(parts) == 1:
        return _all_shifts(share, values)
    random = np.random.default_rng(seed)
    total = np.zeros((len(values), n_draws + 1))
    for part in parts:
        drawn = random.integers(0, part.stop - part.start, n_draws)
        if share[part].any():
            sums = _all_shifts(share[part], values[:, part])
            total += sums[:, np.concatenate([[0], drawn])]
    return total


def effective_shifts(run: ArrayLike, share: Floats, values: Floats) -> Floats:
    """Return how many shifts of each value are effectively independent, at least 1.

    The sums of `shifted_sums` go together along the shift over about the correlation times of both
    series added: their autocovariance is the convolution of the two. The steps of a run over that
    time, multiplied over the runs in which the share varies.
    """
    time = correlation_steps(share, run)
    times = np.array([time + correlation_steps(row, run) - 1 for row in values])
    n_effective = np.ones(len(values))
    for part in slices(run):
        if np.ptp(share[part]) > 0:
            # The cap only keeps the product of many runs finite.
            n_effective = np.minimum(
                n_effective * np.maximum(1.0, (part.stop - part.start) / times), 1e15
            )
    return n_effective


def _all_shifts(share: Floats, values: Floats) -> Floats:
    n = len(share)
    if n > _SHORT:
        # Empty steps, at most 2 %, close the circle: a prime length takes 5 times as long.
        n = next_fast_len(n)
    spectrum = np.conj(np.fft.rfft(values, n, axis=1))
    spectrum *= np.fft.rfft(share, n)
    return np.asarray(np.fft.irfft(spectrum, n, axis=1), np.float64)


def about_mean(values: Floats, weights: Floats, parts: list[slice]) -> Floats:
    about = np.zeros_like(values)
    for part in parts:
        total = np.broadcast_to(weights[:, part].sum(axis=1), len(values))
        mean = np.divide(
            values[:, part].sum(axis=1), total, out=np.zeros(len(values)), where=total > 0
        )
        part_about = values[:, part] - mean[:, np.newaxis] * weights[:, part]
        scale = np.abs(values[:, part]).max(axis=1, initial=0.0)
        part_about[np.abs(part_about).max(axis=1, initial=0.0) <= 1e-12 * scale] = 0.0
        about[:, part] = part_about
    return about


@dataclass(frozen=True)
class LagCorrelation:
    """Correlation of the load with the loss some steps later.

    Args:
        lags: ``(2 max_lag + 1,)``, steps that the loss comes after the load.
        low: lower end of the band that holds ``confidence`` of the correlations at any one lag when
            load and loss have nothing to do with each other.
        n_shifts: shifts that the band rests on, the observed position among them.
        n_effective: effectively independent ones of them (`effective_shifts`).
    """

    lags: Ints
    correlation: Floats
    low: float
    high: float
    confidence: float
    n_shifts: int
    n_effective: float


def ewma(x: ArrayLike, run: ArrayLike, steps: float) -> Floats:
    """Return the exponentially weighted moving average up to and with each step.

    ``level = (1 - 1/steps) level + x / steps``, from 0 at the start of each run: an engine that
    starts has no work behind it.

    Args:
        x: ``(n_steps,)`` or ``(k, n_steps)``.
        steps: time constant, at least 1; 1 returns x.
    """
    from scipy.signal import lfilter  # type: ignore[import-untyped]  # slow to import

    values = as_floats(x, "x")
    if steps < 1 or values.shape[-1] != len(np.asarray(run)):
        raise ValueError(f"x has shape {values.shape}, {len(np.asarray(run))} labels, {steps=}")
    level = np.empty_like(values)
    for part in slices(run):
        level[..., part] = lfilter([1 / steps], [1, 1 / steps - 1], values[..., part])
    return level


def lag_correlation(
    load: ArrayLike,
    loss_share: ArrayLike,
    run: ArrayLike,
    max_lag: int,
    *,
    confidence: float = 0.95,
    n_draws: int = N_DRAWS,
    seed: int = 0,
) -> LagCorrelation | None:
    """Return the correlation of the load with the loss h steps later, h from -max_lag to max_lag.

    ``sum_s a[s] b[s+h] / sqrt(sum a² sum b²)`` over pairs of one run, a and b about their runs' own
    means: the sample cross-correlation function (Box & Jenkins 1970, chapter 11). None when either
    does not vary.

    The band is what correlations look like when the loss lies anywhere: the losses of each run are
    moved along it in a circle, as in `circular_shift`, and at most half of
    ``1 - confidence`` of the shifts lie outside at either end. Both series keep their own
    correlation in time. ``±2 / sqrt(n)`` would not do: the variance of the correlation of two
    unrelated series is ``sum_j rho_a(j) rho_b(j) / n`` (Bartlett 1955; Box & Jenkins 1970, section
    11.1), which the variance over the shifts estimates, and for few bursts it is far from normal,
    which quantiles need not be told. If load and loss are independent and stationary, the observed
    position is one shift of many alike, so that the band holds at each lag with ``confidence``, but
    for the seam (Davison & Hinkley 1997, section 4.4). It is pointwise: of 129 lags six lie outside
    by chance, neighbours together. An association is itself among the shifts, and widens the
    band if it lasts for much of the run: it errs to the side of showing nothing.

    One run: all its shifts. Several: ``n_draws`` seeded tuples of one shift a run.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; expected a number between 0 and 1")
    x = as_floats(load, "load")
    y = as_floats(loss_share, "loss_share", x.shape)
    if max_lag < 0 or x.shape != np.asarray(run).shape:
        raise ValueError(f"load has shape {x.shape}, labels {np.asarray(run).shape}, {max_lag=}")
    sums = np.zeros(2 * max_lag + 1)
    squares = np.zeros(2)
    scale = np.array([float(x @ x), float(y @ y)])
    about = np.empty((2, len(x)))
    for part in slices(run):
        a, b = x[part] - x[part].mean(), y[part] - y[part].mean()
        about[:, part] = a, b
        n, reach = len(a), min(max_lag, len(a) - 1)
        size = next_fast_len(2 * n - 1, real=True)
        crossed = np.fft.irfft(np.conj(np.fft.rfft(a, size)) * np.fft.rfft(b, size), size)
        sums[max_lag - reach : max_lag + reach + 1] += np.roll(crossed, reach)[: 2 * reach + 1]
        squares += a @ a, b @ b
    if np.any(squares <= 1e-18 * scale):
        return None
    size = np.sqrt(squares[0] * squares[1])
    shifted = np.sort(shifted_sums(run, about[1], about[:1], n_draws=n_draws, seed=seed)[0]) / size
    n_out = int((1 - confidence) / 2 * len(shifted))
    return LagCorrelation(
        lags=np.arange(-max_lag, max_lag + 1),
        correlation=np.clip(sums / size, -1, 1),
        low=max(-1.0, float(shifted[n_out])),
        high=min(1.0, float(shifted[-1 - n_out])),
        confidence=confidence,
        n_shifts=len(shifted),
        n_effective=min(len(shifted), float(effective_shifts(run, about[1], about[:1])[0])),
    )


def isotonic(values: ArrayLike, weights: ArrayLike) -> Floats:
    """Return the increasing sequence nearest to values in weighted least squares ``(g,)``.

    By the max-min formula ``fit_i = max_{a<=i} min_{b>=i} mean(a..b)`` (Robertson, Wright &
    Dykstra 1988, theorem 1.4.4), which equals the result of pooling adjacent violators. Time and
    memory grow with the square of g.

    Args:
        weights: ``(g,)``, above 0.
    """
    y = as_floats(values, "values")
    w = as_floats(weights, "weights", y.shape)
    if np.any(w <= 0):
        raise ValueError("a weight is not above 0")
    sums, mass = (np.concatenate([[0.0], np.cumsum(v)]) for v in (w * y, w))
    # The mean of a stretch that ends before it begins does not count, nor does one after i.
    means = np.full((len(y), len(y)), -np.inf)
    some = np.triu_indices(len(y))
    means[some] = (sums[1:] - sums[:-1, None])[some] / (mass[1:] - mass[:-1, None])[some]
    lowest = np.minimum.accumulate(means[:, ::-1], axis=1)[:, ::-1]  # over b >= i
    return np.asarray(lowest.max(axis=0), np.float64)


def load_groups(load: ArrayLike) -> Ints:
    """Return the decile of each step, from 0; equal edges fall together."""
    x = as_floats(load, "load")
    if not len(x):
        raise ValueError("no step; expected at least one")
    edges = np.unique(np.quantile(x, np.linspace(0, 1, 11)[1:-1]))
    # A group is (edge, next edge]; renumbered, for an edge may be the least or the greatest value.
    group = np.searchsorted(edges, x, side="left")
    return np.unique(group, return_inverse=True)[1].astype(np.int64)
