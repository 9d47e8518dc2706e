"""Mechanism: what the losses go with, tested in one family; and how the queues stood.

No test takes tokens for independent draws: between steps losses are moved along the run, within
steps they are clustered by request.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Literal

import numpy as np

from actds_validators.audit.accumulate import CovariateSums
from actds_validators.audit.census import Series
from actds_validators.audit.covariates import COVARIATES, LOAD, defined
from actds_validators.audit.data import RunSource
from actds_validators.audit.missingness import rate_estimate
from actds_validators.audit.result import (
    Association,
    Covariate,
    Lag,
    LagBand,
    Limits,
    Loss,
    LossCurve,
    Mechanism,
    Occupancy,
    Queues,
    Stall,
    TracePoint,
)
from actds_validators.statistics.association import (
    Within,
    block_score,
    change,
    naive_chi_square,
    naive_z,
)
from actds_validators.statistics.events import Floats, Ints, one_per_event
from actds_validators.statistics.intervals import (
    Interval,
    benjamini_hochberg,
    block_sums,
    detectable,
    jackknife_many,
    loss_rate,
)
from actds_validators.statistics.shift import (
    Trend,
    circular_shift,
    isotonic,
    lag_correlation,
    load_groups,
    trend,
)

TIME = Covariate(name="time", label="time in the run", unit="s", group="system")
MIN_WITHIN_REQUESTS = 10
MAX_PARTIAL = 0.05
"""Share of the lost steps that may have lost a part where steps count as lost whole: a queue that
fills up in the middle of a step loses a part of that one."""


def _test(
    name: str,
    covariate: Covariate,
    statistic: float,
    p: float,
    n_units: int,
    unit: str,
    naive_p: float | None = None,
    note: str = "",
) -> Association:
    """Return a test as it stands alone: `family` adjusts it."""
    return Association(
        name=name, covariate=covariate, statistic=statistic, p=p, adjusted_p=p, rejected=False,
        n_units=n_units, unit=unit, naive_p=naive_p, note=note,
    )  # fmt: skip


def load_trends(series: Series, limits: Limits) -> dict[str, Trend]:
    """Return the isotonic trend of the loss over each moving average of the load."""
    found = {}
    for one in defined("step"):
        if one.is_load:
            load = series.system[one.name][0] / series.computed
            fit = trend(series.run, series.computed, series.lost, load, seed=limits.seed)
            if fit is not None:
                found[one.name] = fit
    return found


def family(
    sums: list[CovariateSums],
    series: Series,
    within: Iterable[tuple[Covariate, Within]],
    trends: dict[str, Trend],
    limits: Limits,
) -> list[Association]:
    """Return every test, adjusted over all of them.

    Args:
        sums: of every covariate: system, content, values.
        series: of the losses.
        within: tests of selection within steps.
        trends: of `load_trends`.
        limits: rate and seed.
    """
    found = [
        *_shifts("shift", sums, series, series.lost, limits),
        *_events(sums, series, limits),
        *_trends(series, trends),
        *_changes(series, limits),
    ]
    for covariate, one in within:
        if one.n_requests >= MIN_WITHIN_REQUESTS:
            found.append(_test("within", covariate, one.t, one.p, one.n_requests, "requests"))
    adjusted = benjamini_hochberg([test.p for test in found])
    return [
        test.model_copy(update={"adjusted_p": float(q), "rejected": bool(q <= limits.fdr)})
        for test, q in zip(found, adjusted, strict=True)
    ]


def mechanism(series: Series, tests: list[Association], intervals: list[Interval]) -> Mechanism:
    """Return the section.

    Args:
        series: of the losses.
        tests: of `family`.
        intervals: of the differences, in the order of importance: the widest says what is found.
    """
    error = max((i.error for i in intervals), default=0.0)
    return Mechanism(
        tests=tests,
        n_events=series.n_events,
        n_steps=series.n_steps,
        n_lost_steps=series.n_lost_steps,
        n_partial_steps=series.n_partial_steps,
        n_blocks=series.blocks.n_blocks,
        block_steps=series.blocks.steps * series.steps_per_tick,
        detectable=detectable(error) if intervals else None,
    )


def _whole(series: Series) -> bool:
    """Return whether steps are lost whole."""
    return series.n_partial_steps <= MAX_PARTIAL * series.n_lost_steps


def _block_p(series: Series, lost: Floats, held: Floats, weight: Floats) -> float:
    """Return the p of a test over blocks where steps lose a part: what losses move with then."""
    if _whole(series):
        return 0.0
    found = block_score(series.blocks, series.run, series.computed, lost, held, weight=weight)
    return float(found[0])


def _events(sums: list[CovariateSums], series: Series, limits: Limits) -> list[Association]:
    """Return the tests of the load in which each event counts once.

    A stall of the disk makes the longest bursts, whatever the load, and outweighs the overflows
    of busy times. In 80 simulated runs of 40,000 steps that lost half a percent in 4 to 45 events,
    the tests of the load found 9 of 10 full queues with these, and 5 to 8 of 10 before.

    Only where steps are lost whole: a loss that takes tokens one by one hits a step the more likely
    the more it holds, and events that each weigh 1 then go with the load, whatever the loss does.
    """
    if np.count_nonzero(series.lost) > series.n_ticks / 2:  # no gaps, no events to tell apart
        return []
    if not _whole(series):
        return []
    names = {one.name for one in defined("step") if one.is_load}
    loads = [one for one in sums if one.covariate.name in names]
    lost = series.computed * one_per_event(series.share, series.run)
    return _shifts("event", loads, series, lost, limits)


def _shifts(
    name: str, sums: list[CovariateSums], series: Series, lost: Floats, limits: Limits
) -> list[Association]:
    found = []
    for one in sums:
        n, n_lost = one.n.sum(), one.n_lost.sum()
        x, xx, lost_x = one.sums.sum(axis=1)
        variance = xx / max(n, 1) - (x / max(n, 1)) ** 2
        if n <= 0 or variance <= 1e-12 * max(1.0, xx / n):
            continue
        held, weight = one.sums[0], one.n
        if one.covariate.group == "system":  # of the step: one value, however many tokens share it
            held, weight = held / series.computed, np.ones(series.n_ticks)
            variance = float(held.var())
        test = circular_shift(
            series.run, series.computed, lost, held, weight=weight, seed=limits.seed
        )
        if test is None:
            continue
        found.append(
            _test(
                name,
                one.covariate,
                float(test.difference[0]) / float(np.sqrt(variance)),
                max(float(test.p[0]), _block_p(series, lost, held, weight)),
                max(1, int(test.n_effective[0])),
                "shifts",
                naive_z([n, x, xx, n_lost, lost_x]) if name == "shift" else None,
            )
        )
    return found


def _trends(series: Series, trends: dict[str, Trend]) -> list[Association]:
    every = np.ones(series.n_ticks)
    return [
        _test(
            "trend",
            COVARIATES[name].facts(),
            one.statistic if one.direction == "increasing" else -one.statistic,
            max(
                one.p,
                _block_p(series, series.lost, series.system[name][0] / series.computed, every),
            ),
            max(1, int(one.n_effective)),
            "shifts",
            naive_chi_square(one.n, one.n_lost),
            f"{one.direction} over {len(one.rate)} groups of load",
        )
        for name, one in trends.items()
    ]


def _changes(series: Series, limits: Limits) -> list[Association]:
    found = change(series.computed, series.lost, series.run, seed=limits.seed)
    if found is None or not found.long_enough:
        return []
    at = float(series.t_s[min(found.at, series.n_ticks - 1)])
    note = f"{found.before:.2%} lost before {at:.0f} s, {found.after:.2%} after"
    return [_test("change", TIME, found.statistic, found.p, found.n_blocks, "blocks", note=note)]


N_BINS = 240
N_MARKS = 200
STEP_CURVES = ("batch_tokens", "max_seq_len")
Direction = Literal["increasing", "decreasing"]
MAX_LAG = 64
MAX_DEPTHS = 64


def queues(
    sources: list[RunSource], series: Series, trends: dict[str, Trend], seed: int = 0
) -> Queues:
    """Return the section.

    Args:
        sources: the runs of the series.
        series: of the losses.
        trends: of the loss over the load.
        seed: of the random shifts behind the band of the lags, where there are several runs.
    """
    lags, band = _lags(series, seed)
    return Queues(
        trace=_trace(series),
        stalls=_stalls(sources, series),
        occupancy=_occupancy(sources),
        lags=lags,
        lag_band=band,
        loss_by_load=_loss_by_load(series, trends),
        loss_by_step=_loss_by_step(series),
    )


def _stalls(sources: list[RunSource], series: Series) -> list[Stall]:
    """Return the waits at each stage; marks are seconds on the time line of the series."""
    n: Counter[str] = Counter()
    waited_s: dict[str, float] = defaultdict(float)
    marks_s: dict[str, list[float]] = defaultdict(list)
    for source in sources:
        stalls = source.columns("stalls", ["stage", "t_ns", "duration_ns"])
        for stage in sorted(set(stalls["stage"])):
            own = stalls["stage"] == stage
            n[stage] += int(own.sum())
            waited_s[stage] += int(stalls["duration_ns"][own].sum()) / 1e9
        begin = int(series.offsets[series.runs.index(source.run)])
        steps = source.columns("steps", ["t_ns", "captured_tokens", "dropped_tokens"])
        first = int(steps["t_ns"][steps["captured_tokens"] + steps["dropped_tokens"] > 0].min())
        for at in np.argsort(-stalls["duration_ns"], kind="stable")[:N_MARKS]:
            mark = max(0.0, (int(stalls["t_ns"][at]) - first) / 1e9) + float(series.t_s[begin])
            marks_s[stalls["stage"][at]].append(mark)
    return [
        Stall(stage=stage, n=n[stage], seconds=waited_s[stage], marks_s=marks[:N_MARKS])
        for stage in sorted(n)
        for marks in [sorted(marks_s[stage])]
    ]


def _occupancy(sources: list[RunSource]) -> list[Occupancy]:
    """Return how long the queue of each stage stood at each depth."""
    spent_s: dict[str, dict[tuple[int, int], float]] = defaultdict(lambda: defaultdict(float))
    for source in sources:
        held = source.columns("occupancy", ["stage", "depth", "capacity", "duration_ns"])
        lines = list(zip(*(column.tolist() for column in held.values()), strict=True))
        capacity: dict[tuple[str, int], int] = {}
        lasted: Counter[tuple[str, int]] = Counter()
        for stage, depth, room, ns in lines:
            capacity[stage, depth] = max(room, capacity.get((stage, depth), room))
            lasted[stage, depth] += ns
        for (stage, depth), ns in lasted.items():
            spent_s[stage][depth, capacity[stage, depth]] += ns / 1e9
    return [
        Occupancy(stage=stage, depth=depth, capacity=room, seconds=seconds)
        for stage, depths in sorted(spent_s.items())
        for (depth, room), seconds in sorted(depths.items())[:MAX_DEPTHS]
    ]


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
    trend = trends.get(LOAD)
    if trend is None:
        return []
    return _points(series, trend.groups, trend.load, trend.rate, trend.fitted)


def _loss_by_step(series: Series) -> list[LossCurve]:
    """Return the curve of every number of a step that the essay's drops are said to go with.

    What it describes is tested as any covariate, by shifts: no test more.
    """
    held = series.computed > 0
    if not series.lost.any():
        return []
    found = []
    for name in STEP_CURVES:
        one, groups = COVARIATES[name], np.zeros(series.n_ticks, np.int64)
        value = series.system[name][0] / np.maximum(series.computed, 1)
        groups[held] = load_groups(value[held])
        n = np.bincount(groups, weights=series.computed)
        rate = np.bincount(groups, weights=series.lost) / n
        rising, falling = isotonic(rate, n), -isotonic(-rate, n)
        is_rising = bool(((rising - rate) ** 2 * n).sum() <= ((falling - rate) ** 2 * n).sum())
        mean = np.bincount(groups, weights=series.computed * value) / n
        points = _points(series, groups, mean, rate, rising if is_rising else falling)
        covariate = Covariate(name=one.name, label=one.label, unit=one.unit, group=one.group)
        direction: Direction = "increasing" if is_rising else "decreasing"
        found.append(LossCurve(covariate=covariate, direction=direction, points=points))
    return found


def _points(series: Series, groups: Ints, mean: Floats, rate: Floats, fitted: Floats) -> list[Loss]:
    inside = groups == np.arange(len(mean))[:, np.newaxis]
    cut = series.blocks
    n = block_sums(np.where(inside, series.computed, 0.0), cut.labels, cut.n_blocks)
    lost = block_sums(np.where(inside, series.lost, 0.0), cut.labels, cut.n_blocks)
    rates = jackknife_many(np.stack([n, lost]), loss_rate)
    return [
        Loss(
            load=float(mean[k]),
            rate=rate_estimate(interval, float(rate[k])),
            fitted=float(fitted[k]),
        )
        for k, interval in enumerate(rates)
    ]
