"""Intervals by leaving out one block at a time, bounds that need no interval, many tests at once.

Losses come in bursts: a block is long against a burst, so that blocks, unlike tokens, may count as
independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import special  # type: ignore[import-untyped]

from actds_validators.arrays import Floats, Ints
from actds_validators.statistics.series import as_floats, correlation_steps, slices

BLOCK_TIMES = 10.0
"""Length of a block in correlation times of the loss: the interval is then 5 % too short at most
for correlations that fall exponentially."""

CONFIDENCE = 0.95
"""Of the intervals that are made; `Interval.at` makes others of them."""
_DRAWS_AT_ONCE = 250
Statistic = Callable[[Floats], Floats]
"""Sums ``(k, ...)`` to values ``(...)``; NaN where it is undefined, without a warning."""


@dataclass(frozen=True)
class Interval:
    """A number with its interval."""

    value: float
    low: float
    high: float
    error: float
    n_blocks: int
    freedom: float
    confidence: float

    def at(self, confidence: float) -> Interval:
        """Return the same estimate with an interval of another confidence."""
        half = _half(self.error, self.freedom, confidence)
        low, high = self.value - half, self.value + half
        return replace(self, low=low, high=high, confidence=confidence)


@dataclass(frozen=True)
class Blocks:
    """Consecutive steps that are left out together.

    Args:
        labels: ``(n_steps,)``, from 0, rising.
        steps: length of a block, in steps, before runs are cut evenly.
        long_enough: whether a block is at least `BLOCK_TIMES` correlation times long; if not, the
            run is too short against its bursts and intervals are too narrow.
    """

    labels: Ints
    n_blocks: int
    steps: int
    correlation_steps: float
    long_enough: bool


def blocks(
    n_steps: int,
    run: ArrayLike,
    loss_series: ArrayLike,
    n_blocks_max: int = 50,
    n_blocks_min: int = 20,
) -> Blocks:
    """Return blocks of consecutive steps, long against the correlation time of the loss.

    A block has `BLOCK_TIMES` correlation times (Künsch 1989 and Politis & Romano 1994 on blocks of
    dependent data; the time as in `correlation_steps`), at least ``n_steps / n_blocks_max``
    and at most ``n_steps / n_blocks_min`` steps. Each run is cut evenly into whole blocks, at least
    one: there may be more than ``n_blocks_max`` when there are more runs.

    Args:
        loss_series: ``(n_steps,)``, the share lost of each step.
        n_blocks_min: least blocks, where there are as many steps.
    """
    loss = as_floats(loss_series, "loss_series", (n_steps,))
    if n_steps < 1 or not 1 <= n_blocks_min <= n_blocks_max:
        raise ValueError(
            f"{n_steps} steps, {n_blocks_min} to {n_blocks_max} blocks; expected at least one step"
        )
    time = correlation_steps(loss, run)
    wanted = max(math.ceil(BLOCK_TIMES * time), math.ceil(n_steps / n_blocks_max))
    length = max(1, min(wanted, n_steps // n_blocks_min))
    labels = np.empty(n_steps, np.int64)
    n = 0
    for part in slices(run):
        size = part.stop - part.start
        # Rounded down: a block is never shorter than wanted unless its run is.
        pieces = max(1, size // length)
        labels[part] = n + np.arange(size) * pieces // size
        n += pieces
    return Blocks(labels, n, length, time, length >= BLOCK_TIMES * time)


def block_sums(values: ArrayLike, labels: Ints, n_blocks: int) -> Floats:
    """Return sums over blocks ``(..., n_blocks)`` of values ``(..., n_steps)``.

    Args:
        labels: ``(n_steps,)``, rising from 0 without a gap, as `blocks` returns them.
    """
    array = np.asarray(values, np.float64)
    rises = np.diff(labels, prepend=-1, append=n_blocks)
    if not np.isin(rises[:-1], (0, 1)).all() or rises[0] != 1 or rises[-1] != 1:
        raise ValueError(f"block labels do not rise from 0 to {n_blocks - 1}")
    starts = np.flatnonzero(rises[:-1])
    return np.asarray(np.add.reduceat(array, starts, axis=-1), np.float64)


def jackknife(sums: ArrayLike, statistic: Statistic) -> Interval | None:
    """Return a statistic of sums over blocks with its interval; None where it has none.

    Delete-one-block jackknife: ``error² = (n-1)/n sum (t_i - mean t)²`` over the values without
    block i (Künsch 1989; Efron & Tibshirani 1993, chapter 11), and a Student interval. Its degrees
    of freedom are ``n - 1``, less where few blocks carry the variance:
    ``min(n - 1, 3 (sum d²)² / sum d⁴ - 1)`` with ``d = t_i - mean t``, about n - 1 for normal
    deviations and 3 k - 1 when only k of many blocks lost anything.

    None when there are fewer than two blocks, or when the statistic is undefined on all blocks or
    without one of them: a loss that lies in one block has no interval.

    Args:
        sums: ``(k, n_blocks)``.
        statistic: of ``(k, ...)``, vectorised over what follows.
    """
    array = as_floats(sums, "sums")
    if array.ndim != 2:
        raise ValueError(f"sums have shape {array.shape}; expected (k, n_blocks)")
    return jackknife_many(array[:, np.newaxis], statistic)[0]


def jackknife_many(sums: ArrayLike, statistic: Statistic) -> list[Interval | None]:
    """Return `jackknife` of each covariate.

    Args:
        sums: ``(k, n_covariates, n_blocks)``.
    """
    value, without = replicates(sums, statistic)
    if without.shape[1] < 2:
        return [None] * len(value)
    return from_replicates(value, without)


def replicates(sums: ArrayLike, statistic: Statistic) -> tuple[Floats, Floats]:
    """Return the values ``(n_covariates,)`` and those without each block.

    Args:
        sums: ``(k, n_covariates, n_blocks)``.
    """
    array = as_floats(sums, "sums")
    if array.ndim != 3:
        raise ValueError(f"sums have shape {array.shape}; expected (k, n_covariates, n_blocks)")
    total = array.sum(axis=2)
    return statistic(total), statistic(total[:, :, np.newaxis] - array)


def joint_confidence(
    without: ArrayLike, confidence: float = 0.95, *, n_draws: int = 2000, seed: int = 0
) -> float:
    """Return the confidence of each of several jackknife intervals at which all hold at once.

    For the interval of a value that was chosen because it is the farthest of many: at 95 % by
    itself it holds the truth of 16 unrelated ones in half of all cases; one of a set that holds
    at once may be chosen by whatever it shows. It is ``2 Φ(c) - 1``, c the quantile of
    ``max_j |sum_b ξ_b d_jb| / |d_j|`` over draws of normal ξ, d the deviations of the values
    without each block from their mean (multiplier bootstrap, Chernozhukov, Chetverikov & Kato
    2013). `Interval.at` makes it a Student interval of each value's own degrees of freedom.
    ``confidence`` where there is one value, or none that varies.

    Args:
        without: ``(n_values, n_blocks)``, as for `from_replicates`; rows that are not finite do
            not count.
    """
    array = np.asarray(without, np.float64)
    if array.ndim != 2 or not 0 < confidence < 1:
        raise ValueError(f"values have shape {array.shape}, confidence is {confidence}")
    array = array[np.isfinite(array).all(axis=1)]
    about = array - array.mean(axis=1, keepdims=True)
    size = np.sqrt((about**2).sum(axis=1, keepdims=True))
    kept = size[:, 0] > 1e-12 * np.abs(array).max(axis=1, initial=0.0)
    if np.count_nonzero(kept) < 2:
        return confidence
    unit = (about[kept] / size[kept]).T
    random, largest = np.random.default_rng(seed), []
    for _ in range(0, n_draws, _DRAWS_AT_ONCE):
        drawn = random.standard_normal((_DRAWS_AT_ONCE, len(unit))) @ unit
        largest.append(np.abs(drawn).max(axis=1))
    c = float(np.quantile(np.concatenate(largest), confidence))
    return max(confidence, float(2 * special.ndtr(c) - 1))


def from_replicates(value: ArrayLike, without: ArrayLike) -> list[Interval | None]:
    """Return the jackknife's interval of each value, given the values without each block.

    For statistics that are more than a function of sums, as weights that are made anew without
    the block. None as `jackknife` says.

    Args:
        without: ``(n_covariates, n_blocks)``, at least two blocks.
    """
    values, replicated = np.asarray(value, np.float64), np.asarray(without, np.float64)
    if replicated.ndim != 2 or replicated.shape[:1] != values.shape or replicated.shape[1] < 2:
        raise ValueError(
            f"values have shape {values.shape} and {replicated.shape}; expected (n,) and "
            "(n, n_blocks)"
        )
    n = replicated.shape[1]
    good = np.isfinite(values) & np.isfinite(replicated).all(axis=1)
    results: list[Interval | None] = []
    for c in range(len(values)):
        if not good[c]:
            results.append(None)
            continue
        about = replicated[c] - replicated[c].mean()
        squares = float(about @ about)
        error = math.sqrt((n - 1) / n * squares)
        fourth = float(((about / np.abs(about).max()) ** 4).sum()) if squares > 0 else 0.0
        spread = squares / float(np.abs(about).max()) ** 2 if squares > 0 else 0.0
        freedom = max(1.0, min(n - 1.0, 3 * spread**2 / fourth - 1)) if fourth > 0 else n - 1.0
        half = _half(error, freedom, CONFIDENCE)
        at = float(values[c])
        results.append(Interval(at, at - half, at + half, error, n, freedom, CONFIDENCE))
    return results


def smd(sums: Floats) -> Floats:
    """Return the standardised mean difference: (mean of lost - mean of all) / sd of all.

    ``(lx / n_lost - sx / n) / sqrt(sxx / n - (sx / n)²)`` (Cohen 1988, with the deviation of all
    rows). NaN without a lost token or without variation. Centre covariates that lie far from 0
    before they are summed: the variance is a difference of sums, and below 1e-10 of the mean square
    it counts as none.

    Args:
        sums: ``(5, ...)``: n, sx, sxx over all tokens; n_lost, lx over the lost ones. For rows with
            weights w, put sum w and sum w x in place of the last two.
    """
    n, sx, sxx, n_lost, lx = sums
    mean = _ratio(sx, n)
    return _ratio(_ratio(lx, n_lost) - mean, _deviation(n, mean, sxx))


def smd_of_stored(sums: Floats) -> Floats:
    """Return (mean of stored - mean of all) / sd of all: what a mean over the dataset is off by.

    Equals ``-π / (1 - π)`` times `smd`, π the share lost. NaN without a stored token or without
    variation; 0 when nothing was lost.
    """
    n, sx, sxx, n_lost, lx = sums
    mean = _ratio(sx, n)
    # Not mean of stored less mean of all: that would cancel when little was lost.
    return _ratio(_ratio(n_lost * mean - lx, n - n_lost), _deviation(n, mean, sxx))


def difference_sums(
    blocks: Blocks, n: ArrayLike, sx: ArrayLike, sxx: ArrayLike, n_lost: ArrayLike, lx: ArrayLike
) -> Floats:
    """Return the sums ``(5, n_covariates, n_blocks)`` that `smd` takes, over blocks.

    Args:
        n: ``(n_steps,)`` or ``(n_covariates, n_steps)``, computed tokens, or those with a value.
        sx: ``(n_covariates, n_steps)``, sums of the covariates.
        n_lost: ``(n_steps,)`` or ``(n_covariates, n_steps)``, lost tokens.
    """
    parts = [block_sums(v, blocks.labels, blocks.n_blocks) for v in (n, sx, sxx, n_lost, lx)]
    shape = np.broadcast_shapes(*(np.atleast_2d(part).shape for part in parts))
    return np.stack([np.broadcast_to(part, shape) for part in parts])


def loss_rate(sums: Floats) -> Floats:
    """Return the share lost of ``(2, ...)``: n, n_lost. NaN without a token."""
    return _ratio(sums[1], sums[0])


def _deviation(n: Floats, mean: Floats, sxx: Floats) -> Floats:
    square = _ratio(sxx, n)
    variance = square - mean**2
    with np.errstate(invalid="ignore"):
        varies = variance > 1e-10 * square
    return np.asarray(np.sqrt(np.where(varies, variance, 0.0)), np.float64)


def _ratio(top: ArrayLike, bottom: ArrayLike) -> Floats:
    """Return top / bottom, NaN where bottom is not above rounding."""
    a, b = np.broadcast_arrays(np.asarray(top, np.float64), np.asarray(bottom, np.float64))
    ratio = np.full(b.shape, np.nan)
    np.divide(a, b, out=ratio, where=b > 1e-12)
    return ratio


def _half(error: float, freedom: float, confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; expected a number between 0 and 1")
    return float(special.stdtrit(freedom, (1 + confidence) / 2)) * error


def error_of_draws(n: float, n_lost: float, n_events: float) -> float:
    """Return the standard error of the stored rows' bias if each event were one row at random.

    ``π / (1 - π) / sqrt(n_events)``, in standard deviations of all rows, π the share lost: the mean
    over lost rows that have nothing to do with what is asked is off by ``1 / sqrt(n_events)`` at
    most, which is that of events whose rows are all alike, and the mean over the stored ones by
    ``π / (1 - π)`` times as much. A floor for the jackknife's: blocks of which few lost anything
    may agree by chance.

    Args:
        n_events: effective events (`effective_events`), above 0.
    """
    return n_lost / (n - n_lost) / math.sqrt(n_events)


def at_least(interval: Interval, error: float, confidence: float) -> Interval:
    """Return an interval of another confidence, with a standard error of at least so much."""
    return replace(interval, error=max(interval.error, error)).at(confidence)


def detectable(error: float, power: float = 0.8, alpha: float = 0.05) -> float:
    """Return the smallest difference that a two-sided test finds with a probability of ``power``.

    ``(z_{1 - alpha/2} + z_power) error`` (Bloom 1995), 2.8 standard errors by default.
    """
    if error < 0 or not 0.5 <= power < 1 or not 0 < alpha < 1:
        raise ValueError(f"error {error}, power {power}, alpha {alpha}; out of range")
    return float(special.ndtri(1 - alpha / 2) + special.ndtri(power)) * error


def benjamini_hochberg(p: ArrayLike) -> Floats:
    """Return adjusted p-values: rejecting those up to q keeps the false discovery rate at q.

    ``adjusted_(i) = min_{j >= i} m p_(j) / j`` over the sorted p (Benjamini & Hochberg 1995), at
    most 1; valid for independent or positively dependent tests (Benjamini & Yekutieli 2001).
    """
    values = as_floats(p, "p")
    if values.ndim != 1 or np.any((values < 0) | (values > 1)):
        raise ValueError("p-values must lie between 0 and 1, in one axis")
    m = len(values)
    order = np.argsort(values)
    raw = values[order] * m / np.arange(1, m + 1)
    adjusted = np.empty(m)
    adjusted[order] = np.minimum(np.minimum.accumulate(raw[::-1])[::-1], 1.0)
    return adjusted


def worst_case(loss_share: float) -> float:
    """Return the largest bias of a mean over stored rows, in standard deviations of ALL rows.

    Let π be the share lost, μ and σ mean and deviation of any function of a row over all rows, μ_s
    and μ_l its means over the stored and the lost ones. Then ``μ = (1 - π) μ_s + π μ_l``, so
    ``μ_s - μ = π (μ_s - μ_l)``. The variance between the two groups is at most the whole one:
    ``π (1 - π) (μ_s - μ_l)² <= σ²``. Together ``|μ_s - μ| <= σ sqrt(π / (1 - π))``, with equality
    when the function is constant on each group. Nothing is assumed on why rows were lost. (In
    deviations of the stored rows there is no such bound: those may all be equal.)
    """
    if not 0 <= loss_share < 1:
        raise ValueError(f"loss share is {loss_share}; expected at least 0 and below 1")
    return math.sqrt(loss_share / (1 - loss_share))


def farthest_mean(n: float, effective: float) -> float:
    """Return the most that a mean over some of the rows can lie from that of ALL, in their SD.

    With weights v that sum to 1 over n rows, 0 on those left out, the difference is
    ``sum (v - 1/n) (x - μ)``, at most ``σ sqrt(n sum v² - 1)`` by Cauchy and Schwarz, and
    ``1 / sum v²`` is the number of effective rows. For the stored rows, each of the same weight,
    it is `worst_case`.

    Args:
        effective: effective rows of the mean, above 0 and at most n.
    """
    if not 0 < effective <= n * (1 + 1e-9):
        raise ValueError(f"{effective} effective rows of {n}; expected above 0 and at most all")
    return math.sqrt(max(0.0, n / effective - 1))


def loss_that_allows(bias: float) -> float:
    """Return the share of loss up to which no mean is off by more than ``bias``.

    The inverse of `worst_case`: ``bias² / (1 + bias²)``.
    """
    if not bias >= 0 or math.isinf(bias):
        raise ValueError(f"bias is {bias}; expected a number, at least 0")
    return bias**2 / (1 + bias**2)


# scales of what is never negative, and of shares ------------------------------------------------

Scale = Literal["linear", "log", "logit"]


def to_scale(value: Floats | float, scale: Scale) -> Floats:
    function = {"linear": np.asarray, "log": np.log, "logit": special.logit}[scale]
    return np.asarray(function(np.asarray(value, np.float64)))


def ends(value: Floats, error: Floats, quantile: float, scale: Scale) -> tuple[Floats, Floats]:
    """Return lower and upper end of intervals ``(...)``, symmetric on a scale.

    The error there is the first term of the delta method: ``error / value`` of a logarithm and
    ``error / (value (1 - value))`` of a logit. Where nothing varies both ends are the value. A
    value at an end of the scale, or so near that there is no number for the other end, has the
    linear interval, as far as there are such values.
    """
    back = {"linear": np.asarray, "log": np.exp, "logit": special.expit}[scale]
    least, most = {"linear": (-np.inf, np.inf), "log": (0, np.inf), "logit": (0, 1)}[scale]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        half = quantile * error * slope(value, scale)
        at = to_scale(value, scale)
        low, high = (np.where(error > 0, back(at + step), value) for step in (-half, half))
    fine = np.isfinite(low) & np.isfinite(high)
    step = np.where(error > 0, quantile * error, 0.0)
    linear = (np.clip(value + by, least, most) for by in (-step, step))
    low, high = (np.where(fine, curved, by) for curved, by in zip((low, high), linear, strict=True))
    return low, high


def slope(value: Floats | float, scale: Scale) -> Floats:
    if scale == "linear":
        return np.ones(np.shape(value))
    return np.asarray(1 / value if scale == "log" else 1 / (value * (1 - value)))
