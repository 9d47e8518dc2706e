"""The terminal page of an audit: the first screen of the report, then its tables, largest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from actds.text import Line, Style
from actds_validators.audit.result import (
    Audit,
    Difference,
    Drift,
    Estimate,
    Mechanism,
    Missingness,
)
from actds_validators.report.accounting import balance, never_computed
from actds_validators.report.mechanism import smallest_first
from actds_validators.report.missingness import worst_first
from actds_validators.report.summary import LEVEL_MARKS, About, answer, biases, facts
from actds_validators.report.words import (
    Sentence,
    against,
    clean,
    count,
    estimate,
    limit_of,
    many,
    measured,
    number,
    p_value,
    percent,
    state_of,
)

_STYLES: dict[str, Style] = {"PASS": "good", "WARN": "warn", "FAIL": "bad", "INCONCLUSIVE": "title"}
_TONES: dict[str, Style] = {"good": "good", "bad": "bad", "warn": "warn", "dim": "dim", "": "plain"}
_BIAS_WIDTH = len("Worst-case bias of any mean:")
_MAX_ROWS, _MAX_TOP, _MAX_COLUMN = 25, 8, 64


def render(audit: Audit, about: About | None = None) -> Iterator[Line]:
    """Yield the page, line by line; no line holds a control character.

    Args:
        audit: the result.
        about: what the dataset is; ``None`` where only the result is at hand.
    """
    for line in _page(audit, about):
        yield Line(clean(Sentence(line.text)), line.style)


def _page(audit: Audit, about: About | None) -> Iterator[Line]:
    yield from _first_screen(audit, about)
    yield from _list("What to do", [f"{n}. {s}" for n, s in enumerate(audit.verdict.next_steps, 1)])
    yield from _list("Evidence that is missing", [f"- {lack}" for lack in audit.verdict.lacks])
    yield Line("")
    yield Line(f"Accounting: {balance(audit.accounting)}", "title")
    yield from _accounting(audit)
    yield from _numbers(audit)
    if audit.missingness is not None:
        yield from _strata(audit.missingness)
        yield from _differences(audit.missingness.differences)
    if audit.mechanism is not None:
        yield from _tests(audit.mechanism)
    yield from _weights(audit)
    for drift in audit.drift[:_MAX_TOP]:
        yield from _drift(drift)
    for words in audit.options.failed[:_MAX_ROWS]:
        yield Line(f"Comparison failed: {words}", "bad")
    untested = audit.missingness.could_not_ask if audit.missingness else []
    yield from _list("Not tested", [f"- {question}" for question in untested], "dim", _MAX_ROWS)
    blind = [f"- {words}" for words in audit.would_not_notice]
    yield from _list("What this audit cannot detect", blind, "dim", _MAX_ROWS)


def _first_screen(audit: Audit, about: About | None) -> Iterator[Line]:
    """Yield whether to train on the dataset, how far off a mean can be, and what it is."""
    verdict, d = audit.verdict, audit.verdict.deciding
    style = _STYLES[verdict.level]
    kind = f" ({verdict.kind})" if verdict.kind else ""
    yield Line(f"{LEVEL_MARKS[verdict.level]} {answer(audit)}", style)
    for bias in biases(audit):
        title = f"{bias.title}:".ljust(_BIAS_WIDTH)
        yield Line(f"  {title}  {bias.value} ({bias.note})", "plain" if bias.is_known else "dim")
    yield Line(verdict.sentence)
    limit = f"; {against(d)}: {state_of(d, verdict.level).words}" if d.limit is not None else ""
    decided = f"decided by {d.name} {measured(d.value, d.unit)}{limit}"
    yield Line(f"{verdict.level}{kind} {audit.path}: {decided}", "title")
    known = facts(audit, about)
    width = max(len(name) for name, _ in known)
    for name, words in known:
        yield Line(f"  {name.ljust(width)}  {words}")


def _list(
    title: str, items: Sequence[str], style: Style = "plain", room: int = _MAX_TOP
) -> Iterator[Line]:
    """Yield a title with lines below it, and nothing without a line."""
    if items:
        yield Line("")
        yield Line(title, "title")
    for words in items[:room]:
        yield Line(f"  {words}", style)
    yield from _more(len(items), room)


def _accounting(audit: Audit) -> Iterator[Line]:
    section = audit.accounting
    names = ("dropped", "aborted", "never computed", "filtered")
    gone = [step for step in section.waterfall if step.name in names and step.n_positions]
    for step in gone[:_MAX_ROWS]:
        why = step.reason or "no reason given"
        said = f"{count(step.n_positions)} {step.name} ({percent(step.share)}): {why}"
        yield Line(f"  {said}", "warn" if step.name in ("dropped", "aborted") else "plain")
    yield from _more(len(gone), _MAX_ROWS)
    if section.never_computed:
        yield Line(f" {never_computed(section)}", "plain")
    if section.unresolved:
        lost = many(section.unresolved, "prefix-cache hit")
        yield Line(f"  {lost} without a stored row (E410)", "warn")
    for finding in section.findings[:_MAX_ROWS]:
        said = f"{finding.got}; expected {finding.expected}"
        style: Style = "bad" if finding.severity == "error" else "warn"
        yield Line(f"  {finding.severity} {finding.code} {finding.place}: {said}", style)
    more = len(section.findings) - _MAX_ROWS
    if more > 0:
        yield Line(f"  and {more:,} more findings; --json lists them all", "warn")


def _numbers(audit: Audit) -> Iterator[Line]:
    numbers = audit.verdict.numbers
    if not numbers:
        return
    yield Line("")
    yield Line("Checks", "title")
    states = [state_of(n, audit.verdict.level) for n in numbers[:_MAX_ROWS]]
    cells = [
        (state.mark, n.name, measured(n.value, n.unit), limit_of(n), state.words)
        for n, state in zip(numbers, states, strict=False)
    ]
    head = ("", "number", "value", "limit", "")
    yield from _table(head, cells, [_TONES[state.tone] for state in states], {0, 1, 4})
    yield from _more(len(numbers), _MAX_ROWS)


def _differences(differences: Sequence[Difference]) -> Iterator[Line]:
    if not differences:
        return
    yield Line("")
    yield Line("Largest differences of the lost tokens from all, in SD", "title")
    cells = [
        (
            d.covariate.label,
            d.covariate.group,
            estimate(d.smd),
            _or_dash(d.before_weighting),
            _or_dash(d.after_weighting),
        )
        for d in worst_first(differences)[:_MAX_TOP]
    ]
    head = ("covariate", "group", "SMD [95 %]", "stored", "stored, weighted")
    yield from _table(head, cells, ["plain"] * len(cells), {0, 1})
    yield from _more(len(differences), _MAX_TOP)


def _strata(section: Missingness) -> Iterator[Line]:
    """Yield the strata with excess loss, and the requests that lost everything."""
    if section.worst_strata:
        yield Line("")
        yield Line(
            f"Strata (kinds of token) with excess loss, of {count(section.n_strata)} tested",
            "title",
        )
        cells = [
            (s.kind, s.label, percent(s.rate), f"{count(s.n_lost)} of {count(s.n)}",
             p_value(s.adjusted_p))
            for s in section.worst_strata[:_MAX_TOP]
        ]  # fmt: skip
        head = ("stratum", "which", "lost", "tokens", "adjusted p")
        yield from _table(head, cells, ["bad"] * len(cells), {0, 1})
        yield from _more(len(section.worst_strata), _MAX_TOP)
    if section.whole_requests:
        yield Line("")
        yield Line(f"{many(section.whole_requests, 'request')} lost every computed token")


def _or_dash(value: Estimate | None) -> str:
    return "-" if value is None else number(value.value)


def _tests(section: Mechanism) -> Iterator[Line]:
    yield Line("")
    n_rejected = sum(test.rejected for test in section.tests)
    events = many(section.n_events, "independent loss event")
    tests = many(len(section.tests), "test")
    few = ": too few to name a cause" if section.n_events < 3 else ""
    yield Line(
        f"What the loss depends on: {n_rejected} of {tests} rejected, {events}{few}", "title"
    )
    cells = [
        (
            test.name,
            test.covariate.label,
            test.covariate.group,
            p_value(test.p),
            p_value(test.adjusted_p),
            f"{count(test.n_units)} {test.unit}",
        )
        for test in smallest_first(section.tests)
        if test.rejected
    ]
    if cells:
        head = ("test", "covariate", "group", "p", "adjusted p", "units")
        shown = cells[:_MAX_TOP]
        yield from _table(head, shown, ["bad"] * len(shown), {0, 1, 2})
        yield from _more(len(cells), _MAX_TOP)


def _weights(audit: Audit) -> Iterator[Line]:
    if audit.weighting is None:
        return
    w = audit.weighting
    share = percent(w.effective_rows / w.n_rows) if w.n_rows else "-"
    yield Line("")
    yield Line(
        f"Weights: {count(w.n_rows)} rows are worth {w.effective_rows:,.0f} ({share}), the "
        f"largest weight is {number(w.largest)}; {w.claim}"
    )
    for b in w.balance[:_MAX_TOP]:
        change = f"{number(b.before)} to {number(b.after)} SD"
        yield Line(f"  largest bias of a stored mean, {b.group}: {change}")


def _drift(section: Drift) -> Iterator[Line]:
    yield Line("")
    yield Line(f"{section.kind.capitalize()}: {section.sentence}", "title")
    cells = [
        (m.hook, m.name, number(m.value), "-" if m.floor is None else number(m.floor))
        for m in section.measures[:_MAX_TOP]
    ]
    if cells:
        head = ("hook", "measure", "value", "floor")
        yield from _table(head, cells, ["plain"] * len(cells), {0, 1})
        yield from _more(len(section.measures), _MAX_TOP)


def _table(
    head: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    styles: Sequence[Style],
    left: set[int],
) -> Iterator[Line]:
    """Yield aligned columns; a cell of any length is cut to the room of a column."""
    cut = [tuple(_cut(clean(cell)) for cell in row) for row in [head, *rows]]
    widths = [max(len(row[column]) for row in cut) for column in range(len(head))]
    for row, style in zip(cut, ["dim", *styles], strict=True):
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield Line("  " + "  ".join(cells).rstrip(), style)


def _cut(cell: str) -> str:
    return cell if len(cell) <= _MAX_COLUMN else cell[: _MAX_COLUMN - 1] + "…"


def _more(n: int, room: int) -> Iterator[Line]:
    if n > room:
        yield Line(f"  and {n - room:,} more; --json lists them all", "dim")
