"""Numeric drift of one hook: the same tokens computed twice, row by row and channel by channel.

After the pairs, before the sentence. Imports the statistics and the model of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from actds_validators.audit.result import DriftMeasure, Limits
from actds_validators.statistics import paired
from actds_validators.statistics.family import benjamini_hochberg

__all__ = ["MIN_PAIRS", "PairedHook", "RowFloor", "measure_pairs", "numeric_measures"]

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.float32]

MIN_REQUESTS = 8
"""Requests below which nothing is tested."""
MIN_PAIRS = 8
"""Pairs below which nothing is measured."""
N_SPLITS = 20
_OUTLIER = 8  # times the median distance
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


def usable(rows: Rows) -> npt.NDArray[np.bool_]:
    """Return which rows are finite and not zero."""
    return np.asarray(np.isfinite(rows).all(axis=1) & (rows != 0).any(axis=1))


def measure_pairs(
    hook: str,
    dtype: str,
    rows: tuple[Rows, Rows],
    request: npt.NDArray[np.int64],
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
        means = paired.request_means(paired.relative_shift(first, second), request)
    return PairedHook(
        hook,
        dtype,
        len(first),
        left_out,
        paired.relative_l2(first, second),
        paired.cosine_distance(first, second),
        means,
        floor,
    )


def numeric_measures(hooks: list[PairedHook], limits: Limits) -> list[DriftMeasure]:
    """Return the measures of all hooks; their channels are one family of tests.

    A hook of fewer than ``MIN_PAIRS`` pairs has none.
    """
    hooks = [hook for hook in hooks if hook.n_pairs >= MIN_PAIRS]
    tested = [hook for hook in hooks if len(hook.means) >= MIN_REQUESTS]
    shifts = {hook.hook: paired.channel_shift(hook.means) for hook in tested}
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
    told: list[tuple[str, Callable[[Any], Floats], Callable[[Floats], float], str]] = [
        ("relative L2, mean", _relative_l2, _mean, f"{rounding}; {origin}"),
        ("relative L2, p99", _relative_l2, _p99, origin),
        ("cosine distance, mean", _cosine_distance, _mean, f"1 - cosine; {origin}"),
        (
            "outlier rate",
            _relative_l2,
            _outlier_rate,
            f"share of rows that moved more than {_OUTLIER} times the median; {origin}",
        ),
    ]
    return [
        DriftMeasure(
            hook=hook.hook,
            name=name,
            value=measure(values(hook)),
            floor=measure(values(floor)) if floor else None,
            n=hook.n_pairs,
            unit="rows",
            note=note + hook.left_out,
        )
        for name, values, measure, note in told
    ]


def _channel_measures(
    hook: PairedHook, shift: paired.ChannelShift | None, adjusted_p: Floats | None, limits: Limits
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
        paired.channel_shift(hook.means * signs[:, None])
        for signs in paired.sign_flips(n, N_SPLITS, limits.seed)
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


def _relative_l2(told: PairedHook | RowFloor) -> Floats:
    return told.relative_l2


def _cosine_distance(told: PairedHook | RowFloor) -> Floats:
    return told.cosine_distance


def _mean(values: Floats) -> float:
    return float(values.mean())


def _p99(values: Floats) -> float:
    return float(np.percentile(values, 99))


def _p95(values: list[float]) -> float:
    return float(np.percentile(values, 95))


def _outlier_rate(values: Floats) -> float:
    return float((values > _OUTLIER * np.median(values)).mean())
