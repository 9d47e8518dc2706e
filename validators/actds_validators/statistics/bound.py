"""The most that any mean can be off, whatever was lost.

Imports nothing of the project.
"""

from __future__ import annotations

import math

__all__ = ["loss_that_allows", "worst_case"]


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
