"""Mechanism: what the losses go with, tested by question; and how the queues stood.

No test takes tokens for independent draws: between steps losses are moved along the run, within
steps they are drawn anew and clustered by request.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from actds_validators.arrays import Floats, Ints
from actds_validators.audit.census import Series
from actds_validators.audit.covariates import COVARIATES, defined
from actds_validators.audit.data import RunSource
from actds_validators.audit.missingness import rate_estimate
from actds_validators.audit.passes import CovariateSums
from actds_validators.audit.result import (
    Association,
    Covariate,
    Family,
    FamilyName,
    Group,
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
from actds_validators.audit.within import WithinTest
from actds_validators.statistics.association import (
    JointDraws,
    block_score,
    change,
    draws_for,
    least_over_families,
    naive_z,
    over_families,
)
from actds_validators.statistics.intervals import (
    Interval,
    benjamini_hochberg,
    block_sums,
    detectable,
    jackknife_many,
    loss_rate,
)
from actds_validators.statistics.series import (
    circular_shift,
    isotonic,
    lag_correlation,
    load_groups,
    one_per_event,
)

TIME = Covariate(name="time", label="time in the run", unit="s", group="system")
MAX_PARTIAL = 0.05
"""Share of the lost steps that may have lost a part where steps count as lost whole: a queue that
fills up in the middle of a step loses a part of that one."""
MIN_PART = 0.25
"""Share of the tokens of lost steps that are lost where losses lie along the run all the same."""
N_FAMILIES = 6
LEAST_SHIFTS = 2000
"""Random tuples of shifts where there are several runs; of one run there are as many as steps."""


@dataclass(frozen=True)
class Question:
    """The tests of one question, before they are adjusted over the questions.

    Args:
        n_draws: rearrangements of the losses behind it, the observed one among them.
        is_enumerated: whether there are no more than these.
    """

    name: FamilyName
    tests: list[Association]
    inside: Floats
    n_draws: int
    drawn: str
    is_enumerated: bool = False


_test = partial(Association, adjusted_p=1.0, rejected=False)
"""A test as it stands alone: `families` adjusts it."""


def asked_between(
    sums: list[CovariateSums], series: Series, limits: Limits, of_requests: float = 0.0
) -> list[Question]:
    """Return the questions about time and steps: time, load, content and values of the steps."""
    along = _along_the_run(series, of_requests)
    questions = _time(series, limits)
    for name, group in _OF_STEPS.items():
        some = [x for x in sums if x.covariate.group == group]
        question = _steps(name, some, series, limits, along=along)
        questions += [question] if question else []
    return questions


def asked_within(selections: Iterable[tuple[list[WithinTest], int]]) -> list[Question]:
    questions = []
    for chosen, n_draws in selections:
        of_values = chosen[0].covariate.group == "values"
        tests = [
            _test(
                name="within",
                covariate=test.covariate,
                statistic=test.scores.t,
                p=test.p,
                n_units=test.scores.n_requests,
                unit="requests",
            )
            for test in chosen
        ]
        name: FamilyName = "values of tokens" if of_values else "content of tokens"
        inside = np.array([test.inside for test in chosen])
        drawn = "draws of the lost tokens of each step"
        questions.append(Question(name, tests, inside, n_draws, drawn))
    return questions


def families(questions: list[Question], fdr: float) -> tuple[list[Association], list[Family]]:
    adjusted, of_families = over_families([question.inside for question in questions])
    least = [question.inside.min() for question in questions]
    tests, listed = [], []
    for k, (question, inside) in enumerate(zip(questions, adjusted, strict=True)):
        tests += [
            test.model_copy(
                update={"adjusted_p": float(q), "rejected": bool(q <= fdr), "family": question.name}
            )
            for test, q in zip(question.tests, inside, strict=True)
        ]
        possible = least_over_families(least, k, 1 / question.n_draws)
        listed.append(
            Family(
                question=question.name,
                n_tests=len(question.tests),
                p=float(least[k]),
                adjusted_p=float(of_families[k]),
                n_draws=question.n_draws,
                drawn=question.drawn,
                least_p=1 / question.n_draws,
                least_adjusted_p=possible,
                could_be_found=possible <= fdr,
                needed=math.ceil(len(questions) / fdr) if question.is_enumerated else None,
            )
        )
    return tests, listed


def mechanism(
    series: Series, questions: list[Question], intervals: list[Interval], limits: Limits
) -> Mechanism:
    error = max((i.error for i in intervals), default=0.0)
    tests, of_families = families(questions, limits.fdr)
    return Mechanism(
        tests=tests,
        families=of_families,
        n_events=series.n_events,
        n_steps=series.n_steps,
        n_lost_steps=series.n_lost_steps,
        n_partial_steps=series.n_partial_steps,
        n_blocks=series.blocks.n_blocks,
        block_steps=series.blocks.steps * series.steps_per_tick,
        detectable=detectable(error) if intervals else None,
    )


_OF_STEPS: dict[FamilyName, Group] = {
    "load": "system",
    "content of steps": "content",
    "values of steps": "values",
}


def _whole(series: Series) -> bool:
    return series.n_partial_steps <= MAX_PARTIAL * series.n_lost_steps


def _along_the_run(series: Series, of_requests: float) -> bool:
    """Return whether losses lie along the run, where shifts move them: not with requests.

    Either steps are lost whole, or those that lost something lost a good part of their tokens, and
    the requests of these went on: a queue that took a part of each step. One request that is lost,
    or tokens lost one by one, make the share lost of a step larger where it holds few.

    Args:
        of_requests: share of the lost tokens that belong to requests which lost at least half.
    """
    part = series.lost.sum() / max(1.0, series.computed[series.lost > 0].sum())
    return _whole(series) or bool(part >= MIN_PART and of_requests <= 0.5)


def _event_losses(series: Series) -> Floats | None:
    """Return the losses in which each event counts once, for the tests of the load.

    A stall of the disk makes the longest bursts, whatever the load, and outweighs the overflows
    of busy times. In 80 simulated runs of 40,000 steps that lost half a percent in 4 to 45 events,
    the tests of the load found 9 of 10 full queues with these, and 5 to 8 of 10 before.

    Only where steps are lost whole: a loss that takes tokens one by one hits a step the more likely
    the more it holds, and events that each weigh 1 then go with the load, whatever the loss does.
    """
    if np.count_nonzero(series.lost) > series.n_ticks / 2:  # no gaps, no events to tell apart
        return None
    return series.computed * one_per_event(series.share, series.run) if _whole(series) else None


def _steps(
    name: FamilyName, sums: list[CovariateSums], series: Series, limits: Limits, *, along: bool
) -> Question | None:
    """Return the tests of one group over the steps; ``None`` without one.

    Where losses do not lie along the run each has to hold over blocks of it as well.
    """
    one_run = len(series.runs) == 1
    n_draws = draws_for(N_FAMILIES, limits.fdr, LEAST_SHIFTS)
    joint, tests, of_blocks = JointDraws(), [], []
    of_events = _event_losses(series) if name == "load" else None
    loads = {definition.name for definition in defined("step") if definition.is_load}
    each = [("shift", summed, series.lost) for summed in sums]
    if of_events is not None:
        each += [("event", summed, of_events) for summed in sums if summed.covariate.name in loads]
    for kind, summed, lost in each:
        result = _shift(kind, summed, series, lost, n_draws, limits.seed, along=along)
        if result is not None:
            test, sizes, p = result
            tests.append(test)
            of_blocks.append(p)
            joint.add(sizes)
    if not tests:
        return None
    inside = np.maximum(joint.adjusted(), benjamini_hochberg(of_blocks))
    drawn = "circular shifts of the losses"
    return Question(name, tests, inside, joint.n_draws, drawn, is_enumerated=one_run)


def _shift(
    name: str,
    summed: CovariateSums,
    series: Series,
    lost: Floats,
    n_draws: int,
    seed: int,
    *,
    along: bool,
) -> tuple[Association, Floats, float] | None:
    """Return a test of a covariate, what its shifts give, and its p over blocks."""
    n, n_lost = summed.n.sum(), summed.n_lost.sum()
    x, xx, lost_x = summed.sums.sum(axis=1)
    variance = xx / max(n, 1) - (x / max(n, 1)) ** 2
    if n <= 0 or variance <= 1e-12 * max(1.0, xx / n):
        return None
    values, weight = summed.sums[0], summed.n
    if summed.covariate.group == "system":  # one value, however many tokens share the step
        values, weight = values / series.computed, np.ones(series.n_ticks)
        variance = float(values.var())
    shifts = circular_shift(
        series.run, series.computed, lost, values, weight=weight, n_draws=n_draws, seed=seed
    )
    if shifts is None:
        return None
    of_blocks = 0.0
    if not along:
        p = block_score(series.blocks, series.run, series.computed, lost, values, weight=weight)
        of_blocks = float(p[0])
    test = _test(
        name=name,
        covariate=summed.covariate,
        statistic=float(shifts.difference[0]) / float(np.sqrt(variance)),
        p=max(float(shifts.p[0]), of_blocks),
        n_units=max(1, int(shifts.n_effective[0])),
        unit="shifts",
        naive_p=naive_z([n, x, xx, n_lost, lost_x]) if name == "shift" else None,
    )
    return test, shifts.sizes, of_blocks


def _time(series: Series, limits: Limits) -> list[Question]:
    n_draws = draws_for(N_FAMILIES, limits.fdr, LEAST_SHIFTS)
    changed = change(series.computed, series.lost, series.run, n_draws=n_draws, seed=limits.seed)
    if changed is None or not changed.long_enough:
        return []
    at = float(series.t_s[min(changed.at, series.n_ticks - 1)])
    note = f"{changed.before:.2%} lost before {at:.0f} s, {changed.after:.2%} after"
    test = _test(
        name="change",
        covariate=TIME,
        statistic=changed.statistic,
        p=changed.p,
        n_units=changed.n_blocks,
        unit="blocks",
        note=note,
    )
    return [Question("time", [test], np.array([changed.p]), n_draws + 1, "permutations of blocks")]


N_BINS = 240
N_MARKS = 200
STEP_CURVES = ("batch_tokens", "max_seq_len")
Direction = Literal["increasing", "decreasing"]
MAX_LAG = 64
MAX_DEPTHS = 64


def queues(sources: list[RunSource], series: Series, seed: int = 0) -> Queues:
    """Return the section."""
    lags, band = _lags(series, seed)
    return Queues(
        trace=_trace(series),
        stalls=_stalls(sources, series),
        occupancy=_occupancy(sources),
        lags=lags,
        lag_band=band,
        loss_by_load=_loss_by_load(series),
        loss_by_step=_loss_by_step(series),
    )


def _stalls(sources: list[RunSource], series: Series) -> list[Stall]:
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
        Stall(stage=stage, n=n[stage], seconds=waited_s[stage], marks_s=marks[:N_MARKS])
        for stage in sorted(n)
        for marks in [sorted(marks_s[stage])]
    ]


def _occupancy(sources: list[RunSource]) -> list[Occupancy]:
    spent_s: dict[str, dict[tuple[int, int], float]] = defaultdict(lambda: defaultdict(float))
    for source in sources:
        occupancy = source.columns("occupancy", ["stage", "depth", "capacity", "duration_ns"])
        lines = list(zip(*(column.tolist() for column in occupancy.values()), strict=True))
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
    lagged = lag_correlation(series.computed, series.share, series.run, reach, seed=seed)
    if lagged is None:
        return [], None
    lags = [
        Lag(steps=int(lag) * series.steps_per_tick, correlation=float(value))
        for lag, value in zip(lagged.lags, lagged.correlation, strict=True)
    ]
    return lags, LagBand(
        low=lagged.low,
        high=lagged.high,
        confidence=lagged.confidence,
        n_shifts=lagged.n_shifts,
        n_effective=lagged.n_effective,
    )


def _loss_by_load(series: Series) -> list[Loss]:
    if not series.lost.any() or np.ptp(series.load) == 0:
        return []
    return _curve(series, series.load)[1]


def _loss_by_step(series: Series) -> list[LossCurve]:
    """Return the curve of every number of a step that the essay's drops are said to go with.

    What it describes is tested as any covariate, by shifts: no test more.
    """
    if not series.lost.any():
        return []
    curves = []
    for name in STEP_CURVES:
        direction, points = _curve(series, series.system[name][0] / series.computed)
        curves.append(
            LossCurve(covariate=COVARIATES[name].facts(), direction=direction, points=points)
        )
    return curves


def _curve(series: Series, value: Floats) -> tuple[Direction, list[Loss]]:
    """Return the loss by deciles of a number of the step, with the better monotone fit."""
    groups = load_groups(value)
    n = np.bincount(groups, weights=series.computed)
    rate = np.bincount(groups, weights=series.lost) / n
    rising, falling = isotonic(rate, n), -isotonic(-rate, n)
    is_rising = bool(((rising - rate) ** 2 * n).sum() <= ((falling - rate) ** 2 * n).sum())
    mean = np.bincount(groups, weights=series.computed * value) / n
    points = _points(series, groups, mean, rate, rising if is_rising else falling)
    return "increasing" if is_rising else "decreasing", points


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
