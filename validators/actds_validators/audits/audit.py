"""The audit of one dataset: every section in order, and the verdict at the end.

Runs the stages: sources, series, tokens, then the sections. Imports them all, and the format room.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

import actds
from actds.catalog import Catalog
from actds.errors import ActdsError
from actds.seal import check_provenance
from actds.store import open_store
from actds_validators.audits import bands as banding
from actds_validators.audits.accounting import account_run, accounting
from actds_validators.audits.coverage import CoverageCounts, coverage, read_coverage
from actds_validators.audits.labels import labels_of, read_labels
from actds_validators.audits.mechanism import family, load_trends, mechanism
from actds_validators.audits.missingness import (
    block_totals,
    differences,
    estimate,
    missingness,
    system_sums,
)
from actds_validators.audits.queues import QueueCounts, queues, read_queues
from actds_validators.audits.result import (
    Accounting,
    Audit,
    Covariate,
    Coverage,
    Difference,
    Limits,
    Mechanism,
    Missingness,
    Queues,
    Weighting,
)
from actds_validators.audits.series import Series, make_series, read_steps, register
from actds_validators.audits.sources import RunSource, catalog_source
from actds_validators.audits.tokens import (
    CovariateSums,
    Tokens,
    open_lines,
    prepare,
    token_sums,
    value_sums,
    values_of,
    within_cells,
)
from actds_validators.audits.verdict import Evidence, judge
from actds_validators.audits.weights import (
    Cells,
    cell_expression,
    empty_cells,
    fill_cells,
    weigh,
    weighted_totals,
    weighting,
)
from actds_validators.audits.weights_file import write_weights
from actds_validators.statistics.jackknife import jackknife_many, smd
from actds_validators.statistics.runs import Floats
from actds_validators.statistics.within import Within
from actds_validators.statistics.within import within_cells as within_test

__all__ = ["Audited", "Sections", "audit", "audit_sources"]

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Sections:
    """What the audit of some runs found, without the dataset's name.

    Args:
        accounting: always there.
        missingness: ``None`` when nothing was dropped.
        mechanism: ``None`` when nothing was dropped.
        queues: ``None`` without a step.
        weighting: ``None`` when nothing was dropped.
        evidence: for the verdict.
        cells: of the weights.
    """

    accounting: Accounting
    coverage: Coverage | None
    missingness: Missingness | None
    mechanism: Mechanism | None
    queues: Queues | None
    weighting: Weighting | None
    evidence: Evidence
    cells: Cells | None


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
) -> Audited:
    """Audit a dataset: what was captured against what existed.

    Args:
        path: the dataset.
        limits: settings; those of the spec by default.
        progress: told what is being done.
        weights: where to write the weights of the stored rows, if anywhere.
        classes: Parquet file of token classes by request and positions, as `labels.read_labels`.

    Raises:
        ActdsError: E306 not sealed; E401, E403 without provenance; E202 a file that changed; what
            ``Catalog.read`` raises.

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
        progress("hashing and opening tables")
        sources = [stack.enter_context(catalog_source(catalog, run)) for run in catalog.run_ids]
        found = audit_sources(sources, chosen, progress, labels)
        if weights is not None:
            progress("writing weights")
            claim = found.weighting.claim if found.weighting else "nothing was lost"
            write_weights(weights, catalog, sources, found.cells, claim)
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
        limits=chosen,
        verdict=judge(found.evidence, chosen),
        accounting=found.accounting,
        coverage=found.coverage,
        missingness=found.missingness,
        mechanism=found.mechanism,
        queues=found.queues,
        weighting=found.weighting,
        duration_s=time.monotonic() - began,
        peak_nbytes=_peak_nbytes(),
    )
    return Audited(result, found.cells)


def audit_sources(
    sources: list[RunSource],
    limits: Limits,
    progress: Progress = lambda what: None,
    labels: pa.Table | None = None,
) -> Sections:
    """Return the sections of some runs.

    Args:
        sources: the runs, in order.
        limits: settings.
        progress: told what is being done.
        labels: of `labels.read_labels`, if somebody gave token classes.
    """
    progress("accounting")
    spans: Counter[tuple[str, str | None]] = Counter()
    counts: Counter[str] = Counter()
    findings = []
    for source in sources:
        dispositions, others, wrong = account_run(source)
        spans += dispositions
        counts += others
        findings += wrong
    account = accounting(spans, counts, findings)
    if any(finding.severity == "error" for finding in findings):
        # Nothing that is estimated from tables that disagree means anything.
        return _nothing_but(account)
    steps = [read_steps(source) for source in sources]
    series = make_series(steps, limits.n_blocks)
    if series is None:
        return _nothing_but(account)
    for source in sources:
        open_lines(source)
    has_ids = all(_knows_ids(source) for source in sources)
    vocabulary, named = _vocabulary(sources), _sources(sources)
    queue_counts, covered = QueueCounts(), CoverageCounts()
    prepared: list[tuple[RunSource, Tokens]] = []
    for source, run_steps in zip(sources, steps, strict=True):
        if run_steps.run not in series.runs:
            continue
        register(source, run_steps, series)
        source.connection.register("vocabulary", vocabulary)
        prepared.append((source, prepare(source, named, has_ids=has_ids)))
        read_queues(source, series, queue_counts)
        progress(f"coverage of {source.run}")
        if labels is not None:
            source.connection.register("labels", labels_of(labels, source.run))
        read_coverage(source, covered, labelled=labels is not None)
    trends = load_trends(series, limits) if series.lost.any() else {}
    waits = queues(series, queue_counts, trends)
    seen = coverage(covered, labelled=labels is not None)
    if not series.lost.any():
        return Sections(account, seen, None, None, waits, None, Evidence(account, None, None), None)
    progress("differences")
    content, values = _sums(prepared, series)
    everything = [*system_sums(series), *content, *values]
    cells = empty_cells(series, has_ids=has_ids)
    bands, in_cells = banding.read(prepared, series, cell_expression(cells))
    found = differences(everything, series.blocks, bands)
    progress("weights")
    fill_cells(cells, in_cells)
    cells = weigh(cells, float(series.lost.sum()) / max(1, series.n_events))
    found = _after_weighting(found, content, prepared, cells, series)
    progress("tests")
    tests = family(everything, series, _within(prepared, series), trends, limits)
    missing = missingness(found, account.loss_share, has_values=bool(values), has_ids=has_ids)
    asked = [one for one in everything if one.covariate.group != "system"]
    intervals = [i for i in jackknife_many(block_totals(series.blocks, asked), smd) if i]
    mech = mechanism(series, tests, intervals)
    evidence = Evidence(account, missing, mech, series.blocks.long_enough)
    return Sections(account, seen, missing, mech, waits, weighting(cells), evidence, cells)


def _nothing_but(account: Accounting) -> Sections:
    return Sections(account, None, None, None, None, None, Evidence(account, None, None), None)


def _knows_ids(source: RunSource) -> bool:
    """Return whether the ids of every computed token of a run are known."""
    return bool(source.hooks) or not source.one("select count(*) from drops")[0]


def _vocabulary(sources: list[RunSource]) -> pa.Table:
    """Return rarity in bits, and whether it is special, of every token id that was computed."""
    n: Counter[int] = Counter()
    special: set[int] = set()
    for source in sources:
        rows = "tokens"
        if source.hooks:
            rows = "(select token_id from lines where hook = (select min(hook) from readouts))"
        for token, count in source.rows(f"select token_id, count(*) from {rows} group by all"):
            n[int(token)] += int(count)
        special.update(
            int(token)
            for (token,) in source.rows("select distinct token_id from tokens where flags & 1 = 1")
        )
    ids = np.fromiter(n, np.uint32, len(n))
    seen = np.fromiter(n.values(), np.float64, len(n))
    return pa.table(
        {
            "token_id": ids,
            "rarity": -np.log2(seen / max(1.0, seen.sum())),
            "special": np.isin(ids, np.fromiter(special, np.uint32, len(special))),
        }
    )


def _sources(sources: list[RunSource]) -> list[str]:
    """Return the prompt sources, the most used first; none when there is only one."""
    n: Counter[str] = Counter()
    for source in sources:
        for name, count in source.rows(
            "select source, count(*) from requests where source is not null group by all"
        ):
            n[name] += int(count)
    return [name for name, _ in n.most_common()] if len(n) > 1 else []


def _sums(
    prepared: list[tuple[RunSource, Tokens]], series: Series
) -> tuple[list[CovariateSums], list[CovariateSums]]:
    """Return the sums of content and values over all runs."""
    content: dict[str, CovariateSums] = {}
    values: dict[str, CovariateSums] = {}
    for source, tokens in prepared:
        for one in token_sums(source, tokens, series):
            _add(content, one)
        for one in value_sums(source, series):
            _add(values, one)
    return list(content.values()), list(values.values())


def _add(found: dict[str, CovariateSums], one: CovariateSums) -> None:
    before = found.get(one.covariate.name)
    if before is not None:
        one = CovariateSums(
            one.covariate, before.n + one.n, before.sums + one.sums, before.n_lost + one.n_lost
        )
    found[one.covariate.name] = one


def _after_weighting(
    found: list[Difference],
    content: list[CovariateSums],
    prepared: list[tuple[RunSource, Tokens]],
    cells: Cells,
    series: Series,
) -> list[Difference]:
    """Return the differences with those of the weighted rows beside them."""
    if cells.weights is None or not content:
        return found
    blocks = series.blocks
    weighted: dict[str, Floats] = {}
    for source, tokens in prepared:
        for name, sums in weighted_totals(source, tokens, cells, blocks.n_blocks).items():
            weighted[name] = weighted.get(name, np.zeros_like(sums)) + sums
    totals = block_totals(blocks, content)
    for k, one in enumerate(content):
        totals[3:, k] = weighted[one.covariate.name]
    after = {
        one.covariate.name: estimate(interval)
        for one, interval in zip(content, jackknife_many(totals, smd), strict=True)
    }
    return [d.model_copy(update={"after_weighting": after.get(d.covariate.name)}) for d in found]


def _within(
    prepared: list[tuple[RunSource, Tokens]], series: Series
) -> Iterable[tuple[Covariate, Within]]:
    """Yield the test of selection within steps of every covariate that has one."""
    if series.n_partial_steps < 2:
        return
    names: dict[str, tuple[Covariate, list[dict[str, Floats]]]] = {}
    for number, (source, tokens) in enumerate(prepared):
        asked = [(c, None, e) for c, e in tokens.covariates.values()]
        for covariate, hook, expression in [*asked, *values_of(source)]:
            cells = within_cells(source, expression, hook)
            for key in ("step", "request"):  # runs count from 0 each
                cells[key] = cells[key] + float(number << 40)
            names.setdefault(covariate.name, (covariate, []))[1].append(cells)
    for covariate, parts in names.values():
        joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        test = within_test(**joined)
        if test is not None:
            yield covariate, test


def _peak_nbytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
