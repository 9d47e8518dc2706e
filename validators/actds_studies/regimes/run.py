"""One engine for everything: contrasts, instruments and strata, in one pass over each arm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from typing_extensions import TypeVar

from actds.errors import ActdsError
from actds.explore.lazy import LazyArray
from actds.loader.filters import SINK_NORM
from actds_studies.regimes.arms import Arm, ArmRows, described_rows
from actds_studies.regimes.conclusions import about, answer_of, verdicts
from actds_studies.regimes.contrast import Contrast, Pairing, Side, contrast, some_rows
from actds_studies.regimes.entropies import Entropies
from actds_studies.regimes.equal_tokens import (
    PARTING,
    Histogram,
    Numerics,
    beside_contrast,
    beside_floor,
    parting_parts,
    quantile_lines,
    repeat_floor,
)
from actds_studies.regimes.inference import Judged, Measure, decide, judge
from actds_studies.regimes.instruments import Instrument, PairInstrument
from actds_studies.regimes.instruments.moments import ALL_ROWS, SINKS
from actds_studies.regimes.instruments.probes import Probes
from actds_studies.regimes.result import (
    ArmResult,
    ContrastResult,
    Limits,
    Quantiles,
    Regimes,
    StudyLimits,
    StudyResult,
    Value,
)
from actds_studies.regimes.strata import ALL
from actds_studies.regimes.sums import COUNT, Part, RowReader, Sums, blocks_of
from actds_validators.arrays import Bools, Floats, Ints, Rows

N_SAMPLE = 4096
MAX_PAIRS = 50_000
"""Pairs of which both rows are read together at most: of some requests."""
N_OPEN = 8
"""Files of an arm that stay open: pairs need more than the one that is read."""
COARSE = (ALL, "decode step")
"""Axes in which sums over every feature are kept."""
AnyInstrument = Instrument | PairInstrument
Result = TypeVar("Result", bound=StudyResult, default=Regimes)


@dataclass(frozen=True)
class Asked:
    """A contrast that is asked for.

    Args:
        name: what a reader calls it, as ``G-R``.
        pairing: how to pair the rows; None for the closest way there is.
    """

    name: str
    first: Arm
    second: Arm
    hook: str
    instruments: Sequence[AnyInstrument]
    pairing: Pairing | None = None


@dataclass(frozen=True)
class Measured:
    """What was measured on two arms, before the family of tests is known.

    Args:
        n_sinks: rows of either arm left out because their norm is a sink's.
        n_broken: rows left out because they are not finite, or zero.
    """

    judged: list[Judged]
    quantiles: list[Quantiles]
    n_sinks: tuple[int, int]
    n_broken: tuple[int, int]


def compare(
    questions: Sequence[Asked],
    limits: StudyLimits | None = None,
    progress: Callable[[str], None] = lambda what: None,
    *,
    floor: str | None = None,
    entropies: Entropies | None = None,
    kind: type[Result] = Regimes,  # type: ignore[assignment]
) -> Result:
    """Return what contrasts find; all their tests are one family.

    Args:
        asked: the contrasts; each has instruments of its own, which keep what they learnt of its
            reference.
        limits: what counts as none, level and seed; None for the defaults.
        floor: name of the contrast of arms that were served alike, whose distances are the floor
            of the others'.
        entropies: computes those that were not recorded; None without.
        kind: of the result.

    Raises:
        ActdsError: E014 arms that cannot be compared; what reading raises.
    """
    limits = limits or Limits()
    planned = [_planned(question, limits.seed, entropies) for question in questions]
    all_measured, results = [], []
    for question in questions:
        progress(f"{question.name} at {question.hook}")
        arrays = _rows_of(question.first, question.hook), _rows_of(question.second, question.hook)
        plan, result = planned.pop(0)
        measured = measure(plan, arrays, question.instruments, limits, question.hook)
        if plan.pairing == "token":
            repeats = repeat_floor((question.first, question.second), plan, arrays, question.hook)
            measured = replace(measured, judged=beside_floor(measured.judged, repeats))
        all_measured.append(measured)
        results.append(_with_counts(result, measured))
    results = [
        result.model_copy(update={"values": values})
        for result, values in zip(results, conclude(all_measured, limits), strict=True)
    ]
    if floor is not None:
        results = beside_contrast(results, floor)
    results = [
        question.model_copy(
            update={
                "verdicts": verdicts(question.values, (question.first.name, question.second.name))
            }
        )
        for question in results
    ]
    n_tests = sum(value.p is not None for result in results for value in result.values)
    facts: dict[str, Any] = {"limits": limits, "answer": answer_of(results), "n_tests": n_tests}
    return kind(contrasts=results, **facts)


def _rows_of(arm: Arm, hook: str) -> LazyArray:
    """Return the rows of an arm: read in their order, so that few files need to stay open."""
    return LazyArray(arm.dataset.hooks[hook], arm.dataset.shards_of(hook), n_open=N_OPEN)


def _planned(
    question: Asked, seed: int, entropies: Entropies | None
) -> tuple[Contrast, ContrastResult]:
    """Return the plan of a contrast, and its result as far as that is known before it is measured.

    What the tables say of each row is not kept: there may be many contrasts.
    """
    plan, first, second = contrast(
        question.first,
        question.second,
        question.hook,
        pairing=question.pairing,
        seed=seed,
        entropies=entropies,
    )
    _refuse_same(question, plan)
    for instrument in question.instruments:
        if isinstance(instrument, Probes):
            rows = plan.first.row, plan.second.row
            instrument.need_labels((question.first.name, question.second.name), rows)
    result = ContrastResult(
        name=question.name,
        hook=question.hook,
        pairing=plan.pairing,
        about=about(plan.pairing, (_decode_share(first), _decode_share(second))),
        adjusted=plan.adjusted,
        n_pairs=len(plan.pairs[0]),
        n_groups=plan.n_groups,
        coverage=min(1.0, plan.coverage),
        left_out=_left_out(
            plan, entropies, (question.first.name, first), (question.second.name, second)
        ),
        first=_arm_result(question.first, first, plan.first),
        second=_arm_result(question.second, second, plan.second),
        values=[],
        quantiles=[],
        verdicts=[],
    )
    return plan, result


def _refuse_same(question: Asked, plan: Contrast) -> None:
    """Refuse rows that would be compared with themselves."""
    if question.first.dataset.digest != question.second.dataset.digest:
        return
    first, second = plan.first.row, plan.second.row
    if plan.pairing != "unpaired":
        first, second = first[plan.pairs[0]], second[plan.pairs[1]]
    if np.array_equal(first, second):
        raise ActdsError(
            "E014",
            f"arms {question.first.name} and {question.second.name} at {question.hook}",
            got="the same rows",
            expected="rows that were written or computed in two ways",
        )


def _with_counts(result: ContrastResult, measured: Measured) -> ContrastResult:
    """Return a result with what was left out when the rows were read, and the quantiles."""
    first, second = (
        arm.model_copy(update={"n_sinks": n_sinks, "n_broken": n_broken})
        for arm, n_sinks, n_broken in zip(
            (result.first, result.second), measured.n_sinks, measured.n_broken, strict=True
        )
    )
    more = {"first": first, "second": second, "quantiles": measured.quantiles}
    return result.model_copy(update=more)


def conclude(measured: Sequence[Measured], limits: StudyLimits) -> list[list[Value]]:
    """Return the values of each contrast with their outcomes, one family over all."""
    values = decide([judged for each in measured for judged in each.judged], limits)
    values_of, start = [], 0
    for each in measured:
        values_of.append(values[start : start + len(each.judged)])
        start += len(each.judged)
    return values_of


def measure(
    plan: Contrast,
    arrays: tuple[RowReader, RowReader],
    instruments: Sequence[AnyInstrument],
    limits: StudyLimits,
    hook: str,
) -> Measured:
    """Measure two arms: one pass over each, one over the pairs where an instrument asks for them.

    Args:
        arrays: the rows of either arm, by number.
    """
    single = [instrument for instrument in instruments if isinstance(instrument, Instrument)]
    double = [instrument for instrument in instruments if isinstance(instrument, PairInstrument)]
    coarse = np.array([n for n, s in enumerate(plan.strata) if s.axis in COARSE], np.int64)
    sample = _sample(arrays[0], plan.first)
    if not len(sample):
        return Measured([], [], (0, 0), (len(plan.first), 0))
    norms = np.linalg.norm(sample, axis=1)
    sink = SINK_NORM * float(np.median(norms))
    for instrument in single:
        instrument.prepare(sample[norms <= sink])  # a few sinks would make up all of a scale
    judged: list[Judged] = []
    passes = [
        _pass(arrays[n], side, n, single, plan, coarse, sink)
        for n, side in enumerate((plan.first, plan.second))
    ]
    sums = passes[0][0], passes[1][0]
    if single:
        reference = sums[0].totals(0).total()
        for instrument in single:
            judged += _judged(
                instrument.name, instrument.measures(reference, limits), plan, sums, limits, hook
            )
    quantiles: list[Quantiles] = []
    if plan.pairing == "token" and double:
        pair_sums, lines = _pair_pass(plan, arrays, double, coarse, sink, hook)
        quantiles = lines
        for pair_instrument in double:
            measures = pair_instrument.pair_measures(limits)
            if plan.parted is not None and pair_instrument.name == Numerics.name:
                measures = [*measures, PARTING]
            judged += _judged(
                pair_instrument.name, measures, plan, (pair_sums, pair_sums), limits, hook
            )
    return Measured(judged, quantiles, (passes[0][1], passes[1][1]), (passes[0][2], passes[1][2]))


def _sample(array: RowReader, side: Side) -> Rows:
    """Return some rows of the reference, spread evenly, without those that are not usable."""
    n = min(N_SAMPLE, len(side))
    rows = array[side.row[np.arange(n) * len(side) // max(n, 1)].astype(np.int64)]
    return rows[_usable(rows)]


def _width(instruments: Sequence[object]) -> int:
    return max((int(getattr(instrument, "width", 0)) for instrument in instruments), default=0)


def _usable(rows: Rows) -> Bools:
    return np.asarray(np.isfinite(rows).all(axis=1) & (rows != 0).any(axis=1))


def _norms(rows: Rows, usable: Bools) -> Floats:
    """Return the length of each row ``(n,)``, 0 of those that are not usable."""
    fine = np.where(usable[:, np.newaxis], rows, 0).astype(np.float64)
    return np.asarray(np.linalg.norm(fine, axis=1))


def _pass(
    array: RowReader,
    side: Side,
    number: int,
    instruments: Sequence[Instrument],
    plan: Contrast,
    coarse: Ints,
    sink: float,
) -> tuple[Sums, int, int]:
    sums = Sums(side, len(plan.strata), plan.n_groups, coarse)
    n_sinks = n_broken = 0
    if not instruments:
        return sums, 0, 0
    for block, rows in blocks_of(array, side.row, _width(instruments)):
        fine = _usable(rows)
        is_sink = _norms(rows, fine) > sink
        n_sinks, n_broken = n_sinks + int(is_sink.sum()), n_broken + int((~fine).sum())
        sums.leave_out(block, fine)
        ones = np.ones(len(rows))
        sums.add(block, [Part(ALL_ROWS, ones), Part(SINKS, is_sink.astype(np.float64))])
        sums.leave_out(block, fine & ~is_sink)
        sums.add(block, [Part(COUNT, ones)])
        for instrument in instruments:
            with np.errstate(invalid="ignore", over="ignore"):
                sums.add(block, instrument.parts(rows, number, side.row[block]))
    return sums, n_sinks, n_broken


def _pair_pass(
    plan: Contrast,
    arrays: tuple[RowReader, RowReader],
    instruments: Sequence[PairInstrument],
    coarse: Ints,
    sink: float,
    hook: str,
) -> tuple[Sums, list[Quantiles]]:
    """Return the sums over pairs, and quantiles of their distances.

    Pairs of two sinks are left out. One of a sink and another row is none: it lies far apart.
    """
    kept = _some_pairs(plan)
    left, other = plan.pairs[0][kept], plan.pairs[1][kept]
    side = plan.first
    layers = tuple(type(layer)(layer.stratum[left], None) for layer in side.layers)
    token_id = None if side.token_id is None else side.token_id[left]
    paired = Side(side.row[left], side.cluster[left], side.group[left], layers, token_id)
    partner = plan.second.row[other]
    sums = Sums(paired, len(plan.strata), plan.n_groups, coarse)
    histogram = Histogram(len(plan.strata))
    parted = None if plan.parted is None else plan.parted[kept]
    for block, rows in blocks_of(arrays[0], paired.row, _width(instruments)):
        partners = arrays[1][partner[block].astype(np.int64)]
        fine = _usable(rows) & _usable(partners)
        fine &= (_norms(rows, fine) <= sink) | (_norms(partners, fine) <= sink)
        sums.leave_out(block, fine)
        sums.add(block, [Part(COUNT, np.ones(len(rows)))])
        if parted is not None:
            sums.add(block, parting_parts(parted[block]))
        strata = [np.where(fine, layer.stratum[block], -1) for layer in layers]
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            for instrument in instruments:
                sums.add(block, instrument.pair_parts(rows, partners))
                for name, values in instrument.pair_values(rows, partners).items():
                    histogram.add(name, values, strata)
    return sums, quantile_lines(histogram, plan.strata, hook)


def _some_pairs(plan: Contrast) -> Ints:
    """Return pairs of some requests, up to `MAX_PAIRS`, in the order of the first's rows."""
    left, _ = plan.pairs
    chosen = np.arange(len(left))
    if len(left) > MAX_PAIRS:
        cluster = plan.first.cluster[left]
        rng = np.random.Generator(np.random.Philox(0))
        known = np.unique(cluster)
        order = known[rng.permutation(len(known))].astype(np.int64)
        chosen = some_rows(cluster, order, MAX_PAIRS, rng)
    return chosen[np.argsort(left[chosen], kind="stable")]


def _judged(
    name: str,
    measures: Sequence[Measure],
    plan: Contrast,
    sums: tuple[Sums, Sums],
    limits: StudyLimits,
    hook: str,
) -> list[Judged]:
    measured = []
    for n, stratum in enumerate(plan.strata):
        totals = sums[0].totals(n), sums[1].totals(n)
        if stratum.axis != ALL and not all(total.n_rows for total in totals):
            continue
        for measure in measures:
            if measure.coarse and stratum.axis not in COARSE:
                continue
            if measure.rare and stratum.axis != ALL:  # too few rows to exclude a small rate
                measure = replace(measure, kind="described")
            measured.append(judge(name, hook, stratum, measure, totals, limits))
    return measured


def _left_out(plan: Contrast, entropies: Entropies | None, *arms: tuple[str, ArmRows]) -> list[str]:
    """Return which strata are not formed for want of entropies, and of which arm."""
    has_axis = any(stratum.axis == "entropy" for stratum in plan.strata)
    if has_axis or not any(rows.sampled is not None for _, rows in arms):
        return []
    known = [
        f"{np.isfinite(rows.sampled.entropy).mean():.1%}" if rows.sampled is not None else "none"
        for _, rows in arms
    ]
    shares = " and ".join(
        f"{share} of the rows of {name}" for share, (name, _) in zip(known, arms, strict=True)
    )
    more = "the model's folder (--model) gives the others where rows of the last layer are stored"
    if entropies is not None:
        more = f"the model's folder gives no others: {entropies.lacks}"
    return [
        "entropy and margin: the model's distribution over the next token is known after "
        f"{shares}. A harvest with --entropy records it where the model sampled, and {more}. Bands "
        "of so different rows would not mean the same"
    ]


def _decode_share(rows: ArmRows) -> float | None:
    return None if rows.n_decode is None else rows.n_decode / max(len(rows), 1)


def _arm_result(arm: Arm, rows: ArmRows, side: Side) -> ArmResult:
    return ArmResult(
        name=arm.name,
        words=arm.words,
        rows=described_rows(arm, rows),
        digest=arm.dataset.digest,
        n_rows=len(rows),
        n_requests=rows.n_requests,
        n_compared=len(side),
        n_apart=rows.n_apart,
        n_repeats=rows.n_repeats,
        n_decode=rows.n_decode,
    )
