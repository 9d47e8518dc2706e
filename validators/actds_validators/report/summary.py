"""The parts on the numbers that decided and on the audit itself.

From the result's verdict, limits and heads; tables only.
"""

from __future__ import annotations

from actds.text import human_nbytes
from actds_validators.audit.result import Audit, Limits, Number, Options, Verdict
from actds_validators.report.words import (
    Part,
    Row,
    Sentence,
    Table,
    Tone,
    count,
    first,
    kept,
    limit_of,
    measured,
    number,
    seconds,
)

__all__ = ["blind_part", "check_part", "settings_part"]

_MAX_FAILED = 5  # comparisons: --against and four columns


def check_part(verdict: Verdict) -> Part:
    """Return the table of every number that was held against a limit."""
    numbers = [verdict.deciding, *(n for n in verdict.numbers if n != verdict.deciding)]
    some, more = first(numbers)
    rows = [_row(n, deciding=n is verdict.deciding) for n in some]
    head = ("number", "value", "limit", "")
    table = Table("Checks: every number with its limit", head, rows, frozenset({0, 3}), more)
    lead = "Every number that was held against a limit; the first one decided."
    return Part("checks", "Checks", Sentence(lead), (), [table])


def _row(n: Number, *, deciding: bool) -> Row:
    tone: Tone = {True: "good", False: "bad", None: "dim"}[n.ok]  # type: ignore[assignment]
    words = kept(n) + (", decided" if deciding else "")
    return Row((n.name, measured(n.value, n.unit), limit_of(n), words), tone)


def blind_part(audit: Audit) -> Part:
    """Return the part on what the audit would not notice."""
    lead = "This audit would not notice, whatever its verdict:"
    notes = [Sentence(words) for words in audit.would_not_notice[:12]]
    return Part("blind", "What this audit would not notice", Sentence(lead), (), (), notes)


def settings_part(audit: Audit) -> Part:
    """Return the part on settings and digests."""
    lead = "What was audited, with which settings; the same settings and seed give these numbers."
    peak = "not measured" if audit.peak_nbytes is None else human_nbytes(audit.peak_nbytes)
    runs, more = first(audit.runs, 20)
    rows = [
        Row(("path", Sentence(audit.path))),
        Row(("dataset", audit.dataset)),
        Row(("digest", audit.digest)),
        Row(("seal", "not sealed" if audit.seal is None else str(audit.seal))),
        Row(("runs", Sentence(", ".join(runs + ([more] if more else []))))),
        Row(("overflow policies", Sentence(", ".join(audit.policies[:20]) or "none recorded"))),
        Row(("actds", audit.actds)),
        Row(("schema", audit.schema_)),
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
    return Part("settings", "Settings and digests", Sentence(lead), (), tables)


def _options(options: Options) -> list[Row]:
    """Return what the audit was asked for, beside its limits."""
    rows = [Row(("engine", options.engine))]
    classes, other = options.classes, options.against
    if classes is None:
        rows.append(Row(("token classes", "those of the tables")))
    else:
        matching = f"{count(classes.n_matching)} of {count(classes.n_ranges)}"
        labelled = f"{count(classes.n_labelled)} of {count(classes.n_positions)}"
        rows += [
            Row(("token classes", Sentence(classes.path))),
            Row(("SHA-256 of their file", classes.sha256)),
            Row(("ranges that begin within a request of the dataset", matching)),
            Row(("positions that have a label", labelled)),
        ]
    rows.append(Row(("values compared by", Sentence(", ".join(options.by) or "no column"))))
    if other is None:
        rows.append(Row(("values compared with", "no other dataset")))
    else:
        rows += [
            Row(("values compared with", Sentence(other.path))),
            Row(("its dataset", other.dataset)),
            Row(("its digest", other.digest)),
        ]
    if options.rows is not None:
        rows.append(Row(("rows a side at most", count(options.rows))))
    some, more = first(options.failed, _MAX_FAILED)
    rows += [Row(("comparison that failed", Sentence(words)), "bad") for words in some]
    if more:
        rows.append(Row(("", more), "bad"))
    return rows
