"""One engine for everything: contrasts, instruments and strata, in one pass over each arm.

Pairs of equal tokens have more. Their floor is how far rows lie apart that were computed twice in
the same way: requests that share a prompt compute its tokens more than once; else canaries of the
run say it; a contrast with the same harvest made again, in a process of its own, says it of every
measure. Quantiles of distances are of counts in bins of equal ratio. Forks are pairs after which
both arms sampled (``--entropy``), and sampled different tokens: greedy answers part where the
difference of two computations exceeds the margin between the two largest logits; answers that are
drawn at a temperature part by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pyarrow.compute as pc
from typing_extensions import TypeVar

from actds.errors import ActdsError
from actds.explore.lazy import LazyArray
from actds.loader.filters import SINK_NORM
from actds_studies.regimes.arms import Arm, ArmRows, described_rows
from actds_studies.regimes.conclusions import about, answer_of, verdicts
from actds_studies.regimes.contrast import Contrast, Pairing, contrast, some_rows
from actds_studies.regimes.entropies import Entropies
from actds_studies.regimes.inference import Measure, decide, judge
from actds_studies.regimes.instruments import (
    ALL_ROWS,
    SINKS,
    Instrument,
    Numerics,
    PairInstrument,
    distances,
    of_pairs,
    over,
)
from actds_studies.regimes.instruments.probes import Probes
from actds_studies.regimes.result import (
    ALL,
    MIN_REQUESTS,
    ArmResult,
    ContrastResult,
    Limits,
    Quantiles,
    Regimes,
    StudyLimits,
    StudyResult,
    Value,
)
from actds_studies.regimes.strata import (
    COUNT,
    Layer,
    Part,
    RowReader,
    Side,
    Stratum,
    Sums,
    blocks_of,
)
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


FORKS = of_pairs(
    "forks of the sampled token",
    lambda sums: over(sums["parted"], sums["sampled"]),
    "share of pairs that both sampled after",
    "linear",
)
"""Share of the pairs after which the arms sampled different tokens; only described."""


@dataclass(frozen=True)
class Asked:
    """A contrast that is asked for; None pairs its rows the closest way there is."""

    name: str
    first: Arm
    second: Arm
    hook: str
    instruments: Sequence[AnyInstrument]
    pairing: Pairing | None = None


@dataclass(frozen=True)
class Measured:
    """What was measured on two arms, before the family of tests is known.

    Rows of either arm are left out as sinks, by their norm, or as broken: not finite, or zero.
    """

    judged: list[Value]
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
        questions: each has instruments of its own, which keep what they learnt of its reference.
        floor: name of the contrast of arms that were served alike, whose distances are the floor
            of the others'.
        entropies: computes those that were not recorded; None without.

    Raises:
        ActdsError: E014 arms that cannot be compared; what reading raises.
    """
    limits = limits or Limits()
    planned = [_planned(question, limits.seed, entropies) for question in questions]
    all_measured, results = [], []
    for question in questions:
        progress(f"{question.name} at {question.hook}")
        arms, hook = (question.first, question.second), question.hook
        # Read in their order: few files need to stay open.
        first, second = (
            LazyArray(arm.dataset.hooks[hook], arm.dataset.shards_of(hook), n_open=N_OPEN)
            for arm in arms
        )
        plan, result = planned.pop(0)
        measured = measure(plan, (first, second), question.instruments, limits, hook)
        if plan.pairing == "token":
            judged = beside_repeats(measured.judged, arms, plan, (first, second), hook)
            measured = replace(measured, judged=judged)
        all_measured.append(measured)
        results.append(result)
    results = [
        _with_values(*parts)
        for parts in zip(results, all_measured, conclude(all_measured, limits), strict=True)
    ]
    if floor is not None:
        results = beside_contrast(results, floor)
    results = [
        result.model_copy(update={"verdicts": verdicts(result.values, result.names)})
        for result in results
    ]
    n_tests = sum(value.p is not None for result in results for value in result.values)
    facts: dict[str, Any] = {"limits": limits, "answer": answer_of(results), "n_tests": n_tests}
    return kind(contrasts=results, **facts)


def _planned(
    question: Asked, seed: int, entropies: Entropies | None
) -> tuple[Contrast, ContrastResult]:
    """Return the plan of a contrast, and its result as far as that is known before it is measured.

    What the tables say of each row is not kept: there may be many contrasts.
    """
    arms, pairing = (question.first, question.second), question.pairing
    plan, *rows = contrast(*arms, question.hook, pairing=pairing, seed=seed, entropies=entropies)
    sides = plan.first, plan.second
    numbers = plan.first.row, plan.second.row
    if plan.pairing != "unpaired":
        numbers = numbers[0][plan.pairs[0]], numbers[1][plan.pairs[1]]
    if arms[0].dataset.digest == arms[1].dataset.digest and np.array_equal(*numbers):
        raise ActdsError(
            "E014",
            f"arms {arms[0].name} and {arms[1].name} at {question.hook}",
            got="the same rows",
            expected="rows that were written or computed in two ways",
        )
    for instrument in question.instruments:
        if isinstance(instrument, Probes):
            names = arms[0].name, arms[1].name
            instrument.need_labels(names, (plan.first.row, plan.second.row))
    first, second = (
        ArmResult(
            name=arm.name,
            words=arm.words,
            rows=described_rows(arm, of_arm),
            digest=arm.dataset.digest,
            n_rows=len(of_arm),
            n_requests=of_arm.n_requests,
            n_compared=len(side),
            n_apart=of_arm.n_apart,
            n_repeats=of_arm.n_repeats,
            n_decode=of_arm.n_decode,
        )
        for arm, of_arm, side in zip(arms, rows, sides, strict=True)
    )
    decode = [
        None if arm.n_decode is None else arm.n_decode / max(arm.n_rows, 1)
        for arm in (first, second)
    ]
    result = ContrastResult(
        name=question.name,
        hook=question.hook,
        pairing=plan.pairing,
        about=about(plan.pairing, (decode[0], decode[1])),
        adjusted=plan.adjusted,
        n_pairs=len(plan.pairs[0]),
        n_groups=plan.n_groups,
        coverage=min(1.0, plan.coverage),
        left_out=_left_out(plan, entropies, {first.name: rows[0], second.name: rows[1]}),
        first=first,
        second=second,
        values=[],
        quantiles=[],
        verdicts=[],
    )
    return plan, result


def _with_values(result: ContrastResult, measured: Measured, values: list[Value]) -> ContrastResult:
    first, second = (
        arm.model_copy(update={"n_sinks": n_sinks, "n_broken": n_broken})
        for arm, n_sinks, n_broken in zip(
            (result.first, result.second), measured.n_sinks, measured.n_broken, strict=True
        )
    )
    more = {"first": first, "second": second, "quantiles": measured.quantiles, "values": values}
    return result.model_copy(update=more)


def conclude(measured: Sequence[Measured], limits: StudyLimits) -> list[list[Value]]:
    """Return the values of each contrast with their outcomes, one family over all."""
    values = iter(decide([value for each in measured for value in each.judged], limits))
    return [list(islice(values, len(each.judged))) for each in measured]


def measure(
    plan: Contrast,
    arrays: tuple[RowReader, RowReader],
    instruments: Sequence[AnyInstrument],
    limits: StudyLimits,
    hook: str,
) -> Measured:
    """Measure two arms: a pass over each, and over the pairs where an instrument asks for them."""
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
    passes = [
        _pass(arrays[n], side, n, single, plan, coarse, sink)
        for n, side in enumerate((plan.first, plan.second))
    ]
    sums, quantiles = (passes[0][0], passes[1][0]), list[Quantiles]()
    reference = sums[0].totals(0).total()
    judged: list[Value] = []
    for instrument in single:
        measures = instrument.measures(reference, limits)
        judged += _judged(instrument.name, measures, plan, sums, limits, hook)
    if plan.pairing == "token" and double:
        pair_sums, quantiles = _pair_pass(plan, arrays, double, coarse, sink, hook)
        for pair_instrument in double:
            measures = pair_instrument.pair_measures(limits)
            if plan.parted is not None and pair_instrument.name == Numerics.name:
                measures = [*measures, FORKS]
            judged += _judged(
                pair_instrument.name, measures, plan, (pair_sums, pair_sums), limits, hook
            )
    return Measured(judged, quantiles, (passes[0][1], passes[1][1]), (passes[0][2], passes[1][2]))


def _sample(array: RowReader, side: Side) -> Rows:
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
    layers = tuple(
        Layer(layer.stratum[left], None if layer.weight is None else layer.weight[left])
        for layer in side.layers
    )
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
            after = {"sampled": parted[block] >= 0, "parted": parted[block] > 0}
            sums.add(block, (Part(name, known.astype(np.float64)) for name, known in after.items()))
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
) -> list[Value]:
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


_UNWEIGHTED = (
    "and count 1 / inclusion (a pair the product). Not so weighted: quantiles of distances, the "
    "floor, features that fire in one arm only, and a prefix that several requests computed, of "
    "which the first stored row counts"
)


def _left_out(
    plan: Contrast, entropies: Entropies | None, arms: Mapping[str, ArmRows]
) -> list[str]:
    notes = [
        f"the rows of {name} were drawn, {_UNWEIGHTED}"
        for name, rows in arms.items()
        if rows.represents is not None
    ]
    has_axis = any(stratum.axis == "entropy" for stratum in plan.strata)
    if has_axis or not any(rows.sampled is not None for rows in arms.values()):
        return notes
    shares = []
    for name, rows in arms.items():
        known = "none"
        if rows.sampled is not None:
            known = f"{np.isfinite(rows.sampled.entropy).mean():.1%}"
        shares.append(f"{known} of the rows of {name}")
    more = "the model's folder (--model) gives the others where rows of the last layer are stored"
    if entropies is not None:
        more = f"the model's folder gives no others: {entropies.lacks}"
    return [
        *notes,
        "entropy and margin: the model's distribution over the next token is known after "
        f"{' and '.join(shares)}. A harvest with --entropy records it where the model sampled, and "
        f"{more}. Bands of so different rows would not mean the same",
    ]


_MIN_TOKENS = 20
_OF_PAIRS = ("numerics", "overlap")
"""Instruments with sizes of pairs of equal tokens: halves of the reference have none."""


def beside_repeats(
    judged: list[Value],
    arms: tuple[Arm, Arm],
    plan: Contrast,
    arrays: tuple[RowReader, RowReader],
    hook: str,
) -> list[Value]:
    """Return values with the floor of numerics over all rows, if 20 tokens were computed twice."""
    parts: list[tuple[Floats, Floats]] = []
    for repeats, array in zip(plan.repeats, arrays, strict=True):
        first, other = (array[repeat] for repeat in repeats)
        fine = _usable(first) & _usable(other)
        parts.append(distances(first[fine], other[fine]))
    words = "tokens that one arm computed twice, in two requests"
    if sum(len(relative) for relative, _ in parts) < _MIN_TOKENS:
        parts, words = [], "canaries, tokens computed again in requests replayed alone"
        for dataset in {id(arm.dataset): arm.dataset for arm in arms}.values():
            lines = dataset.canary(run=False)
            same = pc.and_(pc.equal(lines["hook"], hook), pc.equal(lines["verdict"], "same"))
            lines = lines.filter(same)
            parts.append((lines["relative_l2"].to_numpy(), 1 - lines["cosine"].to_numpy()))
    relative, cosine = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    if len(relative) < _MIN_TOKENS:
        return judged
    floors = {
        "equal to the bit": float((relative == 0).mean()),
        "relative L2": float(relative.mean()),
        "cosine distance": float(cosine.mean()),
    }
    words = f"{len(relative):,} {words}"
    return [
        _with_floor(value, floors[value.measure], words)
        if value.instrument == "numerics" and value.axis == ALL and value.measure in floors
        else value
        for value in judged
    ]


def _with_floor(value: Value, floor: float | None, words: str) -> Value:
    if value.value is None:
        return value
    return value.model_copy(update={"floor": floor, "note": f"floor: {words}"})


def beside_contrast(results: Sequence[ContrastResult], name: str) -> list[ContrastResult]:
    """Return results in which sizes of pairs stand beside the same of one of the contrasts.

    E014 where that one is not paired by token.
    """
    known: dict[tuple[str, ...], Value] = {}
    for result in results:
        if result.name == name and result.pairing != "token":
            got = f"{name} at {result.hook} is paired by {result.pairing}"
            expected = "a contrast of the same tokens, as of a replay made twice"
            raise ActdsError("E014", "floor", got=got, expected=expected)
        if result.name == name:
            known |= {_place(value): value for value in result.values}
    beside = []
    for result in results:
        values = [
            _with_floor(value, known[_place(value)].value, name)
            if value.instrument in _OF_PAIRS
            and value.kind in ("size", "described")
            and _place(value) in known
            else value
            for value in result.values
        ]
        is_beside = result.name != name and result.pairing == "token"
        beside.append(result.model_copy(update={"values": values}) if is_beside else result)
    return beside


def _place(value: Value) -> tuple[str, ...]:
    return value.hook, value.instrument, value.measure, value.axis, value.stratum


LOWEST = 1e-12
"""Distances below count as 0."""
PER_DECADE = 200
"""Bins: a quantile is off by 0.6 % of itself at most."""
_DECADES = 15


class Histogram:
    """Counts of values by stratum."""

    def __init__(self, n_strata: int) -> None:
        self._n_strata = n_strata
        self._counts: dict[str, Ints] = {}
        self._largest: dict[str, Floats] = {}

    @property
    def names(self) -> list[str]:
        return list(self._counts)

    def add(self, name: str, values: Floats, strata: Sequence[Ints]) -> None:
        """Count values ``(n,)`` in the strata of each axis ``(n,)``, -1 for none."""
        n_bins = _DECADES * PER_DECADE + 2
        if name not in self._counts:
            self._counts[name] = np.zeros((self._n_strata, n_bins), np.int64)
            self._largest[name] = np.zeros(self._n_strata)
        positive = np.maximum(np.nan_to_num(values), LOWEST / 10)
        place = np.floor(np.log10(positive / LOWEST) * PER_DECADE).astype(np.int64) + 1
        place = np.clip(place, 0, n_bins - 1)
        for stratum in strata:
            present = stratum >= 0
            np.add.at(self._counts[name], (stratum[present], place[present]), 1)
            np.maximum.at(self._largest[name], stratum[present], values[present])

    def count(self, name: str, stratum: int) -> int:
        return int(self._counts[name][stratum].sum())

    def quantile(self, name: str, stratum: int, share: float) -> float:
        """Return a quantile; share 1 gives the largest value itself."""
        largest = float(self._largest[name][stratum])
        if share >= 1:
            return largest
        counts = np.cumsum(self._counts[name][stratum])
        place = int(np.searchsorted(counts, share * counts[-1], side="left"))
        if place == 0:
            return 0.0
        return min(float(LOWEST * 10 ** ((place - 0.5) / PER_DECADE)), largest)


def quantile_lines(histogram: Histogram, strata: Sequence[Stratum], hook: str) -> list[Quantiles]:
    """Return the quantiles at 50, 90, 99 and 100 % of every stratum of at least eight pairs."""
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p100": 1.0}
    return [
        Quantiles(
            hook=hook,
            axis=stratum.axis,
            stratum=stratum.name,
            measure=name,
            n_pairs=n_pairs,
            **{p: histogram.quantile(name, n, share) for p, share in shares.items()},
        )
        for name in histogram.names
        for n, stratum in enumerate(strata)
        if (n_pairs := histogram.count(name, n)) >= MIN_REQUESTS
    ]
