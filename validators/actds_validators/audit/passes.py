"""Passes: every row of every run read once or twice, part by part, on an engine.

Third stage of the audit: words first, for a token's rarity is known when all are counted; then the
tokens, then their readouts. Imports the passes, their sums and the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actds_validators.audit.cell_sums import CellSums, RunCells
from actds_validators.audit.class_counts import CLASSES
from actds_validators.audit.coverage import CoverageCounts, read_spans
from actds_validators.audit.executor import Engine
from actds_validators.audit.labels import class_words, labels_of
from actds_validators.audit.lookup import MAX_SOURCES, Lookup, Vocabulary, make_lookup, thinning
from actds_validators.audit.result import Covariate, Limits
from actds_validators.audit.run_rows import RunRows, read_rows
from actds_validators.audit.scale import MAX_PROBES, TAIL, Scale, Widths, scale_of
from actds_validators.audit.series import RunSteps, Series
from actds_validators.audit.sources import Part, RunSource
from actds_validators.audit.strata import MIN_TOKENS, SpanStrata, Strata, candidates
from actds_validators.audit.tokens import (
    CellEdges,
    TokenPass,
    TokenSums,
    content_covariates,
    lost_pieces,
)
from actds_validators.audit.values import ValuePass, ValueSums, value_covariates
from actds_validators.audit.words import WordPass

__all__ = ["Passed", "knows_ids", "pass_over", "row_strata"]

Ints = npt.NDArray[np.int64]
Within = tuple[Covariate, list[RunCells], int]


@dataclass
class Passed:
    """What the rows of all runs add up to.

    Args:
        lookups: of each run, by its name.
        covered: for the coverage map.
        covariates: content covariates by name, in the order of the sums.
        tokens: sums of the content covariates; ``None`` where nothing was lost.
        value_covariates: of each hook.
        values: sums of the readouts; ``None`` where nothing was lost or no run has readouts.
        hooks: hooks with readouts.
        widths: numbers of a readout that were looked at.
        scale: where the readouts lie, with values.
        spans: strata that the spans tell; ``None`` where nothing was lost.
        slots: token ids that were counted block by block, and how many there were to choose from.
        within: each covariate with the sums by step and request of each run, and its place there.
    """

    lookups: dict[str, Lookup]
    covered: CoverageCounts
    covariates: dict[str, Covariate]
    tokens: TokenSums | None = None
    value_covariates: list[list[Covariate]] = field(default_factory=list)
    values: ValueSums | None = None
    hooks: tuple[str, ...] = ()
    widths: Widths = field(default_factory=lambda: Widths(0, 0))
    scale: Scale | None = None
    spans: SpanStrata | None = None
    slots: tuple[Ints, int] = field(default_factory=lambda: (np.zeros(0, np.int64), 0))
    within: list[Within] = field(default_factory=list)


def knows_ids(sources: list[RunSource]) -> bool:
    """Return whether the ids of every computed token are known, those of lost ones as well."""
    return all(s.hooks or not s.one("select count(*) from drops")[0] for s in sources)


def pass_over(
    sources: list[RunSource],
    steps: list[RunSteps],
    series: Series,
    edges: CellEdges | None,
    engine: Engine,
    labels: pa.Table | None = None,
    progress: Callable[[str], None] = lambda what: None,
    limits: Limits | None = None,
    *,
    has_ids: bool,
) -> Passed:
    """Read the rows of all runs.

    Args:
        sources: the runs.
        steps: of each.
        series: of all.
        edges: of the weights' cells; ``None`` where nothing was lost: then coverage is all.
        engine: where the parts are read.
        labels: table of `labels.read_labels`, if somebody gave token classes.
        progress: told what is being done.
        limits: of the strata.
        has_ids: of `knows_ids`.
    """
    runs = [
        (source, own, read_rows(source, own))
        for source, own in zip(sources, steps, strict=True)
        if own.run in series.runs
    ]
    progress("counting token ids")
    counted = [(source, rows) for source, _, rows in runs]
    vocabulary, lost_ids = _words(counted, engine, has_ids=has_ids)
    names = _sources([source for source, _, _ in runs])[:MAX_SOURCES]
    covariates = content_covariates(names, has_ids=has_ids)
    words = class_words(labels) if labels is not None else ()
    found = Passed({}, CoverageCounts(words), covariates)
    hooks = tuple(sorted({hook for source, _, _ in runs for hook in source.hooks}))
    found.hooks = hooks
    found.widths = Widths(
        max((source.n_projections for source, _, _ in runs), default=0),
        min(MAX_PROBES, max((source.n_probes for source, _, _ in runs), default=0)),
    )
    token_slot = np.full(len(vocabulary) + 1, -1, np.int64)
    if edges is not None:
        found.spans = SpanStrata(series.blocks.n_blocks)
        if has_ids:
            found.slots = _slots(vocabulary, lost_ids, limits or Limits())
            token_slot[found.slots[0]] = np.arange(len(found.slots[0]))
        if hooks:
            progress("sampling readouts")
            readouts = [part for source, _, _ in runs for part in source.parts["readouts"]]
            found.scale = scale_of(readouts, hooks, found.widths, engine)
    token_parts: list[RunCells] = []
    value_parts: list[list[RunCells]] = [[] for _ in hooks]
    n_covariates = len(covariates) + 2 * len(hooks) * found.widths.n_values
    every = thinning([own for _, own, _ in runs], n_covariates)
    for (source, own, rows), ids in zip(runs, lost_ids, strict=True):
        lookup = make_lookup(
            source,
            own,
            series,
            rows,
            vocabulary,
            ids,
            names,
            None if labels is None else labels_of(labels, source.run),
            token_slot,
            has_ids=has_ids,
            every=every,
        )
        found.lookups[source.run] = lookup
        progress(f"tokens of {source.run}")
        read_spans(source, lookup, found.covered)
        token_parts.append(RunCells(_add_tokens(found, source, lookup, edges, engine)))
        if found.spans is not None:
            found.spans.add(source, lookup)
        if edges is not None and found.scale is not None:
            progress(f"readouts of {source.run}")
            value_pass = ValuePass(lookup, hooks, found.widths, found.scale, edges)
            for parts, cells in zip(
                value_parts, _add_values(found, source, value_pass, engine), strict=True
            ):
                parts.append(RunCells(cells))
    if found.tokens is not None:
        found.covered.rows.add(found.tokens.classes)
    if edges is None:
        found.tokens = None
        return found
    if found.values is not None and found.scale is not None:
        away = found.values.centred(series.blocks.labels)
        found.scale = replace(found.scale, middle=found.scale.middle + away)
        value_parts = [
            [RunCells(run.parts, d) for run in of_hook]
            for of_hook, d in zip(value_parts, away, strict=True)
        ]
    found.value_covariates = [value_covariates(hook, found.widths) for hook in hooks]
    found.within = [(c, token_parts, k) for k, c in enumerate(covariates.values())]
    for values_of_hook, parts in zip(found.value_covariates, value_parts, strict=True):
        found.within += [(c, parts, k) for k, c in enumerate(values_of_hook)]
    return found


def row_strata(found: Passed) -> Iterator[Strata]:
    """Yield the strata that the rows tell: special tokens, classes, ids, tails of the values."""
    if found.tokens is None or not found.lookups:
        return
    lookup = next(iter(found.lookups.values()))
    classes = found.covered.rows.words[len(CLASSES) :]
    chosen, n_ids = found.slots
    stored, lost = found.tokens.strata
    computed = stored + lost
    if lookup.has_ids:
        yield Strata("special tokens", ["all of them"], computed[:1], lost[:1], 1)
        ids = [str(i) for i in lookup.vocabulary.ids(chosen).tolist()]
        first = 1 + len(classes)
        yield Strata("token id", ids, computed[first:], lost[first:], n_ids)
    if classes:
        some = slice(1, 1 + len(classes))
        yield Strata("class", list(classes), computed[some], lost[some], len(classes))
    if found.values is not None:
        stored, gone = (t.reshape(-1, t.shape[-1]) for t in found.values.tails)
        words = [
            f"{side} {TAIL:.0%} of the {word} at {hook}"
            for side in ("lowest", "highest")
            for hook in found.hooks
            for word in found.widths.words
        ]
        yield Strata("tail of a value", words, stored + gone, gone, len(words))


def _add_tokens(
    found: Passed, source: RunSource, lookup: Lookup, edges: CellEdges | None, engine: Engine
) -> list[CellSums]:
    """Add the tokens of a run, stored and lost, and return their sums by step and request."""
    token_pass = TokenPass(lookup, tuple(found.covariates), edges)
    found.tokens = found.tokens or token_pass.sums()
    pieces: list[Part | range] = [*source.parts["tokens"], *lost_pieces(lookup)]
    for sums in engine.map(token_pass, pieces):
        found.tokens.add(sums)
    return found.tokens.take_within()


def _add_values(
    found: Passed, source: RunSource, value_pass: ValuePass, engine: Engine
) -> list[list[CellSums]]:
    """Add the readouts of a run, and return their sums by step and request, hook by hook."""
    found.values = found.values or value_pass.sums()
    for sums in engine.map(value_pass, source.parts["readouts"]):
        found.values.add(sums)
    return [found.values.take_within(number) for number in range(len(value_pass.hooks))]


def _slots(vocabulary: Vocabulary, lost_ids: list[Ints], limits: Limits) -> tuple[Ints, int]:
    """Return the places of the ids to count block by block, and how many were chosen from."""
    lost = np.zeros(len(vocabulary))
    for ids in lost_ids:
        places = vocabulary.places(ids[ids >= 0])
        lost += np.bincount(places[places >= 0], minlength=len(vocabulary))
    n = np.maximum(vocabulary.counts(), lost)  # of a run without readouts the stored ones
    return candidates(n, lost, limits), int((n >= MIN_TOKENS).sum())


def _words(
    runs: list[tuple[RunSource, RunRows]], engine: Engine, *, has_ids: bool
) -> tuple[Vocabulary, list[Ints]]:
    """Return the vocabulary of all runs, and the ids of each run's lost positions."""
    counts, special = _Counts(), _Counts()
    lost_ids = []
    for source, rows in runs:
        ids = np.full(rows.losses.n_positions if has_ids else 0, -1, np.int64)
        for part in engine.map(WordPass(rows, None), source.parts["tokens"]):
            special.add(part.special, np.ones(len(part.special), np.int64))
            if not source.hooks:
                counts.add(part.ids, part.counts)
        if source.hooks:
            for part in engine.map(WordPass(rows, source.hooks[0]), source.parts["readouts"]):
                counts.add(part.ids, part.counts)
                if has_ids:
                    ids[part.lost] = part.lost_ids
        lost_ids.append(ids)
    known, n = counts.total()
    return Vocabulary(known, n.astype(np.float64), np.isin(known, special.total()[0])), lost_ids


class _Counts:
    """Counts by number, added up a few parts at a time."""

    def __init__(self) -> None:
        self._numbers: list[Ints] = []
        self._counts: list[Ints] = []

    def add(self, numbers: Ints, counts: Ints) -> None:
        self._numbers.append(numbers)
        self._counts.append(counts)
        if len(self._numbers) == 32:
            numbers, counts = self.total()
            self._numbers, self._counts = [numbers], [counts]

    def total(self) -> tuple[Ints, Ints]:
        """Return the numbers, rising, and how often each was counted."""
        if not self._numbers:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        numbers, at = np.unique(np.concatenate(self._numbers), return_inverse=True)
        counts = np.zeros(len(numbers), np.int64)
        np.add.at(counts, at.reshape(-1), np.concatenate(self._counts))
        return numbers, counts


def _sources(sources: list[RunSource]) -> tuple[str, ...]:
    """Return the prompt sources, the most used first; none when there is only one."""
    n: Counter[str] = Counter()
    for source in sources:
        for name, count in source.rows(
            "select source, count(*) from requests where source is not null group by all "
            "order by source"
        ):
            n[name] += int(count)
    return tuple(name for name, _ in n.most_common()) if len(n) > 1 else ()
