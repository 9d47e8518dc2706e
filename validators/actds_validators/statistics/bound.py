"""The most that any mean can be off, whatever was lost.

Imports nothing of the project.
"""

from __future__ import annotations

import math

__all__ = ["farthest_mean", "loss_that_allows", "worst_case"]


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
