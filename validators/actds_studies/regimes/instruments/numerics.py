"""Numerics: how far the rows of equal tokens lie apart when they were computed another way.

Only pairs of the same token behind the same prefix say this. A distance is never negative, so
it is compared with a limit, not with zero. With a dictionary the drift stands in its units: over
its reconstruction error, and as the share of features that switch on or off.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from actds_studies.regimes.inference import Measure
from actds_studies.regimes.instruments.base import Dictionary, mean_of
from actds_studies.regimes.result import Limits
from actds_studies.regimes.sums import GroupSums, Part
from actds_validators.arrays import Floats, Rows
from actds_validators.statistics.samples import cosine_distance, relative_l2


class Numerics:
    """Distances of pairs of rows.

    Args:
        dictionary: a dictionary of the hook, None without.
    """

    name = "numerics"

    def __init__(self, dictionary: Dictionary | None = None) -> None:
        self._dictionary = dictionary
        self.width = 0

    def pair_parts(self, first: Rows, second: Rows) -> Iterator[Part]:
        """Yield what is added up of pairs of rows, ``(n, d_model)`` each."""
        yield Part("equal", (first == second).all(axis=1).astype(np.float64))
        values = self.pair_values(first, second)
        yield Part("relative L2", values["relative L2"])
        yield Part("cosine distance", values["cosine distance"])
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
        return {
            "relative L2": relative_l2(first, second),
            "cosine distance": cosine_distance(first, second),
        }

    def pair_measures(self, limits: Limits) -> list[Measure]:
        """Return the mean distances and, with a dictionary, what they mean for it."""

        def equal(pairs: GroupSums, _: GroupSums) -> Floats:
            return mean_of(pairs, "equal")

        def distance(pairs: GroupSums, _: GroupSums) -> Floats:
            return mean_of(pairs, "relative L2")

        def cosine(pairs: GroupSums, _: GroupSums) -> Floats:
            return mean_of(pairs, "cosine distance")

        found = [
            Measure(
                "equal to the bit",
                equal,
                "share of pairs",
                "described",
                scale="logit",
                of_pairs=True,
            ),
            Measure(
                "relative L2", distance, "mean over pairs", "size", limits.relative_l2, scale="log"
            ),
            Measure(
                "cosine distance",
                cosine,
                "mean over pairs",
                "described",
                scale="log",
                of_pairs=True,
            ),
        ]
        if self._dictionary is None:
            return found

        def drift(pairs: GroupSums, _: GroupSums) -> Floats:
            return ratio(pairs["drift"], pairs["error"])

        def switched(pairs: GroupSums, _: GroupSums) -> Floats:
            return ratio(pairs["switched"], pairs["active"])

        return [
            *found,
            Measure(
                "drift over the dictionary's error",
                drift,
                "squared distance over squared error",
                "size",
                limits.drift,
                scale="log",
            ),
            Measure(
                "features that switch",
                switched,
                "share of those active in either row",
                "size",
                limits.switched,
                scale="logit",
            ),
        ]


def ratio(top: Floats, bottom: Floats) -> Floats:
    """Return top / bottom, 0 where both are 0 and NaN where only bottom is."""
    some = bottom > 0
    found = np.divide(top, bottom, out=np.full(np.shape(top), np.nan), where=some)
    return np.where(~some & (top == 0), 0.0, found)
