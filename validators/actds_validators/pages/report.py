"""The report of an audit, as a page and on a terminal, and the index of several datasets."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from actds.text import Line, counted
from actds_validators.about import About
from actds_validators.audit.place import LEVELS, TITLES, Level
from actds_validators.audit.result import Accounting, Audit
from actds_validators.pages import accounting, mechanism, missingness, summary
from actds_validators.pages.answer import (
    AnswerPage,
    Shown,
    brief_lines,
    cleaned,
    dataset_facts,
    listed,
    render_page,
    titled,
)
from actds_validators.pages.summary import bar, biases, facts, lines, terminal_lines
from actds_validators.pages.words import (
    LOOKS,
    Fact,
    Part,
    Row,
    Sentence,
    Table,
    against,
    count,
    measured,
    state_of,
)

SECTIONS = (
    *summary.SECTIONS[:3],
    *accounting.SECTIONS,
    *missingness.SECTIONS,
    *mechanism.SECTIONS,
    *summary.SECTIONS[3:],
)
"""Sections in the order of the report; each module has its own, with their charts."""


@dataclass(frozen=True)
class Absent:
    title: str
    why: Sentence


def render(audit: Audit, about: About | None = None) -> str:
    """Return the page: HTML in UTF-8, under 1 MB whatever the dataset.

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
_NOT_BRIEF = ("places", "source", "coverage", "queues", "settings")
"""Sections that a terminal has not; the places are on its first screen."""


def render_lines(audit: Audit, about: About | None = None) -> Iterator[Line]:
    """Return the page, line by line; no line holds a control character."""
    return cleaned(_page(audit, about))


def _page(audit: Audit, about: About | None) -> Iterator[Line]:
    yield from first_screen(audit, about)
    yield from listed("What to do", [f"{n}. {s}" for n, s in enumerate(audit.answer.next_steps, 1)])
    yield from _losses(audit)
    yield from listed("Evidence that is missing", [f"- {lack}" for lack in audit.verdict.lacks])
    for section in SECTIONS:
        part = section.part(audit)
        if part is not None and part.name not in _NOT_BRIEF:
            yield from brief_lines(part)


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


_ANSWERS: dict[Level, str] = {
    "PASS": "yes",
    "WARN": "yes with limits",
    "INCONCLUSIVE": "not known",
    "FAIL": "no",
}
_MAX_DATASETS, _MAX_SLUG = 500, 60


@dataclass(frozen=True)
class Entry:
    """A dataset of the index.

    Args:
        audit: its audit; None of one that is not valid, or is imported, as is what it is about.
        why: what is wrong with one that is not valid.
        page: file name of its own page, in the folder of the index; empty for none.
        unaudited: level of the answer without an audit.
    """

    path: str
    answer: str
    audit: Audit | None = None
    about: About | None = None
    why: str = ""
    page: str = ""
    unaudited: Level = "FAIL"

    @property
    def level(self) -> Level:
        """Return the level of the answer; what is not valid fails."""
        return self.unaudited if self.audit is None else self.audit.answer.level


def page_beside(index: Path, n: int, path: str) -> Path:
    """Return the file for the page of a dataset: beside the index, its number before its name.

    The path is anybody's: only letters, digits, ``.``, ``_`` and ``-`` of it are taken.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.rstrip("/").rpartition("/")[2])[:_MAX_SLUG]
    return index.with_name(f"{index.stem}-{n}-{name}.html")


def render_index(entries: Sequence[Entry], command: str) -> str:
    """Return the page: HTML in UTF-8, self-contained but for its links, without script."""
    levels = [entry.level for entry in entries]
    shown = [f"{n} {words}" for level, words in _ANSWERS.items() if (n := levels.count(level))]
    return AnswerPage(
        subject="check",
        question=f"May I train on these {counted(len(entries), 'dataset')}?",
        level=max(levels, key=LEVELS.index, default="PASS"),
        answer=", ".join(shown).capitalize(),
        boxes=_counts(entries),
        next_steps=_first_steps(entries),
        facts=[("Command", command)],
        sections=[Shown(_table(entries))],
    ).html()


def _counts(entries: Sequence[Entry]) -> list[Fact]:
    audits = [entry.audit for entry in entries if entry.audit is not None]
    places = Counter(TITLES[a.answer.place] for a in audits if a.answer.place is not None)
    note = "what is not valid, or imported, is not audited"
    valid = Fact("Valid", f"{len(audits)} of {len(entries)}", note)
    if not places:
        return [Fact("Decided at", "no place", "every audited dataset passes"), valid]
    title, n = places.most_common(1)[0]
    return [Fact("Decided most often at", title, f"in {counted(n, 'dataset')}"), valid]


def _first_steps(entries: Sequence[Entry]) -> list[str]:
    """Return the first step of each dataset that does not pass, those that fail first."""
    steps = []
    for level in reversed(LEVELS[1:]):
        for entry in entries:
            known = [entry.why] if entry.audit is None else entry.audit.answer.next_steps
            if entry.level == level and known:
                steps.append(f"{entry.path}: {known[0]}")
    return steps or ["Nothing: use them as they are."]


def _table(entries: Sequence[Entry]) -> Part:
    left = len(entries) - _MAX_DATASETS
    more = f"and {count(left)} more, each with its own page" if left > 0 else ""
    head = ("dataset", "decided at", "bias of a mean by it", "train on it?")
    rows = [_row(entry) for entry in entries[:_MAX_DATASETS]]
    table = Table("Datasets", head, rows, frozenset({0, 1, 3}), more, narrow=True)
    lead = (
        "A dataset is decided at the worst of the seven places between its source and a batch; "
        "a bias is in standard deviations. Each valid dataset links to its own page."
    )
    return Part("datasets", "Datasets", Sentence(lead), [table])


def _row(entry: Entry) -> Row:
    look = LOOKS[entry.level]
    answer = f"{look.mark} {entry.answer}"
    path, audit, tone = Sentence(entry.path), entry.audit, look.tone
    if audit is None:
        return Row((path, "-", "-", answer), tone, entry.why, entry.page)
    notes, account = [audit.answer.sentence], audit.accounting
    if entry.about is not None:
        rows = f"{count(account.captured)} of {count(account.computed)} computed"
        notes += [f"{name}: {words}" for name, words in dataset_facts(entry.about, rows)]
    line = next((line for line in lines(audit) if line.decides), None)
    decided = ("-", "-") if line is None else (line.title, line.bias or "-")
    return Row((path, *decided, answer), tone, " ".join(notes), entry.page)
