"""Weights that put stored rows in the place of lost ones of the same cell.

Imports `runs`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from actds_validators.statistics.runs import Floats, as_floats

__all__ = ["effective_rows", "inverse_probability", "prior_strength", "shrunken_rates"]


def effective_rows(weights: ArrayLike, rows: ArrayLike | None = None) -> float:
    """Return ``(sum w)² / sum w²``: as many rows of equal weight have a mean as exact (Kish 1965).

    0 without a weight above 0.

    Args:
        weights: ``(k,)``, at least 0.
        rows: ``(k,)``, rows that have each weight; one each by default.

    Raises:
        ValueError: shapes that differ, a negative value or one that is not finite.
    """
    w = as_floats(weights, "weights")
    n = np.ones_like(w) if rows is None else as_floats(rows, "rows", w.shape)
    if np.any(w < 0) or np.any(n < 0):
        raise ValueError("weights and rows must be at least 0")
    squares = float((n * w**2).sum())
    return float((n * w).sum()) ** 2 / squares if squares > 0 else 0.0


def prior_strength(n: ArrayLike, n_lost: ArrayLike) -> float:
    """Return the tokens that the common loss rate counts for, beta-binomial method of moments.

    With ``S = sum n (r - r̄)²`` over the g cells of rate r, ``N = sum n`` and r̄ the common rate,
    ``E S = r̄ (1 - r̄) ((g - 1) (1 - ρ) + ρ (N - sum n² / N)) `` where ρ is the correlation of two
    tokens of one cell (Kleinman 1973, with weights n); the strength is ``1 / ρ - 1``, the α + β of
    the beta distribution. Infinite when cells differ by no more than chance, or fewer than two have
    a token, or nothing or everything was lost.

    Losses come in bursts, so tokens of a cell go together and the strength is rather too small than
    too large: divide both counts by the burst's tokens to count bursts.

    Args:
        n: ``(g,)``, computed tokens.
        n_lost: ``(g,)``, lost ones.

    Raises:
        ValueError: shapes that differ, a value that is not finite, more lost than computed.
    """
    count, gone = _counts(n, n_lost)
    held = count > 0
    count, gone = count[held], gone[held]
    total = float(count.sum())
    common = float(gone.sum()) / total if total > 0 else 0.0
    g = len(count)
    if g < 2 or not 0 < common < 1:
        return math.inf
    spread = float((count * (gone / count - common) ** 2).sum()) / (common * (1 - common))
    room = total - float((count**2).sum()) / total
    if room <= g - 1:
        return math.inf
    rho = (spread - (g - 1)) / (room - (g - 1))
    return math.inf if rho <= 0 else max(0.0, 1 / rho - 1)


def shrunken_rates(n: ArrayLike, n_lost: ArrayLike, strength: float | None = None) -> Floats:
    """Return the loss rate of each cell, drawn to the common rate.

    ``(n_lost + strength r̄) / (n + strength)``: the posterior mean of a beta-binomial model
    (empirical Bayes, Robbins 1956; Morris 1983), with `prior_strength` by default. A cell without a
    token has the common rate.

    Args:
        n: computed tokens of each cell, any shape.
        n_lost: lost ones.
        strength: tokens that the common rate counts for, at least 0, may be infinite.

    Raises:
        ValueError: no token at all, shapes that differ, a value that is not finite, more lost than
            computed, or a negative strength.
    """
    count, gone = _counts(n, n_lost)
    if count.sum() <= 0:
        raise ValueError("no cell has a token")
    common = float(gone.sum() / count.sum())
    prior = prior_strength(count.ravel(), gone.ravel()) if strength is None else strength
    if not prior >= 0:
        raise ValueError(f"strength is {strength}; expected at least 0")
    if math.isinf(prior):
        return np.full(count.shape, common)
    mass = count + prior
    found = np.full(count.shape, common)
    np.divide(gone + prior * common, mass, out=found, where=mass > 0)
    return found


def inverse_probability(
    n: ArrayLike, n_lost: ArrayLike, strength: float | None = None
) -> Floats | None:
    """Return the weight of a stored row of each cell, 1 in the mean over stored rows.

    ``1 / (1 - rate)`` with the rate of `shrunken_rates` (Horvitz & Thompson 1952), divided by its
    mean over the stored rows (Hájek 1971). 0 for a cell without a stored row: nothing can stand for
    what it lost. None when no row is stored.

    Args:
        n: computed tokens of each cell, any shape.
        n_lost: lost ones.
        strength: as `shrunken_rates`.

    Raises:
        ValueError: as `shrunken_rates`.
    """
    count, gone = _counts(n, n_lost)
    stored = count - gone
    if stored.sum() <= 0:
        return None
    kept = 1 - shrunken_rates(count, gone, strength)
    weights = np.divide(1.0, kept, out=np.zeros(count.shape), where=stored > 0)
    return np.asarray(weights * (stored.sum() / (weights * stored).sum()), np.float64)


def _counts(n: ArrayLike, n_lost: ArrayLike) -> tuple[Floats, Floats]:
    count = as_floats(n, "n")
    gone = as_floats(n_lost, "n_lost", count.shape)
    if np.any(gone < 0) or np.any(gone > count):
        raise ValueError("lost tokens must lie between 0 and the computed tokens of each cell")
    return count, gone
