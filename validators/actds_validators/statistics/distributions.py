"""Distributions: their tails and quantiles, how far two lie apart, and bounds on a mean.

scipy.special alone: scipy.stats takes a second to import. The naive tests here take tokens for
independent draws. They are not: these never decide anything, and are shown beside the tests that
do, because they are what a reader would have computed: whole-step losses in bursts make them
reject nearly always.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import special  # type: ignore[import-untyped]

from actds_validators.statistics.events import Floats, as_floats


def normal_quantile(p: float) -> float:
    """Return the quantile of the standard normal."""
    return float(special.ndtri(p))


def normal_two_sided(z: float) -> float:
    """Return P(|Z| >= z) of the standard normal."""
    return float(2 * special.ndtr(-abs(z)))


def student_quantile(p: float, freedom: float) -> float:
    """Return the quantile of Student's t."""
    return float(special.stdtrit(freedom, p))


def student_two_sided(t: float, freedom: float) -> float:
    """Return P(|T| >= t) of Student's t."""
    return float(2 * special.stdtr(freedom, -abs(t)))


def chi_square_tail(statistic: float, freedom: float) -> float:
    """Return P(X >= statistic) of the chi-square distribution."""
    return float(special.chdtrc(freedom, statistic))


def kolmogorov_tail(statistic: float) -> float:
    """Return P(sup |B(t)| >= statistic) of a Brownian bridge B."""
    return float(special.kolmogorov(statistic))


def total_variation(first: ArrayLike, second: ArrayLike) -> float | None:
    """Return ``1/2 sum |p - q|``: 0 equal, 1 disjoint; None when a histogram is empty.

    Args:
        first: ``(n_bins,)``, weights, at least 0; normalised here.
        second: as first.

    Raises:
        ValueError: shapes that differ, a negative weight or one that is not finite.
    """
    pair = _normalised(first, second)
    return None if pair is None else min(1.0, float(np.abs(pair[0] - pair[1]).sum() / 2))


def jensen_shannon(first: ArrayLike, second: ArrayLike) -> float | None:
    """Return the Jensen-Shannon distance, base 2: 0 equal, 1 disjoint; None when one is empty.

    ``sqrt(KL(p, m) / 2 + KL(q, m) / 2)`` with ``m = (p + q) / 2`` (Lin 1991; its root is a metric:
    Endres & Schindelin 2003). Between finite samples of one distribution it is above 0, by about
    ``sqrt((n_bins - 1) (1/n_1 + 1/n_2) / (8 ln 2))``.

    Args:
        first: ``(n_bins,)``, weights, at least 0; normalised here.
        second: as first.

    Raises:
        ValueError: shapes that differ, a negative weight or one that is not finite.
    """
    pair = _normalised(first, second)
    if pair is None:
        return None
    middle = (pair[0] + pair[1]) / 2
    divergence = 0.0
    for p in pair:
        held = p > 0
        divergence += float((p[held] * np.log2(p[held] / middle[held])).sum()) / 2
    return math.sqrt(min(max(divergence, 0.0), 1.0))


def _normalised(first: ArrayLike, second: ArrayLike) -> tuple[Floats, Floats] | None:
    p = as_floats(first, "first")
    q = as_floats(second, "second", p.shape)
    if np.any(p < 0) or np.any(q < 0):
        raise ValueError("a histogram has a negative weight")
    if p.sum() <= 0 or q.sum() <= 0:
        return None
    return p / p.sum(), q / q.sum()


def worst_case(loss_share: float) -> float:
    """Return the largest bias of a mean over stored rows, in standard deviations of ALL rows.

    Let π be the share lost, μ and σ mean and deviation of any function of a row over all rows, μ_s
    and μ_l its means over the stored and the lost ones. Then ``μ = (1 - π) μ_s + π μ_l``, so
    ``μ_s - μ = π (μ_s - μ_l)``. The variance between the two groups is at most the whole one:
    ``π (1 - π) (μ_s - μ_l)² <= σ²``. Together ``|μ_s - μ| <= σ sqrt(π / (1 - π))``, with equality
    when the function is constant on each group. Nothing is assumed on why rows were lost. (In
    deviations of the stored rows there is no such bound: those may all be equal.)

    Args:
        loss_share: π, at least 0 and below 1.

    Raises:
        ValueError: a share outside [0, 1).
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
        n: rows in all.
        effective: effective rows of the mean, above 0 and at most n.

    Raises:
        ValueError: effective rows that are not.
    """
    if not 0 < effective <= n * (1 + 1e-9):
        raise ValueError(f"{effective} effective rows of {n}; expected above 0 and at most all")
    return math.sqrt(max(0.0, n / effective - 1))


def loss_that_allows(bias: float) -> float:
    """Return the share of loss up to which no mean is off by more than ``bias``.

    The inverse of `worst_case`: ``bias² / (1 + bias²)``.

    Args:
        bias: in standard deviations of all rows, at least 0.

    Raises:
        ValueError: a negative bias.
    """
    if not bias >= 0 or math.isinf(bias):
        raise ValueError(f"bias is {bias}; expected a number, at least 0")
    return bias**2 / (1 + bias**2)


def naive_z(sums: ArrayLike) -> float | None:
    """Return the p of lost against stored tokens as if they were independent; never decides.

    The score test ``z = r sqrt(n)``, r the correlation of the covariate with being lost. None when
    nothing or everything was lost, or without variation.

    Args:
        sums: ``(5,)``: n, sx, sxx, n_lost, lx.

    Raises:
        ValueError: another shape or a value that is not finite.
    """
    n, sx, sxx, n_lost, lx = as_floats(sums, "sums", (5,)).tolist()
    if not 0 < n_lost < n:
        return None
    variance = sxx / n - (sx / n) ** 2
    if variance <= 1e-10 * sxx / n:
        return None
    rate = n_lost / n
    covariance = lx / n - rate * sx / n
    return normal_two_sided(covariance / math.sqrt(variance * rate * (1 - rate)) * math.sqrt(n))


def naive_chi_square(n: ArrayLike, n_lost: ArrayLike) -> float | None:
    """Return the p of equal loss rates over cells as if tokens were independent; never decides.

    Pearson's chi-square of the 2 x g table. None when nothing or everything was lost, or fewer than
    two cells have a token.

    Args:
        n: ``(g,)``, computed tokens of each cell.
        n_lost: ``(g,)``, lost ones.

    Raises:
        ValueError: shapes that differ, a value that is not finite, more lost than computed.
    """
    count = as_floats(n, "n")
    gone = as_floats(n_lost, "n_lost", count.shape)
    if np.any(gone < 0) or np.any(gone > count):
        raise ValueError("lost tokens must lie between 0 and the computed tokens of each cell")
    held = count > 0
    count, gone = count[held], gone[held]
    total, total_lost = float(count.sum()), float(gone.sum())
    if len(count) < 2 or not 0 < total_lost < total:
        return None
    rate = total_lost / total
    statistic = float(((gone - rate * count) ** 2 / (count * rate * (1 - rate))).sum())
    return chi_square_tail(statistic, len(count) - 1)
