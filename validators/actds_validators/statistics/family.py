"""Many tests at once.

Imports numpy alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from actds_validators.statistics.runs import Floats, as_floats

__all__ = ["benjamini_hochberg"]


def benjamini_hochberg(p: ArrayLike) -> Floats:
    """Return adjusted p-values: rejecting those up to q keeps the false discovery rate at q.

    ``adjusted_(i) = min_{j >= i} m p_(j) / j`` over the sorted p (Benjamini & Hochberg 1995), at
    most 1; valid for independent or positively dependent tests (Benjamini & Yekutieli 2001).

    Args:
        p: ``(m,)``, may be empty.

    Raises:
        ValueError: a p outside 0 to 1.
    """
    found = as_floats(p, "p")
    if found.ndim != 1 or np.any((found < 0) | (found > 1)):
        raise ValueError("p-values must lie between 0 and 1, in one axis")
    m = len(found)
    order = np.argsort(found)
    raw = found[order] * m / np.arange(1, m + 1)
    adjusted = np.empty(m)
    adjusted[order] = np.minimum(np.minimum.accumulate(raw[::-1])[::-1], 1.0)
    return adjusted
