"""Moments: mean, variance and kurtosis of each channel, and how many values lie far out.

The per-dimension Kullback-Leibler divergence is that of two normal distributions: a triage, which
says where to look, and is not tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from actds_studies.regimes.inference import Measure
from actds_studies.regimes.instruments import difference, mean_of
from actds_studies.regimes.result import Limits
from actds_studies.regimes.sums import GroupSums, Part
from actds_validators.arrays import Floats, Ints, Rows

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
            return _log(np.where(varies, central_moments(sums)[1], np.nan))

        def log_kurtosis(sums: GroupSums) -> Floats:
            return _log(np.where(varies, kurtosis(sums), np.nan))

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
        """Return the mean of each channel, in the units of the rows."""
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
    return np.asarray(sums[SINKS] / np.where(sums[ALL_ROWS] > 0, sums[ALL_ROWS], np.nan))


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


def _log(value: Floats) -> Floats:
    return np.asarray(np.log(np.where(value > 0, value, np.nan)))
