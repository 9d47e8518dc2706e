"""Values audit: whether two parts of a dataset, or two datasets, hold the same values.

The only part of the audit that reads activations, with the engine of `actds_validators.regimes`:
two arms, moments and numerics, over all rows. Two questions, never mixed: *numeric drift* (the same
token computed twice) and *population shift* (other tokens).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, cast, get_args

import actds
from actds.errors import ActdsError
from actds.load.dataset import Dataset
from actds.store.local import LocalStore
from actds.text import counted
from actds_validators.audit.result import Audit, Drift, DriftMeasure, Limits, OtherDataset
from actds_validators.regimes.arms import Arm, ArmRows, read_arm
from actds_validators.regimes.contrast import Contrast, Pairing, pairings, plan, same_requests
from actds_validators.regimes.floors import P99, RepeatFloor, beside_floor, repeat_floor
from actds_validators.regimes.instruments.moments import Moments
from actds_validators.regimes.instruments.numerics import Numerics
from actds_validators.regimes.result import Limits as RegimeLimits
from actds_validators.regimes.result import Outcome, Value
from actds_validators.regimes.run import Measured, conclude, measure
from actds_validators.regimes.strata import MIN_REQUESTS
from actds_validators.regimes.thinning import some_requests, thinned
from actds_validators.regimes.wording import element_of, verdicts

Column = Literal["phase", "kernel_mode", "run", "source"]
"""What a dataset can be divided by."""
COLUMNS: tuple[Column, ...] = get_args(Column)
N_ROWS = 20_000
_MAX_GROUPS = 8
_DRAWN = 10  # rows among which equal tokens and positions are looked for, for each that is read
_ALL = 0.95  # share of the rows in pairs by token above which the two sides are the same tokens
_WORDS = {"phase": "phase", "kernel_mode": "kernel mode", "run": "run", "source": "source"}
_NAMES = {"kernel_mode": "step.kernel_mode", "run": "run", "source": "request.source"}
_WORST: tuple[Outcome, ...] = ("shifts", "undecided", "carries over")
_WHY = {
    "phase": "Prompt text and generated text are different tokens",
    "kernel_mode": "Steps of different kernel modes hold different tokens",
}


@dataclass(frozen=True)
class _Hook:
    """What was measured at a hook.

    Args:
        name: of the hook.
        rows: the rows of the two arms.
        told: which of them were read.
        measured: before the family of tests is known.
        floor: of numerics.
    """

    name: str
    rows: tuple[ArmRows, ArmRows]
    told: Contrast
    measured: Measured
    floor: RepeatFloor | None


@dataclass(frozen=True)
class Found:
    """A comparison before the family of tests is known.

    Args:
        names: of the two sides.
        column: what divides a dataset, None for two datasets.
        pairing: how rows were paired.
        hooks: what was measured.
    """

    names: tuple[str, str]
    column: Column | None
    pairing: Pairing
    hooks: list[_Hook]


def drift_against(
    dataset: Dataset, other: Dataset, limits: Limits, *, rows: int = N_ROWS
) -> list[Found]:
    """Compare two datasets: numeric drift where they hold the same tokens, else their populations.

    Args:
        dataset: the one audited; it is the reference.
        other: what it is compared with.
        limits: seed and false discovery rate.
        rows: rows of each that are read at most.

    Raises:
        ActdsError: E014 the two have no hook in common; what reading raises.
    """
    return _compare(Arm(dataset.path, dataset), Arm(other.path, other), None, limits, rows)


def drift_by(
    dataset: Dataset, column: Column, limits: Limits, *, rows: int = N_ROWS
) -> list[Found]:
    """Compare the parts of a dataset: each value of a column with the first one.

    Args:
        dataset: the dataset.
        column: ``phase``, ``kernel_mode``, ``run`` or ``source``.
        limits: seed and false discovery rate.
        rows: rows of each part that are read at most.

    Returns:
        For each value but the first its comparisons; of more than eight values the first eight.

    Raises:
        ActdsError: E014 the column has fewer than two values; what reading raises.
    """
    first, *others = (
        arm_of(dataset, column, value) for value in values_to_compare(dataset, column)[:_MAX_GROUPS]
    )
    return [one for other in others for one in _compare(first, other, column, limits, rows)]


def arm_of(dataset: Dataset, column: Column, value: str) -> Arm:
    """Return the rows of a dataset with one value in a column."""
    name = f"{_WORDS[column]} {value}"
    if column == "phase":
        return Arm(name, dataset, phase=value)
    return Arm(name, dataset, where=f"{_NAMES[column]} == {value!r}")


def values_to_compare(dataset: Dataset, column: str) -> list[str]:
    """Return the values of a column, those of most steps or requests first; no row is read.

    Raises:
        ActdsError: E014 no such column, or it has fewer than two values.
    """
    if column not in COLUMNS:
        raise ActdsError(
            "E014", dataset.path, got=f"column {column!r}", expected=f"one of {', '.join(COLUMNS)}"
        )
    values = _values_of(dataset, column)
    if len(values) < 2:
        only = f"only {values[0]}" if values else "none"
        raise ActdsError(
            "E014", dataset.path, got=f"{_WORDS[column]}: {only}", expected="two values to compare"
        )
    return values


def _values_of(dataset: Dataset, column: Column) -> list[str]:
    """Return the values of a column, those of most steps or requests first; null is left out."""
    if column == "phase":
        return list(dataset.phases)
    if column == "run":
        there = {shard.run for shard in dataset.shards}
        return [run for run in dataset.catalog.run_ids if run in there]
    read = dataset.steps if column == "kernel_mode" else dataset.requests
    counts = [
        (entry["counts"], entry["values"])
        for entry in read(run=False)[column].value_counts().to_pylist()
        if entry["values"] is not None
    ]
    return [value for _, value in sorted(counts, key=lambda pair: (-pair[0], pair[1]))]


def common_hooks(first: Dataset, second: Dataset) -> list[str]:
    """Return the hooks of equal width that two datasets have; no row is read.

    Raises:
        ActdsError: E014 they have none, or one of them has no rows of such a hook.
    """
    hooks = [
        name
        for name, hook in first.hooks.items()
        if name in second.hooks and hook.d_model == second.hooks[name].d_model
    ]
    if not hooks:
        got, expected = (
            "hooks " + ", ".join(f"{name} of {hook.d_model}" for name, hook in d.hooks.items())
            for d in (second, first)
        )
        raise ActdsError("E014", second.path, got=got, expected=f"one of {expected}")
    for dataset in (first, second):
        for hook in hooks:
            if not len(dataset.array(hook)):
                raise ActdsError("E014", dataset.path, got=f"no rows: {hook}", expected="rows")
    return hooks


def _compare(
    first: Arm, second: Arm, column: Column | None, limits: Limits, rows: int
) -> list[Found]:
    """Compare two arms, by token where any rows are equal tokens, and as populations otherwise.

    Populations are compared unless 95 % of the rows of either side have a partner by token: paired
    by request and position, else unpaired, weighted to equal tokens and positions.
    """
    one, other = first.dataset, second.dataset
    groups: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for hook in common_hooks(one, other):
        key = tuple(tuple(shard.name for shard in d.shards_of(hook)) for d in (one, other))
        groups.setdefault(key, []).append(hook)
    found: dict[Pairing, list[_Hook]] = {}
    for hooks in groups.values():
        own = read_arm(first, hooks[0]), read_arm(second, hooks[0])
        for told in _plans(own, same_requests(first, second, own), limits.seed, rows):
            for hook in hooks:
                few = thinned(told, rows, limits.seed)
                measured = _measured((first, second), own, few, hook, limits)
                found.setdefault(told.pairing, []).append(measured)
    return [Found((first.name, second.name), column, kind, of) for kind, of in found.items()]


def _plans(
    rows: tuple[ArmRows, ArmRows], same_dataset: bool, seed: int, n_rows: int
) -> Iterator[Contrast]:
    for kind in pairings(*rows, same_dataset=same_dataset):
        if kind == "unpaired":
            rows = some_requests(*rows, _DRAWN * n_rows, seed, same_dataset=same_dataset)
        told = plan(*rows, same_dataset=same_dataset, pairing=kind, seed=seed, divided=False)
        yield told
        if kind != "token" or len(told.pairs[0]) >= _ALL * max(map(len, rows)):
            return


def _measured(
    arms: tuple[Arm, Arm], rows: tuple[ArmRows, ArmRows], told: Contrast, hook: str, limits: Limits
) -> _Hook:
    arrays = arms[0].dataset.array(hook), arms[1].dataset.array(hook)
    measured = measure(told, arrays, [Moments(), Numerics()], _limits(limits), hook)
    floor = repeat_floor(arms, told, arrays, hook) if told.pairing == "token" else None
    measured = replace(measured, judged=beside_floor(measured.judged, floor))
    return _Hook(hook, rows, told, measured, floor)


def _limits(limits: Limits) -> RegimeLimits:
    return RegimeLimits(fdr=limits.fdr, seed=limits.seed)


def drifts(found: Sequence[Found], limits: Limits) -> list[Drift]:
    """Return comparisons as the result has them; all their tests are one family."""
    hooks = [hook for one in found for hook in one.hooks]
    concluded = iter(conclude([hook.measured for hook in hooks], _limits(limits)))
    return [_drift(one, [next(concluded) for _ in one.hooks]) for one in found]


def _drift(found: Found, values: list[list[Value]]) -> Drift:
    measures = [
        one for hook, own in zip(found.hooks, values, strict=True) for one in _measures(hook, own)
    ]
    is_numeric = found.pairing == "token"
    sentence = _numeric_sentence if is_numeric else _population_sentence
    coverage = min(_coverage(hook) for hook in found.hooks)
    return Drift(
        kind="numeric drift" if is_numeric else "population shift",
        first=found.names[0],
        second=found.names[1],
        paired=is_numeric,
        pairing=found.pairing,
        coverage=coverage,
        n_first=max(len(hook.told.first) for hook in found.hooks),
        n_second=max(len(hook.told.second) for hook in found.hooks),
        measures=measures,
        sentence=sentence(found, [value for own in values for value in own], coverage),
    )


def _coverage(hook: _Hook) -> float:
    if hook.told.pairing != "token":
        return min(1.0, hook.told.coverage)
    second = hook.told.coverage * len(hook.rows[1])  # the pairs, before some are drawn
    return min(1.0, second / max(map(len, hook.rows)))


def _measures(hook: _Hook, values: Sequence[Value]) -> Iterator[DriftMeasure]:
    """Yield the measures of a hook that were estimated."""
    left_out = _left_out(hook)
    for value in values:
        if value.value is None:
            continue
        yield _measure(value, left_out)
        if value.measure != "relative L2":
            continue
        for line in hook.measured.quantiles:
            if line.measure == value.measure:
                floor = None if hook.floor is None else hook.floor.values[P99]
                yield DriftMeasure(
                    hook=value.hook,
                    name=P99,
                    value=line.p99,
                    floor=floor,
                    n=min(value.n_requests),
                    value_unit="over pairs",
                    note=_joined(value.note, left_out),
                )


def _measure(value: Value, left_out: str) -> DriftMeasure:
    assert value.value is not None
    element = element_of(value)
    few = "" if value.outcome != "undecided" or not value.short else value.short
    return DriftMeasure(
        hook=value.hook,
        name=value.measure,
        value=value.value,
        low=value.low,
        high=value.high,
        floor=value.floor,
        limit=value.limit,
        detectable=value.detectable,
        p=value.p,
        adjusted_p=value.adjusted_p,
        outcome=value.outcome,
        n=min(value.n_requests),
        value_unit=value.unit,
        note=_joined(element, few, value.note, left_out),
    )


def _left_out(hook: _Hook) -> str:
    n_repeats = sum(rows.n_repeats for rows in hook.rows)
    n_sinks, n_broken = sum(hook.measured.n_sinks), sum(hook.measured.n_broken)
    words = [
        f"each prefix counts once, {counted(n_repeats, 'repeat')} left out" if n_repeats else "",
        f"{counted(n_broken, 'row')} with a value that is not finite, or zero, left out"
        if n_broken
        else "",
        f"{counted(n_sinks, 'row')} above 10 median norms left out" if n_sinks else "",
    ]
    return _joined(*words)


def _joined(*words: str) -> str:
    return "; ".join(word for word in words if word)


def _numeric_sentence(found: Found, values: Sequence[Value], coverage: float) -> str:
    """Return the sentence of a numeric drift, by the hook whose rows lie farthest apart."""
    first, second = found.names
    n_pairs = max(len(hook.told.pairs[0]) for hook in found.hooks)
    tokens = counted(n_pairs, "token") + " with the same prefix "
    tokens += "was" if n_pairs == 1 else "were"
    distances = [v for v in values if v.measure == "relative L2" and v.value is not None]
    if not distances and any(sum(hook.measured.n_broken) for hook in found.hooks):
        return f"No pair of rows of {first} and {second} could be compared: too few are finite."
    if not distances:
        return (
            f"Only {tokens} computed in {first} and in {second}: too few, those of "
            f"{MIN_REQUESTS} requests are needed."
        )
    worst = max(distances, key=lambda one: one.value or 0.0)
    floor = "no floor is known" if worst.floor is None else f"the floor is {worst.floor:.2g}"
    moments = _moments(values)
    what = "are equal" if not worst.value else f"differ by {worst.value:.2g} of their norm"
    return (
        f"{tokens} computed in {first} and in {second}: their rows {what} ({worst.hook}; {floor}; "
        f"limit {worst.limit:g}: {worst.outcome}). {moments[0].upper()}{moments[1:]} "
        f"{coverage:.0%} of the rows have such a pair."
    )


def _population_sentence(found: Found, values: Sequence[Value], coverage: float) -> str:
    """Return the sentence of a population shift, by the hook where most is found."""
    first, second = found.names
    rows = f"rows of {first} and of {second}"
    if not any(value.outcome for value in values):
        few = f"those of {MIN_REQUESTS} requests on either side"
        return f"Too few {rows} can be compared: {few}, at equal tokens and positions, are needed."
    if found.pairing == "position":
        how = "paired by request and position"
    else:
        how = f"at equal tokens and positions, which {coverage:.0%} of the second have"
    why = _WHY.get(found.column or "", "The texts are not the same")
    return (
        f"The {rows}, {how}: {_moments(values)} {why}: this compares populations and does not show "
        "a numerical difference."
    )


def _moments(values: Sequence[Value]) -> str:
    """Return what moments find at the hook where they find most."""
    told = verdicts([value for value in values if value.instrument == "moments"])
    return min(told, key=lambda one: _WORST.index(one.outcome)).sentence


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Args:
        dataset: the dataset audited.
        against: path of the other one as it was given, ``None`` without.
        other: the other one.
        by: columns.
        rows: rows a side that are read at most.
    """

    dataset: Dataset
    against: str | None
    other: Dataset | None
    by: tuple[Column, ...]
    rows: int

    def added_to(self, result: Audit) -> tuple[Audit, Exception | None]:
        """Return the result with the comparisons, and what the first one that failed raised.

        The verdict rests on none of them, so that a failure takes nothing from the result; the
        options name every one.
        """
        found: list[Found] = []
        failed: list[Exception] = []
        for compare in self._parts(result.limits):
            try:
                found += compare()
            except Exception as error:  # the caller raises it when the result is written
                failed.append(error)
        other = None
        if self.other is not None and self.against is not None:
            dataset = self.other.catalog.genesis.dataset
            other = OtherDataset(path=self.against, dataset=dataset, digest=self.other.digest)
        asked = {
            "by": list(self.by),
            "against": other,
            "rows": self.rows,
            "failed": [_words(error) for error in failed],
        }
        options = result.options.model_copy(update=asked)
        sections = drifts(found, result.limits)
        told = result.model_copy(update={"drift": sections, "options": options})
        return told, failed[0] if failed else None

    def _parts(self, limits: Limits) -> list[Callable[[], list[Found]]]:
        dataset, other = self.dataset, self.other
        parts: list[Callable[[], list[Found]]] = []
        if other is not None:
            parts.append(partial(drift_against, dataset, other, limits, rows=self.rows))
        by = (partial(drift_by, dataset, column, limits, rows=self.rows) for column in self.by)
        return [*parts, *by]


def open_comparison(path: str, against: str | None, by: tuple[str, ...], rows: int) -> Comparison:
    """Return what is to be compared; no row is read.

    Args:
        path: the dataset audited.
        against: another dataset, if any.
        by: columns; one that is named twice counts once.
        rows: rows a side that are read at most.

    Raises:
        ActdsError: E009 the other dataset is the one audited; E014 no hook in common, no rows, or
            nothing to compare in a column; what ``actds.open`` raises of either dataset.
    """
    dataset = actds.open(path)
    other = None if against is None else actds.open(against)
    if other is not None and other.digest == dataset.digest and _place(other) == _place(dataset):
        raise ActdsError(
            "E009",
            f"--against {against}",
            got="the dataset that is audited",
            expected="another one",
        )
    common_hooks(dataset, dataset if other is None else other)
    for column in by:
        values_to_compare(dataset, column)
    columns = cast("tuple[Column, ...]", tuple(dict.fromkeys(by)))
    return Comparison(dataset, against, other, columns, rows)


def _place(dataset: Dataset) -> str:
    """Return where a dataset stands, through links."""
    store = dataset.catalog.store
    return os.path.realpath(store.root) if isinstance(store, LocalStore) else store.uri


def _words(error: Exception) -> str:
    if isinstance(error, ActdsError):
        return f"{error.code} {error.place}: {error.got}"
    return f"{type(error).__name__}: {error}"
