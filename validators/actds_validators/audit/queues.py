"""Queues: when it was lost, and how the pipeline stood.

A section of the audit. Aggregates of the series and of the writer's own tables, at most a few
hundred points whatever the length of the run. Imports `series`, `sources` and the result.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from actds_validators.audit.missingness import estimate
from actds_validators.audit.result import (
    Estimate,
    Lag,
    LagBand,
    Loss,
    Occupancy,
    Queues,
    Stall,
    TracePoint,
)
from actds_validators.audit.series import Series
from actds_validators.audit.sources import RunSource
from actds_validators.statistics.intervals import block_sums, jackknife_many, loss_rate
from actds_validators.statistics.shift import Trend, lag_correlation

__all__ = ["QueueCounts", "queues", "read_queues"]

N_BINS = 240
N_MARKS = 200
MAX_LAG = 64
MAX_DEPTHS = 64


class QueueCounts:
    """Stalls and occupancy, added up over runs."""

    def __init__(self) -> None:
        self.stalls: Counter[str] = Counter()
        self.stalled_s: dict[str, float] = defaultdict(float)
        self.marks_s: dict[str, list[float]] = {}
        self.occupancy: dict[str, dict[tuple[int, int], float]] = {}


def read_queues(source: RunSource, series: Series, counts: QueueCounts) -> None:
    """Add a run's stalls and occupancy.

    Args:
        source: the run.
        series: for the clock: marks are seconds on its time line.
        counts: what to add to.
    """
    for stage, n, seconds in source.rows(
        "select stage, count(*), sum(duration_ns) / 1e9 from stalls group by stage"
    ):
        counts.stalls[stage] += int(n)
        counts.stalled_s[stage] += float(seconds)
    if source.run in series.runs:
        begin = int(series.offsets[series.runs.index(source.run)])
        [first] = source.one(
            "select min(t_ns) from steps where captured_tokens + dropped_tokens > 0"
        )
        for stage, t_ns in source.rows(
            f"select stage, t_ns from stalls order by duration_ns desc limit {N_MARKS}"
        ):
            mark = max(0.0, (int(t_ns) - int(first)) / 1e9) + float(series.t_s[begin])
            counts.marks_s.setdefault(stage, []).append(mark)
    for stage, depth, capacity, seconds in source.rows(
        "select stage, depth, max(capacity), sum(duration_ns) / 1e9 from occupancy "
        "group by stage, depth"
    ):
        counts.occupancy.setdefault(stage, defaultdict(float))[int(depth), int(capacity)] += float(
            seconds
        )


def queues(series: Series, counts: QueueCounts, trends: dict[str, Trend], seed: int = 0) -> Queues:
    """Return the section.

    Args:
        series: of the losses.
        counts: of `read_queues`.
        trends: of the loss over the load.
        seed: of the random shifts behind the band of the lags, where there are several runs.
    """
    lags, band = _lags(series, seed)
    return Queues(
        trace=_trace(series),
        stalls=[
            Stall(
                stage=stage,
                n=n,
                seconds=counts.stalled_s[stage],
                marks_s=sorted(counts.marks_s.get(stage, []))[:N_MARKS],
            )
            for stage, n in sorted(counts.stalls.items())
        ],
        occupancy=[
            Occupancy(stage=stage, depth=depth, capacity=capacity, seconds=seconds)
            for stage, depths in sorted(counts.occupancy.items())
            for (depth, capacity), seconds in sorted(depths.items())[:MAX_DEPTHS]
        ],
        lags=lags,
        lag_band=band,
        loss_by_load=_loss_by_load(series, trends),
    )


def _trace(series: Series) -> list[TracePoint]:
    end = float((series.t_s + series.seconds).max())
    if end <= 0:
        return []
    index = np.minimum((series.t_s / end * N_BINS).astype(int), N_BINS - 1)
    computed = np.bincount(index, weights=series.computed, minlength=N_BINS)
    lost = np.bincount(index, weights=series.lost, minlength=N_BINS)
    load = np.bincount(index, weights=series.load * series.computed, minlength=N_BINS)
    width = end / N_BINS
    return [
        TracePoint(
            t_s=k * width,
            seconds=width,
            computed=int(computed[k]),
            lost=int(lost[k]),
            load=float(load[k] / computed[k]) if computed[k] else 0.0,
        )
        for k in range(N_BINS)
    ]


def _lags(series: Series, seed: int) -> tuple[list[Lag], LagBand | None]:
    reach = min(MAX_LAG, max(0, series.n_ticks // 4))
    found = lag_correlation(series.computed, series.share, series.run, reach, seed=seed)
    if found is None:
        return [], None
    lags = [
        Lag(steps=int(lag) * series.steps_per_tick, correlation=float(value))
        for lag, value in zip(found.lags, found.correlation, strict=True)
    ]
    return lags, LagBand(
        low=found.low,
        high=found.high,
        confidence=found.confidence,
        n_shifts=found.n_shifts,
        n_effective=found.n_effective,
    )


def _loss_by_load(series: Series, trends: dict[str, Trend]) -> list[Loss]:
    trend = trends.get("load_8")
    if trend is None:
        return []
    inside = trend.groups == np.arange(len(trend.n))[:, np.newaxis]
    cut = series.blocks
    n = block_sums(np.where(inside, series.computed, 0.0), cut.labels, cut.n_blocks)
    lost = block_sums(np.where(inside, series.lost, 0.0), cut.labels, cut.n_blocks)
    rates = jackknife_many(np.stack([n, lost]), loss_rate)
    found = []
    for k, interval in enumerate(rates):
        rate = estimate(interval) or Estimate(value=float(trend.rate[k]), low=0.0, high=1.0)
        found.append(
            Loss(
                load=float(trend.load[k]),
                rate=Estimate(value=rate.value, low=max(0.0, rate.low), high=min(1.0, rate.high)),
                fitted=float(trend.fitted[k]),
            )
        )
    return found
