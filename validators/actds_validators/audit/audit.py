"""The audit of one dataset: every section in order, and the verdict at the end.

Runs the stages: sources, series, tokens, then the sections. Imports them all, and the format room.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

import actds
from actds.errors import ActdsError
from actds.reading import Catalog
from actds.seal import check_provenance
from actds.store import open_store
from actds_validators.audit.accounting import account_run, accounting
from actds_validators.audit.bands import bands_of
from actds_validators.audit.blind_spots import blind_spots
from actds_validators.audit.coverage import coverage
from actds_validators.audit.dominance import dominant_cell
from actds_validators.audit.executor import N_THREADS, Engine, EngineName, Threads, open_engine
from actds_validators.audit.labels import match_labels, read_labels
from actds_validators.audit.lookup import Lookup
from actds_validators.audit.mechanism import family, load_trends, mechanism
from actds_validators.audit.missingness import (
    block_totals,
    differences,
    missingness,
    system_sums,
)
from actds_validators.audit.passes import Passed, knows_ids, pass_over, row_strata
from actds_validators.audit.queues import QueueCounts, queues, read_queues
from actds_validators.audit.result import (
    Accounting,
    Audit,
    ClassesFile,
    Covariate,
    Coverage,
    Difference,
    Limits,
    Mechanism,
    Missingness,
    Options,
    Queues,
    Weighting,
)
from actds_validators.audit.scale import MAX_PROBES, Widths
from actds_validators.audit.series import Series, make_series, read_steps
from actds_validators.audit.sources import RunSource, catalog_source
from actds_validators.audit.strata import worst_strata
from actds_validators.audit.sums import CovariateSums, content_sums, value_sums
from actds_validators.audit.verdict import Evidence, judge
from actds_validators.audit.weights import (
    Cells,
    after_weighting,
    cell_edges,
    counted_cells,
    stored_cells,
    weigh,
    weighting,
)
from actds_validators.audit.weights_file import write_weights
from actds_validators.statistics.association import Within
from actds_validators.statistics.association import within_cells as within_test
from actds_validators.statistics.intervals import jackknife_many, smd_of_stored

__all__ = ["Audited", "Sections", "audit", "audit_sources"]

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Sections:
    """What the audit of some runs found, without the dataset's name.

    Args:
        evidence: for the verdict; with the accounting, always there.
        coverage: ``None`` when nothing is stored.
        queues: ``None`` without a step.
        missingness: ``None`` when nothing was dropped, as what follows.
        mechanism: what the losses go with.
        weighting: what the weights are.
        cells: of the weights.
        lookups: of each run, by name: what the weights file is made with.
    """

    evidence: Evidence
    coverage: Coverage | None = None
    queues: Queues | None = None
    missingness: Missingness | None = None
    mechanism: Mechanism | None = None
    weighting: Weighting | None = None
    cells: Cells | None = None
    lookups: dict[str, Lookup] = field(default_factory=dict)

    @property
    def accounting(self) -> Accounting:
        """Return what became of every position."""
        return self.evidence.accounting


@dataclass(frozen=True)
class Audited:
    """The result, and what the weights file is made of.

    Args:
        result: the audit.
        cells: load and complexity cells with their weights; ``None`` when nothing was dropped.
    """

    result: Audit
    cells: Cells | None


def audit(
    path: str | Path,
    limits: Limits | None = None,
    progress: Progress = lambda what: None,
    weights: Path | None = None,
    classes: Path | None = None,
    engine: EngineName = "threads",
) -> Audited:
    """Audit a dataset: what was captured against what existed.

    Args:
        path: the dataset.
        limits: settings; those of the spec by default.
        progress: told what is being done.
        weights: where to write the weights of the stored rows, if anywhere; not written when
            something does not add up.
        classes: Parquet file of token classes by request and positions, as `labels.read_labels`.
        engine: ``threads`` of this process, or ``ray``: the same numbers from either.

    Raises:
        ActdsError: E009 classes that cannot be used; E011 no Ray; E306 not sealed; E401, E403
            without provenance; E202 a file that changed; what ``Catalog.read`` raises.

    Spec: 0.1 section 14.
    """
    began = time.monotonic()
    chosen = limits or Limits()
    labels = None if classes is None else read_labels(classes)
    catalog = Catalog.read(open_store(path))
    if not catalog.is_sealed:
        raise ActdsError("E306", str(path), got="no seal of the present ledger", expected="a seal")
    check_provenance(catalog)
    with ExitStack() as stack:
        runner = stack.enter_context(open_engine(engine))
        progress("hashing and opening tables")
        sources = [stack.enter_context(catalog_source(catalog, run)) for run in catalog.run_ids]
        named = None if labels is None else match_labels(labels, sources)
        unseen = _unseen(sources)
        table = None if labels is None else labels.table
        found = audit_sources(sources, chosen, progress, table, runner, named)
        if weights is not None and found.accounting.is_sound:
            progress("writing weights")
            claim = found.weighting.claim if found.weighting else "nothing was lost"
            write_weights(weights, catalog, found.lookups, found.cells, claim)
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
        options=Options(engine=engine, classes=named),
        limits=chosen,
        verdict=judge(found.evidence, chosen),
        accounting=found.accounting,
        coverage=found.coverage,
        missingness=found.missingness,
        mechanism=found.mechanism,
        queues=found.queues,
        weighting=found.weighting,
        would_not_notice=unseen,
        duration_s=time.monotonic() - began,
        peak_nbytes=_peak_nbytes(),
    )
    return Audited(result, found.cells)


def audit_sources(
    sources: list[RunSource],
    limits: Limits,
    progress: Progress = lambda what: None,
    labels: pa.Table | None = None,
    engine: Engine | None = None,
    named: ClassesFile | None = None,
) -> Sections:
    """Return the sections of some runs.

    Args:
        sources: the runs, in order.
        limits: settings.
        progress: told what is being done.
        labels: table of `labels.read_labels`, if somebody gave token classes.
        engine: where the rows are read; threads by default.
        named: of `labels.match_labels`, with labels.
    """
    progress("accounting")
    spans: Counter[tuple[str, str | None]] = Counter()
    counts: Counter[str] = Counter()
    findings = []
    with ThreadPoolExecutor(N_THREADS) as pool:
        for dispositions, others, wrong in pool.map(account_run, sources):
            spans += dispositions
            counts += others
            findings += wrong
    account = accounting(spans, counts, findings)
    if not account.is_sound:
        # Nothing that is estimated from tables that disagree means anything.
        return Sections(Evidence(account, None, None))
    steps = [read_steps(source) for source in sources]
    series = make_series(steps, limits.n_blocks)
    if series is None:
        return Sections(Evidence(account, None, None))
    has_ids = knows_ids(sources)
    edges = cell_edges(series, has_ids=has_ids) if series.lost.any() else None
    passed = pass_over(
        sources, steps, series, edges, engine or Threads(), labels, progress, limits,
        has_ids=has_ids,
    )  # fmt: skip
    queue_counts = QueueCounts()
    for source in sources:
        if source.run in series.runs:
            read_queues(source, series, queue_counts)
    seen = coverage(passed.covered, named)
    if seen is not None:
        progress("rows that were served often")
        by_run = [(s, passed.lookups[s.run]) for s in sources if s.run in passed.lookups]
        cell = dominant_cell(by_run, passed.hooks, engine or Threads())
        seen = seen.model_copy(update={"dominant": cell})
    trends = load_trends(series, limits) if edges else {}
    waits = queues(series, queue_counts, trends, limits.seed)
    if edges is None or passed.tokens is None:
        nothing = Evidence(account, None, None, coverage=seen)
        return Sections(nothing, coverage=seen, queues=waits, lookups=passed.lookups)
    progress("differences")
    content = content_sums(passed.tokens, passed.covariates)
    values = []
    if passed.values is not None and passed.scale is not None:
        values = value_sums(
            passed.values, passed.value_covariates, passed.scale.middle, series.blocks
        )
    everything = [*system_sums(series), *content, *values]
    found = differences(everything, series.blocks, bands_of(passed.tokens), series.effective_events)
    progress("weights")
    cells = weigh(counted_cells(edges, series, passed.tokens))
    found = _after_weighting(found, everything, passed, cells, series)
    weighed = weighting(cells, found, limits.negligible_bias)
    progress("tests")
    tests = family(everything, series, _within(passed, series), trends, limits)
    missing = missingness(found, account.loss_share, has_values=bool(values), has_ids=has_ids)
    missing = missing.model_copy(update=_strata(passed, limits))
    asked = [one for one in everything if one.covariate.group != "system"]
    intervals = [i for i in jackknife_many(block_totals(series.blocks, asked), smd_of_stored) if i]
    mech = mechanism(series, tests, intervals)
    evidence = Evidence(account, missing, mech, series.blocks.long_enough, weighed, seen)
    return Sections(
        evidence,
        coverage=seen,
        queues=waits,
        missingness=missing,
        mechanism=mech,
        weighting=weighed,
        cells=cells,
        lookups=passed.lookups,
    )


def _after_weighting(
    found: list[Difference],
    everything: list[CovariateSums],
    passed: Passed,
    cells: Cells,
    series: Series,
) -> list[Difference]:
    """Return the differences with those of the weighted rows beside them."""
    if cells.weights is None or passed.tokens is None:
        return found
    middle = passed.scale.middle if passed.scale else None
    held = stored_cells(passed.tokens, passed.values, passed.value_covariates, middle)
    names = [one.covariate.name for one in everything]
    estimates = after_weighting(
        cells,
        passed.tokens,
        [held[name] for name in names],
        block_totals(series.blocks, everything),
    )
    after = dict(zip(names, estimates, strict=True))
    return [d.model_copy(update={"after_weighting": after.get(d.covariate.name)}) for d in found]


def _unseen(sources: list[RunSource]) -> list[str]:
    """Return what an audit of some runs would not notice."""
    hooks = tuple(sorted({hook for source in sources for hook in source.hooks}))
    n_probes = max((source.n_probes for source in sources), default=0)
    widths = Widths(
        max((source.n_projections for source in sources), default=0), min(MAX_PROBES, n_probes)
    )
    return blind_spots(hooks if knows_ids(sources) else (), widths, n_probes)


def _strata(passed: Passed, limits: Limits) -> dict[str, object]:
    """Return the fields of the missingness on the strata that lost most."""
    assert passed.spans is not None
    every = [*passed.spans.strata(limits), *row_strata(passed)]
    return {
        "worst_strata": worst_strata(every, passed.spans.rate, limits),
        "n_strata": sum(one.n_tested for one in every),
        "whole_requests": passed.spans.whole[0],
    }


def _within(passed: Passed, series: Series) -> Iterable[tuple[Covariate, Within]]:
    """Yield the test of selection within steps of every covariate that has one."""
    if series.n_partial_steps < 2:
        return
    for covariate, of_runs, k in passed.within:
        parts = [part.columns(k) for part in of_runs]
        for number, part in enumerate(parts):
            for key in ("step", "request"):  # runs count from 0 each
                part[key] = part[key] + (number << 40)
        joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        test = within_test(**joined)
        if test is not None:
            yield covariate, test


def _peak_nbytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
