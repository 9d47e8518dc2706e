"""How alike two dictionaries are: directions matched one to one, and what became of features.

Directions are matched so that their cosines add up to most.

A feature is kept when one feature of the other dictionary explains 70 % of the variance of its
activations over the same rows. It is split into k when k features together do, each of which
explains 10 % or more and none 70 %; merged when it is one of those into which a feature of the
other is split; and gone when it is none of these.

Features are added one by one, each time the one that explains most of what is left and rises with
it, by least squares (orthogonal matching pursuit). So two features of one dictionary that are often
active together make no split: the first one added has explained both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from actds_studies.stability.result import Features
from actds_validators.arrays import Bools, Floats, Ints

if TYPE_CHECKING:
    from scipy.sparse import csr_array  # type: ignore[import-untyped]


@dataclass(frozen=True)
class Matched:
    """The best matching of two sets of directions.

    Args:
        cosine: cosine of each pair ``(n_pairs,)``.
        n: directions of the larger set: those without a partner count 0 in means and shares.
        nearest: mean over both sets of the largest cosine that a direction has in the other.
        pairs: which directions ``(n_pairs, 2)``.
    """

    cosine: Floats
    n: int
    nearest: float
    pairs: Ints

    @property
    def mean(self) -> float:
        return float(self.cosine.sum()) / self.n if self.n else 0.0

    def share(self, least: float) -> float:
        """Return the share of directions matched at a cosine of ``least`` or more."""
        return float((self.cosine >= least).sum()) / self.n if self.n else 0.0


def cosines(first: npt.NDArray[np.floating], second: npt.NDArray[np.floating]) -> Floats:
    """Return the cosines of directions ``(n_first, d)`` and ``(n_second, d)``."""
    first_unit, second_unit = (
        a / np.maximum(np.linalg.norm(a, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        for a in (np.asarray(first, np.float64), np.asarray(second, np.float64))
    )
    return np.asarray(first_unit @ second_unit.T)


def match(similarity: Floats) -> Matched:
    """Return the one-to-one matching of the largest sum (the Hungarian method).

    Args:
        similarity: ``(n_first, n_second)``, may have no rows or columns.
    """
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    n_first, n_second = similarity.shape
    if not similarity.size:
        return Matched(np.empty(0), max(n_first, n_second), 0.0, np.empty((0, 2), np.int64))
    pairs = linear_sum_assignment(similarity, maximize=True)
    nearest = np.concatenate([similarity.max(axis=1), similarity.max(axis=0)]).mean()
    return Matched(
        similarity[pairs], max(n_first, n_second), float(nearest), np.stack(pairs, axis=1)
    )


def chance(n: int, d_model: int) -> float:
    """Return the mean cosine of two sets of ``n`` random directions, matched."""
    rng = np.random.Generator(np.random.Philox(0))
    return match(cosines(rng.normal(size=(n, d_model)), rng.normal(size=(n, d_model)))).mean


def match_directions(
    first: npt.NDArray[np.floating], second: npt.NDArray[np.floating], alive: tuple[Bools, Bools]
) -> Matched:
    """Return the matching of the directions that are alive.

    A feature that never was active is where it started: two dictionaries of one start would share
    it for that alone.
    """
    matched = match(cosines(first[alive[0]], second[alive[1]]))
    pairs = [np.flatnonzero(of)[at] for of, at in zip(alive, matched.pairs.T, strict=True)]
    return replace(matched, pairs=np.stack(pairs, axis=1))


MIN_EVENTS = 20
"""Rows on which a feature is active at least, to have a correlation that means something."""
EXPLAINED = 0.7
"""Share of a feature's variance that others explain when they do its work."""
PART = 0.1
"""Share that each of several explains at least."""
MOST = 6
"""Parts of a feature that are looked for."""
N_PARTS = ((2, 2), (3, 3), (4, MOST))
"""Numbers of parts of which the result gives the shares, first and last."""
_BLOCK = 512
_CONSTANT = 1e-12  # variance over the mean square of what does not vary
_INDEPENDENT = 1e-6  # variance that a candidate has left; a copy of a chosen one explains nothing


def features_of(first: csr_array, second: csr_array) -> Features | None:
    """Return what became of the first dictionary's features in the second.

    Features that are active on fewer than ``MIN_EVENTS`` rows are counted on neither side.

    Args:
        first: features of rows, ``(n, n_features)``.
        second: those of the other dictionary of the same rows.

    Returns:
        Shares of the first's features that are counted; None where none is.
    """
    first, second = _counted(first), _counted(second)
    n = first.shape[1]
    if not n:
        return None
    cross = correlations(first, second)
    n_parts, _ = parts_of(cross, correlations(second, second))
    of_second, parts = parts_of(cross.T, correlations(first, first))
    # The fewest features that one is merged with, itself counted; 0 where it is in no merger.
    merged = np.zeros(n, np.int64)
    for k in range(MOST, 1, -1):
        merged[parts[of_second == k, :k].ravel()] = k
    merged[n_parts > 0] = 0
    return Features(
        n=n,
        kept=float((n_parts == 1).sum()) / n,
        split=float((n_parts > 1).sum()) / n,
        merged=float((merged > 0).sum()) / n,
        gone=float(((n_parts == 0) & (merged == 0)).sum()) / n,
        split_into=[float(((n_parts >= a) & (n_parts <= b)).sum()) / n for a, b in N_PARTS],
        merged_from=[float(((merged >= a) & (merged <= b)).sum()) / n for a, b in N_PARTS],
    )


def parts_of(cross: Floats, within: Floats) -> tuple[Ints, Ints]:
    """Return how many features of the second dictionary explain each of the first, and which.

    Args:
        cross: correlations of the first's features with the second's ``(n_first, n_second)``.
        within: correlations of the second's ``(n_second, n_second)``.

    Returns:
        The number ``(n_first,)``: 1 for one that does alone, 0 where they do not; and the features
        in the order in which they were added ``(n_first, MOST)``, -1 for none.
    """
    n_first, n_second = cross.shape
    n_parts, chosen = np.zeros(n_first, np.int64), np.full((n_first, MOST), -1)
    for at in range(0, n_first if n_second else 0, _BLOCK):
        block = slice(at, at + _BLOCK)
        n_parts[block], chosen[block] = _added(cross[block], within)
    return n_parts, chosen


def _added(left: Floats, within: Floats) -> tuple[Ints, Ints]:
    """Return `parts_of` features by their correlations with the candidates.

    Args:
        left: correlations with the candidates ``(m, n)``.
        within: correlations of the candidates ``(n, n)``.
    """
    m, n = left.shape
    every = np.arange(m)
    n_added, chosen = np.zeros(m, np.int64), np.full((m, MOST), -1)
    explained, free = np.zeros(m), np.ones((m, n))  # of a candidate: not explained by those chosen
    directions: list[Floats] = []  # of those chosen, each freed of the ones before it
    going: Bools = np.ones(m, np.bool_)
    for k in range(min(MOST, n)):
        usable = (left > 0) & (free > _INDEPENDENT)
        gain = np.divide(np.square(left), free, out=np.zeros_like(left), where=usable)
        best = gain.argmax(axis=1)
        going &= gain[every, best] >= PART
        chosen[going, k] = best[going]
        explained[going] += gain[every, best][going]
        n_added[going] += 1
        going &= (k > 0) | (explained < EXPLAINED)  # one that does alone has no parts
        if not going.any():
            break
        direction = within[best].copy()
        for before in directions:
            direction -= before[every, best][:, None] * before
        length = np.sqrt(np.maximum(free[every, best], _INDEPENDENT))
        direction /= length[:, None]
        left = left - (left[every, best] / length)[:, None] * direction
        free = free - np.square(direction)
        directions.append(direction)
    return np.where(explained >= EXPLAINED, n_added, 0), chosen


def _counted(features: csr_array) -> csr_array:
    events = np.bincount(features.indices, minlength=features.shape[1])
    _, spread = _moments(features)
    return features[:, np.flatnonzero((events >= MIN_EVENTS) & (spread > 0))]


def _moments(features: csr_array) -> tuple[Floats, Floats]:
    values = features.astype(np.float64)
    sums = (np.asarray(x.sum(axis=0)).reshape(-1) for x in (values, values * values))
    mean, square = (total / features.shape[0] for total in sums)
    variance = square - np.square(mean)
    return mean, np.sqrt(np.where(variance > _CONSTANT * square, variance, 0))


def correlations(first: csr_array, second: csr_array) -> Floats:
    """Return Pearson's correlations of features over rows ``(n_first, n_second)``.

    0 for a feature that does not vary.

    Args:
        first: ``(n, n_first)``.
        second: ``(n, n_second)``.
    """
    n = first.shape[0]
    (mean, spread), (other_mean, other_spread) = _moments(first), _moments(second)
    scale, other_scale = (
        np.divide(1, s, out=np.zeros_like(s), where=s > 0) for s in (spread, other_spread)
    )
    result = np.empty((first.shape[1], second.shape[1]))
    turned, values = first.astype(np.float64).T.tocsr(), second.astype(np.float64)
    for at in range(0, len(result), _BLOCK):
        block = slice(at, at + _BLOCK)
        covariance = (turned[block] @ values).toarray()
        covariance /= n
        covariance -= np.outer(mean[block], other_mean)
        covariance *= scale[block, None]
        covariance *= other_scale
        result[block] = covariance
    return result
