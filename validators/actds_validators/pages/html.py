"""The report of an audit: its sections, their charts, and the page of them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from actds_validators.about import About
from actds_validators.audit.result import Accounting, Audit
from actds_validators.pages.accounting import (
    accounting_part,
    coverage_map,
    coverage_part,
    waterfall,
)
from actds_validators.pages.answer import Shown
from actds_validators.pages.markup import render_page
from actds_validators.pages.mechanism import (
    capture_trace,
    lag_plot,
    loss_against_load,
    loss_against_step,
    mechanism_part,
    occupancy,
    queues_part,
    weight_map,
    weights_part,
)
from actds_validators.pages.missingness import (
    bound_curve,
    forest,
    heat_map,
    missingness_part,
    stored_bias,
)
from actds_validators.pages.places import bar, lengths, lines, places_part, source_part
from actds_validators.pages.summary import (
    biases,
    check_part,
    evidence_part,
    facts,
    settings_part,
)
from actds_validators.pages.svg import Picture
from actds_validators.pages.words import (
    GROUPS,
    LOOKS,
    Part,
    Sentence,
    against,
    measured,
    state_of,
)

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
