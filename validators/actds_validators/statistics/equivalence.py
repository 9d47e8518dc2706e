"""What an interval proves, and what a test could have found.

Imports `distributions` and `jackknife`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from actds_validators.statistics.distributions import normal_quantile
from actds_validators.statistics.jackknife import Interval

__all__ = ["at_least", "detectable", "equivalent", "error_of_draws"]


def equivalent(interval: Interval, delta: float, alpha: float = 0.05) -> bool:
    """Return whether two one-sided tests prove a value to lie within ±delta, at level alpha.

    TOST (Schuirmann 1987): both one-sided tests reject exactly when the interval of confidence
    ``1 - 2 alpha`` lies inside ``(-delta, delta)``. That a test of no difference does not reject
    proves nothing; this does.

    Args:
        interval: at any confidence; it is put to ``1 - 2 alpha``.
        delta: in the unit of the value, above 0.
        alpha: level, below 0.5.

    Raises:
        ValueError: a delta not above 0, or an alpha outside (0, 0.5).
    """
    if delta <= 0 or not 0 < alpha < 0.5:
        raise ValueError(f"delta {delta}, alpha {alpha}; expected above 0, and between 0 and 0.5")
    at = interval.at(1 - 2 * alpha)
    return -delta < at.low and at.high < delta


def error_of_draws(n: float, n_lost: float, n_events: float) -> float:
    """Return the standard error of the stored rows' bias if each event were one row at random.

    ``π / (1 - π) / sqrt(n_events)``, in standard deviations of all rows, π the share lost: the mean
    over lost rows that have nothing to do with what is asked is off by ``1 / sqrt(n_events)`` at
    most, which is that of events whose rows are all alike, and the mean over the stored ones by
    ``π / (1 - π)`` times as much. A floor for the jackknife's: blocks of which few lost anything
    may agree by chance.

    Args:
        n: rows in all.
        n_lost: lost ones, below n.
        n_events: effective events (`events.effective_events`), above 0.
    """
    return n_lost / (n - n_lost) / math.sqrt(n_events)


def at_least(interval: Interval, error: float, confidence: float) -> Interval:
    """Return an interval of another confidence, with a standard error of at least so much.

    Raises:
        ValueError: a confidence outside (0, 1).
    """
    return replace(interval, error=max(interval.error, error)).at(confidence)


def detectable(error: float, power: float = 0.8, alpha: float = 0.05) -> float:
    """Return the smallest difference that a two-sided test finds with a probability of ``power``.

    ``(z_{1 - alpha/2} + z_power) error`` (Bloom 1995), 2.8 standard errors by default.

    Args:
        error: standard error of the estimate, at least 0.
        power: between 0.5 and 1.
        alpha: level.

    Raises:
        ValueError: an argument out of its range.
    """
    if error < 0 or not 0.5 <= power < 1 or not 0 < alpha < 1:
        raise ValueError(f"error {error}, power {power}, alpha {alpha}; out of range")
    return (normal_quantile(1 - alpha / 2) + normal_quantile(power)) * error
