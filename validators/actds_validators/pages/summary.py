"""The first screen: may I train on this, how far off can a mean be, and what is this dataset.

With the sections that follow from the verdict alone: checks, limits of the evidence, settings.
"""

from __future__ import annotations

import math

from actds.text import format_nbytes
from actds_validators.about import About
from actds_validators.audit.result import Audit, Limits, Number, Options
from actds_validators.pages.head import dataset_facts
from actds_validators.pages.words import (
    Fact,
    Part,
    Row,
    Sentence,
    State,
    Table,
    count,
    first,
    interval,
    limit_of,
    measured,
    number,
    seconds,
    state_of,
)


def biases(audit: Audit) -> list[Fact]:
    """Return the worst-case bias of any mean, and the largest that was estimated."""
    return [_worst_case(audit), _estimated(audit)]


def _worst_case(audit: Audit) -> Fact:
    title, share = "Worst-case bias of any mean", audit.accounting.loss_share
    if not audit.accounting.is_sound:
        return Fact(title, "not known", "the accounting does not match", is_known=False)
    if share >= 1:
        return Fact(title, "no bound", "no computed token is stored")
    bias = math.sqrt(share / (1 - share))
    limit = f"{number(audit.limits.negligible_bias)} SD"
    if not share:
        note = "no rows were lost" + _chosen(audit)
    elif bias <= audit.limits.negligible_bias:
        note = f"negligible: at most {limit}"
    else:
        note = f"above {limit}: further evidence is needed"
    return Fact(title, f"{_three(bias)} SD", note)


def _chosen(audit: Audit) -> str:
    """Return that rows which a rule left out are in no loss rate, where there are some."""
    n = audit.accounting.filtered
    return f"; {n:,} positions that a rule left out are not compared" if n else ""


def _estimated(audit: Audit) -> Fact:
    title = "Largest estimated bias"
    if not audit.accounting.is_sound:
        return Fact(title, "not estimated", "the accounting does not match", is_known=False)
    if not audit.accounting.loss_share:
        return Fact(title, "0 SD", "no rows were lost" + _chosen(audit))
    asked = [
        (d.covariate.label, d.before_weighting, d.at_once)
        for d in (audit.missingness.differences if audit.missingness else ())
        if d.before_weighting and d.covariate.group != "system"
    ]
    if not asked:
        return Fact(title, "not estimated", "no mean could be compared", is_known=False)
    label, found, at_once = max(asked, key=lambda one: abs(one[1].value))
    tested = "the tested mean"
    if len(asked) > 1:
        tested = f"largest of {count(len(asked))} tested means"
        tested += ", for all of which the interval holds at once" if at_once else ""
    shown = at_once or found
    span = f"{100 * shown.confidence:g} % CI {interval(shown)}"
    return Fact(title, f"{_three(found.value)} SD", f"{label}; {span}; {tested}")


def _three(value: float) -> str:
    return number(float(f"{value:.3g}"))


def facts(audit: Audit, known: About | None) -> list[tuple[str, str]]:
    """Return what the dataset is: model, hooks, rows, date, command; each a name and its words.

    Args:
        known: ``None`` where only the result is at hand.
    """
    rows = f"{count(audit.accounting.captured)} of {count(audit.accounting.computed)} computed"
    if known is None:
        return [("Dataset", audit.dataset), ("Rows", rows)]
    return [*dataset_facts(known, rows), ("Command", known.command)]


def check_part(audit: Audit) -> Part:
    """Return the table of every number with its limit."""
    verdict = audit.verdict
    numbers = [verdict.deciding, *(n for n in verdict.numbers if n != verdict.deciding)]
    some, more = first(numbers)
    rows = [_row(n, state_of(n, verdict.level), deciding=n is verdict.deciding) for n in some]
    table = Table("Every number with its limit", ("number", "value", "limit", ""), rows,
                  frozenset({0, 3}), more, narrow=True)  # fmt: skip
    lead = (
        "The first number decided the verdict. SD is the standard deviation over all computed "
        "tokens."
    )
    return Part("checks", "Checks", Sentence(lead), [table])


def _row(n: Number, state: State, *, deciding: bool) -> Row:
    words = f"{state.mark} {state.words}" + (", decided" if deciding else "")
    return Row((n.name, measured(n.value, n.unit), limit_of(n), words), state.tone)


def evidence_part(audit: Audit) -> Part | None:
    """Return what was tested, what could not be, and what no audit of this dataset can detect."""
    missing = audit.missingness
    tested, untested = (missing.could_ask, missing.could_not_ask) if missing else ([], [])
    notes = [
        *(f"Tested: {question}" for question in tested[:16]),
        *(f"Not tested: {question}" for question in untested[:16]),
        *(f"Cannot be detected: {words}" for words in audit.would_not_notice[:16]),
    ]
    if not notes:
        return None
    lead = (
        "What this audit tested, what it could not test, and what it cannot detect. These are "
        "limits of the evidence, not faults of the data."
    )
    return Part("evidence", "Limits of the evidence", Sentence(lead), (), [*map(Sentence, notes)])


def settings_part(audit: Audit) -> Part:
    """Return the settings and digests."""
    lead = "What was audited, with which settings; the same settings and seed give these numbers."
    peak = "not measured" if audit.peak_nbytes is None else format_nbytes(audit.peak_nbytes)
    runs, more = first(audit.runs, 20)
    rows = [
        Row(("path", Sentence(audit.path))),
        Row(("dataset", audit.dataset)),
        Row(("digest", audit.digest)),
        Row(("seal", "not sealed" if audit.seal is None else str(audit.seal))),
        Row(("runs", Sentence(", ".join(runs + ([more] if more else []))))),
        Row(("overflow policies", Sentence(", ".join(audit.policies[:20]) or "none recorded"))),
        Row(("actds", audit.actds)),
        Row(("format", f"{audit.format} {audit.version}")),
        Row(("audit took", f"{seconds(audit.duration_s)}, peak memory {peak}")),
    ]
    limits = [
        Row((name, number(getattr(audit.limits, name)), Sentence(field.description or "")))
        for name, field in Limits.model_fields.items()
    ]
    words = frozenset({0, 1})
    tables = [
        Table("Dataset", ("", ""), rows, words),
        Table("Options", ("", ""), _options(audit.options), words),
        Table("Settings", ("setting", "value", "meaning"), limits, frozenset({0, 2})),
    ]
    return Part("settings", "Settings and digests", Sentence(lead), tables)


def _options(options: Options) -> list[Row]:
    """Return what was asked for, beside the limits."""
    rows = [Row(("executor", options.engine))]
    classes = options.classes
    if classes is None:
        rows.append(Row(("token classes", "from the tables of the dataset")))
    else:
        matching = f"{count(classes.n_matching)} of {count(classes.n_ranges)}"
        labelled = f"{count(classes.n_labelled)} of {count(classes.n_positions)}"
        rows += [
            Row(("token classes", Sentence(classes.path))),
            Row(("SHA-256 of that file", classes.sha256)),
            Row(("ranges that begin within a request of the dataset", matching)),
            Row(("positions that have a label", labelled)),
        ]
    return rows
