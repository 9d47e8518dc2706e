"""Matching: directions of two dictionaries, one to one, so that their cosines add up to most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actds_validators.arrays import Bools, Floats, Ints


@dataclass(frozen=True)
class Matched:
    """The best matching of two sets of directions.

    Args:
        first: indices into the first ``(n_pairs,)``.
        second: their partners in the second ``(n_pairs,)``.
        cosine: cosine of each pair ``(n_pairs,)``.
        n: directions of the larger set: those without a partner count 0 in means and shares.
        nearest: mean over both sets of the largest cosine that a direction has in the other.
    """

    first: Ints
    second: Ints
    cosine: Floats
    n: int
    nearest: float

    @property
    def mean(self) -> float:
        """Return the mean cosine."""
        return float(self.cosine.sum()) / self.n if self.n else 0.0

    def share(self, least: float) -> float:
        """Return the share of directions matched at a cosine of ``least`` or more."""
        return float((self.cosine >= least).sum()) / self.n if self.n else 0.0


def cosines(first: npt.NDArray[np.floating], second: npt.NDArray[np.floating]) -> Floats:
    """Return the cosines of directions ``(n_first, d)`` and ``(n_second, d)``."""
    one, other = (
        a / np.maximum(np.linalg.norm(a, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        for a in (np.asarray(first, np.float64), np.asarray(second, np.float64))
    )
    return np.asarray(one @ other.T)


def match(similarity: Floats) -> Matched:
    """Return the one-to-one matching of the largest sum (the Hungarian method).

    Args:
        similarity: ``(n_first, n_second)``, may have no rows or columns.
    """
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    n_first, n_second = similarity.shape
    if not similarity.size:
        none = np.empty(0, np.int64)
        return Matched(none, none, np.empty(0), max(n_first, n_second), 0.0)
    first, second = linear_sum_assignment(similarity, maximize=True)
    nearest = np.concatenate([similarity.max(axis=1), similarity.max(axis=0)]).mean()
    cosine = similarity[first, second]
    return Matched(first, second, cosine, max(n_first, n_second), float(nearest))


def chance(n: int, d_model: int) -> float:
    """Return the mean cosine of two sets of ``n`` random directions, matched."""
    rng = np.random.Generator(np.random.Philox(0))
    return match(cosines(rng.normal(size=(n, d_model)), rng.normal(size=(n, d_model)))).mean


def match_directions(
    first: npt.NDArray[np.floating], second: npt.NDArray[np.floating], alive: tuple[Bools, Bools]
) -> Matched:
    """Return the matching of the directions that are alive; indices are those of the whole sets.

    A feature that never was active is where it started: two dictionaries of one start would share
    it for that alone.
    """
    places = tuple(np.flatnonzero(own) for own in alive)
    found = match(cosines(first[places[0]], second[places[1]]))
    return Matched(
        places[0][found.first], places[1][found.second], found.cosine, found.n, found.nearest
    )
