"""The terminal page of an audit: the first screen of the report, then its tables, largest first."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import TypeVar

from actds.text import Line, Style, counted
from actds_validators.audit.result import (
    MIN_BLAMED,
    Association,
    Audit,
    Difference,
    Mechanism,
    Missingness,
    Number,
    StratumLoss,
)
from actds_validators.report.accounting import balance, never_computed
from actds_validators.report.mechanism import smallest_first
from actds_validators.report.missingness import worst_first
from actds_validators.report.places import terminal_lines
from actds_validators.report.summary import LEVEL_MARKS, About, biases, facts
from actds_validators.report.words import (
    Columns,
    Sentence,
    against,
    clean,
    count,
    estimate,
    limit_of,
    measured,
    number,
    or_dash,
    p_value,
    percent,
    state_of,
)

T = TypeVar("T")
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
    yield from first_screen(audit, about)
    yield from _list("What to do", [f"{n}. {s}" for n, s in enumerate(audit.answer.next_steps, 1)])
    yield from _losses(audit)
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
    untested = audit.missingness.could_not_ask if audit.missingness else []
    yield from _list("Not tested", [f"- {question}" for question in untested], "dim", _MAX_ROWS)
    blind = [f"- {words}" for words in audit.would_not_notice]
    yield from _list("What this audit cannot detect", blind, "dim", _MAX_ROWS)


def first_screen(audit: Audit, about: About | None) -> Iterator[Line]:
    """Yield whether to train on the dataset, what each place did to it, and what it is."""
    answer = audit.answer
    yield Line(f"{LEVEL_MARKS[answer.level]} {answer.words}", _STYLES[answer.level])
    yield from terminal_lines(audit)
    yield Line(answer.sentence)
    if answer.load is not None:
        yield Line(f"  {answer.load}", "title")
    yield from (Line(f"Near miss: {words}", "warn") for words in answer.near_misses[:2])
    known = facts(audit, about)
    width = max(len(name) for name, _ in known)
    for name, words in known:
        yield Line(f"  {name.ljust(width)}  {words}")


def _losses(audit: Audit) -> Iterator[Line]:
    """Yield the verdict on what queues and ends lost, with the number that decided it."""
    verdict, d = audit.verdict, audit.verdict.deciding
    kind = f" ({verdict.kind})" if verdict.kind else ""
    limit = f"; {against(d)}: {state_of(d, verdict.level).words}" if d.limit is not None else ""
    decided = f"decided by {d.name} {measured(d.value, d.unit)}{limit}"
    yield Line("")
    yield Line(f"Losses: {verdict.level}{kind}, {decided}", "title")
    yield Line(f"  {verdict.sentence}")
    for bias in biases(audit):
        title = f"{bias.title}:".ljust(_BIAS_WIDTH)
        yield Line(f"  {title}  {bias.value} ({bias.note})", "plain" if bias.is_known else "dim")


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
    names = ("dropped", "aborted", "never computed", "filtered", "undelivered")
    gone = [step for step in section.waterfall if step.name in names and step.n_positions]
    for step in gone[:_MAX_ROWS]:
        why = step.reason or "no reason given"
        is_lost = step.name in ("dropped", "aborted")
        share = step.n_positions / section.computed if is_lost else step.share
        of = "of the computed" if is_lost else "of all"
        said = f"{count(step.n_positions)} {step.name} ({percent(share)} {of}): {why}"
        yield Line(f"  {said}", "warn" if is_lost else "plain")
    yield from _more(len(gone), _MAX_ROWS)
    if section.never_computed:
        yield Line(f" {never_computed(section)}", "plain")
    if section.unresolved:
        lost = counted(section.unresolved, "prefix-cache hit")
        yield Line(f"  {lost} without a stored row (E410)", "warn")
    if section.external:
        served = counted(section.external, "position")
        yield Line(f"  {served} served from KV that came from outside the run", "plain")
    for finding in section.findings[:_MAX_ROWS]:
        said = f"{finding.got}; expected {finding.expected}"
        style: Style = "bad" if finding.severity == "error" else "warn"
        yield Line(f"  {finding.severity} {finding.code} {finding.place}: {said}", style)
    more = len(section.findings) - _MAX_ROWS
    if more > 0:
        yield Line(f"  and {more:,} more findings; --json lists them all", "warn")


def _numbers(audit: Audit) -> Iterator[Line]:
    level = audit.verdict.level
    columns: Columns[Number] = (
        ("", lambda n: state_of(n, level).mark),
        ("number", lambda n: n.name),
        ("value", lambda n: measured(n.value, n.unit)),
        ("limit", limit_of),
        ("", lambda n: state_of(n, level).words),
    )
    yield from _titled(
        "Checks", columns, audit.verdict.numbers, {0, 1, 4}, _MAX_ROWS,
        style=lambda n: _TONES[state_of(n, level).tone],
    )  # fmt: skip


def _differences(differences: Sequence[Difference]) -> Iterator[Line]:
    columns: Columns[Difference] = (
        ("covariate", lambda d: d.covariate.label),
        ("group", lambda d: d.covariate.group),
        ("SMD [95 %]", lambda d: estimate(d.smd)),
        ("stored", lambda d: or_dash(d.before_weighting, lambda e: number(e.value))),
        ("stored, weighted", lambda d: or_dash(d.after_weighting, lambda e: number(e.value))),
    )
    title = "Largest differences of the lost tokens from all, in SD"
    yield from _titled(title, columns, worst_first(differences))


def _strata(section: Missingness) -> Iterator[Line]:
    """Yield the strata with excess loss, and the requests that lost everything."""
    columns: Columns[StratumLoss] = (
        ("stratum", lambda s: s.kind),
        ("which", lambda s: s.label),
        ("lost", lambda s: percent(s.rate)),
        ("tokens", lambda s: f"{count(s.n_lost)} of {count(s.n)}"),
        ("adjusted p", lambda s: p_value(s.adjusted_p)),
    )
    title = f"Strata (kinds of token) with excess loss, of {count(section.n_strata)} tested"
    yield from _titled(title, columns, section.worst_strata, style=lambda s: "bad")
    if section.whole_requests:
        yield Line("")
        yield Line(f"{counted(section.whole_requests, 'request')} lost every computed token")


def _tests(section: Mechanism) -> Iterator[Line]:
    rejected = [test for test in smallest_first(section.tests) if test.rejected]
    events = counted(section.n_events, "independent loss event")
    tests = counted(len(section.tests), "test")
    few = ": too few to name a cause" if section.n_events < MIN_BLAMED else ""
    yield Line("")
    yield Line(
        f"What the loss depends on: {len(rejected)} of {tests} rejected, {events}{few}", "title"
    )
    columns: Columns[Association] = (
        ("test", lambda t: t.name),
        ("covariate", lambda t: t.covariate.label),
        ("group", lambda t: t.covariate.group),
        ("p", lambda t: p_value(t.p)),
        ("adjusted p", lambda t: p_value(t.adjusted_p)),
        ("units", lambda t: f"{count(t.n_units)} {t.unit}"),
    )
    yield from _table(columns, rejected, {0, 1, 2}, style=lambda t: "bad")


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


def _titled(
    title: str,
    columns: Columns[T],
    items: Sequence[T],
    left: Container[int] = (0, 1),
    room: int = _MAX_TOP,
    style: Callable[[T], Style] = lambda one: "plain",
) -> Iterator[Line]:
    """Yield a table below its title, and nothing without an item."""
    if items:
        yield Line("")
        yield Line(title, "title")
        yield from _table(columns, items, left, room, style)


def _table(
    columns: Columns[T],
    items: Sequence[T],
    left: Container[int] = (0, 1),
    room: int = _MAX_TOP,
    style: Callable[[T], Style] = lambda one: "plain",
) -> Iterator[Line]:
    """Yield aligned columns; a cell of any length is cut to the room of a column."""
    if not items:
        return
    shown = items[:room]
    rows = [[name for name, _ in columns], *([say(one) for _, say in columns] for one in shown)]
    cut = [[_cut(clean(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cut, strict=True)]
    for row, of_row in zip(cut, ["dim", *map(style, shown)], strict=True):
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield Line("  " + "  ".join(cells).rstrip(), of_row)
    yield from _more(len(items), room)


def _cut(cell: str) -> str:
    return cell if len(cell) <= _MAX_COLUMN else cell[: _MAX_COLUMN - 1] + "…"


def _more(n: int, room: int) -> Iterator[Line]:
    if n > room:
        yield Line(f"  and {n - room:,} more; --json lists them all", "dim")
