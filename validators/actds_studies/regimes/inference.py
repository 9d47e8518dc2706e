"""Inference: intervals that leave out groups of requests, tests that exchange them, verdicts.

Every statistic is a function of sums over groups of requests that the two arms share. Its values
without each group give a standard error. What each group adds to the difference of the arms, taken
about the two arms pooled, changes its sign when the group's requests are exchanged: the test flips
these signs as coins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import special  # type: ignore[import-untyped]

from actds.text import counted
from actds_studies.regimes.conclusions import beyond
from actds_studies.regimes.contrast import halves
from actds_studies.regimes.result import (
    ALL,
    MIN_REQUESTS,
    MIN_ROWS,
    Element,
    Outcome,
    StudyLimits,
    Value,
)
from actds_studies.regimes.strata import COUNT, GroupSums, Made, Stratum, Totals
from actds_validators.arrays import Bools, Floats, Ints
from actds_validators.statistics.intervals import (
    Scale,
    benjamini_hochberg,
    detectable,
    ends,
    from_replicates,
    joint_confidence,
    slope,
    to_scale,
)

N_FLIPS = 9_999
N_FLIPS_OVERLAP = 1_999
N_HALVES = 60
_EXCEEDANCES = 20
_BATCH = 250
_STEP = 1e-3  # of a group's sums, for a derivative
_ALL_FLIPS = 12  # groups up to which every flip is made
_POWER = 0.8  # of a test, at the least difference that it is said to find
_HALF_TURN = 179.5  # degrees
_EQUIVALENCE = 0.05  # level of each of the two one-sided tests


@dataclass(frozen=True)
class Measure:
    """One thing that is measured in every stratum.

    Args:
        statistic: of the sums ``(..., k)`` of the two arms, to ``(..., m)``; NaN where an element
            is not estimated. A direction gives ``(..., m, d)``.
        kind: ``difference``: 0 when the arms are alike, and either sign else. ``size``: of one
            set of pairs, never negative, compared with its limit. ``direction``: m differences of
            unit vectors, told as angles in degrees. ``overlap``: 1 when the arms are alike and
            less else; without a limit it is not tested. ``described``: neither tested nor judged.
        limit: largest value that still counts as none.
        of_arm: of a difference, what it is a difference of: of the sums of one arm ``(..., k)`` to
            ``(..., m)``, of a direction ``(..., m, d)``, unchanged when all sums are multiplied. It
            makes the test exact.
        arm_value: the same of one arm, ``(..., k)`` to ``(..., m)``, to be shown.
        carried: of a direction, what each row weighs in it, of sums ``(..., k)`` to ``(..., m)``.
            Of fewer than 8 groups of requests, by this weight, nothing is estimated: a feature may
            be active in one document alone.
        labels: names of the m elements, None for their numbers.
        scale: on which its interval is symmetric: ``log`` of what is never negative, ``logit`` of a
            share, so that no end is a value that there cannot be.
        rare: whether it is a share of rows: with no event in n of them, 3 / n cannot be excluded
            (Hanley & Lippman-Hand 1983).
        of_pairs: whether it is of pairs of both arms: halves of the reference have no such value.
        keep: elements that are told one by one over all rows: half of them the farthest.
    """

    name: str
    statistic: Callable[[GroupSums, GroupSums], Floats]
    unit: str
    kind: Literal["difference", "size", "direction", "overlap", "described"]
    limit: float | None = None
    of_arm: Callable[[GroupSums], Floats] | None = None
    arm_value: Callable[[GroupSums], Floats] | None = None
    carried: Callable[[GroupSums], Floats] | None = None
    labels: Sequence[str] | None = None
    coarse: bool = False
    scale: Scale = "linear"
    rare: bool = False
    of_pairs: bool = False
    note: str = ""
    keep: int = 0


def judge(
    instrument: str,
    hook: str,
    stratum: Stratum,
    measure: Measure,
    sums: tuple[Totals, Totals],
    limits: StudyLimits,
) -> Value:
    """Return what a measure finds in a stratum, before the family of tests is known."""
    short = _too_few(sums)
    n = 0
    if short is None:
        present = np.flatnonzero(sums[0].groups[COUNT][:, 0] + sums[1].groups[COUNT][:, 0] > 0)
        sums = _of_groups(sums[0], present), _of_groups(sums[1], present)
        n = len(present)
        short = None if n > 1 else "all requests are one group: none can be left out"
    first, second = sums
    value = Value(
        instrument=instrument,
        hook=hook,
        axis=stratum.axis,
        stratum=stratum.name,
        measure=measure.name,
        unit=measure.unit,
        kind=measure.kind,
        limit=measure.limit,
        n_rows=(first.n_rows, second.n_rows),
        n_requests=(first.n_requests, second.n_requests),
        n_effective=(first.n_effective, second.n_effective),
        n_tokens=None
        if first.n_tokens is None or second.n_tokens is None
        else (first.n_tokens, second.n_tokens),
        n_groups=n,
        note=measure.note,
    )
    if short is not None:
        return value.model_copy(update={"short": short})
    work = {"direction": _direction, "overlap": _overlap}.get(measure.kind, _elements)
    if stratum.axis != ALL:
        measure = replace(measure, keep=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        changes = work(measure, first, second, limits)
    return value.model_copy(update=changes)


def _too_few(sums: tuple[Totals, Totals]) -> str | None:
    """Return of what an arm has too little for an estimate, None where it has enough."""
    requests = min(total.n_requests for total in sums)
    if not requests:
        return "no row of one arm has a row of the other to be compared with"
    if requests < MIN_REQUESTS:
        return f"{counted(requests, 'request')}; {MIN_REQUESTS} are needed for an estimate"
    worth = min(total.n_effective for total in sums)
    if worth < MIN_ROWS:
        rows = counted(int(worth), "effective row")
        return f"{rows}; {MIN_ROWS} are needed for an estimate"
    return None


def pseudo_values(value: Floats, without: Floats) -> tuple[Floats, Floats]:
    """Return the jackknife's pseudo-values ``(n, ...)`` and the standard error ``(...)``.

    ``n value - (n - 1) without`` (Tukey 1958), without each of n groups ``(n, ...)``; their
    standard error is that of ``intervals.from_replicates``.
    """
    n = len(without)
    deviation = without - without.mean(axis=0)
    error = np.sqrt((n - 1) / n * np.square(deviation).sum(axis=0))
    # What is rounding only is no spread.
    error = np.where(error <= 1e-12 * np.abs(value), 0.0, error)
    return n * value - (n - 1) * without, np.asarray(error)


def influences(of_arm: Callable[[GroupSums], Floats], first: Totals, second: Totals) -> Floats:
    """Return what each group adds to the difference of two arms ``(n_groups, m, ...)``.

    The derivative of the arm's function at the sums of both arms pooled, towards the group's own
    sums of the second arm less those of the first (the infinitesimal jackknife, Jaeckel 1972). An
    exchange of the group's two sides leaves the pool as it is and turns the sign, whatever the
    function: pseudo-values, which are taken about each arm by itself, do so for means only.
    """
    half, other = first.total(), second.total()
    pool = Made(lambda name: half[name] + other[name])
    n_rows = [np.maximum(total[COUNT], 1e-300) for total in (half, other)]

    def toward(groups: GroupSums, step: float) -> Floats:
        return of_arm(Made(lambda name: pool[name] + step * groups[name]))

    values = []
    for totals, n in zip((first, second), n_rows, strict=True):
        slope_of = (toward(totals.groups, _STEP) - toward(totals.groups, -_STEP)) / (2 * _STEP)
        values.append(slope_of * (pool[COUNT] / n))
    return np.asarray(np.nan_to_num(values[1] - values[0]), np.float64)


def effective(weights: Floats) -> Floats:
    """Return how many groups a sum is of ``(m,)``: ``(sum w)² / sum w²`` of ``(n_groups, m)``."""
    squares = np.square(weights).sum(axis=0)
    return np.asarray(weights.sum(axis=0) ** 2 / np.where(squares > 0, squares, np.inf))


def flip_p(
    statistic: Callable[[Floats], Floats],
    n_groups: int,
    seed: int,
    n_flips: int = N_FLIPS,
    observed: float | None = None,
) -> float:
    """Return how likely a statistic as large is when every group's sign is a coin.

    All flips of up to 12 groups; else random ones, which end when 20 reached the observed value:
    ``p = 20 / flips``, or ``(1 + reached) / (1 + n_flips)``. Either is a valid p (Besag & Clifford
    1991), and a null hypothesis that holds costs few flips.

    Args:
        statistic: of signs ``(n, n_groups)`` to ``(n,)``; large is evidence.
        observed: its value for one of the elements, of which it is the maximum: p is then that of
            the element, adjusted for all of them (Westfall & Young 1993); None for the maximum.
    """
    if observed is None:
        observed = float(statistic(np.ones((1, n_groups)))[0])
    edge = observed - 1e-9 * abs(observed)
    if n_groups <= _ALL_FLIPS:
        # One sign may stay: a flip and its opposite are as large.
        bits = np.arange(1 << n_groups)[:, np.newaxis] >> np.arange(n_groups) & 1
        return float(np.mean(statistic(np.asarray(1.0 - 2.0 * bits, np.float64)) >= edge))
    rng = np.random.Generator(np.random.Philox(seed))
    done = reached = 0
    while done < n_flips:
        size = min(_BATCH, n_flips - done)
        signs = np.asarray(1.0 - 2.0 * rng.integers(0, 2, (size, n_groups)), np.float64)
        over = statistic(signs) >= edge
        hits = np.flatnonzero(over)
        if reached + len(hits) >= _EXCEEDANCES:
            last = int(hits[_EXCEEDANCES - reached - 1])
            return _EXCEEDANCES / (done + last + 1)
        reached += len(hits)
        done += size
    return (1 + reached) / (1 + n_flips)


def absolute_t(pseudo: Floats) -> Callable[[Floats], Floats]:
    """Return the absolute t of each element of pseudo-values ``(n, m)``, by signs."""
    n = len(pseudo)
    squares = np.square(pseudo).sum(axis=0)

    def statistic(signs: Floats) -> Floats:
        mean = signs @ pseudo / n
        variance = np.maximum((squares - n * mean**2) / (n - 1), 1e-14 * squares / n + 1e-300)
        return np.asarray(np.abs(mean / np.sqrt(variance / n)))

    return statistic


def lengths(gram: Floats) -> Callable[[Floats], Floats]:
    """Return the length of each mean of vectors, by signs; their products ``(m, n, n)``.

    Lengths count against those that random signs give on average, the root of the trace.
    """
    trace = np.maximum(np.trace(gram, axis1=1, axis2=2), 1e-300)

    def statistic(signs: Floats) -> Floats:
        values = np.einsum("sg,mgh,sh->sm", signs, gram, signs, optimize=True)
        return np.asarray(values / trace)

    return statistic


def largest_p(of_each: Callable[[Floats], Floats], n_worst: int, n_groups: int, seed: int) -> float:
    """Return p of one of many elements ``(n, m)``: against the largest of all, by flips."""
    observed = float(of_each(np.ones((1, n_groups)))[0, n_worst])

    def largest(signs: Floats) -> Floats:
        return np.asarray(of_each(signs).max(axis=1, initial=0.0))

    return flip_p(largest, n_groups, seed, observed=observed)


def _told(score: Floats, size: Floats, limit: float | None) -> int:
    """Return the element that stands for a measure: of those beyond the limit, if any, the
    farthest by its score, which compares it with its own error.
    """
    beyond_it: Bools = np.asarray(size >= (0.0 if limit is None else limit))
    return int(np.argmax(np.where(beyond_it, score, -1.0) if beyond_it.any() else score))


def _elements(
    measure: Measure, first: Totals, second: Totals, limits: StudyLimits
) -> dict[str, object]:
    value = np.atleast_1d(measure.statistic(first.total(), second.total()))
    without = np.atleast_2d(measure.statistic(first.without(), second.without()))
    if without.shape[1:] != value.shape:
        without = without.reshape(-1, *value.shape)
    good: Bools = np.asarray(np.isfinite(value) & np.isfinite(without).all(axis=0))
    changes: dict[str, object] = {"n_elements": int(good.sum()), "n_untested": int((~good).sum())}
    if not good.any():
        return changes
    where = np.flatnonzero(good)
    value, without = value[good], without[:, good]
    pseudo, error = pseudo_values(value, without)
    if measure.keep:
        changes["elements"] = _kept(measure, where, value, error, (first, second))
    if measure.kind == "difference" and measure.of_arm is not None:
        pseudo = influences(measure.of_arm, first, second)[:, good]
    score = np.abs(value) / np.maximum(error, 1e-300) if len(value) > 1 else np.abs(value)
    if measure.kind == "described" and len(value) > 1:
        score = np.abs(value)
    worst = _told(np.where(value == 0, 0.0, score), np.abs(value), measure.limit)
    interval = from_replicates(value[worst : worst + 1], without[:, worst].reshape(1, -1))[0]
    assert interval is not None
    element = int(where[worst])
    # Chosen as the farthest of all: the interval is one of a set that holds at once.
    two_sided = float(special.stdtrit(interval.freedom, (1 + joint_confidence(without.T)) / 2))
    at = np.array([interval.value, error[worst]])
    low, high = ends(at[:1], at[1:], two_sided, measure.scale)
    changes |= {
        "value": interval.value,
        "low": float(low[0]),
        "high": float(high[0]),
        "error": interval.error,
        "element": _label(measure, element, len(good)),
    }
    if measure.arm_value is not None:
        changes["arms"] = tuple(
            _finite(np.atleast_1d(measure.arm_value(t.total()))[element]) for t in (first, second)
        )
    if measure.kind in ("difference", "described") and not measure.of_pairs:
        changes["floor"] = _floor(measure, first, element, limits)
    if measure.kind == "described":
        return changes
    n, m = len(without), len(value)
    one_sided = float(special.stdtrit(n - 1, 1 - _EQUIVALENCE / m))
    if measure.kind == "size":
        assert measure.limit is not None
        far = ends(value, error, one_sided, measure.scale)[1]
        changes["p"] = _p_beyond(float(value[worst]), float(error[worst]), n, measure)
        needed = float(value.max())
    else:
        far = np.abs(value) + one_sided * error
        changes["p"] = largest_p(absolute_t(pseudo), worst, n, limits.seed)
        needed = float(np.abs(value).max())
    if measure.rare:
        far = np.where(error > 0, far, far + 3 / min(first.n_rows, second.n_rows))
    changes["farthest"] = float(far.max())
    changes["detectable"] = detectable(float(np.median(error)), alpha=min(0.05 / m, 0.5))
    if measure.limit is not None:
        changes["equivalent"] = bool(far.max() <= measure.limit)
        half = one_sided * float(error[int(np.argmax(far))])
        if not changes["equivalent"]:
            changes["short"] = _short(half, needed, measure, first, second)
    return changes


def _p_beyond(value: float, error: float, n_groups: int, measure: Measure) -> float:
    """Return p of a size being beyond its limit: one-sided, Student, on the measure's scale."""
    assert measure.limit is not None
    if error == 0:
        return 0.0 if value > measure.limit else 1.0
    distance = to_scale(value, measure.scale) - to_scale(measure.limit, measure.scale)
    t = distance / (error * slope(value, measure.scale))
    return float(special.stdtr(n_groups - 1, -t))


def _kept(
    measure: Measure, where: Ints, value: Floats, error: Floats, arms: tuple[Totals, Totals]
) -> list[Element]:
    """Return some elements of a difference, in their order: half are the farthest.

    Args:
        where: numbers of the elements that are estimated ``(m,)``, as their values and errors.
    """
    far = np.argsort(-np.abs(value) / np.maximum(error, 1e-300), kind="stable")
    rest = np.sort(far[measure.keep // 2 :])
    step = max(1, math.ceil(len(rest) / max(1, measure.keep - measure.keep // 2)))
    chosen = np.sort(np.concatenate([far[: measure.keep // 2], rest[::step]])).astype(np.int64)
    of = None
    if measure.arm_value is not None:
        of = [np.atleast_1d(measure.arm_value(arm.total()))[where] for arm in arms]
    return [
        Element(
            name=_label(measure, int(where[k]), 2) or str(where[k]),
            value=float(value[k]),
            error=float(error[k]),
            arms=None if of is None else (_finite(of[0][k]), _finite(of[1][k])),
        )
        for k in chosen.tolist()
    ]


def _direction(
    measure: Measure, first: Totals, second: Totals, limits: StudyLimits
) -> dict[str, object]:
    """Return the fields of turned directions.

    The squared chord between two unit vectors is estimated without the noise's own length: the
    mean of products of pseudo-values of different groups. It may come out below 0, where no chord
    is: value and lower end are then 0.
    """
    value = measure.statistic(first.total(), second.total())
    without = measure.statistic(first.without(), second.without())
    assert measure.of_arm is not None and measure.carried is not None
    carried = np.stack([effective(measure.carried(total.groups)) for total in (first, second)])
    good: Bools = np.asarray(
        np.isfinite(value).all(axis=-1)
        & np.isfinite(without).all(axis=(0, -1))
        & (carried >= MIN_REQUESTS).all(axis=0)
    )
    changes: dict[str, object] = {"n_elements": int(good.sum()), "n_untested": int((~good).sum())}
    if not good.any():
        return changes
    where = np.flatnonzero(good)
    n = len(without)
    pseudo = n * value[good] - (n - 1) * without[:, good]  # (n, m, d)
    gram = np.einsum("gmd,hmd->mgh", pseudo, pseudo, optimize=True)
    total, within = gram.sum(axis=(1, 2)), np.trace(gram, axis1=1, axis2=2)
    chord = (total - within) / (n * (n - 1))
    less = (total[:, None] - 2 * gram.sum(axis=2)) - (within[:, None] - 2 * _diagonal(gram))
    leave_one = less / ((n - 1) * (n - 2)) if n > 2 else np.repeat(chord[:, None], n, axis=1)
    error = np.sqrt((n - 1) / n * np.square(leave_one - leave_one.mean(axis=1)[:, None]).sum(1))
    m = len(chord)
    quantile = float(special.stdtrit(n - 1, 1 - _EQUIVALENCE / m))
    far = _angle(chord + quantile * error)
    # A group without an event has the value itself as its pseudo-value, and adds nothing here.
    added = influences(measure.of_arm, first, second)[:, good]
    gram = np.einsum("gmd,hmd->mgh", added, added, optimize=True)
    of_each = lengths(gram)
    worst = _told(of_each(np.ones((1, n)))[0], _angle(chord), measure.limit)
    two_sided = float(special.stdtrit(n - 1, 0.975))
    changes |= {
        "value": float(_angle(chord[worst : worst + 1])[0]),
        "low": float(_angle(chord[worst : worst + 1] - two_sided * error[worst])[0]),
        "high": float(_angle(chord[worst : worst + 1] + two_sided * error[worst])[0]),
        "element": _label(measure, int(where[worst]), len(good)),
        "floor": _chord_floor(measure, first, int(where[worst]), limits),
        "farthest": float(far.max()),
        "p": largest_p(of_each, worst, n, limits.seed),
    }
    least = float(np.median(detectable_turn(gram)))
    followed = f"half of the {m:,} features that were followed" if m > 1 else "the one followed"
    unseen = f"a turn under {least:.2g}° could not have been found in {followed}"
    if least >= _HALF_TURN:
        unseen = f"no turn could have been found in {followed}"
    changes |= {"detectable": least, "note": f"{measure.note}; {unseen}"}
    if measure.limit is not None:
        changes["equivalent"] = bool(far.max() <= measure.limit)
        if not changes["equivalent"]:
            changes["short"] = (
                f"an angle of up to {_apart(float(far.max()), measure.limit)} degrees cannot be "
                f"excluded; the limit is {measure.limit:g}; {unseen}"
            )
    return changes


def detectable_turn(gram: Floats) -> Floats:
    """Return the turn of each direction that its test finds with a power of 80 %, in degrees.

    Under no turn the squared length of what n groups add, of products ``(m, n, n)``, is about a
    chi-squared variable, of as many degrees of freedom as their products say (Satterthwaite 1946).
    It has to exceed the quantile that is left to each of m directions; about a turn it is about
    normal, and wider by what the groups add along it.
    """
    m, n, _ = gram.shape
    rows = gram.mean(axis=2, keepdims=True)
    # About the mean: the turn itself is in every group.
    chance = gram - rows - rows.transpose(0, 2, 1) + rows.mean(axis=1, keepdims=True)
    chance *= n / (n - 1)
    trace = np.maximum(np.trace(chance, axis1=1, axis2=2), 1e-300)
    squares = np.square(chance).sum(axis=(1, 2)) - np.square(_diagonal(chance)).sum(axis=1)
    squares = np.clip(squares, 1e-12 * trace**2, trace**2)
    freedom = trace**2 / squares
    quantile = special.chdtri(freedom, min(_EQUIVALENCE / m, 0.5)) / freedom
    beyond_it, spread, z = trace * (quantile - 1), squares / trace, special.ndtri(_POWER)
    root = np.sqrt(4 * spread * (beyond_it + spread * z**2) + 2 * squares)
    return _angle(beyond_it + 2 * spread * z**2 + z * root)


def _chord_floor(
    measure: Measure, first: Totals, element: int, limits: StudyLimits
) -> float | None:
    """Return the 95 % quantile of the angle between halves of the reference, without its noise.

    By the same estimate: the groups of the halves are taken in pairs.
    """
    n = len(first.groups[COUNT]) // 2
    if n < 2:
        return None
    chords = []
    for kept in halves(2 * n, N_HALVES, limits.seed):
        half, other = (_of_groups(first, np.flatnonzero(side)) for side in (kept, ~kept))
        whole = measure.statistic(half.total(), other.total())[element]
        without = measure.statistic(half.without(), other.without())[:, element]
        pseudo = n * whole - (n - 1) * without
        products = np.square(pseudo.sum(axis=0)).sum() - np.square(pseudo).sum()
        chords.append(products / (n * (n - 1)))
    return _finite(float(np.quantile(_angle(np.array(chords)), 0.95)))


def _of_groups(total: Totals, chosen: Ints) -> Totals:
    return replace(total, groups=Made(lambda name: total.groups[name][chosen]))


def _overlap(
    measure: Measure, first: Totals, second: Totals, limits: StudyLimits
) -> dict[str, object]:
    """Return the fields of an overlap: at equal n beside its floor, tested by exchange.

    An overlap of two samples falls with their size by itself. So half of the first arm's groups
    is compared with the other half of the second's, and with the other half of its own.
    """
    n = len(first.groups[COUNT])
    split = halves(n, N_HALVES, limits.seed)
    within = measure.statistic(first.of(split), first.of(~split))[:, 0]
    across = measure.statistic(first.of(split), second.of(~split))[:, 0]
    if not (np.isfinite(within).all() and np.isfinite(across).all()):
        return {}
    lost = within - across
    value, floor = float(across.mean()), float(within.mean())

    def statistic(signs: Floats) -> Floats:
        kept: Bools = signs > 0
        half, other = first.of(kept), second.of(~kept)
        swapped, back = second.of(kept), first.of(~kept)
        mixed = measure.statistic(
            Made(lambda name: half[name] + other[name]),
            Made(lambda name: swapped[name] + back[name]),
        )[:, 0]
        return np.asarray(1 - mixed)

    low, high = np.quantile(across, [0.025, 0.975])
    changes: dict[str, object] = {
        "value": value,
        "low": float(low),
        "high": float(high),
        "floor": floor,
        "n_elements": 1,
    }
    if measure.limit is None:
        return changes
    farthest = float(np.quantile(lost, 0.95))
    changes |= {
        "farthest": farthest,
        # No overlap is lost where it is as large as within the reference.
        "p": flip_p(statistic, n, limits.seed, N_FLIPS_OVERLAP) if value < floor else 1.0,
        "equivalent": farthest <= measure.limit,
    }
    if not changes["equivalent"]:
        changes["short"] = (
            f"it may have lost {_apart(farthest, measure.limit)} against halves of the "
            f"reference; the limit is {measure.limit:g}"
        )
    return changes


def _floor(measure: Measure, first: Totals, element: int, limits: StudyLimits) -> float | None:
    n = len(first.groups[COUNT])
    if n < 4:
        return None
    split = halves(n, N_HALVES, limits.seed)
    values = np.abs(measure.statistic(first.of(split), first.of(~split)).reshape(N_HALVES, -1))
    return _finite(float(np.quantile(values[:, element], 0.95)))


def _short(half: float, size: float, measure: Measure, first: Totals, second: Totals) -> str:
    """Return what is missing for equivalence; half an interval falls with the root of requests."""
    n = min(first.n_requests, second.n_requests)
    limit = measure.limit
    assert limit is not None
    beyond = size >= limit
    room = limit if beyond and measure.kind != "size" else abs(limit - size)
    if half == 0 and not beyond:  # no such row at all: what is short are rows, and not requests
        n_rows = min(first.n_rows, second.n_rows)
        needed = math.ceil(3 / room)
        return f"about {needed:,} rows are needed to rule out such a share, {n_rows:,} are there"
    times = (half / room) ** 2 if room else 0.0
    if not 0 < times < 1e6:
        return f"the estimate lies at the limit, {limit:g}"
    why = "to tell the estimate from the limit" if beyond else "to stay within the limit"
    if (needed := math.ceil(n * times)) <= n:
        return f"some more than the {n:,} requests that are there are needed {why}"
    return f"about {needed:,} requests are needed {why}, {n:,} are there"


def decide(judged: Sequence[Value], limits: StudyLimits) -> list[Value]:
    """Return the values with adjusted p and verdict: one family of tests over all of them.

    A value carries over when it is shown to lie within its limit. It shifts when it is not, the
    estimate itself lies beyond the limit, and its adjusted p is at most the false discovery rate.
    Else it is undecided: also where a test finds a difference, and whether it is beyond the limit
    remains open.
    """
    p = np.array([value.p for value in judged if value.p is not None], np.float64)
    adjusted = iter(benjamini_hochberg(p).tolist())
    values = []
    for value in judged:
        if value.p is None:
            values.append(value)
            continue
        q = float(next(adjusted))
        outcome: Outcome = "undecided"
        if value.equivalent:
            outcome = "carries over"
        elif q <= limits.fdr and (value.limit is None or beyond(value) >= 1):
            outcome = "shifts"
        short = value.short if outcome == "undecided" else None
        if outcome == "undecided" and beyond(value) >= 1 and value.p <= _least_p(value):
            short = (
                f"p is {value.p:.2g}, as small as exchanges of {value.n_groups} groups make it, "
                f"and {q:.2g} among {len(p):,} tests: compare fewer hooks and contrasts, or "
                "more requests"
            )
        values.append(
            value.model_copy(update={"adjusted_p": q, "outcome": outcome, "short": short})
        )
    return values


def _least_p(value: Value) -> float:
    """Return the smallest p that a test by exchange can have; -1 for one that makes none."""
    if value.kind == "size":
        return -1.0
    if value.n_groups <= _ALL_FLIPS:
        return 2.0 ** (1 - value.n_groups)
    return 1 / (1 + (N_FLIPS_OVERLAP if value.kind == "overlap" else N_FLIPS))


def _apart(value: float, limit: float) -> str:
    """Return a number beyond a limit in as many figures as tell it from the limit, two at least."""
    figures = (f"{value:.{n}g}" for n in range(2, 8))
    return next((text for text in figures if float(text) > limit), f"{value:g}")


def _angle(chord: Floats) -> Floats:
    half = np.sqrt(np.clip(chord, 0.0, 4.0)) / 2
    return np.asarray(np.degrees(2 * np.arcsin(np.minimum(half, 1.0))))


def _diagonal(gram: Floats) -> Floats:
    return np.asarray(np.diagonal(gram, axis1=1, axis2=2))


def _label(measure: Measure, element: int, n: int) -> str | None:
    if measure.labels is not None:
        return measure.labels[element]
    return str(element) if n > 1 else None


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
