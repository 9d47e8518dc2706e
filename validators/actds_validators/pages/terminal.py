"""The terminal page of an audit: the first screen of the report, then its tables, largest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from actds.text import Line, Style, counted
from actds_validators.about import About
from actds_validators.audit.result import (
    MIN_BLAMED,
    Audit,
    Difference,
    Mechanism,
    Missingness,
)
from actds_validators.pages.accounting import balance, never_computed
from actds_validators.pages.lines import MAX_LIST, captioned, cleaned, listed, table_lines, titled
from actds_validators.pages.mechanism import TESTS, smallest_first
from actds_validators.pages.missingness import STRATA, worst_first
from actds_validators.pages.places import terminal_lines
from actds_validators.pages.summary import biases, check_part, facts
from actds_validators.pages.words import (
    LOOKS,
    Columns,
    against,
    count,
    estimate,
    measured,
    number,
    or_dash,
    percent,
    state_of,
    table_of,
)

_BIAS_WIDTH = len("Worst-case bias of any mean:")
_MAX_ROWS = 25


def render(audit: Audit, about: About | None = None) -> Iterator[Line]:
    """Return the page, line by line; no line holds a control character.

    Args:
        about: what the dataset is; ``None`` where only the result is at hand.
    """
    return cleaned(_page(audit, about))


def _page(audit: Audit, about: About | None) -> Iterator[Line]:
    yield from first_screen(audit, about)
    yield from listed("What to do", [f"{n}. {s}" for n, s in enumerate(audit.answer.next_steps, 1)])
    yield from _losses(audit)
    yield from listed("Evidence that is missing", [f"- {lack}" for lack in audit.verdict.lacks])
    yield from titled(f"Accounting: {balance(audit.accounting)}")
    yield from _accounting(audit)
    yield from titled("Checks")
    yield from table_lines(check_part(audit).tables[0])
    if audit.missingness is not None:
        yield from _strata(audit.missingness)
        yield from _differences(audit.missingness.differences)
    if audit.mechanism is not None:
        yield from _tests(audit.mechanism)
    yield from _weights(audit)
    untested = audit.missingness.could_not_ask if audit.missingness else []
    yield from listed("Not tested", [f"- {question}" for question in untested], "dim", _MAX_ROWS)
    blind = [f"- {words}" for words in audit.would_not_notice]
    yield from listed("What this audit cannot detect", blind, "dim", _MAX_ROWS)


def first_screen(audit: Audit, about: About | None) -> Iterator[Line]:
    """Yield whether to train on the dataset, what each place did to it, and what it is."""
    answer = audit.answer
    yield Line(f"{LOOKS[answer.level].mark} {answer.words}", LOOKS[answer.level].style)
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
    yield from titled(f"Losses: {verdict.level}{kind}, {decided}")
    yield Line(f"  {verdict.sentence}")
    for bias in biases(audit):
        title = f"{bias.title}:".ljust(_BIAS_WIDTH)
        yield Line(f"  {title}  {bias.value} ({bias.note})", "plain" if bias.is_known else "dim")


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
    if len(gone) > _MAX_ROWS:
        yield Line(f"  and {len(gone) - _MAX_ROWS:,} more; --json lists them all", "dim")
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


_DIFFERENCES: Columns[Difference] = (
    ("covariate", lambda d: d.covariate.label),
    ("group", lambda d: d.covariate.group),
    ("SMD [95 %]", lambda d: estimate(d.smd)),
    ("stored", lambda d: or_dash(d.before_weighting, lambda e: number(e.value))),
    ("stored, weighted", lambda d: or_dash(d.after_weighting, lambda e: number(e.value))),
)


def _differences(differences: Sequence[Difference]) -> Iterator[Line]:
    title = "Largest differences of the lost tokens from all, in SD"
    ordered = worst_first(differences)
    return captioned(table_of(title, _DIFFERENCES, ordered, frozenset({0, 1}), room=MAX_LIST))


def _strata(section: Missingness) -> Iterator[Line]:
    """Yield the strata with excess loss, and the requests that lost everything."""
    title = f"Strata (kinds of token) with excess loss, of {count(section.n_strata)} tested"
    yield from captioned(
        table_of(title, STRATA, section.worst_strata, frozenset({0, 1}), room=MAX_LIST,
                 tone=lambda s: "bad")
    )  # fmt: skip
    if section.whole_requests:
        yield Line("")
        yield Line(f"{counted(section.whole_requests, 'request')} lost every computed token")


def _tests(section: Mechanism) -> Iterator[Line]:
    rejected = [test for test in smallest_first(section.tests) if test.rejected]
    events = counted(section.n_events, "independent loss event")
    tests = counted(len(section.tests), "test")
    few = ": too few to name a cause" if section.n_events < MIN_BLAMED else ""
    title = f"What the loss depends on: {len(rejected)} of {tests} rejected, {events}{few}"
    if not rejected:
        yield from titled(title)
    yield from captioned(
        table_of(
            title, TESTS[:-1], rejected, frozenset(range(4)), room=MAX_LIST, tone=lambda t: "bad"
        )
    )


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
    for b in w.balance[:MAX_LIST]:
        change = f"{number(b.before)} to {number(b.after)} SD"
        yield Line(f"  largest bias of a stored mean, {b.group}: {change}")
