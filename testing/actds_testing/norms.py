"""A small study, as another package would bring it: whether rows of two arms differ in length.

It says how much longer the rows of one arm are on average, and how much more unequal. Whoever
divides rows by one number for all arms, as dictionaries do, relies on both.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from actds_studies.regimes.conclusions import Words
from actds_studies.regimes.inference import Measure
from actds_studies.regimes.instruments import difference, mean_of
from actds_studies.regimes.result import StudyLimits
from actds_studies.regimes.strata import GroupSums, Part
from actds_studies.study import Study, command_of
from actds_validators.arrays import Floats, Ints, Rows


class Norms:
    """Lengths of rows: their mean, and their relative spread."""

    name = "norms"

    def prepare(self, sample: Rows) -> None:
        pass

    def parts(self, rows: Rows, side: int, row: Ints) -> Iterator[Part]:
        norm = np.linalg.norm(rows.astype(np.float64), axis=1)
        yield Part("norm", norm)
        yield Part("square", norm * norm)

    def measures(self, reference: GroupSums, limits: StudyLimits) -> list[Measure]:
        ratio, limit = "ln of the ratio", vars(limits)
        return [
            difference("mean norm", _log_mean, ratio, limit["mean_norm"], arm_value=_mean),
            difference("spread of norms", _spread, "of the mean", limit["spread"]),
        ]


def _mean(sums: GroupSums) -> Floats:
    return mean_of(sums, "norm")


def _log_mean(sums: GroupSums) -> Floats:
    return np.log(mean_of(sums, "norm"))


def _spread(sums: GroupSums) -> Floats:
    mean = mean_of(sums, "norm")
    variance = np.maximum(mean_of(sums, "square") - mean * mean, 0)
    return np.asarray(np.sqrt(variance) / mean)


NORMS = Study(
    name="norms",
    summary="Say whether rows are longer in one arm than in another.",
    question="Do the rows of these arms differ in length?",
    instruments=lambda: [Norms()],
    words={
        "norms": Words(
            advice="Scale rows of {first} and {other} each by a mean norm of its own",
            measures={
                "mean norm": (
                    "{ratio} × the norm",
                    "the mean norm of rows of {second} is {ratio} times that of {first}",
                ),
                "spread of norms": (
                    "{percent} % {more_of} spread",
                    "norms of {second} spread by {percent} % of their mean {more_of} than of "
                    "{first}",
                ),
            },
        )
    },
    limits={
        "mean_norm": (0.1, "ln of the ratio of mean norms"),
        "spread": (0.1, "difference of standard deviations over means"),
    },
)
command = command_of(NORMS)
