"""Values audit: whether two selections, or two datasets, hold the same values.

The only part of the audit that reads activations. Two questions, never mixed: *numeric drift* (the
same token computed twice) and *population shift* (other tokens). Each measure stands beside its
floor, the same measure within one regime.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

import actds
from actds.errors import ActdsError
from actds.format import arrays
from actds.format.shard import Shard
from actds.load.dataset import Dataset
from actds.store.local import LocalStore
from actds_validators.audit.drift import rows as select
from actds_validators.audit.drift.measures import (
    MIN_PAIRS,
    PairedHook,
    RowFloor,
    measure_pairs,
    measure_populations,
    numeric_measures,
    population_measures,
    usable,
)
from actds_validators.audit.drift.rows import (
    COLUMNS,
    Column,
    Found,
    Prefixes,
    Selection,
    distinct,
    pair,
    repeats,
)
from actds_validators.audit.result import Audit, Drift, DriftMeasure, Limits, OtherDataset
from actds_validators.regimes.requests import Requests, match
from actds_validators.statistics.events import Ints
from actds_validators.statistics.samples import cosine_distance, relative_l2

_WHY = {
    "phase": "Prompt text and generated text are different tokens",
    "kernel_mode": "Steps of different kernel modes hold different tokens",
}


def repeats_words(n: int) -> str:
    """Return the end of a note that says how many repeated prefixes were left out."""
    return f"; each prefix counts once, {n} repeats left out" if n else ""


def numeric_sentence(
    first: Selection,
    second: Selection,
    hooks: list[PairedHook],
    measures: list[DriftMeasure],
    share: float,
) -> str:
    """Return the sentence of a numeric drift.

    Args:
        first: one side.
        second: the other.
        hooks: what the pairs measure.
        measures: the measures of all hooks.
        share: share of the rows that have a partner.
    """
    means = [one for one in measures if one.name == "relative L2, mean"]
    n_pairs = max((hook.n_pairs for hook in hooks), default=0)
    if not means and not n_pairs:
        return f"No pair of rows of {first.name} and {second.name} could be compared."
    if not means:
        tokens = (
            "token with the same prefix was" if n_pairs == 1 else "tokens with the same prefix were"
        )
        return (
            f"Only {n_pairs} {tokens} computed in {first.name} and in {second.name}: too few, "
            f"{MIN_PAIRS} are needed."
        )
    worst = max(means, key=lambda one: one.value)
    floor = "no floor is known" if worst.floor is None else f"the floor is {worst.floor:.2g}"
    what = "are equal" if worst.value == 0 else f"differ by {worst.value:.2g} of their norm"
    return (
        f"{n_pairs:,} tokens with the same prefix were computed in "
        f"{first.name} and in {second.name}: their rows {what} ({worst.hook}; {floor})"
        f"{_shifted(hooks, measures)}. {share:.0%} of the rows have such a pair."
    )


def population_sentence(
    first: Selection, second: Selection, measures: list[DriftMeasure], limits: Limits
) -> str:
    """Return the sentence of a population shift, by the hook that a classifier separates best."""
    areas = [one for one in measures if one.name == "classifier AUC"]
    if not areas:
        return (
            f"The rows of {first.name} and {second.name} could not be compared: too few are finite."
        )
    one = max(areas, key=lambda area: area.value)
    p = one.adjusted_p
    floor = "" if one.floor is None else f", floor {one.floor:.2f}"
    rows = f"the rows of {first.name} and of {second.name}"
    if p is None:
        said = f"Too few requests to test {rows} ({one.hook}; AUC {one.value:.2f}{floor})"
    else:
        can = "A classifier separates" if p <= limits.fdr else "No classifier separates"
        said = f"{can} {rows} ({one.hook}; AUC {one.value:.2f}{floor}, p {p:.2g})"
    why = _WHY.get(first.column or "", "The tokens are not the same")
    return f"{said}. {why}: this compares populations and does not show a numerical difference."


def _shifted(hooks: list[PairedHook], measures: list[DriftMeasure]) -> str:
    shares = {one.hook: one.value for one in measures if one.name == "channels shifted"}
    if not shares:
        return ""
    counts = {
        hook.hook: round(shares[hook.hook] * hook.means.shape[1])
        for hook in hooks
        if hook.hook in shares
    }
    named = [f"{n} channel{'s' if n > 1 else ''} of {name}" for name, n in counts.items() if n]
    return (
        f"; shifted on average: {', '.join(named)}" if named else "; no channel shifts on average"
    )


Rows = npt.NDArray[np.float32]

N_ROWS = 20_000
_MAX_VALUES = 1 << 24  # of a side and hook: 64 MiB of float32
_MAX_GROUPS = 8
_ALL = 0.95  # share of rows with a partner above which the two sides are the same tokens
_MIN_REPEATS = 20
_WORDS = {"phase": "phase", "kernel_mode": "kernel mode", "run": "run", "source": "source"}


@dataclass(frozen=True)
class _Sides:
    """Two selections with what a group of hooks shares: shards, requests and their match."""

    selections: tuple[Selection, Selection]
    shards: tuple[list[Shard], list[Shard]]
    requests: tuple[Requests, Requests]
    hooks: list[str]
    counts: Ints
    match: Ints
    rows: int
    limits: Limits

    def cluster(self, side: int, request: Ints) -> Ints:
        """Return the cluster of requests of a side: matched ones share theirs."""
        if side == 0:
            return request
        matched = self.match[request]
        return np.where(matched >= 0, matched, len(self.requests[0]) + request)

    def find(self, side: int, quota: Ints) -> Found:
        """Return the rows of the drawn requests of a side."""
        n = len(self.requests[side])
        drawn = quota[side] > 0
        return select.find_rows(
            self.selections[side],
            self.shards[side],
            self.requests[side],
            drawn[self.cluster(side, np.arange(n))],
        )

    def prefixes(self, side: int, found: Found) -> Prefixes:
        """Return the token ids of the requests that rows of a side belong to."""
        requests = self.requests[side]
        wanted = np.zeros(len(requests), np.bool_)
        wanted[found.request] = True
        return Prefixes(self.selections[side].dataset, self.shards[side], requests, wanted)

    def read(self, side: int, hook: str, row: Ints) -> Rows:
        """Return rows of a hook as float32 ``(n, d_model)``."""
        dataset = self.selections[side].dataset
        bits = dataset.array(hook).gather(row)
        return arrays.as_ml_dtypes(bits, dataset.hooks[hook].dtype).astype(np.float32)


def drift_against(
    dataset: Dataset, other: Dataset, limits: Limits, *, rows: int = N_ROWS
) -> list[Drift]:
    """Compare two datasets: numeric drift where they hold the same tokens, else their populations.

    Args:
        dataset: the one audited; it stands first.
        other: what it is compared with.
        limits: seed and false discovery rate.
        rows: rows of each that are read at most.

    Raises:
        ActdsError: E014 the two have no hook in common; what reading raises.
    """
    return drift(Selection(dataset, dataset.path), Selection(other, other.path), limits, rows=rows)


def drift_by(
    dataset: Dataset, column: Column, limits: Limits, *, rows: int = N_ROWS
) -> list[Drift]:
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
    values = values_to_compare(dataset, column)
    first, *others = (
        Selection(dataset, f"{_WORDS[column]} {value}", column, value)
        for value in values[:_MAX_GROUPS]
    )
    return [one for other in others for one in drift(first, other, limits, rows=rows)]


def values_to_compare(dataset: Dataset, column: str) -> list[str]:
    """Return the values of a column, those of most steps or requests first; no row is read.

    Raises:
        ActdsError: E014 no such column, or it has fewer than two values.
    """
    if column not in COLUMNS:
        raise ActdsError(
            "E014", dataset.path, got=f"column {column!r}", expected=f"one of {', '.join(COLUMNS)}"
        )
    values = select.values_of(dataset, column)
    if len(values) < 2:
        only = f"only {values[0]}" if values else "none"
        raise ActdsError(
            "E014", dataset.path, got=f"{_WORDS[column]}: {only}", expected="two values to compare"
        )
    return values


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


def drift(
    first: Selection, second: Selection, limits: Limits, *, rows: int = N_ROWS
) -> list[Drift]:
    """Compare two selections, paired where both hold the same tokens, unpaired otherwise.

    Numeric drift is told where any token stands on both sides with the same prefix; population
    shift unless 95 % of the rows of either side have such a partner. Non-finite rows are counted
    and left out. At most ``rows`` rows a side are in memory, fewer where rows are very wide.

    Args:
        first: rows that the others are compared with.
        second: the others.
        limits: seed and false discovery rate.
        rows: rows of each side that are read at most, whole requests where they fit.

    Raises:
        ActdsError: E014 no common hook, or no rows on a side; what reading raises.
    """
    found: list[Drift] = []
    for sides in _sides(first, second, limits, rows):
        numeric, share = _numeric(sides)
        found += numeric
        if share < _ALL:
            found += _population(sides)
    return found


def _sides(first: Selection, second: Selection, limits: Limits, rows: int) -> list[_Sides]:
    """Return the two sides for each group of hooks that share their shards."""
    one, other = first.dataset, second.dataset
    groups: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for hook in common_hooks(one, other):
        key = tuple(tuple(s.name for s in d.shards_of(hook)) for d in (one, other))
        groups.setdefault(key, []).append(hook)
    requests = (Requests(one), Requests(other))
    sides = []
    for hooks in groups.values():
        shards = (one.shards_of(hooks[0]), other.shards_of(hooks[0]))
        counts = [
            select.count_rows(selection, *told)
            for selection, told in zip(
                (first, second), zip(shards, requests, strict=True), strict=True
            )
        ]
        for selection, count in zip((first, second), counts, strict=True):
            if not count.any():
                raise ActdsError(
                    "E014",
                    selection.dataset.path,
                    got=f"no rows: {selection.name}",
                    expected="rows",
                )
        if one is other and first.column != "run":
            matched = np.arange(len(requests[0]))
        else:
            matched = match(*requests, (counts[0] > 0, counts[1] > 0))
        told = _Sides(
            (first, second),
            shards,
            requests,
            hooks,
            np.zeros((2, len(requests[0]) + len(requests[1])), np.int64),
            matched,
            min(rows, max(1, _MAX_VALUES // max(one.hooks[hook].d_model for hook in hooks))),
            limits,
        )
        for side, count in enumerate(counts):
            told.counts[side, told.cluster(side, np.arange(len(count)))] = count
        sides.append(told)
    return sides


def _numeric(sides: _Sides) -> tuple[list[Drift], float]:
    """Return the numeric drift, if any token stands on both sides, and the share that does."""
    first, second = sides.selections
    if first.dataset is second.dataset and first.column not in (None, "run"):
        return [], 0.0  # a position has one row, and it is on one side
    both = (sides.counts > 0).all(axis=0)
    if not both.any():
        return [], 0.0
    drawn = select.draw(sides.counts * both, sides.rows, sides.limits.seed)
    found = [sides.find(side, drawn) for side in (0, 1)]
    prefixes = [sides.prefixes(side, found[side]) for side in (0, 1)]
    pairs = pair((found[0], prefixes[0]), (found[1], prefixes[1]), sides.match)
    if not len(pairs[0]):
        return [], 0.0
    share = min(
        len(pairs[0]) / len(rows) * float(counts[both].sum() / counts.sum())
        for rows, counts in zip(found, sides.counts, strict=True)
    )
    once = distinct(found[0].take(pairs[0]), prefixes[0])
    request = found[0].request[pairs[0][once]]
    kept = select.thinned(request, drawn[0], sides.limits.seed)
    chosen = [rows.take(which[once][kept]) for rows, which in zip(found, pairs, strict=True)]
    repeated = [
        tuple(which[: sides.rows] for which in repeats(rows, prefix))
        for rows, prefix in zip(found, prefixes, strict=True)
    ]
    hooks = [
        measure_pairs(
            hook,
            _coarser(sides, hook),
            (sides.read(0, hook, chosen[0].row), sides.read(1, hook, chosen[1].row)),
            chosen[0].request,
            _row_floor(sides, hook, found, repeated),
            repeats_words(int((~once).sum())),
        )
        for hook in sides.hooks
    ]
    measures = numeric_measures(hooks, sides.limits)
    n = len(kept)
    told = Drift(
        kind="numeric drift",
        first=first.name,
        second=second.name,
        paired=True,
        n_first=n,
        n_second=n,
        measures=measures,
        sentence=numeric_sentence(first, second, hooks, measures, share),
    )
    return [told], share


def _row_floor(
    sides: _Sides, hook: str, found: list[Found], repeated: list[tuple[Ints, ...]]
) -> RowFloor | None:
    """Return the distances of tokens that one side computed twice, else those of its canaries."""
    relative, cosine = [np.empty(0)], [np.empty(0)]
    for side, (one, other) in enumerate(repeated):
        first, second = (sides.read(side, hook, found[side].row[which]) for which in (one, other))
        fine = usable(first) & usable(second)
        relative.append(relative_l2(first[fine], second[fine]))
        cosine.append(cosine_distance(first[fine], second[fine]))
    n = sum(map(len, relative))
    if n >= _MIN_REPEATS:
        words = f"{n} tokens that one side computed twice, in two requests"
        return RowFloor(np.concatenate(relative), np.concatenate(cosine), words)
    relative, cosine = [np.empty(0)], [np.empty(0)]
    for dataset in {id(one.dataset): one.dataset for one in sides.selections}.values():
        canary = dataset.canary(run=False)
        is_same = pc.and_(pc.equal(canary["hook"], hook), pc.equal(canary["verdict"], "same"))
        same = canary.filter(is_same)
        relative.append(same["relative_l2"].to_numpy())
        cosine.append(1 - same["cosine"].to_numpy())
    n = sum(map(len, relative))
    if n < _MIN_REPEATS:
        return None
    words = f"{n} canaries, tokens computed again in requests replayed alone"
    return RowFloor(np.concatenate(relative), np.concatenate(cosine), words)


def _population(sides: _Sides) -> list[Drift]:
    """Return the comparison of the two sides as populations."""
    seed = sides.limits.seed
    drawn = select.draw(sides.counts, sides.rows, seed)
    found, clusters, n_repeated = [], [], 0
    for side in (0, 1):
        rows = sides.find(side, drawn)
        once = distinct(rows, sides.prefixes(side, rows))
        n_repeated += int((~once).sum())
        found.append(rows.take(once))
        clusters.append(sides.cluster(side, found[side].request))
    counts = np.stack([np.bincount(own, minlength=sides.counts.shape[1]) for own in clusters])
    quota = select.balanced(np.minimum(counts, drawn))
    for side in (0, 1):
        kept = select.thinned(clusters[side], quota[side], seed + side)
        found[side], clusters[side] = found[side].take(kept), clusters[side][kept]
    hooks = [
        measure_populations(
            hook,
            (sides.read(0, hook, found[0].row), sides.read(1, hook, found[1].row)),
            (clusters[0], clusters[1]),
            sides.limits,
            repeats_words(n_repeated),
        )
        for hook in sides.hooks
    ]
    measures = population_measures(hooks)
    first, second = sides.selections
    return [
        Drift(
            kind="population shift",
            first=first.name,
            second=second.name,
            paired=False,
            n_first=len(found[0]),
            n_second=len(found[1]),
            measures=measures,
            sentence=population_sentence(first, second, measures, sides.limits),
        )
    ]


def _coarser(sides: _Sides, hook: str) -> str:
    """Return the coarser of the types that the two sides store."""
    types = {selection.dataset.hooks[hook].dtype for selection in sides.selections}
    return next(name for name in ("bfloat16", "float16", "float32") if name in types)


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
        sections: list[Drift] = []
        failed: list[Exception] = []
        for compare in self._parts(result.limits):
            try:
                sections += compare()
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
        told = result.model_copy(update={"drift": sections, "options": options})
        return told, failed[0] if failed else None

    def _parts(self, limits: Limits) -> list[Callable[[], list[Drift]]]:
        dataset, other = self.dataset, self.other
        parts: list[Callable[[], list[Drift]]] = []
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
