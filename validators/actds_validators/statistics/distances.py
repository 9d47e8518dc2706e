"""How far two distributions over the same bins lie apart.

Imports `runs`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from actds_validators.statistics.runs import Floats, as_floats

__all__ = ["jensen_shannon", "total_variation"]


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
