"""Measures of drift of one hook: the same tokens computed twice, or other tokens on two sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from actds_validators.audit.result import DriftMeasure, Limits
from actds_validators.statistics import samples
from actds_validators.statistics.events import Bools, Floats, Ints
from actds_validators.statistics.intervals import benjamini_hochberg

Rows = npt.NDArray[np.float32]

MIN_REQUESTS = 8
"""Requests below which nothing is tested, of populations on either side."""
MIN_PAIRS = 8
"""Pairs below which nothing is measured."""
N_SPLITS = 20
_MOVED = 8  # times the median distance
_ROUNDING = {"bfloat16": "2^-9", "float16": "2^-12", "float32": "2^-25"}


@dataclass(frozen=True)
class RowFloor:
    """Distances of rows of one token that one regime computed twice.

    Args:
        relative_l2: per row.
        cosine_distance: per row.
        words: where they come from.
    """

    relative_l2: Floats
    cosine_distance: Floats
    words: str


@dataclass(frozen=True)
class PairedHook:
    """What the pairs of one hook measure.

    Args:
        hook: its name.
        dtype: coarser of the two types the rows are stored in.
        n_pairs: pairs that were measured.
        left_out: words for pairs that were not measured, empty if none.
        relative_l2: per pair.
        cosine_distance: per pair.
        means: relative shift per request and channel ``(n_requests, d_model)``.
        floor: the same distances within one regime, if known.
    """

    hook: str
    dtype: str
    n_pairs: int
    left_out: str
    relative_l2: Floats
    cosine_distance: Floats
    means: Floats
    floor: RowFloor | None


def usable(rows: Rows) -> Bools:
    """Return which rows are finite and not zero."""
    return np.asarray(np.isfinite(rows).all(axis=1) & (rows != 0).any(axis=1))


def measure_pairs(
    hook: str,
    dtype: str,
    rows: tuple[Rows, Rows],
    request: Ints,
    floor: RowFloor | None,
    left_out: str = "",
) -> PairedHook:
    """Return the distances of paired rows.

    Args:
        hook: whose rows.
        dtype: coarser of the stored types.
        rows: the two computations of each token ``(n_pairs, d_model)``.
        request: request of each pair.
        floor: distances within one regime.
        left_out: words for pairs that are left out already.
    """
    fine = usable(rows[0]) & usable(rows[1])
    first, second, request = rows[0][fine], rows[1][fine], request[fine]
    d_model = rows[0].shape[1]
    n_broken = int((~fine).sum())
    if n_broken:
        left_out += f"; {n_broken} pairs with a value that is not finite, or a zero row, left out"
    means = np.empty((0, d_model))
    if len(first):
        means = samples.request_means(samples.relative_shift(first, second), request)
    return PairedHook(
        hook,
        dtype,
        len(first),
        left_out,
        samples.relative_l2(first, second),
        samples.cosine_distance(first, second),
        means,
        floor,
    )


def numeric_measures(hooks: list[PairedHook], limits: Limits) -> list[DriftMeasure]:
    """Return the measures of all hooks; their channels are one family of tests.

    A hook of fewer than ``MIN_PAIRS`` pairs has none.
    """
    hooks = [hook for hook in hooks if hook.n_pairs >= MIN_PAIRS]
    tested = [hook for hook in hooks if len(hook.means) >= MIN_REQUESTS]
    shifts = {hook.hook: samples.channel_shift(hook.means) for hook in tested}
    family = benjamini_hochberg(
        np.concatenate([np.empty(0), *(shift.p for shift in shifts.values())])
    )
    measures, at = [], 0
    for hook in hooks:
        measures += _row_measures(hook)
        shift = shifts.get(hook.hook)
        n_channels = hook.means.shape[1]
        mine = family[at : at + n_channels] if shift else None
        at += n_channels if shift else 0
        measures += _channel_measures(hook, shift, mine, limits)
    return measures


def _row_measures(hook: PairedHook) -> list[DriftMeasure]:
    floor = hook.floor
    origin = f"floor: {floor.words}" if floor else "no floor: no token was computed twice before"
    rounding = f"rounding to {hook.dtype} alone moves a row by about {_ROUNDING[hook.dtype]}"
    words = f"share of rows that moved more than {_MOVED} times the median"
    told: list[tuple[str, str, Callable[[Floats], Any], str]] = [
        ("relative L2, mean", "relative_l2", np.mean, f"{rounding}; {origin}"),
        ("relative L2, p99", "relative_l2", lambda x: np.percentile(x, 99), origin),
        ("cosine distance, mean", "cosine_distance", np.mean, f"1 - cosine; {origin}"),
        (
            "outlier rate",
            "relative_l2",
            lambda x: (x > _MOVED * np.median(x)).mean(),
            f"{words}; {origin}",
        ),
    ]
    return [
        DriftMeasure(
            hook=hook.hook,
            name=name,
            value=float(measure(getattr(hook, of))),
            floor=float(measure(getattr(floor, of))) if floor else None,
            n=hook.n_pairs,
            unit="rows",
            note=note + hook.left_out,
        )
        for name, of, measure, note in told
    ]


def _channel_measures(
    hook: PairedHook, shift: samples.ChannelShift | None, adjusted_p: Floats | None, limits: Limits
) -> list[DriftMeasure]:
    n = len(hook.means)
    largest = int(np.argmax(np.abs(hook.means.mean(axis=0))))
    value = float(np.abs(hook.means.mean(axis=0))[largest])
    unit_words = "in units of the row's root mean square"
    if shift is None or adjusted_p is None:
        few = f"channel {largest}, {unit_words}; too few requests to test ({n} of {MIN_REQUESTS})"
        name = "largest channel shift"
        return [DriftMeasure(hook=hook.hook, name=name, value=value, floor=None, n=n, note=few)]
    rejected = adjusted_p <= limits.fdr
    splits = [
        samples.channel_shift(hook.means * signs[:, None])
        for signs in samples.sign_flips(n, N_SPLITS, limits.seed)
    ]
    floor_share = _p95([float((benjamini_hochberg(one.p) <= limits.fdr).mean()) for one in splits])
    floor_shift = _p95([float(np.abs(one.mean).max()) for one in splits])
    words = f"floor: 95th percentile of {N_SPLITS} splits of the requests in halves"
    which = np.flatnonzero(rejected)
    named = ", ".join(str(channel) for channel in which[:8])
    named = f"channels {named}{', ...' if len(which) > 8 else ''}" if len(which) else "none"
    return [
        DriftMeasure(
            hook=hook.hook,
            name="channels shifted",
            value=float(rejected.mean()),
            floor=floor_share,
            p=float(shift.p.min()),
            adjusted_p=float(adjusted_p.min()),
            n=n,
            note=f"share; {named}; t tests over requests; {words}",
        ),
        DriftMeasure(
            hook=hook.hook,
            name="largest channel shift",
            value=value,
            floor=floor_shift,
            p=float(shift.p[largest]),
            adjusted_p=float(adjusted_p[largest]),
            n=n,
            note=f"channel {largest}, {unit_words}; {words}",
        ),
    ]


def _p95(values: list[float]) -> float:
    return float(np.percentile(values, 95))


N_PERMUTATIONS = 199
_N_DIRECTIONS = 32  # of the covariance distance
_MAX_CHANNELS = 1024  # above it the classifier sees the leading directions only
_N_LEADING = 128
_LARGE = 10  # times the median norm
Measure = Callable[[Rows, samples.Units, samples.Labels], Floats]


def population_measures(hooks: list[list[DriftMeasure]]) -> list[DriftMeasure]:
    """Return the measures of all hooks with p-values adjusted over all of them."""
    measures = [measure for hook in hooks for measure in hook]
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
) -> list[DriftMeasure]:
    """Return the two-sample measures of a hook, with p and without adjusted p.

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
        return []
    norm = np.linalg.norm(everything, axis=1)
    outlier = norm > _LARGE * np.median(norm)
    if n_broken:
        left_out += f"; {n_broken} rows with a value that is not finite left out"
    judge = _Judge(hook, limits.seed, left_out)
    told = [_outliers(judge, outlier, samples.make_units(who, second), second)]
    calm = ~outlier
    if not second[calm].all() and second[calm].any():
        if outlier.any():
            judge = replace(
                judge, left_out=left_out + f"; {int(outlier.sum())} outlier rows left out"
            )
        units = samples.make_units(who[calm], second[calm])
        told = [*_distributions(judge, samples.standardised(everything[calm]), units), *told]
    return told


def _outliers(
    judge: _Judge, outlier: samples.Labels, units: samples.Units, second: samples.Labels
) -> DriftMeasure:
    shares = [float(outlier[second == side].mean()) for side in (False, True)]
    return judge.tell(
        "outlier rate",
        lambda rows, units, labels: samples.rate_gap(rows[:, 0] > 0, units, labels),
        outlier[:, None].astype(np.float32),
        units,
        f"difference of the shares of rows whose norm is over {_LARGE} times the median: first "
        f"{shares[0]:.3%}, second {shares[1]:.3%}",
        test=bool(outlier.any()),
    )


def _distributions(judge: _Judge, rows: Rows, units: samples.Units) -> list[DriftMeasure]:
    if not rows.shape[1]:
        return []  # every channel is constant
    seed = judge.seed
    n_least = min(int((units.side[units.of_row] == side).sum()) for side in (False, True))
    k = max(1, min(_N_DIRECTIONS, rows.shape[1], n_least // 20))
    wide = rows.shape[1] > _MAX_CHANNELS
    seen = samples.standardised(samples.leading_subspace(rows, _N_LEADING, seed)) if wide else rows
    seen_words = f"{seen.shape[1]} {'leading directions' if wide else 'channels'}"
    _, (first, second) = samples.kurtosis_gap(rows, units, units.side[None])
    return [
        judge.tell(
            "log-variance ratio",
            samples.log_variance_ratio,
            rows,
            units,
            "rms over channels of ln(variance of second / variance of first)",
        ),
        judge.tell(
            "covariance distance",
            samples.covariance_distance,
            samples.leading_subspace(rows, k, seed),
            units,
            f"affine-invariant, rms of logarithms, in the {k} leading directions of both",
        ),
        judge.tell(
            "classifier AUC",
            lambda rows, units, labels: samples.grouped_auc(rows, units, labels, seed),
            seen,
            units,
            f"linear discriminant on {seen_words}, {samples.N_FOLDS} folds of whole requests; 0.5 "
            "is chance",
        ),
        judge.tell(
            "kurtosis",
            lambda rows, units, labels: samples.kurtosis_gap(rows, units, labels)[0],
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
        units: samples.Units,
        words: str,
        *,
        test: bool = True,
    ) -> DriftMeasure:
        """Return the measure with its floor, and with its p where enough requests are there."""
        sides = [int((units.side == side).sum()) for side in (False, True)]
        enough = min(sides) >= MIN_REQUESTS
        labels = units.side[None]
        if test and enough:
            exchanged = samples.exchanges(units, N_PERMUTATIONS, self.seed)
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
            p=samples.permutation_p(float(values[0]), values[1:]) if len(values) > 1 else None,
            n=len(np.unique(units.request)),
            note=f"{words}; {origin if floor is not None else 'no floor'}{few}{self.left_out}",
        )

    def _floor(self, measure: Measure, rows: Rows, units: samples.Units) -> float | None:
        found = []
        for side in (False, True):
            mine, own = units.on_side(side)
            if len(own) >= MIN_REQUESTS:
                split = samples.halves(len(own), N_SPLITS, self.seed + side)
                found.append(measure(rows[mine], own, split))
        return float(np.percentile(np.concatenate(found), 95)) if found else None
