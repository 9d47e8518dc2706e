"""The report of an audit: its sections with their charts as a page, its tables on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from actds.text import Line, Style, counted
from actds_validators.audit.result import (
    MIN_BLAMED,
    Accounting,
    Audit,
    Difference,
    Mechanism,
    Missingness,
)
from actds_validators.pages.accounting import (
    accounting_part,
    balance,
    coverage_map,
    coverage_part,
    never_computed,
    waterfall,
)
from actds_validators.pages.answer import (
    MAX_LIST,
    Shown,
    captioned,
    cleaned,
    listed,
    render_page,
    table_lines,
    titled,
)
from actds_validators.pages.mechanism import (
    TESTS,
    capture_trace,
    lag_plot,
    loss_against_load,
    loss_against_step,
    mechanism_part,
    occupancy,
    queues_part,
    smallest_first,
    weight_map,
    weights_part,
)
from actds_validators.pages.missingness import (
    STRATA,
    bound_curve,
    forest,
    heat_map,
    missingness_part,
    stored_bias,
    worst_first,
)
from actds_validators.pages.summary import (
    bar,
    biases,
    check_part,
    evidence_part,
    facts,
    lengths,
    lines,
    places_part,
    settings_part,
    source_part,
    terminal_lines,
)
from actds_validators.pages.svg import Picture
from actds_validators.pages.words import (
    GROUPS,
    LOOKS,
    Columns,
    Part,
    Sentence,
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
from actds_validators.sections import About

Chart = Callable[[Audit], Picture | None]


@dataclass(frozen=True)
class SectionOf:
    """A section of the report, made from a result.

    Args:
        part: its words and tables; ``None`` where the result has nothing for it.
        charts: drawn between the words and the tables, each where the result has its numbers.
        title: under which a missing section is named, with the reason; empty for none.
        of_losses: whether it is about lost rows alone.
    """

    part: Callable[[Audit], Part | None]
    charts: tuple[Chart, ...] = ()
    title: str = ""
    absent: str = ""
    of_losses: bool = False


SECTIONS: tuple[SectionOf, ...] = (
    SectionOf(places_part),
    SectionOf(source_part, (lengths,), "Source", "no run record says what the source had"),
    SectionOf(check_part),
    SectionOf(accounting_part, (waterfall,)),
    SectionOf(
        coverage_part,
        (coverage_map,),
        "Coverage",
        "the tables hold no token classes or positions to map",
    ),
    SectionOf(
        missingness_part,
        (*(partial(forest, group=group) for group in GROUPS), stored_bias, heat_map, bound_curve),
        "Missingness",
        "no token was lost: there is none to compare with the stored ones",
        of_losses=True,
    ),
    SectionOf(
        mechanism_part,
        (),
        "Mechanism",
        "no token was lost, so there is nothing to test",
        of_losses=True,
    ),
    SectionOf(
        queues_part,
        (capture_trace, loss_against_load, loss_against_step, occupancy, lag_plot),
        "Time and queues",
        "the run records neither steps nor queues",
    ),
    SectionOf(
        weights_part,
        (weight_map,),
        "Weights",
        "no token was dropped: every weight is 1",
        of_losses=True,
    ),
    SectionOf(evidence_part),
    SectionOf(settings_part),
)
"""Sections in the order of the report; a new section or chart is an entry here."""


@dataclass(frozen=True)
class Absent:
    """Sections that the result does not have, and why in one sentence."""

    title: str
    why: Sentence


def render(audit: Audit, about: About | None = None) -> str:
    """Return the page: HTML in UTF-8, under 1 MB whatever the dataset.

    Args:
        about: what the dataset is; ``None`` where only the result is at hand.

    Raises:
        ImportError: Jinja2 is not installed (the extra ``audit``).
    """
    verdict = audit.verdict
    deciding, state = verdict.deciding, state_of(verdict.deciding, verdict.level)
    return render_page(
        "page.html.j2",
        actds=audit.actds,
        level=audit.answer.level,
        audit=audit,
        mark=LOOKS[audit.answer.level].mark,
        bar=bar(audit),
        places=lines(audit),
        losses=bool(audit.accounting.loss_share or not audit.accounting.is_sound),
        biases=biases(audit),
        facts=[(name, Sentence(words)) for name, words in facts(audit, about)],
        sentence=Sentence(verdict.sentence),
        value=measured(deciding.value, deciding.unit),
        held=f"{against(deciding)}: {state.words}" if deciding.limit is not None else "",
        next_steps=[Sentence(step) for step in audit.answer.next_steps[:20]],
        lacks=[Sentence(lack) for lack in verdict.lacks[:20]],
        sections=_shown(audit),
        absent=_absent(audit),
    )


def _shown(audit: Audit) -> list[Shown]:
    return [
        Shown(part, [p for draw in section.charts if (p := draw(audit)) is not None])
        for section in SECTIONS
        if (part := section.part(audit)) is not None
    ]


def _absent(audit: Audit) -> list[Absent]:
    """Return the sections that the result lacks, each with the reason that the result shows."""
    reasons: dict[str, list[str]] = {}
    for section in SECTIONS:
        if section.title and section.part(audit) is None:
            why = section.absent
            if not audit.accounting.is_sound:
                why = "there are accounting mismatches, so nothing can be estimated"
            elif section.of_losses:
                why = _without_losses(section.title, audit.accounting) or why
            reasons.setdefault(why, []).append(section.title)
    return [Absent(", ".join(titles), Sentence(f"{why}.")) for why, titles in reasons.items()]


def _without_losses(title: str, account: Accounting) -> str:
    """Return why a section on losses is missing; empty where nothing was lost."""
    if account.dropped and title == "Weights" and not account.captured:
        return "no row is stored, so none can have a weight"
    if account.dropped:
        return "the result does not hold it, although tokens were dropped"
    if account.aborted and title != "Weights":
        return "no token was dropped; those of aborted requests are counted, not compared"
    return ""


_BIAS_WIDTH = len("Worst-case bias of any mean:")
_MAX_ROWS = 25


def render_lines(audit: Audit, about: About | None = None) -> Iterator[Line]:
    """Return the page, line by line; no line holds a control character."""
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
    steps = [step for step in section.waterfall if step.name in names and step.n_positions]
    for step in steps[:_MAX_ROWS]:
        why = step.reason or "no reason given"
        is_lost = step.name in ("dropped", "aborted")
        share = step.n_positions / section.computed if is_lost else step.share
        of = "of the computed" if is_lost else "of all"
        line = f"{count(step.n_positions)} {step.name} ({percent(share)} {of}): {why}"
        yield Line(f"  {line}", "warn" if is_lost else "plain")
    if len(steps) > _MAX_ROWS:
        yield Line(f"  and {len(steps) - _MAX_ROWS:,} more; --json lists them all", "dim")
    if section.never_computed:
        yield Line(f" {never_computed(section)}", "plain")
    if section.unresolved:
        lost = counted(section.unresolved, "prefix-cache hit")
        yield Line(f"  {lost} without a stored row (E410)", "warn")
    if section.external:
        served = counted(section.external, "position")
        yield Line(f"  {served} served from KV that came from outside the run", "plain")
    for finding in section.findings[:_MAX_ROWS]:
        line = f"{finding.got}; expected {finding.expected}"
        style: Style = "bad" if finding.severity == "error" else "warn"
        yield Line(f"  {finding.severity} {finding.code} {finding.place}: {line}", style)
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
