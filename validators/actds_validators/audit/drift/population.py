"""Population shift of one hook: other tokens on the two sides, compared as two samples.

After the selections, before the sentence. Imports the statistics and the model of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from actds_validators.audit.result import DriftMeasure, Limits
from actds_validators.statistics import two_sample as two
from actds_validators.statistics.family import benjamini_hochberg

__all__ = ["PopulationHook", "measure_populations", "population_measures"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]

MIN_REQUESTS = 8
"""Requests on each side below which nothing is tested."""
N_PERMUTATIONS = 199
N_SPLITS = 20
_N_DIRECTIONS = 32  # of the covariance distance
_MAX_CHANNELS = 1024  # above it the classifier sees the leading directions only
_N_LEADING = 128
_OUTLIER = 10  # times the median norm
Measure = Callable[[Rows, two.Units, two.Labels], Floats]


@dataclass(frozen=True)
class PopulationHook:
    """The measures of one hook before their p-values are adjusted together.

    Args:
        hook: its name.
        measures: with p and without adjusted p.
    """

    hook: str
    measures: list[DriftMeasure]


def population_measures(hooks: list[PopulationHook]) -> list[DriftMeasure]:
    """Return the measures of all hooks with p-values adjusted over all of them."""
    measures = [measure for hook in hooks for measure in hook.measures]
    tested = [n for n, measure in enumerate(measures) if measure.p is not None]
    p = benjamini_hochberg(np.array([measures[n].p for n in tested], np.float64))
    for n, value in zip(tested, p.tolist(), strict=True):
        measures[n] = measures[n].model_copy(update={"adjusted_p": value})
    return measures


def measure_populations(
    hook: str,
    rows: tuple[Rows, Rows],
    request: tuple[Ints, Ints],
    limits: Limits,
    left_out: str = "",
) -> PopulationHook:
    """Return the two-sample measures of a hook.

    Args:
        hook: whose rows.
        rows: rows of the two sides ``(n, d_model)`` each.
        request: request of each row; the same number on both sides is one request.
        limits: gives the seed.
        left_out: words for rows that are left out already.
    """
    everything = np.concatenate(rows)
    who = np.concatenate(request)
    second = np.arange(len(who)) >= len(rows[0])
    finite = np.isfinite(everything).all(axis=1)
    n_broken = int((~finite).sum())
    everything, who, second = everything[finite], who[finite], second[finite]
    if second.all() or not second.any():
        return PopulationHook(hook, [])
    norm = np.linalg.norm(everything, axis=1)
    outlier = norm > _OUTLIER * np.median(norm)
    if n_broken:
        left_out += f"; {n_broken} rows with a value that is not finite left out"
    judge = _Judge(hook, limits.seed, left_out)
    told = [_outliers(judge, outlier, two.make_units(who, second), second)]
    calm = ~outlier
    if not second[calm].all() and second[calm].any():
        if outlier.any():
            judge = replace(
                judge, left_out=left_out + f"; {int(outlier.sum())} outlier rows left out"
            )
        units = two.make_units(who[calm], second[calm])
        told = [*_distributions(judge, two.standardised(everything[calm]), units), *told]
    return PopulationHook(hook, told)


def _outliers(
    judge: _Judge, outlier: two.Labels, units: two.Units, second: two.Labels
) -> DriftMeasure:
    shares = [float(outlier[second == side].mean()) for side in (False, True)]
    return judge.tell(
        "outlier rate",
        lambda rows, units, labels: two.rate_gap(rows[:, 0] > 0, units, labels),
        outlier[:, None].astype(np.float32),
        units,
        f"difference of the shares of rows whose norm is over {_OUTLIER} times the median: first "
        f"{shares[0]:.3%}, second {shares[1]:.3%}",
        test=bool(outlier.any()),
    )


def _distributions(judge: _Judge, rows: Rows, units: two.Units) -> list[DriftMeasure]:
    if not rows.shape[1]:
        return []  # every channel is constant
    seed = judge.seed
    n_least = min(int((units.side[units.of_row] == side).sum()) for side in (False, True))
    k = max(1, min(_N_DIRECTIONS, rows.shape[1], n_least // 20))
    wide = rows.shape[1] > _MAX_CHANNELS
    seen = two.standardised(two.leading_subspace(rows, _N_LEADING, seed)) if wide else rows
    seen_words = f"{seen.shape[1]} {'leading directions' if wide else 'channels'}"
    _, (first, second) = two.kurtosis_gap(rows, units, units.side[None])
    return [
        judge.tell(
            "log-variance ratio",
            two.log_variance_ratio,
            rows,
            units,
            "rms over channels of ln(variance of second / variance of first)",
        ),
        judge.tell(
            "covariance distance",
            two.covariance_distance,
            two.leading_subspace(rows, k, seed),
            units,
            f"affine-invariant, rms of logarithms, in the {k} leading directions of both",
        ),
        judge.tell(
            "classifier AUC",
            lambda rows, units, labels: two.grouped_auc(rows, units, labels, seed),
            seen,
            units,
            f"linear discriminant on {seen_words}, {two.N_FOLDS} folds of whole requests; 0.5 is "
            "chance",
        ),
        judge.tell(
            "kurtosis",
            lambda rows, units, labels: two.kurtosis_gap(rows, units, labels)[0],
            rows,
            units,
            f"difference of the median channel's excess kurtosis: first {first:.3g}, second "
            f"{second:.3g}; a description, not tested",
            test=False,
        ),
    ]


@dataclass(frozen=True)
class _Judge:
    """Holds a measure against relabelled requests and against halves of each side."""

    hook: str
    seed: int
    left_out: str

    def tell(
        self,
        name: str,
        measure: Measure,
        rows: Rows,
        units: two.Units,
        words: str,
        *,
        test: bool = True,
    ) -> DriftMeasure:
        """Return the measure with its floor, and with its p where enough requests are there."""
        sides = [int((units.side == side).sum()) for side in (False, True)]
        enough = min(sides) >= MIN_REQUESTS
        labels = units.side[None]
        if test and enough:
            exchanged = two.exchanges(units, N_PERMUTATIONS, self.seed)
            labels = np.concatenate([labels, exchanged])
        values = measure(rows, units, labels)
        floor = self._floor(measure, rows, units) if enough else None
        origin = f"floor: 95th percentile of {N_SPLITS} splits of each side's requests in halves"
        few = "; too few requests to test" if test and not enough else ""
        return DriftMeasure(
            hook=self.hook,
            name=name,
            value=float(values[0]),
            floor=floor,
            p=two.permutation_p(float(values[0]), values[1:]) if len(values) > 1 else None,
            n=len(np.unique(units.request)),
            note=f"{words}; {origin if floor is not None else 'no floor'}{few}{self.left_out}",
        )

    def _floor(self, measure: Measure, rows: Rows, units: two.Units) -> float | None:
        found = []
        for side in (False, True):
            mine, own = units.on_side(side)
            if len(own) >= MIN_REQUESTS:
                split = two.halves(len(own), N_SPLITS, self.seed + side)
                found.append(measure(rows[mine], own, split))
        return float(np.percentile(np.concatenate(found), 95)) if found else None
