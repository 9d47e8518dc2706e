"""Overlap: whether the arms use the same features, by token and among the most frequent ones.

The overlap of two samples of one distribution is below 1 and falls with their size. So each value
is that of halves of the requests, beside the same number of the reference with itself; and where
one arm has more rows than the other, as many of either count, of the same tokens and positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from actds_studies.regimes.inference import Measure
from actds_studies.regimes.instruments.base import Dictionary, events, mean_of
from actds_studies.regimes.result import Limits
from actds_studies.regimes.sums import GroupSums, Part
from actds_validators.arrays import Bools, Floats, Ints, Rows

TOPS = (50, 200, 1000)
_EVENTS, _ROWS = "overlap events", "overlap rows"
_DIFFER = "features of a token that differ"
_MAX_KENDALL = 4096  # features: its time grows with n log n for each exchange


class Overlap:
    """Overlap of the active features of the arms.

    Args:
        tops: numbers of most frequent features; those above half of all features are left out.
    """

    name = "overlap"

    def __init__(self, dictionary: Dictionary, tops: tuple[int, ...] = TOPS) -> None:
        self._dictionary = dictionary
        self._tops = tops
        self.width = 0

    def prepare(self, sample: Rows) -> None:
        """Take the number of features."""
        self.width = self._dictionary.encode(sample[:1]).shape[1]

    def parts(self, rows: Rows, side: int, row: Ints) -> Iterator[Part]:
        """Yield which features are active."""
        yield Part(_EVENTS, events(self._dictionary.encode(rows)), coarse=True, even=True)
        yield Part(_ROWS, np.ones(len(rows)), coarse=True, even=True)

    def measures(self, reference: GroupSums, limits: Limits) -> list[Measure]:
        """Return the overlaps of the most frequent features, and of the order of all of them."""
        n_features = reference[_EVENTS].shape[-1]
        found = [
            Measure(
                f"top {k} features, Jaccard",
                partial(_of_rates, function=partial(top_jaccard, k=k)),
                "Jaccard at equal n",
                "overlap",
                limits.overlap,
                coarse=True,
            )
            for k in self._tops
            if 2 * k <= n_features
        ]
        for name, function in (("Spearman", spearman), ("Kendall", kendall)):
            if name == "Spearman" or n_features <= _MAX_KENDALL:
                measure = partial(_of_rates, function=function)
                found.append(
                    Measure(
                        f"order of features by rate, {name}",
                        measure,
                        "correlation at equal n",
                        "overlap",
                        limits.overlap if name == "Spearman" else None,
                        coarse=True,
                    )
                )
        return found

    def pair_parts(self, first: Rows, second: Rows) -> Iterator[Part]:
        """Yield the overlap of the active features of pairs of rows."""
        yield Part("jaccard", 1 - self.pair_values(first, second)[_DIFFER])

    def pair_values(self, first: Rows, second: Rows) -> dict[str, Floats]:
        """Return 1 less the Jaccard index of the active features of pairs of rows ``(n,)``.

        As of distances, the largest quantile is then the worst pair.
        """
        active, other = (self._dictionary.encode(rows) > 0 for rows in (first, second))
        return {_DIFFER: 1 - jaccard_of_rows(active, other)}

    def pair_measures(self, limits: Limits) -> list[Measure]:
        """Return how much of a token's features is lost on average: 1 less their Jaccard index."""

        def lost(pairs: GroupSums, _: GroupSums) -> Floats:
            return 1 - mean_of(pairs, "jaccard")

        return [
            Measure(
                _DIFFER,
                lost,
                "1 - Jaccard, mean over pairs",
                "size",
                limits.overlap,
                scale="logit",
            )
        ]


def jaccard_of_rows(
    active: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    other: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
) -> Floats:
    """Return the Jaccard index of each row's two sets ``(n,)``, 1 where both are empty."""
    both, either = (active & other).sum(axis=1), (active | other).sum(axis=1)
    return np.where(either > 0, both / np.maximum(either, 1), 1.0)


def top_jaccard(one: Floats, other: Floats, k: int) -> float:
    """Return the Jaccard index of the k most frequent of either ``(n_features,)``.

    Of equal rates the feature with the lower number comes first, on both sides.
    """
    first, second = _most(one, k), _most(other, k)
    return int((first & second).sum()) / int((first | second).sum())


def _most(rates: Floats, k: int) -> Bools:
    """Return which features are the k most frequent."""
    if len(rates) <= k:
        return np.ones(len(rates), np.bool_)
    edge = np.partition(rates, -k)[-k]  # a whole sort takes ten times as long
    found: Bools = np.asarray(rates > edge)
    found[np.flatnonzero(rates == edge)[: k - int(found.sum())]] = True
    return found


def spearman(one: Floats, other: Floats) -> float:
    """Return the rank correlation of rates ``(n_features,)``, equal rates at their mean rank."""
    left, right = (stats.rankdata(v) for v in (one, other))
    left, right = left - left.mean(), right - right.mean()
    size = float(np.sqrt((left @ left) * (right @ right)))
    return float(left @ right) / size if size > 0 else float("nan")


def kendall(one: Floats, other: Floats) -> float:
    """Return Kendall's tau-b of rates ``(n_features,)``."""
    return float(stats.kendalltau(one, other).statistic)


def _of_rates(first: GroupSums, second: GroupSums, function: object) -> Floats:
    """Return a function of the rates of features ``(..., 1)``; those that no arm has are left out.

    NaN where an arm has no row.
    """
    assert callable(function)
    rates = [
        np.atleast_2d(sums[_EVENTS] / np.where(sums[_ROWS] > 0, sums[_ROWS], np.nan))
        for sums in (first, second)
    ]
    found = []
    for one, other in zip(*rates, strict=True):
        good = np.isfinite(one).all() and np.isfinite(other).all()
        some = (one > 0) | (other > 0)
        found.append(function(one[some], other[some]) if good and some.sum() > 1 else np.nan)
    values = np.array(found, np.float64)[:, np.newaxis]
    return values[0] if np.ndim(first[_EVENTS]) == 1 else values
