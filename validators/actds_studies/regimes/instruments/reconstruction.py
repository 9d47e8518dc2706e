"""Reconstruction: how well a dictionary fits the rows of either arm, and with which features.

``FVU = sum |x - x̂|² / sum |x - μ|²`` has a denominator: over the reference's variance and over the
arm's own, always both, because the second alone can turn the sign of a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from actds_studies.regimes.inference import Measure
from actds_studies.regimes.instruments import (
    Remembered,
    difference,
    events,
    log_of,
    mean_of,
    of_pairs,
    over,
)
from actds_studies.regimes.result import Limits
from actds_studies.regimes.strata import COUNT, GroupSums, Part
from actds_validators.arrays import Bools, Floats, Ints, Rows
from actds_validators.dictionaries import Dictionary

OfRates = Callable[[Floats, Floats], float]
TOPS = (50, 200, 1000)
_EVENTS, _ROWS = "overlap events", "overlap rows"
_DIFFER = "features of a token that differ"
_MAX_KENDALL = 4096  # features: its time grows with n log n for each exchange


class Overlap:
    """Overlap of the active features of the arms, by token and among the most frequent.

    The overlap of two samples of one distribution is below 1 and falls with their size. So each
    value is that of halves of the requests, beside the reference's with itself, over as many rows
    of either arm, of the same tokens and positions.

    Args:
        tops: numbers of most frequent features; those above half of all features are left out.
    """

    name = "overlap"

    def __init__(self, dictionary: Dictionary | Remembered, tops: tuple[int, ...] = TOPS) -> None:
        self._dictionary = dictionary
        self._tops = tops
        self.width = 0

    def prepare(self, sample: Rows) -> None:
        self.width = self._dictionary.encode(sample[:1]).shape[1]

    def parts(self, rows: Rows, side: int, row: Ints) -> Iterator[Part]:
        yield Part(_EVENTS, events(self._dictionary.encode(rows)), coarse=True, even=True)
        yield Part(_ROWS, np.ones(len(rows)), coarse=True, even=True)

    def measures(self, reference: GroupSums, limits: Limits) -> list[Measure]:
        """Return the overlaps of the most frequent features, and of the order of all of them."""
        n_features = reference[_EVENTS].shape[-1]
        jaccard, correlation = "Jaccard at equal n", "correlation at equal n"
        order = "order of features by rate"
        measures: list[tuple[str, OfRates, str, float | None]] = [
            (f"top {k} features, Jaccard", partial(top_jaccard, k=k), jaccard, limits.overlap)
            for k in self._tops
            if 2 * k <= n_features
        ]
        measures.append((f"{order}, Spearman", spearman, correlation, limits.overlap))
        if n_features <= _MAX_KENDALL:
            measures.append((f"{order}, Kendall", kendall, correlation, None))
        return [
            Measure(name, partial(_of_rates, function=of), unit, "overlap", limit, coarse=True)
            for name, of, unit, limit in measures
        ]

    def pair_parts(self, first: Rows, second: Rows) -> Iterator[Part]:
        yield Part("jaccard", 1 - self.pair_values(first, second)[_DIFFER])

    def pair_values(self, first: Rows, second: Rows) -> dict[str, Floats]:
        """Return 1 less the Jaccard index of the active features of pairs of rows ``(n,)``.

        As of distances, the largest quantile is then the worst pair.
        """
        active, other = (self._dictionary.encode(rows) > 0 for rows in (first, second))
        return {_DIFFER: 1 - jaccard_of_rows(active, other)}

    def pair_measures(self, limits: Limits) -> list[Measure]:
        """Return how much of a token's features is lost on average: 1 less their Jaccard index."""

        unit, limit = "1 - Jaccard, mean over pairs", limits.overlap
        return [of_pairs(_DIFFER, lambda sums: 1 - mean_of(sums, "jaccard"), unit, "logit", limit)]


def jaccard_of_rows(active: Bools, other: Bools) -> Floats:
    """Return the Jaccard index of each row's two sets ``(n,)``, 1 where both are empty."""
    shared, either = (active & other).sum(axis=1), (active | other).sum(axis=1)
    return np.where(either > 0, shared / np.maximum(either, 1), 1.0)


def top_jaccard(left: Floats, right: Floats, k: int) -> float:
    """Return the Jaccard index of the k most frequent of either ``(n_features,)``.

    Of equal rates the feature with the lower number comes first, on both sides.
    """
    first, second = _most(left, k), _most(right, k)
    return int((first & second).sum()) / int((first | second).sum())


def _most(rates: Floats, k: int) -> Bools:
    if len(rates) <= k:
        return np.ones(len(rates), np.bool_)
    edge = np.partition(rates, -k)[-k]  # a whole sort takes ten times as long
    mask: Bools = np.asarray(rates > edge)
    mask[np.flatnonzero(rates == edge)[: k - int(mask.sum())]] = True
    return mask


def spearman(first: Floats, second: Floats) -> float:
    """Return the rank correlation of rates ``(n_features,)``, equal rates at their mean rank."""
    left, right = (stats.rankdata(v) for v in (first, second))
    left, right = left - left.mean(), right - right.mean()
    size = float(np.sqrt((left @ left) * (right @ right)))
    return float(left @ right) / size if size > 0 else float("nan")


def kendall(first: Floats, second: Floats) -> float:
    """Return Kendall's tau-b of rates ``(n_features,)``."""
    return float(stats.kendalltau(first, second).statistic)


def _of_rates(first: GroupSums, second: GroupSums, function: OfRates) -> Floats:
    """Return a function of the rates of features ``(..., 1)``; those that no arm has are left out.

    NaN where an arm has no row.
    """
    rates = [np.atleast_2d(over(sums[_EVENTS], sums[_ROWS])) for sums in (first, second)]
    answers = []
    for left, right in zip(*rates, strict=True):
        good = np.isfinite(left).all() and np.isfinite(right).all()
        some = (left > 0) | (right > 0)
        answers.append(function(left[some], right[some]) if good and some.sum() > 1 else np.nan)
    values = np.array(answers, np.float64)[:, np.newaxis]
    return values[0] if np.ndim(first[_EVENTS]) == 1 else values


MIN_EVENTS = 20
"""Rows on which a feature must be active, in both arms together, to be tested."""
N_TURNED = 64
"""Features of which the direction is followed: the ones most often active in the reference."""
MIN_TURN_EVENTS = 25
"""Rows on which a followed feature must be active in both arms."""
N_SHOWN = 240
"""Features of which the result has the rates."""
ACTIVE = "active"


class Reconstruction:
    """A dictionary on the rows of either arm.

    Args:
        turned: features of which the direction is followed; None takes those that are most often
            active in a sample of the reference.
    """

    name = "dictionary"

    def __init__(self, dictionary: Dictionary | Remembered, turned: Ints | None = None) -> None:
        self._dictionary = dictionary
        self._turned = turned
        self.width = 0
        self._directions: Rows = np.empty((0, 0), np.float32)
        self._centre: Floats = np.zeros(0)

    def prepare(self, sample: Rows) -> None:
        """Choose the features that are followed, from rows of the reference ``(n, d)``."""
        self._centre = sample.astype(np.float64).mean(axis=0)
        features = self._dictionary.encode(sample)
        self.width = features.shape[1]
        if self._turned is None:
            rate = (features > 0).sum(axis=0)
            order = np.argsort(-rate, kind="stable")[:N_TURNED]
            self._turned = np.sort(order[rate[order] > 0])
        basis = np.zeros((len(self._turned) + 1, features.shape[1]), np.float32)
        basis[np.arange(len(self._turned)), self._turned] = 1.0
        # Of the longest row: one of zeros has no scale, where rows are normalized.
        of = sample[[int(np.linalg.norm(sample, axis=1).argmax())]]
        decoded = self._dictionary.decode(basis, np.repeat(of, len(basis), axis=0))
        self._directions = (decoded[:-1] - decoded[-1]) / self._dictionary.frame(of)[1]

    def parts(self, rows: Rows, side: int, row: Ints) -> Iterator[Part]:
        """Yield errors, squares, active features and the followed features' directions."""
        assert self._turned is not None
        features = self._dictionary.encode(rows)
        rest = rows.astype(np.float64) - self._dictionary.decode(features, rows)
        centred = rows.astype(np.float64) - self._centre
        yield Part("error", np.square(rest).sum(axis=1))
        yield Part("x", centred)
        yield Part("xx", np.square(centred).sum(axis=1))
        active = events(features)
        yield Part("l0", active.sum(axis=1))
        yield Part(ACTIVE, active, coarse=True)
        turned = features[:, self._turned].astype(np.float64)
        yield Part("turned n", (turned > 0).astype(np.float32), coarse=True)
        yield Part("turned aa", turned**2 * self._dictionary.frame(rows)[1], coarse=True)
        yield Part("turned", turned, coarse=True, right=rest)

    def measures(self, reference: GroupSums, limits: Limits) -> list[Measure]:
        """Return the differences of fit, of the features' rates and of their directions."""
        assert self._turned is not None
        n_turned, labels = len(self._turned), [str(n) for n in self._turned.tolist()]
        whole = variance_of(reference)

        def fvu(sums: GroupSums) -> Floats:
            return over(mean_of(sums, "error"), whole)

        def fvu_of_arm(sums: GroupSums) -> Floats:
            return over(mean_of(sums, "error"), variance_of(sums))

        def active(sums: GroupSums) -> Floats:
            return mean_of(sums, "l0")

        def log_active(sums: GroupSums) -> Floats:
            return log_of(mean_of(sums, "l0"))

        def direction(sums: GroupSums) -> Floats:
            # sum of a (x - x̂ + a d): the row as this feature alone should explain it, times it.
            vector = sums["turned"].reshape(*sums["turned"].shape[:-1], n_turned, -1)
            vector = vector + sums["turned aa"][..., None] * self._directions
            return over(vector, np.linalg.norm(vector, axis=-1, keepdims=True))

        def turn(first: GroupSums, second: GroupSums) -> Floats:
            enough = np.minimum(first["turned n"], second["turned n"]) >= MIN_TURN_EVENTS
            return np.where(enough[..., None], direction(second) - direction(first), np.nan)

        ratio, gap, limit = "ln of the ratio", "difference", limits.fvu
        values = [
            difference("FVU over the reference's variance", fvu, gap, limit, arm_value=fvu),
            difference(
                "FVU over the arm's own variance", fvu_of_arm, gap, limit, arm_value=fvu_of_arm
            ),
            difference(
                "active features of a row", log_active, ratio, limits.log_l0, arm_value=active
            ),
            Measure(
                "rates of features",
                log_rates,
                ratio,
                "difference",
                limits.log_rate,
                of_arm=lambda sums: log_of(mean_of(sums, ACTIVE)),
                arm_value=lambda sums: mean_of(sums, ACTIVE),
                coarse=True,
                note=f"features with under {MIN_EVENTS} events are counted, not tested",
                keep=N_SHOWN,
            ),
        ]
        if n_turned:
            values.append(
                Measure(
                    "turn of features",
                    turn,
                    "degrees",
                    "direction",
                    limits.angle,
                    of_arm=direction,
                    carried=lambda sums: sums["turned aa"],
                    labels=labels,
                    coarse=True,
                    note="the noise's own angle is taken off",
                )
            )
        return values


def variance_of(sums: GroupSums) -> Floats:
    """Return the mean squared distance of rows from their mean ``(..., 1)``."""
    mean = mean_of(sums, "x")
    values = mean_of(sums, "xx") - np.square(mean).sum(axis=-1, keepdims=True)
    return np.asarray(np.maximum(values, 0.0))


def log_rates(first: GroupSums, second: GroupSums) -> Floats:
    """Return the ln of the ratio of each feature's rates ``(..., n_features)``.

    ``(events + 0.5) / (n + 1)`` in either arm; NaN where both together have too few events.
    """
    rates = [np.log((sums[ACTIVE] + 0.5) / (sums[COUNT] + 1)) for sums in (first, second)]
    enough = first[ACTIVE] + second[ACTIVE] >= MIN_EVENTS
    return np.where(enough, rates[1] - rates[0], np.nan)
