"""Reconstruction: how well a dictionary fits the rows of either arm, and with which features.

``FVU = sum |x - x̂|² / sum |x - μ|²`` has a denominator: over the reference's variance and over the
arm's own, always both, because the second alone can turn the sign of a gap.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from actds_studies.regimes.inference import Measure
from actds_studies.regimes.instruments.base import Dictionary, difference, events, mean_of
from actds_studies.regimes.result import Limits
from actds_studies.regimes.sums import COUNT, GroupSums, Part
from actds_validators.arrays import Floats, Ints, Rows

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

    def __init__(self, dictionary: Dictionary, turned: Ints | None = None) -> None:
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
        mine = features[:, self._turned].astype(np.float64)
        yield Part("turned n", (mine > 0).astype(np.float32), coarse=True)
        yield Part("turned aa", mine**2 * self._dictionary.frame(rows)[1], coarse=True)
        yield Part("turned", mine, coarse=True, right=rest)

    def measures(self, reference: GroupSums, limits: Limits) -> list[Measure]:
        """Return the differences of fit, of the features' rates and of their directions."""
        assert self._turned is not None
        n_turned, labels = len(self._turned), [str(n) for n in self._turned.tolist()]
        whole = float(variance_of(reference)[..., 0])

        def over_reference(sums: GroupSums) -> Floats:
            return np.asarray(mean_of(sums, "error") / (whole if whole > 0 else np.nan))

        def over_own(sums: GroupSums) -> Floats:
            own = variance_of(sums)
            return np.asarray(mean_of(sums, "error") / np.where(own > 0, own, np.nan))

        def log_l0(sums: GroupSums) -> Floats:
            return _log(mean_of(sums, "l0"))

        def direction(sums: GroupSums) -> Floats:
            # sum of a (x - x̂ + a d): the row as this feature alone should explain it, times it.
            vector = sums["turned"].reshape(*sums["turned"].shape[:-1], n_turned, -1)
            vector = vector + sums["turned aa"][..., None] * self._directions
            length = np.linalg.norm(vector, axis=-1, keepdims=True)
            return np.asarray(vector / np.where(length > 0, length, np.nan))

        def turn(first: GroupSums, second: GroupSums) -> Floats:
            enough = np.minimum(first["turned n"], second["turned n"]) >= MIN_TURN_EVENTS
            return np.where(enough[..., None], direction(second) - direction(first), np.nan)

        ratio, gap = "ln of the ratio", "difference"
        found = [
            difference(
                "FVU over the reference's variance",
                over_reference,
                gap,
                limits.fvu,
                arm_value=over_reference,
            ),
            difference(
                "FVU over the arm's own variance", over_own, gap, limits.fvu, arm_value=over_own
            ),
            difference(
                "active features of a row", log_l0, ratio, limits.log_l0, arm_value=_active_features
            ),
            Measure(
                "rates of features",
                log_rates,
                ratio,
                "difference",
                limits.log_rate,
                of_arm=lambda sums: _log(mean_of(sums, ACTIVE)),
                arm_value=lambda sums: mean_of(sums, ACTIVE),
                coarse=True,
                note=f"features with under {MIN_EVENTS} events are counted, not tested",
                keep=N_SHOWN,
            ),
        ]
        if n_turned:
            found.append(
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
        return found


def variance_of(sums: GroupSums) -> Floats:
    """Return the mean squared distance of rows from their mean ``(..., 1)``."""
    mean = mean_of(sums, "x")
    found = mean_of(sums, "xx") - np.square(mean).sum(axis=-1, keepdims=True)
    return np.asarray(np.maximum(found, 0.0))


def log_rates(first: GroupSums, second: GroupSums) -> Floats:
    """Return the ln of the ratio of each feature's rates ``(..., n_features)``.

    ``(events + 0.5) / (n + 1)`` in either arm; NaN where both together have too few events.
    """
    rates = [np.log((sums[ACTIVE] + 0.5) / (sums[COUNT] + 1)) for sums in (first, second)]
    enough = first[ACTIVE] + second[ACTIVE] >= MIN_EVENTS
    return np.where(enough, rates[1] - rates[0], np.nan)


def _active_features(sums: GroupSums) -> Floats:
    return mean_of(sums, "l0")


def _log(value: Floats) -> Floats:
    return np.asarray(np.log(np.where(value > 0, value, np.nan)))
