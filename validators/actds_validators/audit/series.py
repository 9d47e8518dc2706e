"""Series: what was computed and lost over time, and how the queues stood."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Literal

import numpy as np

from actds_validators.arrays import Floats, Ints
from actds_validators.audit import result
from actds_validators.audit.covariates import COVARIATES, LOAD, columns_of, defined
from actds_validators.audit.data import RunSource
from actds_validators.statistics import intervals
from actds_validators.statistics.series import (
    correlation_steps,
    count_events,
    effective_events,
    isotonic,
    lag_correlation,
    load_groups,
)

_COUNTED = ("step", "t_ns", "captured_tokens", "dropped_tokens")
MAX_TICKS = 1 << 17
"""Longest series; a longer run is looked at several steps at a time."""


@dataclass(frozen=True)
class RunSteps:
    """The steps of one run that computed a token, in order."""

    run: str
    step: Ints
    t_ns: Ints
    computed: Floats
    lost: Floats
    covariates: dict[str, Floats]  # values of the system covariates, (n_steps,) each


@dataclass(frozen=True)
class Series:
    """All runs one after the other, as ticks of one or more steps.

    Args:
        system: system covariate to sums ``(2, n_ticks)``: x and its square over the tokens; and
            of x over the lost ones, ``(3, n_ticks)`` in all.
    """

    runs: tuple[str, ...]
    run: Ints
    t_s: Floats  # seconds since the first step of the first run, without the time between runs
    seconds: Floats
    computed: Floats
    lost: Floats
    load: Floats
    system: dict[str, Floats]
    blocks: intervals.Blocks
    offsets: Ints  # first tick of each run, and the number of ticks
    steps_per_tick: int
    n_events: int
    effective_events: float  # events of equal size that a mean over the lost tokens rests on
    n_steps: int
    n_lost_steps: int
    n_partial_steps: int

    @property
    def n_ticks(self) -> int:
        return len(self.run)

    @property
    def share(self) -> Floats:
        return np.divide(
            self.lost, self.computed, out=np.zeros(self.n_ticks), where=self.computed > 0
        )


def read_steps(source: RunSource) -> RunSteps:
    """Return the steps of a run that computed something new; the load counts the others, too."""
    definitions = defined("step")
    more = [name for name in columns_of(definitions) if name not in _COUNTED]
    columns = source.columns("steps", [*_COUNTED, *more])
    order = np.argsort(columns["step"], kind="stable")
    columns = {name: values[order] for name, values in columns.items()}
    lost = columns["dropped_tokens"].astype(np.float64)
    computed = columns["captured_tokens"] + lost
    floats = {name: np.asarray(columns[name], np.float64) for name in columns_of(definitions)}
    covariates = {
        covariate.name: np.asarray(covariate.values(floats), np.float64)
        for covariate in definitions
    }
    kept = computed > 0
    return RunSteps(
        source.run,
        columns["step"][kept],
        columns["t_ns"][kept],
        computed[kept],
        lost[kept],
        {name: values[kept] for name, values in covariates.items()},
    )


def make_series(runs: list[RunSteps], n_blocks: int) -> Series | None:
    """Return the series of some runs, ``None`` when no token was computed."""
    runs = [run for run in runs if len(run.step)]
    n_steps = sum(len(run.step) for run in runs)
    if not n_steps:
        return None
    width = -(-n_steps // MAX_TICKS)
    starts = [np.arange(0, len(run.step), width) for run in runs]
    labels = np.repeat(np.arange(len(runs)), [len(s) for s in starts])

    def summed(values: list[Floats]) -> Floats:
        parts = [np.add.reduceat(v, s, axis=-1) for v, s in zip(values, starts, strict=True)]
        return np.concatenate(parts, axis=-1)

    computed, lost = summed([r.computed for r in runs]), summed([r.lost for r in runs])
    system = {
        name: summed([_sums(r, r.covariates[name]) for r in runs]) for name in runs[0].covariates
    }
    t_s, seconds = _clock(runs, starts)
    share = np.divide(lost, computed)
    n_events, effective = _events(lost, share, labels)
    return Series(
        runs=tuple(run.run for run in runs),
        run=labels,
        t_s=t_s,
        seconds=seconds,
        computed=computed,
        lost=lost,
        load=system[LOAD][0] / computed,
        system=system,
        blocks=intervals.blocks(len(labels), labels, share, n_blocks, min(20, n_blocks)),
        offsets=np.cumsum([0, *(len(s) for s in starts)]),
        steps_per_tick=width,
        n_events=n_events,
        effective_events=effective,
        n_steps=n_steps,
        n_lost_steps=sum(int((r.lost > 0).sum()) for r in runs),
        n_partial_steps=sum(int(((r.lost > 0) & (r.lost < r.computed)).sum()) for r in runs),
    )


def _events(lost: Floats, share: Floats, labels: Ints) -> tuple[int, float]:
    """Return the independent loss events, and how many of equal size they are worth.

    The correlation is that of the share lost: lost tokens go with the size of the steps as well.
    Where most ticks lose something there are no gaps to count: then as many as there are
    correlation times.
    """
    if not lost.any():
        return 0, 0.0
    time = correlation_steps(share, labels)
    if np.count_nonzero(lost) <= len(lost) / 2:
        gap = math.ceil(time)
        return count_events(lost, labels, gap), effective_events(lost, labels, gap)
    n_events = max(1, int(len(lost) / time))
    return n_events, float(n_events)


def _sums(run: RunSteps, x: Floats) -> Floats:
    return np.stack([run.computed * x, run.computed * x * x, run.lost * x])


def _clock(runs: list[RunSteps], starts: list[Ints]) -> tuple[Floats, Floats]:
    """Return seconds since the first step, runs put one behind the other, and tick lengths."""
    times, lengths, base = [], [], 0.0
    for run, start in zip(runs, starts, strict=True):
        t = (np.maximum.accumulate(run.t_ns[start]) - run.t_ns[0]) / 1e9
        last = (max(int(run.t_ns[-1]), int(run.t_ns[0])) - int(run.t_ns[0])) / 1e9
        end = max(last, float(t[-1]))
        times.append(base + t)
        lengths.append(np.diff(t, append=end))
        base += end
    return np.concatenate(times), np.concatenate(lengths)


# when it was lost, and how the queues stood --------------------------------------------------

N_BINS = 240
N_MARKS = 200
STEP_CURVES = ("batch_tokens", "max_seq_len")
Direction = Literal["increasing", "decreasing"]
MAX_LAG = 64
MAX_DEPTHS = 64


def queues(sources: list[RunSource], series: Series, seed: int = 0) -> result.Queues:
    """Return the section."""
    lags, band = _lags(series, seed)
    return result.Queues(
        trace=_trace(series),
        stalls=_stalls(sources, series),
        occupancy=_occupancy(sources),
        lags=lags,
        lag_band=band,
        loss_by_load=_loss_by_load(series),
        loss_by_step=_loss_by_step(series),
    )


def _stalls(sources: list[RunSource], series: Series) -> list[result.Stall]:
    n: Counter[str] = Counter()
    waited_s: dict[str, float] = defaultdict(float)
    marks_s: dict[str, list[float]] = defaultdict(list)
    for source in sources:
        stalls = source.columns("stalls", ["stage", "t_ns", "duration_ns"])
        for stage in sorted(set(stalls["stage"])):
            of_stage = stalls["stage"] == stage
            n[stage] += int(of_stage.sum())
            waited_s[stage] += int(stalls["duration_ns"][of_stage].sum()) / 1e9
        begin = int(series.offsets[series.runs.index(source.run)])
        steps = source.columns("steps", ["t_ns", "captured_tokens", "dropped_tokens"])
        first = int(steps["t_ns"][steps["captured_tokens"] + steps["dropped_tokens"] > 0].min())
        for at in np.argsort(-stalls["duration_ns"], kind="stable")[:N_MARKS]:
            mark = max(0.0, (int(stalls["t_ns"][at]) - first) / 1e9) + float(series.t_s[begin])
            marks_s[stalls["stage"][at]].append(mark)
    return [
        result.Stall(stage=stage, n=n[stage], seconds=waited_s[stage], marks_s=marks[:N_MARKS])
        for stage in sorted(n)
        for marks in [sorted(marks_s[stage])]
    ]


def _occupancy(sources: list[RunSource]) -> list[result.Occupancy]:
    spent_s: dict[tuple[str, int, int], float] = defaultdict(float)
    sums = [("capacity", "max"), ("duration_ns", "sum")]
    for source in sources:
        table = source.table("occupancy", ["stage", "depth", "capacity", "duration_ns"])
        for line in table.group_by(["stage", "depth"]).aggregate(sums).to_pylist():
            place = line["stage"], line["depth"], line["capacity_max"]
            spent_s[place] += line["duration_ns_sum"] / 1e9
    return [
        result.Occupancy(stage=stage, depth=depth, capacity=room, seconds=seconds)
        for _, lines in groupby(sorted(spent_s.items()), lambda item: item[0][0])
        for (stage, depth, room), seconds in islice(lines, MAX_DEPTHS)
    ]


def _trace(series: Series) -> list[result.TracePoint]:
    end = float((series.t_s + series.seconds).max())
    if end <= 0:
        return []
    index = np.minimum((series.t_s / end * N_BINS).astype(int), N_BINS - 1)
    computed, lost, load = (
        np.bincount(index, weights=x, minlength=N_BINS)
        for x in (series.computed, series.lost, series.load * series.computed)
    )
    width = end / N_BINS
    return [
        result.TracePoint(
            t_s=k * width,
            seconds=width,
            computed=int(computed[k]),
            lost=int(lost[k]),
            load=float(load[k] / computed[k]) if computed[k] else 0.0,
        )
        for k in range(N_BINS)
    ]


def _lags(series: Series, seed: int) -> tuple[list[result.Lag], result.LagBand | None]:
    reach = min(MAX_LAG, max(0, series.n_ticks // 4))
    lagged = lag_correlation(series.computed, series.share, series.run, reach, seed=seed)
    if lagged is None:
        return [], None
    lags = [
        result.Lag(steps=int(lag) * series.steps_per_tick, correlation=float(value))
        for lag, value in zip(lagged.lags, lagged.correlation, strict=True)
    ]
    return lags, result.LagBand.model_validate(lagged, from_attributes=True)


def _loss_by_load(series: Series) -> list[result.Loss]:
    if not series.lost.any() or np.ptp(series.load) == 0:
        return []
    return _curve(series, series.load)[1]


def _loss_by_step(series: Series) -> list[result.LossCurve]:
    """Return the curve of every number of a step that the essay's drops are said to go with.

    What it describes is tested as any covariate, by shifts: no test more.
    """
    if not series.lost.any():
        return []
    curves = {
        name: _curve(series, series.system[name][0] / series.computed) for name in STEP_CURVES
    }
    return [
        result.LossCurve(covariate=COVARIATES[name].facts(), direction=direction, points=points)
        for name, (direction, points) in curves.items()
    ]


def _curve(series: Series, value: Floats) -> tuple[Direction, list[result.Loss]]:
    """Return the loss by deciles of a number of the step, with the better monotone fit."""
    groups = load_groups(value)
    n = np.bincount(groups, weights=series.computed)
    rate = np.bincount(groups, weights=series.lost) / n
    rising, falling = isotonic(rate, n), -isotonic(-rate, n)
    is_rising = bool(((rising - rate) ** 2 * n).sum() <= ((falling - rate) ** 2 * n).sum())
    mean = np.bincount(groups, weights=series.computed * value) / n
    points = _points(series, groups, mean, rate, rising if is_rising else falling)
    return "increasing" if is_rising else "decreasing", points


def rate_estimate(interval: intervals.Interval | None, rate: float) -> result.Estimate:
    share = result.Estimate.of(interval) or result.Estimate(value=rate, low=0.0, high=1.0)
    return result.Estimate(value=share.value, low=max(0.0, share.low), high=min(1.0, share.high))


def _points(
    series: Series, groups: Ints, mean: Floats, rate: Floats, fitted: Floats
) -> list[result.Loss]:
    inside = groups == np.arange(len(mean))[:, np.newaxis]
    cut = series.blocks
    n = intervals.block_sums(np.where(inside, series.computed, 0.0), cut.labels, cut.n_blocks)
    lost = intervals.block_sums(np.where(inside, series.lost, 0.0), cut.labels, cut.n_blocks)
    rates = intervals.jackknife_many(np.stack([n, lost]), intervals.loss_rate)
    return [
        result.Loss(
            load=float(mean[k]),
            rate=rate_estimate(interval, float(rate[k])),
            fitted=float(fitted[k]),
        )
        for k, interval in enumerate(rates)
    ]
