"""The audit of one dataset: every section in order, and the verdict at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

import actds
from actds.dataset.catalog import Catalog
from actds.dataset.reading import read_catalog
from actds.dataset.sources import read_records
from actds.executor import Executor, Threads, open_executor
from actds.publish.sealing import check_provenance
from actds.store import open_store
from actds_validators.arrays import Floats, Ints
from actds_validators.audit import data as tables
from actds_validators.audit import mechanism, missingness
from actds_validators.audit.census import accounting, source_account
from actds_validators.audit.covariates import (
    MAX_PROBES,
    RunSteps,
    Series,
    Widths,
    content,
    defined,
    make_series,
    read_steps,
)
from actds_validators.audit.coverage import CoverageCounts, coverage, dominant_cell, read_spans
from actds_validators.audit.lookup import (
    MAX_SOURCES,
    TAIL,
    CellEdges,
    Lookup,
    Shared,
    Vocabulary,
    knows_entropy,
    knows_ids,
    make_lookup,
    prompt_sources,
    read_rows,
    read_vocabulary,
    scale_of,
    thinning,
)
from actds_validators.audit.passes import (
    CovariateSums,
    ExecutorName,
    Measured,
    PartialRows,
    RowPass,
    Sums,
)
from actds_validators.audit.place import Answer, Place, PlaceName, SourceAccount
from actds_validators.audit.places import Audited, conclude, places, unaccounted
from actds_validators.audit.result import (
    Audit,
    ClassesFile,
    Difference,
    Limits,
    Options,
    Queues,
    Verdict,
)
from actds_validators.audit.verdict import Evidence, judge
from actds_validators.audit.weights import (
    Cells,
    after_weighting,
    cell_edges,
    counted_cells,
    stored_cells,
    weigh,
    weighting,
    write_weights,
)
from actds_validators.audit.wording import blind_spots
from actds_validators.statistics.association import draws_for
from actds_validators.statistics.intervals import Interval, jackknife_many, smd_of_stored

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Sections(Evidence):
    """What the audit of some runs found: the evidence, and what no verdict rests on.

    Args:
        lookups: of each run, by name: what the weights file is made with.
    """

    queues: Queues | None = None
    cells: Cells | None = None
    lookups: dict[str, Lookup] = field(default_factory=dict)


@dataclass(frozen=True)
class AuditResult:
    """What an audit found.

    Args:
        result: every section, as ``--json`` writes it; ``result.verdict`` is the conclusion.
        cells: load and complexity cells with their weights; ``None`` when nothing was dropped.
        catalog: everything that the ledger of the dataset reached.
    """

    result: Audit
    cells: Cells | None
    catalog: Catalog


def audit_dataset(
    path: str | Path,
    limits: Limits,
    progress: Progress = lambda what: None,
    weights: Path | None = None,
    classes: Path | None = None,
    executor: ExecutorName = "threads",
    accept: Sequence[PlaceName] = (),
    follow_up: str | None = None,
    sae: Sequence[str | os.PathLike[str]] = (),
    model: str | None = None,
) -> AuditResult:
    """Audit a dataset: what was captured against what existed.

    Args:
        follow_up: a replay of a random part of its requests, if any.
        sae: dictionaries whose features are counted, each ``[HOOK=]PATH``.
        model: what they call the model of the rows.
        weights: where to write the weights of the stored rows, if anywhere; not written when
            something does not add up.

    Spec: 0.1 section 14.
    """
    began = time.monotonic()
    labels = None if classes is None else tables.read_labels(classes)
    catalog = read_catalog(open_store(path), apart=True)
    if not catalog.is_sealed:
        raise catalog.not_sealed(str(path))
    check_provenance(catalog)
    dictionaries = None
    if sae:
        from actds_validators.audit.features import dictionaries_of

        dictionaries = dictionaries_of(catalog, sae, model)
    with open_executor(executor, tables.N_THREADS) as runner:
        progress("hashing and opening tables")
        sources = [tables.catalog_source(catalog, run) for run in catalog.run_ids]
        named = None if labels is None else tables.match_labels(labels, sources)
        unseen = _unseen(sources)
        table = tables.role_labels(sources) if labels is None else labels.table
        sections = audit_sources(sources, limits, progress, table, runner, named)
        if weights is not None and sections.accounting.is_sound:
            progress("writing weights")
            claim = sections.weighting.claim if sections.weighting else "nothing was lost"
            write_weights(weights, catalog, sections.lookups, sections.cells, claim)
    if follow_up is not None and sections.accounting.is_sound and sections.accounting.loss_share:
        from actds_validators.audit import follow_up as following

        progress("the rows of the follow-up")
        sections = replace(sections, follow_up=following.follow_up(catalog, follow_up))
        unseen = _unseen(sources, followed_up=True)
    if sections.accounting.is_sound:
        from actds_validators.audit import sample as sampling

        progress("the rows that were drawn")
        sections = replace(sections, sample=sampling.sample(catalog, sources, dictionaries))
        if sections.sample is not None and not sections.lost_otherwise:
            unseen = _unseen(sources, drawn=True)
    verdict = judge(sections, limits)
    source, judged, answered = None, list[Place](), unaccounted(verdict)
    if sections.accounting.is_sound:
        progress("the source, and every place behind it")
        source, judged, answered = _answered(catalog, str(path), sections, verdict, limits, accept)
    policies = {
        str(record.fields["capture.overflow_policy"].value) for record in catalog.runs.values()
    }
    result = Audit(
        actds=actds.__version__,
        path=str(path),
        dataset=catalog.genesis.dataset,
        digest=catalog.digest,
        seal=catalog.seal.n if catalog.seal else None,
        runs=catalog.run_ids,
        policies=sorted(policies),
        options=Options(engine=executor, classes=named, accepted=list(accept)),
        limits=limits,
        answer=answered,
        places=judged,
        source=source,
        verdict=verdict,
        accounting=sections.accounting,
        coverage=sections.coverage,
        missingness=sections.missingness,
        mechanism=sections.mechanism,
        queues=sections.queues,
        follow_up=sections.follow_up,
        sample=sections.sample,
        weighting=sections.weighting,
        would_not_notice=unseen,
        duration_s=time.monotonic() - began,
        peak_nbytes=_peak_nbytes(),
    )
    return AuditResult(result, sections.cells, catalog)


def _answered(
    catalog: Catalog,
    path: str,
    sections: Sections,
    verdict: Verdict,
    limits: Limits,
    accept: Sequence[PlaceName],
) -> tuple[SourceAccount, list[Place], Answer]:
    records = read_records(catalog)
    source = source_account(catalog, records)
    audited = Audited(catalog, path, records, source, sections, verdict, limits)
    return source, *conclude(places(audited), accept, path, sections.queues)


def audit_sources(
    sources: list[tables.RunSource],
    limits: Limits,
    progress: Progress = lambda what: None,
    labels: pa.Table | None = None,
    executor: Executor | None = None,
    named: ClassesFile | None = None,
) -> Sections:
    on = executor or Threads(tables.N_THREADS)
    progress("accounting")
    account = accounting(sources, on.map)
    if not account.is_sound:
        # Nothing that is estimated from tables that disagree means anything.
        return Sections(account)
    steps = [read_steps(source) for source in sources]
    series = make_series(steps, limits.n_blocks)
    if series is None:
        return Sections(account)
    has_ids, has_entropy = knows_ids(sources), knows_entropy(sources)
    edges = (
        cell_edges(series, has_ids=has_ids, has_entropy=has_entropy) if series.lost.any() else None
    )
    passed = pass_over(sources, steps, series, edges, on, labels, progress, limits)
    used = [source for source in sources if source.run in series.runs]
    seen = coverage(passed.covered, named)
    if seen is not None:
        progress("rows that were served often")
        cell = dominant_cell([(s, passed.lookups[s.run]) for s in used], passed.measured.hooks, on)
        seen = seen.model_copy(update={"dominant": cell})
    waits = mechanism.queues(used, series, limits.seed)
    policies = {source.labels.get("overflow policy") for source in sources} - {None}
    words = tuple(sorted(map(str, policies)))
    sections = Sections(
        account, coverage=seen, queues=waits, lookups=passed.lookups, policies=words
    )
    if edges is None or passed.sums is None:
        return sections
    progress("differences")
    everything = _covariate_sums(passed, passed.sums, series)
    read = 1 - account.unread / max(1, account.dropped)
    totals = missingness.of_all_lost(
        missingness.block_totals(series.blocks, everything), everything, read
    )
    bands = passed.sums.bands_of(passed.measured.definitions)
    differing = missingness.differences(everything, totals, bands, series.effective_events)
    progress("weights")
    cells = weigh(counted_cells(edges, series, passed.sums.cell_n))
    differing = _after_weighting(differing, everything, totals, passed, cells)
    progress("tests")
    of_requests = passed.spans.of_requests if passed.spans else 0.0
    questions = [
        *mechanism.asked_between(everything, series, limits, of_requests),
        *_within(passed, series, limits),
    ]
    missing = missingness.missingness(differing, account, passed.measured)
    return replace(
        sections,
        missingness=missing.model_copy(update=_strata(passed, limits)),
        mechanism=mechanism.mechanism(series, questions, _intervals(everything, totals), limits),
        blocks_long_enough=series.blocks.long_enough,
        weighting=weighting(cells, differing, limits.negligible_bias),
        cells=cells,
    )


def _covariate_sums(passed: Passed, sums: Sums, series: Series) -> list[CovariateSums]:
    every = missingness.system_sums(series)
    for group, covariates in passed.measured.covariates.items():
        middle = passed.measured.middles[group]
        every += sums.moments[group].covariate_sums(covariates, middle, series.blocks)
    return every


def _intervals(everything: list[CovariateSums], totals: Floats) -> list[Interval]:
    is_tested = np.array([summed.covariate.group != "system" for summed in everything])
    return [i for i in jackknife_many(totals[:, is_tested], smd_of_stored) if i]


@dataclass
class Passed:
    """What the rows of all runs add up to.

    Args:
        slots: token ids that were counted block by block, and how many there were to choose from.
        within: of each group of covariates, the rows of each run in steps that lost a part.
        means: of each hook, how far the means lie from where its rows were taken.
    """

    lookups: dict[str, Lookup]
    covered: CoverageCounts
    measured: Measured
    sums: Sums | None = None
    spans: missingness.SpanStrata | None = None
    slots: tuple[Ints, int] = field(default_factory=lambda: (np.zeros(0, np.int64), 0))
    within: dict[str, list[PartialRows]] = field(default_factory=dict)
    means: dict[str, Floats] = field(default_factory=dict)


def pass_over(
    sources: list[tables.RunSource],
    steps: list[RunSteps],
    series: Series,
    edges: CellEdges | None,
    executor: Executor,
    labels: pa.Table | None = None,
    progress: Progress = lambda what: None,
    limits: Limits | None = None,
) -> Passed:
    """Read the rows of all runs: the token ids first, for rarity is known when all are counted.

    Args:
        edges: of the weights' cells; ``None`` where nothing was lost: then coverage is all.
    """
    runs = [
        (source, of_run, read_rows(source, of_run))
        for source, of_run in zip(sources, steps, strict=True)
        if of_run.run in series.runs
    ]
    used = [source for source, _, _ in runs]
    has_ids, has_entropy = knows_ids(sources), knows_entropy(sources)
    progress("counting token ids")
    counted = [(source, rows) for source, _, rows in runs]
    vocabulary, lost_ids = read_vocabulary(counted, executor.map, has_ids=has_ids)
    words = prompt_sources(used)[:MAX_SOURCES]
    definitions = content(words, has_ids=has_ids, has_entropy=has_entropy)
    measured = Measured(definitions, edges, _hooks(used), _widths(used))
    if edges is not None and measured.hooks:
        progress("sampling readouts")
        readouts = [part for source in used for part in source.parts["readouts"]]
        scale = scale_of(readouts, measured.hooks, measured.widths, executor)
        measured = replace(measured, scale=scale)
    classes = tables.class_words(labels) if labels is not None else ()
    passed = Passed({}, CoverageCounts(classes), measured)
    if edges is not None:
        passed.spans = missingness.SpanStrata(series.blocks.n_blocks)
        if has_ids:
            passed.slots = _slots(vocabulary, lost_ids, limits or Limits())
    token_slot = np.full(len(vocabulary.counts) + 1, -1, np.int64)
    token_slot[passed.slots[0]] = np.arange(len(passed.slots[0]))
    n_numbers = len(definitions) + len(measured.hooks) * measured.widths.n_values
    every = thinning([of_run for _, of_run, _ in runs], n_numbers)
    shared = Shared(series, vocabulary, definitions, token_slot, has_ids, every)
    total: Sums | None = None
    for (source, of_run, rows), ids in zip(runs, lost_ids, strict=True):
        of_labels = None if labels is None else tables.labels_of(labels, source.run)
        lookup = make_lookup(source, of_run, rows, shared, ids, of_labels)
        passed.lookups[source.run] = lookup
        progress(f"rows of {source.run}")
        read_spans(source, lookup, passed.covered)
        row_pass = RowPass(lookup, measured)
        total = total or row_pass.sums([*measured.covariates])
        for sums in executor.map(row_pass, row_pass.pieces(source.parts)):
            total.add(sums)
        for group, moments in total.moments.items():
            passed.within.setdefault(group, []).append(moments.take_within())
        if passed.spans is not None:
            passed.spans.add(source, lookup)
    if total is not None:
        passed.covered.rows.add(total.classes)
    if edges is not None and total is not None:
        passed.sums = total
        _centre(passed, total, series.blocks.labels)
    return passed


def _centre(passed: Passed, total: Sums, block: Ints) -> None:
    """Put the sums of the readouts about their means, which no pass knew before."""
    measured, scale = passed.measured, passed.measured.scale
    if scale is None:
        return
    shifts = np.stack([total.moments[hook].centre(block) for hook in measured.hooks])
    passed.measured = replace(measured, scale=replace(scale, middle=scale.middle + shifts))
    passed.means = dict(zip(measured.hooks, shifts, strict=True))


def _row_strata(passed: Passed) -> Iterator[missingness.Strata]:
    if passed.sums is None or not passed.lookups:
        return
    lookup = next(iter(passed.lookups.values()))
    classes = passed.covered.rows.words[len(tables.CLASSES) :]
    chosen, n_ids = passed.slots
    stored, lost = passed.sums.strata
    computed = stored + lost
    if lookup.has_ids:
        yield missingness.Strata("special tokens", ["all of them"], computed[:1], lost[:1], 1)
        ids = [str(i) for i in lookup.vocabulary.index.numbers(chosen).tolist()]
        first = 1 + len(classes)
        yield missingness.Strata("token id", ids, computed[first:], lost[first:], n_ids)
    if classes:
        some = slice(1, 1 + len(classes))
        yield missingness.Strata("class", list(classes), computed[some], lost[some], len(classes))
    if passed.measured.scale is not None:
        stored, n_lost = (t.reshape(-1, t.shape[-1]) for t in passed.sums.tails)
        words = [
            f"{side} {TAIL:.0%} of the {word} at {hook}"
            for side in ("lowest", "highest")
            for hook in passed.measured.hooks
            for word in passed.measured.widths.words
        ]
        yield missingness.Strata("tail of a value", words, stored + n_lost, n_lost, len(words))


def _slots(vocabulary: Vocabulary, lost_ids: list[Ints], limits: Limits) -> tuple[Ints, int]:
    lost = np.zeros(len(vocabulary.counts))
    for ids in lost_ids:
        places = vocabulary.index.of(ids[ids >= 0])
        lost += np.bincount(places[places >= 0], minlength=len(vocabulary.counts))
    n = np.maximum(vocabulary.counts, lost)  # of a run without readouts the stored ones
    return missingness.candidates(n, lost, limits), int((n >= missingness.MIN_TOKENS).sum())


def _after_weighting(
    differing: list[Difference],
    everything: list[CovariateSums],
    totals: Floats,
    passed: Passed,
    cells: Cells,
) -> list[Difference]:
    if cells.weights is None or passed.sums is None:
        return differing
    stored = stored_cells(passed.sums, passed.measured.middles)
    estimates = after_weighting(cells, passed.sums.cell_n, stored, totals)
    after = dict(zip((summed.covariate.name for summed in everything), estimates, strict=True))
    return [
        d.model_copy(update={"after_weighting": after.get(d.covariate.name)}) for d in differing
    ]


def _unseen(
    sources: list[tables.RunSource], *, followed_up: bool = False, drawn: bool = False
) -> list[str]:
    n_probes = max((source.n_probes for source in sources), default=0)
    hooks = _hooks(sources) if knows_ids(sources) else ()
    return blind_spots(hooks, _widths(sources), n_probes, followed_up=followed_up, drawn=drawn)


def _hooks(sources: list[tables.RunSource]) -> tuple[str, ...]:
    return tuple(sorted({hook for source in sources for hook in source.hooks}))


def _widths(sources: list[tables.RunSource]) -> Widths:
    return Widths(
        max((source.n_projections for source in sources), default=0),
        min(MAX_PROBES, max((source.n_probes for source in sources), default=0)),
        defined("readout"),
    )


def _strata(passed: Passed, limits: Limits) -> dict[str, object]:
    assert passed.spans is not None
    every = [*passed.spans.strata(limits), *_row_strata(passed)]
    return {
        "worst_strata": missingness.worst_strata(
            every, passed.spans.rate, passed.spans.share, limits
        ),
        "n_strata": sum(strata.n_tested for strata in every),
        "whole_requests": passed.spans.n_whole,
    }


def _within(passed: Passed, series: Series, limits: Limits) -> list[mechanism.Question]:
    if series.n_partial_steps < 2:
        return []
    began = [lookup.request_block for lookup in passed.lookups.values()]
    n_draws = draws_for(mechanism.N_FAMILIES, limits.fdr, mechanism.LEAST_DRAWS)
    covariates = passed.measured.covariates
    return mechanism.asked_within(
        mechanism.selections(passed.within, covariates, passed.means, began, n_draws, limits.seed)
    )


def _peak_nbytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
