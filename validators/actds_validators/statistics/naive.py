"""Tests that take tokens for independent draws. They are not: these never decide anything.

Shown beside the tests that do, because they are what a reader would have computed: whole-step
losses in bursts make them reject nearly always. Imports `distributions` and `runs`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from actds_validators.statistics.distributions import chi_square_tail, normal_two_sided
from actds_validators.statistics.runs import as_floats

__all__ = ["naive_chi_square", "naive_z"]


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
