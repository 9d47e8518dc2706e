"""What an instrument is: what it adds up of rows or pairs, and makes of the sums; the first two.

`Moments` are mean, variance and kurtosis of each channel, and how many values lie far out. The
per-dimension Kullback-Leibler divergence is that of two normal distributions: a triage, which says
where to look, and is not tested. `Numerics` is how far rows of equal tokens lie apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from scipy.sparse import csr_array  # type: ignore[import-untyped]

from actds_studies.regimes.inference import Measure
from actds_studies.regimes.result import Limits
from actds_studies.regimes.strata import COUNT, GroupSums, Part
from actds_validators.arrays import Bools, Floats, Ints, Rows
from actds_validators.dictionaries import Dictionary
from actds_validators.dictionaries.tensors import refused
from actds_validators.statistics.intervals import Scale


class Remembered:
    """A dictionary that several instruments use: it remembers the features of the last rows.

    Rows that are not finite count as zeros, and are unused. E015, with the dictionary's path, where
    it makes numbers of finite rows that are not finite.
    """

    def __init__(self, dictionary: Dictionary, path: str = "dictionary") -> None:
        self._dictionary, self._path = dictionary, path
        self._last: list[tuple[Rows, Rows]] = []

    def encode(self, rows: Rows) -> Rows:
        """Return the features ``(n, n_features)`` of rows, which nobody changes meanwhile."""
        for known, features in self._last:
            if known is rows:
                return features
        with np.errstate(over="ignore", invalid="ignore"):
            features = self._checked("features", self._dictionary.encode(_finite(rows)))
        self._last = [*self._last[-1:], (rows, features)]  # the two rows of pairs
        return features

    def decode(self, features: Rows, rows: Rows | None = None) -> Rows:
        with np.errstate(over="ignore", invalid="ignore"):
            decoded = self._dictionary.decode(features, None if rows is None else _finite(rows))
            return self._checked("rows", decoded)

    def frame(self, rows: Rows) -> tuple[Rows, Rows]:
        return self._dictionary.frame(_finite(rows))

    def _checked(self, what: str, values: Rows) -> Rows:
        if not np.isfinite(values.sum(dtype=np.float64)):
            got = f"{what} that are not finite in float32"
            raise refused(self._path, got, "finite ones of finite rows")
        return values


def _finite(rows: Rows) -> Rows:
    """Return rows ``(n, d_model)``, those that are not finite as zeros."""
    fine: Bools = np.asarray(np.isfinite(rows).all(axis=1))
    return rows if fine.all() else np.where(fine[:, np.newaxis], rows, np.float32(0))


def events(features: Rows) -> csr_array:
    """Return where features ``(n, n_features)`` are active, as a sparse matrix of ones."""
    n, width = features.shape
    flat = np.flatnonzero((features > 0).ravel())  # four times as fast as over two axes
    starts = np.searchsorted(flat, width * np.arange(n + 1))
    return csr_array((np.ones(len(flat)), flat % max(width, 1), starts), shape=(n, width))


@runtime_checkable
class Instrument(Protocol):
    """What measures the rows of each arm."""

    name: str

    def prepare(self, sample: Rows) -> None:
        """Take what depends on the reference, as its centre, from some of its rows ``(n, d)``."""
        ...

    def parts(self, rows: Rows, side: int, row: Ints) -> Iterator[Part]:
        """Yield what is added up of rows.

        Args:
            rows: ``(n, d_model)``, some perhaps not finite: what they give is not used.
            side: 0 for the reference, 1 for the other arm.
            row: their numbers in the arm's array ``(n,)``.
        """
        ...

    def measures(self, reference: GroupSums, limits: Any) -> list[Measure]:
        """Return what is measured.

        Args:
            reference: sums ``(k,)`` over all rows of the reference.
            limits: the ``StudyLimits`` of the study, its measures' limits by their names.
        """
        ...


@runtime_checkable
class PairInstrument(Protocol):
    """What measures pairs of rows of the same token."""

    name: str

    def pair_parts(self, first: Rows, second: Rows) -> Iterator[Part]:
        """Yield what is added up of pairs of rows, ``(n, d_model)`` each."""
        ...

    def pair_values(self, first: Rows, second: Rows) -> dict[str, Floats]:
        """Return by name what quantiles are told of, ``(n,)`` each."""
        ...

    def pair_measures(self, limits: Any) -> list[Measure]:
        """Return what is measured of the pairs; statistics get the same sums twice."""
        ...


def over(top: Floats, bottom: Floats) -> Floats:
    """Return top / bottom, NaN where bottom is not above 0."""
    return np.asarray(top / np.where(bottom > 0, bottom, np.nan))


def log_of(value: Floats) -> Floats:
    """Return the natural logarithm, NaN where a value is not above 0."""
    return np.asarray(np.log(np.where(value > 0, value, np.nan)))


def mean_of(sums: GroupSums, name: str) -> Floats:
    """Return a sum over the count of the rows, ``(..., k)``; NaN without a row."""
    return over(sums[name], sums[COUNT])


def of_pairs(
    name: str,
    statistic: Callable[[GroupSums], Floats],
    unit: str,
    scale: Scale,
    limit: float | None = None,
) -> Measure:
    """Return the measure of a size of pairs; without a limit it is only described."""
    kind: Literal["described", "size"] = "described" if limit is None else "size"
    pairs = limit is None
    return Measure(
        name, lambda sums, _: statistic(sums), unit, kind, limit, scale=scale, of_pairs=pairs
    )


def difference(
    name: str,
    of_arm: Callable[[GroupSums], Floats],
    unit: str,
    limit: float,
    *,
    arm_value: Callable[[GroupSums], Floats] | None = None,
    labels: Sequence[str] | None = None,
) -> Measure:
    """Return the measure of how a function of an arm differs between the two.

    Args:
        of_arm: of the sums of one arm ``(..., k)``, unchanged when all are multiplied.
        arm_value: what is shown of either arm, None for nothing.
        labels: names of the elements, None for their numbers.
    """
    return Measure(
        name,
        lambda first, second: of_arm(second) - of_arm(first),
        unit,
        "difference",
        limit,
        of_arm,
        arm_value,
        labels=labels,
    )


OUTLIER_SD = 6.0
"""A value this many standard deviations from its channel's mean is an outlier."""
MIN_EVENTS = 20
"""Outliers that a channel must have in both arms together to be tested."""
SINKS, ALL_ROWS = "sinks", "all rows"
"""Sums that the engine makes before it leaves sinks out."""


class Moments:
    """Moments of each channel.

    Powers are of ``(x - centre) / scale``, of a sample of the reference: sums of fourth powers of
    uncentred values would lose every digit.
    """

    name = "moments"

    def __init__(self) -> None:
        self._centre: Floats = np.zeros(0)
        self._scale: Floats = np.ones(0)

    def prepare(self, sample: Rows) -> None:
        """Take centre and scale of each channel from rows of the reference ``(n, d)``."""
        values = sample.astype(np.float64)
        self._centre = values.mean(axis=0)
        spread = values.std(axis=0)
        self._scale = np.where(spread > 1e-12, spread, 1.0)

    def parts(self, rows: Rows, side: int, row: Ints) -> Iterator[Part]:
        """Yield the powers 1 to 4 of each channel, and where it lies far out."""
        value = (rows.astype(np.float64) - self._centre) / self._scale
        yield Part("x1", value)
        square = value * value
        yield Part("x2", square)
        yield Part("x3", square * value)
        yield Part("x4", square * square)
        yield Part("far", (np.abs(value) > OUTLIER_SD).astype(np.float32))

    def measures(self, reference: GroupSums, limits: Limits) -> list[Measure]:
        spread = np.sqrt(central_moments(reference)[1])
        varies = spread > 1e-6
        scale = np.where(varies, spread, np.nan)

        def mean(sums: GroupSums) -> Floats:
            return np.asarray(mean_of(sums, "x1") / scale)

        def log_variance(sums: GroupSums) -> Floats:
            return log_of(np.where(varies, central_moments(sums)[1], np.nan))

        def log_kurtosis(sums: GroupSums) -> Floats:
            return log_of(np.where(varies, kurtosis(sums), np.nan))

        def far(sums: GroupSums) -> Floats:
            return mean_of(sums, "far")

        def far_channels(first: GroupSums, second: GroupSums) -> Floats:
            enough = first["far"] + second["far"] >= MIN_EVENTS
            return np.where(enough, far(second) - far(first), np.nan)

        def divergence(first: GroupSums, second: GroupSums) -> Floats:
            return normal_divergence(second, first)

        sd, ratio = "standard deviations of the reference", "ln of the ratio"
        rows = "rows above 10 median norms, beside position 0 and BOS"
        values = (
            f"values beyond {OUTLIER_SD:g} SD; channels with under {MIN_EVENTS} of them are "
            "counted, not tested"
        )
        return [
            difference("mean", mean, sd, limits.mean, arm_value=self._mean),
            difference("variance", log_variance, ratio, limits.log_variance),
            difference("kurtosis", log_kurtosis, ratio, limits.log_kurtosis, arm_value=kurtosis),
            replace(
                difference("outlier rate of rows", sink_rate, "share of rows", limits.outliers),
                arm_value=sink_rate,
                rare=True,
                note=rows,
            ),
            replace(
                difference("outlier rate of channels", far, "share of rows", limits.outliers),
                statistic=far_channels,
                arm_value=far,
                note=values,
            ),
            Measure(
                "KL divergence of a channel",
                divergence,
                "nats",
                "described",
                scale="log",
                note="triage: of two normal distributions, the other arm from the reference",
            ),
        ]

    def _mean(self, sums: GroupSums) -> Floats:
        return self._centre + self._scale * mean_of(sums, "x1")


def central_moments(sums: GroupSums) -> tuple[Floats, Floats, Floats, Floats]:
    """Return mean, variance, and third and fourth central moment ``(..., d)`` of scaled values."""
    mean, second, third, fourth = (mean_of(sums, f"x{n}") for n in (1, 2, 3, 4))
    variance = np.maximum(second - mean**2, 0.0)
    return (
        mean,
        variance,
        third - 3 * mean * second + 2 * mean**3,
        fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4,
    )


def kurtosis(sums: GroupSums) -> Floats:
    """Return the kurtosis ``(..., d)``: 3 for a normal distribution."""
    _, variance, _, fourth = central_moments(sums)
    return np.asarray(fourth / np.where(variance > 0, variance, np.nan) ** 2)


def sink_rate(sums: GroupSums) -> Floats:
    """Return the share of rows that are sinks ``(..., 1)``."""
    return over(sums[SINKS], sums[ALL_ROWS])


def normal_divergence(sums: GroupSums, other: GroupSums) -> Floats:
    """Return the divergence of one normal distribution from another ``(..., d)``, in nats."""
    mean, variance, *_ = central_moments(sums)
    centre, spread, *_ = central_moments(other)
    known = (variance > 0) & (spread > 0)
    spread_here, base = (np.where(known, v, np.nan) for v in (variance, spread))
    divergence = 0.5 * (
        np.log(base / spread_here) + (spread_here + (mean - centre) ** 2) / base - 1
    )
    return np.asarray(np.maximum(divergence, 0.0))  # what is below is rounding


_N_ROWS = 2048  # rows that are held as float64 at a time


def distances(first: Rows, second: Rows) -> tuple[Floats, Floats]:
    """Return ``|second - first| / |first|`` and one minus the cosine per row, ``(n,)`` each.

    Exactly 0 for equal rows.

    Args:
        first: rows ``(n, d_model)``, none of them zero.
    """
    relative, cosine = [np.empty(0)], [np.empty(0)]
    for at in range(0, len(first), _N_ROWS):
        a, b = (rows[at : at + _N_ROWS].astype(np.float64) for rows in (first, second))
        relative.append(np.linalg.norm(b - a, axis=1) / np.linalg.norm(a, axis=1))
        unit, other = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (a, b))
        cosine.append(np.square(unit - other).sum(axis=1) / 2)
    return np.concatenate(relative), np.concatenate(cosine)


class Numerics:
    """How far rows of the same token behind the same prefix lie apart.

    A distance is never negative: it is compared with a limit, not with zero. With a dictionary it
    stands over its error as well, and as the share of features that switch.
    """

    name = "numerics"

    def __init__(self, dictionary: Dictionary | Remembered | None = None) -> None:
        self._dictionary = dictionary
        self.width = 0

    def pair_parts(self, first: Rows, second: Rows) -> Iterator[Part]:
        """Yield what is added up of pairs of rows, ``(n, d_model)`` each."""
        yield Part("equal", (first == second).all(axis=1).astype(np.float64))
        values = self.pair_values(first, second)
        yield from (Part(name, distances) for name, distances in values.items())
        if self._dictionary is None:
            return
        features = self._dictionary.encode(first)
        self.width = features.shape[1]
        rest = first.astype(np.float64) - self._dictionary.decode(features, first)
        yield Part("drift", np.square(second.astype(np.float64) - first).sum(axis=1))
        yield Part("error", np.square(rest).sum(axis=1))
        active, other = features > 0, self._dictionary.encode(second) > 0
        yield Part("switched", (active ^ other).sum(axis=1).astype(np.float64))
        yield Part("active", (active | other).sum(axis=1).astype(np.float64))

    def pair_values(self, first: Rows, second: Rows) -> dict[str, Floats]:
        """Return relative L2 and cosine distance of pairs, ``(n,)`` each."""
        return dict(zip(("relative L2", "cosine distance"), distances(first, second), strict=True))

    def pair_measures(self, limits: Limits) -> list[Measure]:
        """Return the mean distances and, with a dictionary, what they mean for it."""
        pairs, limit = "mean over pairs", limits.relative_l2
        measures = [
            of_pairs("equal to the bit", partial(mean_of, name="equal"), "share of pairs", "logit"),
            of_pairs("relative L2", partial(mean_of, name="relative L2"), pairs, "log", limit),
            of_pairs("cosine distance", partial(mean_of, name="cosine distance"), pairs, "log"),
        ]
        if self._dictionary is not None:
            measures += [
                of_pairs(
                    "drift over the dictionary's error",
                    lambda sums: ratio(sums["drift"], sums["error"]),
                    "squared distance over squared error",
                    "log",
                    limits.drift,
                ),
                of_pairs(
                    "features that switch",
                    lambda sums: ratio(sums["switched"], sums["active"]),
                    "share of those active in either row",
                    "logit",
                    limits.switched,
                ),
            ]
        return measures


def ratio(top: Floats, bottom: Floats) -> Floats:
    """Return top / bottom, 0 where both are 0 and NaN where only bottom is."""
    return np.where((bottom == 0) & (top == 0), 0.0, over(top, bottom))
