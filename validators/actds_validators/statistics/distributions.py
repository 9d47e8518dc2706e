"""Tails and quantiles of the distributions that the tests refer to.

Imports scipy.special alone: scipy.stats takes a second to import.
"""

from __future__ import annotations

from scipy import special  # type: ignore[import-untyped]

__all__ = [
    "chi_square_tail",
    "kolmogorov_tail",
    "normal_quantile",
    "normal_two_sided",
    "student_quantile",
    "student_two_sided",
]


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
