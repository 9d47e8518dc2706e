"""Mechanism: what the losses go with, tested by question; and how the queues stood.

No test takes tokens for independent draws: between steps losses are moved along the run, within
steps they are drawn anew and clustered by request.

Within steps, whether lost tokens differ from those that shared their step, and so their load: of
two tests of each covariate the larger p counts. One draws the losses anew among the tokens of each
step: exact for losses that hit tokens, the tokens of a request in a step, or whole requests,
however rare or heavy-tailed the covariate. The other takes scores clustered by request and step: it
needs many, and holds for losses that lie side by side in any way.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from typing import Literal

import numpy as np

from actds.format.positions import Keys, pair_key, position_key, split_key
from actds_validators.arrays import Bools, Floats, Ints
from actds_validators.audit.covariates import COVARIATES, Series, defined
from actds_validators.audit.data import RunSource
from actds_validators.audit.missingness import rate_estimate
from actds_validators.audit.passes import CONTENT, CovariateSums, PartialRows
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
from actds_validators.statistics import association, intervals
from actds_validators.statistics.series import (
    circular_shift,
    isotonic,
    lag_correlation,
    load_groups,
    one_per_event,
)

MIN_REQUESTS = 10
"""Requests with a token in a step that lost a part, at least: of fewer nothing is tested."""
LEAST_DRAWS = 500


@dataclass(frozen=True)
class WithinTest:
    """The test of one covariate.

    Args:
        inside: adjusted over the family: by the largest of all tests in each draw, and after
            Benjamini and Hochberg; the larger.
    """

    covariate: Covariate
    scores: association.Within
    p: float  # the larger of both
    inside: float


@dataclass(frozen=True)
class RowsOfSteps:
    """Rows of the steps that lost a part, of all runs, in an order that no reader decides."""

    step: Ints  # number of the step of each, (n_rows,), another in each run
    request: Ints
    began: Ints  # block of the jackknife in which the request began
    lost: Bools
    orders: list[Ints]
    keys: list[Keys]  # of each run, request and position of these

    def values(self, runs: Sequence[PartialRows]) -> Floats:
        every = []
        for order, keys, run in zip(self.orders, self.keys, runs, strict=True):
            positions = position_key(run.request, run.position)
            by_key = np.argsort(positions, kind="stable")
            at = np.searchsorted(positions[by_key], keys)
            known = np.flatnonzero(at < len(positions))
            known = known[positions[by_key[at[known]]] == keys[known]]
            x = np.full((len(run.values), len(order)), np.nan)
            x[:, known] = run.values[:, by_key[at[known]]]
            every.append(x)
        return np.concatenate(every, axis=1)


def all_rows(runs: Sequence[PartialRows], began: Sequence[Ints]) -> RowsOfSteps:
    orders = [np.lexsort((run.position, run.request, run.step)) for run in runs]
    some = list(enumerate(zip(runs, orders, strict=True)))
    return RowsOfSteps(
        step=np.concatenate([run.step[order] + (k << 40) for k, (run, order) in some]),
        request=np.concatenate([run.request[order] + (k << 40) for k, (run, order) in some]),
        began=np.concatenate([began[k][run.request[order]] for k, (run, order) in some]),
        lost=np.concatenate([run.lost[order] for _, (run, order) in some]),
        orders=orders,
        keys=[position_key(run.request[order], run.position[order]) for _, (run, order) in some],
    )


def _number(values: Floats, k: int) -> Floats:
    """Return a number of the rows, or its square: side by side all would be held twice."""
    x: Floats = values[k % len(values)]
    return x if k < len(values) else x * x


class Units:
    """What is lost together, told by the losses alone: tokens, cells or whole requests.

    A cell is the tokens of a request in a step. Requests are lost whole where most of those that
    lost a token, of two at least, lost all of these; cells likewise. A unit counts as lost where
    most of its tokens are.
    """

    def __init__(self, rows: RowsOfSteps, n_draws: int, seed: int) -> None:
        self.n_rows = len(rows.step)
        self.step, self.request = (
            np.unique(values, return_inverse=True)[1] for values in (rows.step, rows.request)
        )
        pairs, self.cell = np.unique(pair_key(self.step, self.request), return_inverse=True)
        self.lost = rows.lost
        self.kind = "tokens"
        unit, stratum = np.arange(self.n_rows), self.step
        if _lost_whole(self.request, rows.lost):
            self.kind, unit, stratum = "requests", self.request, rows.began
        elif _lost_whole(self.cell, rows.lost):
            self.kind, unit = "cells", self.cell
        self.unit, self.size = unit, np.bincount(unit)
        of_unit = np.zeros(len(self.size), np.int64)
        of_unit[unit] = stratum
        is_lost = 2 * np.bincount(unit, rows.lost) > self.size
        self.turns = association.Turns(of_unit, is_lost, n_draws, seed)
        self.pairs = split_key(pairs)

    def about_step(self, x: Floats) -> Floats:
        known = ~np.isnan(x)
        at = self.step[known]
        mean = np.bincount(at, x[known]) / np.maximum(np.bincount(at), 1)
        about = np.zeros_like(x)
        about[known] = x[known] - mean[at]
        return about

    def drawn(self, numbers: Iterable[Floats]) -> Floats:
        """Return sums over the lost units of each draw ``(n_numbers, 1 + n_draws)``.

        Of requests each counts the same: of a stored one only the tokens are here that shared a
        step with lost ones, and sums over fewer tokens would vary less than those of lost ones.
        """
        of_units = []
        for x in numbers:
            about = self.about_step(x)
            if self.kind != "tokens":
                about = np.bincount(self.unit, about).astype(np.float64)
            if self.kind == "requests":
                about /= self.size
            of_units.append(about[self.turns.units])
        return self.turns.sums(np.stack(of_units))

    def scores(self, x: Floats) -> association.Within | None:
        known = ~np.isnan(x)
        n = len(self.pairs[0])
        sums = []
        for some in (known, known & self.lost):
            at = self.cell[some]
            sums += [np.bincount(at, minlength=n), np.bincount(at, x[some], n)]
        used = sums[0] > 0
        return association.within_cells(*(v[used] for v in (*self.pairs, *sums)))


def _lost_whole(unit: Ints, lost: Bools) -> bool:
    n, n_lost = np.bincount(unit), np.bincount(unit, lost)
    hit = (n_lost > 0) & (n > 1)
    n_hit, n_part = (int(np.count_nonzero(some)) for some in (hit, hit & (n_lost < n)))
    return n_hit > 0 and 2 * n_part <= n_hit


def selections(
    runs: dict[str, list[PartialRows]],
    covariates: dict[str, list[Covariate]],
    means: dict[str, Floats],
    began: Sequence[Ints],
    n_draws: int,
    seed: int,
) -> Iterator[tuple[list[WithinTest], int]]:
    """Yield the tests of content, then those of the values of all hooks, and their draws."""
    rows = all_rows(runs[CONTENT], began)
    if len(np.unique(rows.step)) < 2:
        return
    units = Units(rows, n_draws, seed)
    for groups in ([CONTENT], [g for g in runs if g != CONTENT]):
        joint, tests = association.JointDraws(), []
        for group in groups:
            values = rows.values(runs[group])
            if group in means:
                values -= means[group][:, np.newaxis]
            scores = [units.scores(_number(values, k)) for k in range(len(covariates[group]))]
            kept = [k for k, t in enumerate(scores) if t and t.n_requests >= MIN_REQUESTS]
            if kept:
                sizes = np.abs(units.drawn(_number(values, k) for k in kept))
                joint.add(sizes)
                reached = sizes >= sizes[:, :1] - 1e-9 * sizes.max(axis=1, keepdims=True)
                of = [covariates[group][k] for k in kept]
                tests += list(zip(of, (scores[k] for k in kept), reached.mean(axis=1), strict=True))
        if tests:
            clustered = intervals.benjamini_hochberg([t.p for _, t, _ in tests if t])
            inside = np.maximum(joint.adjusted(), clustered)
            yield (
                [
                    WithinTest(covariate, t, max(t.p, float(p)), float(q))
                    for (covariate, t, p), q in zip(tests, inside, strict=True)
                    if t
                ],
                joint.n_draws,
            )


# between steps ------------------------------------------------------------------------------

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
    """The tests of one question, before they are adjusted over the questions."""

    name: FamilyName
    tests: list[Association]
    inside: Floats
    n_draws: int  # rearrangements of the losses behind it, the observed one among them
    drawn: str
    is_enumerated: bool = False  # whether there are no more than these


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
    drawn = "draws of the lost tokens of each step"
    for chosen, n_draws in selections:
        group = chosen[0].covariate.group
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
        name: FamilyName = "values of tokens" if group == "values" else "content of tokens"
        inside = np.array([test.inside for test in chosen])
        questions.append(Question(name, tests, inside, n_draws, drawn))
    return questions


def families(questions: list[Question], fdr: float) -> tuple[list[Association], list[Family]]:
    adjusted, of_families = association.over_families([question.inside for question in questions])
    least = [question.inside.min() for question in questions]
    tests, listed = [], []
    for k, (question, inside) in enumerate(zip(questions, adjusted, strict=True)):
        tests += [
            test.model_copy(
                update={"adjusted_p": float(q), "rejected": bool(q <= fdr), "family": question.name}
            )
            for test, q in zip(question.tests, inside, strict=True)
        ]
        possible = association.least_over_families(least, k, 1 / question.n_draws)
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


_COUNTS = ("n_events", "n_steps", "n_lost_steps", "n_partial_steps")


def mechanism(
    series: Series, questions: list[Question], stored: list[intervals.Interval], limits: Limits
) -> Mechanism:
    tests, of_families = families(questions, limits.fdr)
    return Mechanism(
        tests=tests,
        families=of_families,
        **{name: getattr(series, name) for name in _COUNTS},
        n_blocks=series.blocks.n_blocks,
        block_steps=series.blocks.steps * series.steps_per_tick,
        detectable=intervals.detectable(max(i.error for i in stored)) if stored else None,
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
    joint, tests, of_blocks = association.JointDraws(), [], []
    of_events = _event_losses(series) if name == "load" else None
    loads = {definition.name for definition in defined("step") if definition.is_load}
    each = [("shift", summed, series.lost) for summed in sums]
    if of_events is not None:
        each += [("event", summed, of_events) for summed in sums if summed.covariate.name in loads]
    for kind, summed, lost in each:
        result = _shift(kind, summed, series, lost, limits, along=along)
        if result is not None:
            test, sizes, p = result
            tests.append(test)
            of_blocks.append(p)
            joint.add(sizes)
    if not tests:
        return None
    inside = np.maximum(joint.adjusted(), intervals.benjamini_hochberg(of_blocks))
    drawn = "circular shifts of the losses"
    return Question(name, tests, inside, joint.n_draws, drawn, is_enumerated=one_run)


def _shift(
    name: str, summed: CovariateSums, series: Series, lost: Floats, limits: Limits, *, along: bool
) -> tuple[Association, Floats, float] | None:
    n, n_lost = summed.n.sum(), summed.n_lost.sum()
    x, xx, lost_x = summed.sums.sum(axis=1)
    variance = xx / max(n, 1) - (x / max(n, 1)) ** 2
    if n <= 0 or variance <= 1e-12 * max(1.0, xx / n):
        return None
    n_draws = association.draws_for(N_FAMILIES, limits.fdr, LEAST_SHIFTS)
    values, weight = summed.sums[0], summed.n
    if summed.covariate.group == "system":  # one value, however many tokens share the step
        values, weight = values / series.computed, np.ones(series.n_ticks)
        variance = float(values.var())
    shifts = circular_shift(
        series.run, series.computed, lost, values, weight=weight, n_draws=n_draws, seed=limits.seed
    )
    if shifts is None:
        return None
    of_blocks = 0.0
    if not along:
        p = association.block_score(
            series.blocks, series.run, series.computed, lost, values, weight=weight
        )
        of_blocks = float(p[0])
    test = _test(
        name=name,
        covariate=summed.covariate,
        statistic=float(shifts.difference[0]) / float(np.sqrt(variance)),
        p=max(float(shifts.p[0]), of_blocks),
        n_units=max(1, int(shifts.n_effective[0])),
        unit="shifts",
        naive_p=association.naive_z([n, x, xx, n_lost, lost_x]) if name == "shift" else None,
    )
    return test, shifts.sizes, of_blocks


def _time(series: Series, limits: Limits) -> list[Question]:
    n_draws = association.draws_for(N_FAMILIES, limits.fdr, LEAST_SHIFTS)
    changed = association.change(
        series.computed, series.lost, series.run, n_draws=n_draws, seed=limits.seed
    )
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


# when it was lost, and how the queues stood --------------------------------------------------

N_BINS = 240
N_MARKS = 200
STEP_CURVES = ("batch_tokens", "max_seq_len")
MAX_LAG = 64
MAX_DEPTHS = 64


def queues(sources: list[RunSource], series: Series, seed: int = 0) -> Queues:
    lags, band = _lags(series, seed)
    varies = series.lost.any() and np.ptp(series.load) > 0
    return Queues(
        trace=_trace(series),
        stalls=_stalls(sources, series),
        occupancy=_occupancy(sources),
        lags=lags,
        lag_band=band,
        loss_by_load=_curve(series, series.load)[1] if varies else [],
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
        Stall(stage=s, n=n[s], seconds=waited_s[s], marks_s=sorted(marks_s[s])[:N_MARKS])
        for s in sorted(n)
    ]


def _occupancy(sources: list[RunSource]) -> list[Occupancy]:
    spent_s: dict[tuple[str, int, int], float] = defaultdict(float)
    sums = [("capacity", "max"), ("duration_ns", "sum")]
    for source in sources:
        table = source.table("occupancy", ["stage", "depth", "capacity", "duration_ns"])
        for line in table.group_by(["stage", "depth"]).aggregate(sums).to_pylist():
            place = line["stage"], line["depth"], line["capacity_max"]
            spent_s[place] += line["duration_ns_sum"] / 1e9
    return [
        Occupancy(stage=stage, depth=depth, capacity=room, seconds=seconds)
        for _, lines in groupby(sorted(spent_s.items()), lambda item: item[0][0])
        for (stage, depth, room), seconds in islice(lines, MAX_DEPTHS)
    ]


def _trace(series: Series) -> list[TracePoint]:
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
    return lags, LagBand.model_validate(lagged, from_attributes=True)


def _loss_by_step(series: Series) -> list[LossCurve]:
    """Return the curve of every number of a step that the essay's drops are said to go with.

    What it describes is tested as any covariate, by shifts: no test more.
    """
    if not series.lost.any():
        return []
    curves = {
        name: _curve(series, series.system[name][0] / series.computed) for name in STEP_CURVES
    }
    return [
        LossCurve(covariate=COVARIATES[name].facts(), direction=direction, points=points)
        for name, (direction, points) in curves.items()
    ]


def _curve(series: Series, value: Floats) -> tuple[Literal["increasing", "decreasing"], list[Loss]]:
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
    n = intervals.block_sums(np.where(inside, series.computed, 0.0), cut.labels, cut.n_blocks)
    lost = intervals.block_sums(np.where(inside, series.lost, 0.0), cut.labels, cut.n_blocks)
    rates = intervals.jackknife_many(np.stack([n, lost]), intervals.loss_rate)
    return [
        Loss(load=x, rate=rate_estimate(interval, of_all), fitted=fit)
        for interval, x, of_all, fit in zip(rates, mean, rate, fitted, strict=True)
    ]
