"""Effective partners: in how many features of another dictionary a feature is found again.

One that is there as it is has 1; one that is split in two equal halves has 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from actds_validators.statistics.events import Floats

if TYPE_CHECKING:
    from scipy.sparse import csr_array  # type: ignore[import-untyped]

__all__ = ["MIN_EVENTS", "correlations", "effective_partners", "split_and_merge"]

MIN_EVENTS = 20
"""Rows on which a feature is active at least, to have a correlation that means something."""
_BLOCK = 1024


def split_and_merge(first: csr_array, second: csr_array) -> tuple[float | None, float | None]:
    """Return the median effective partners of the features of each dictionary in the other.

    Args:
        first: features of rows, ``(n, n_features)``.
        second: those of the other dictionary of the same rows.

    Returns:
        Of the first's features in the second (split) and of the second's in the first (merge);
        None where no feature has a partner.
    """
    frequent = [
        features[:, np.flatnonzero(np.bincount(features.indices, minlength=features.shape[1])
                                   >= MIN_EVENTS)]
        for features in (first, second)
    ]  # fmt: skip
    found = []
    for one, other in (frequent, frequent[::-1]):
        partners = effective_partners(one, other)
        partners = partners[np.isfinite(partners)]
        found.append(float(np.median(partners)) if len(partners) else None)
    return found[0], found[1]


def effective_partners(first: csr_array, second: csr_array) -> Floats:
    """Return the effective partners of each feature of the first ``(n_features,)``.

    The exponential of the entropy of its squared positive correlations, normalised. NaN for a
    feature that correlates with none.
    """
    parts = [np.empty(0)]
    for at in range(0, first.shape[1], _BLOCK):
        weight = np.square(np.maximum(correlations(first[:, at : at + _BLOCK], second), 0))
        total = weight.sum(axis=1, keepdims=True)
        share = np.divide(weight, total, out=np.zeros_like(weight), where=total > 0)
        logs = np.log(share, out=np.zeros_like(share), where=share > 0)
        entropy = -(share * logs).sum(axis=1)
        parts.append(np.where(total[:, 0] > 0, np.exp(entropy), np.nan))
    return np.concatenate(parts)


def correlations(first: csr_array, second: csr_array) -> Floats:
    """Return Pearson's correlations of features over rows ``(n_first, n_second)``.

    0 for a feature that does not vary.

    Args:
        first: ``(n, n_first)``.
        second: ``(n, n_second)``.
    """
    n = first.shape[0]
    one, other = first.astype(np.float64), second.astype(np.float64)
    means = [np.asarray(x.sum(axis=0)).reshape(-1) / n for x in (one, other)]
    squares = [np.asarray((x * x).sum(axis=0)).reshape(-1) / n for x in (one, other)]
    spread = [
        np.sqrt(np.maximum(s - m * m, 0)) for s, m in zip(squares, means, strict=True)
    ]  # fmt: skip
    covariance = (one.T @ other).toarray() / n - np.outer(means[0], means[1])
    scale = np.outer(spread[0], spread[1])
    floor = 1e-12 * np.sqrt(np.outer(squares[0], squares[1]))
    return np.asarray(
        np.divide(covariance, scale, out=np.zeros_like(covariance), where=scale > floor)
    )
