"""The report of an audit, as a page and on a terminal, and the index of several datasets.

First the answer: may I train on this, how far off can a mean be, and what is this dataset. The
sections that follow from the verdict alone are here: places, checks, limits of the evidence,
settings.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from actds.text import Line, counted, format_nbytes
from actds_validators.audit.place import LEVELS, TITLES, Level, Place
from actds_validators.audit.result import Accounting, Audit, Limits, Options
from actds_validators.pages import accounting, mechanism, missingness
from actds_validators.pages.answer import (
    AnswerPage,
    Part,
    SectionOf,
    brief_lines,
    cleaned,
    dataset_facts,
    listed,
    render_page,
    titled,
)
from actds_validators.pages.svg import WIDTH, FigureData, Picture
from actds_validators.pages.words import (
    LOOKS,
    Fact,
    Look,
    Row,
    Sentence,
    Table,
    against,
    count,
    first,
    interval,
    limit_of,
    measured,
    number,
    or_dash,
    percent,
    seconds,
    state_of,
)
from actds_validators.sections import About

_STATES: dict[str, tuple[str, Look]] = {
    "PASS": ("passes", LOOKS["PASS"]),
    "loaded": ("passes, loaded as said", Look("✓", "warn", "warn")),
    "accepted": ("accepted", Look("-", "dim", "dim")),
    "WARN": ("has limits", LOOKS["WARN"]),
    "INCONCLUSIVE": ("not known", LOOKS["INCONCLUSIVE"]),
    "FAIL": ("fails", LOOKS["FAIL"]),
}
"""Of each state of a place its words, and its look."""
_FILLS = {
    "source": "all",
    "cache": "reused",
    "rules": "filtered",
    "ends": "ended",
    "queues": "lost",
    "values": "floor",
    "identity": "none",
}
_BAR_PX = 26


@dataclass(frozen=True)
class PlaceLine:
    """A place as a line of a page: its name, what it did, and how it is judged."""

    title: str
    headline: str
    bias: str
    state: str
    look: Look
    fill: str
    decides: bool


def lines(audit: Audit) -> list[PlaceLine]:
    return [
        PlaceLine(
            TITLES[place.name],
            place.headline,
            _bias(place),
            *_STATES[_state(place)],
            f"i-{_FILLS[place.name]}",
            place.name == audit.answer.place,
        )
        for place in audit.places[: len(TITLES)]
    ]


def _state(place: Place) -> str:
    if place.level == "PASS":
        return "PASS"
    return "accepted" if place.accepted else "loaded" if place.loaded else place.level


def _bias(place: Place) -> str:
    if place.bias is None:
        return "not known"
    if place.level == "PASS" and not place.n:
        return ""
    sign = "up to " if place.bias_is == "at most" else "about "
    return f"{sign}{number(float(f'{place.bias:.2g}'))} SD"


def terminal_lines(audit: Audit) -> Iterator[Line]:
    """Yield a line for each place: what went there, and how far off a mean can be by it."""
    each = lines(audit)
    width = max((len(line.title) for line in each), default=0)
    for line in each:
        bias = f": a mean is off by {line.bias}" if line.bias not in ("", "not known") else ""
        more = {"passes, loaded as said": "; passes, loaded as said", "accepted": "; accepted"}
        text = f"  {line.look.mark} {line.title.ljust(width)}  {line.headline}{bias}"
        yield Line(text + more.get(line.state, ""), line.look.style)


def bar(audit: Audit) -> Picture | None:
    """Return all that the source and its answers would have given, divided by where it went.

    None where the accounting does not add up. In positions: a record that was never served counts
    as many as its prompt has tokens, one of unknown length as many as the mean.
    """
    parts = _parts(audit)
    whole = sum(n for _, n in parts)
    if not audit.places or not whole:
        return None
    summary = ", ".join(f"{name} {percent(n / whole)}" for name, n in parts if n)
    picture = Picture(
        "places",
        "Where rows went between the source and a batch",
        f"Of {count(whole)} positions: {summary}.",
        WIDTH,
        _BAR_PX,
        FigureData(("place", "positions"), list(parts)),
    )
    x = 0.0
    for name, n in parts:
        width = WIDTH * n / whole
        # What is too thin to see still shows as a line.
        drawn = max(width, 2.0) if n else 0.0
        kind = _FILLS.get(name, "stored")
        words = TITLES.get(name, name)  # type: ignore[call-overload]
        picture.box(min(x, WIDTH - drawn), 2, drawn, _BAR_PX - 4, kind, f"{words}: {count(n)}")
        x += width
    return picture


def _parts(audit: Audit) -> list[tuple[str, int]]:
    account, source = audit.accounting, audit.source
    never = 0
    if source is not None and source.records is not None:
        never = source.tokens - source.served_tokens
        measured = source.records - source.unmeasured
        if measured > 0:
            never += round(source.unmeasured * source.tokens / measured)
    bad = sum(p.n or 0 for p in audit.places if p.name == "values")
    return [
        ("source", never),
        ("cache", account.cache_ref),
        ("rules", account.filtered),
        ("ends", account.aborted + account.never_computed + account.undelivered),
        ("queues", account.dropped),
        ("values", bad),
        ("stored", max(0, account.captured - bad)),
    ]


def places_part(audit: Audit) -> Part | None:
    if not audit.places:
        return None
    rows = []
    for place, line in zip(audit.places, lines(audit), strict=False):
        worst = place.worst
        of_whom = "-"
        if worst is not None:
            of_whom = f"{worst.kind} {worst.label}: {percent(worst.n / worst.of)}"
        went = or_dash(place.n, count)
        if place.n is not None and place.of:
            went = f"{count(place.n)} of {count(place.of)} {place.unit}"
        state = f"{line.look.mark} {line.state}" + (", decided" if line.decides else "")
        cells = (line.title, went, of_whom, line.bias or "-", state)
        note = f"{place.sentence} Limit: {place.limit}."
        rows.append(Row(cells, line.look.tone, note))
    table = Table(
        "Places between the source and a batch",
        ("place", "went there", "of whom most", "bias of a mean", ""),
        rows,
        frozenset({0, 1, 2, 3, 4}),
    )
    lead = (
        "Every place where rows go between the source and a training batch, in the order in which "
        "they pass. A bias is that of a mean over rows, in standard deviations: up to, for any "
        "mean there is; about, as estimated."
    )
    return Part("places", "Seven places", lead, [table])


def biases(audit: Audit) -> list[Fact]:
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
    n = audit.accounting.filtered
    return f"; {n:,} positions that a rule left out are not compared" if n else ""


def _estimated(audit: Audit) -> Fact:
    title = "Largest estimated bias"
    if not audit.accounting.is_sound:
        return Fact(title, "not estimated", "the accounting does not match", is_known=False)
    if not audit.accounting.loss_share:
        return Fact(title, "0 SD", "no rows were lost" + _chosen(audit))
    compared = [
        (d.covariate.label, d.before_weighting, d.at_once)
        for d in (audit.missingness.differences if audit.missingness else ())
        if d.before_weighting and d.covariate.group != "system"
    ]
    if not compared:
        return Fact(title, "not estimated", "no mean could be compared", is_known=False)
    label, largest, at_once = max(compared, key=lambda entry: abs(entry[1].value))
    tested = "the tested mean"
    if len(compared) > 1:
        tested = f"largest of {count(len(compared))} tested means"
        tested += ", for all of which the interval holds at once" if at_once else ""
    shown = at_once or largest
    span = f"{100 * shown.confidence:g} % CI {interval(shown)}"
    return Fact(title, f"{_three(largest.value)} SD", f"{label}; {span}; {tested}")


def _three(value: float) -> str:
    return number(float(f"{value:.3g}"))


def _stored_rows(account: Accounting) -> str:
    rows = f"{count(account.captured)} of {count(account.computed)} computed"
    if not account.thinned:
        return rows
    share = percent(account.thinned / (account.computed + account.thinned))
    return f"{rows}, beside {count(account.thinned)} that were not drawn ({share})"


def facts(audit: Audit, known: About | None) -> list[tuple[str, str]]:
    rows = _stored_rows(audit.accounting)
    if known is None:
        return [("Dataset", audit.dataset), ("Rows", rows)]
    return [*dataset_facts(known, rows), ("Command", known.command)]


def check_part(audit: Audit) -> Part:
    verdict = audit.verdict
    numbers = [verdict.deciding, *(n for n in verdict.numbers if n != verdict.deciding)]
    some, more = first(numbers)
    rows = []
    for n in some:
        state, mark = state_of(n, verdict.level), ", decided" if n is verdict.deciding else ""
        words = f"{state.mark} {state.words}{mark}"
        rows.append(Row((n.name, measured(n.value, n.unit), limit_of(n), words), state.tone))
    table = Table("Every number with its limit", ("number", "value", "limit", ""), rows,
                  frozenset({0, 3}), more, narrow=True)  # fmt: skip
    lead = (
        "The first number decided the verdict. SD is the standard deviation over all computed "
        "tokens."
    )
    return Part("checks", "Checks", lead, [table])


def evidence_part(audit: Audit) -> Part | None:
    """Return what was tested, what could not be, and what no audit of this dataset can detect."""
    missing = audit.missingness
    tested, untested = (missing.could_ask, missing.could_not_ask) if missing else ([], [])
    lists = {"Tested": tested, "Not tested": untested, "Cannot be detected": audit.would_not_notice}
    notes = []
    for title, sentences in lists.items():
        some, more = first(sentences, 16)
        notes += [f"{title}: {words}" for words in [*some, *([more] if more else [])]]
    if not notes:
        return None
    lead = (
        "What this audit tested, what it could not test, and what it cannot detect. These are "
        "limits of the evidence, not faults of the data."
    )
    brief = [Line(f"  - {note}", "dim") for note in notes]
    evidence = notes
    return Part("evidence", "Limits of the evidence", lead, (), evidence, brief)


def settings_part(audit: Audit) -> Part:
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
    return Part("settings", "Settings and digests", lead, tables)


def _options(options: Options) -> list[Row]:
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


SECTIONS = (
    SectionOf(places_part),
    accounting.SECTIONS[0],
    SectionOf(check_part),
    *accounting.SECTIONS[1:],
    *missingness.SECTIONS,
    *mechanism.SECTIONS,
    SectionOf(evidence_part),
    SectionOf(settings_part),
)
"""Sections in the order of the report; each module has its own, with their charts."""


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
        facts=facts(audit, about),
        value=measured(deciding.value, deciding.unit),
        held=f"{against(deciding)}: {state.words}" if deciding.limit is not None else "",
        sections=_shown(audit),
        absent=_absent(audit),
    )


def _shown(audit: Audit) -> list[Part]:
    return [
        replace(part, pictures=[p for draw in section.charts if (p := draw(audit)) is not None])
        for section in SECTIONS
        if (part := section.part(audit)) is not None
    ]


def _absent(audit: Audit) -> list[tuple[str, str]]:
    reasons: dict[str, list[str]] = {}
    for section in SECTIONS:
        if section.title and section.part(audit) is None:
            why = section.absent
            if not audit.accounting.is_sound:
                why = "there are accounting mismatches, so nothing can be estimated"
            elif section.of_losses:
                why = _without_losses(section.title, audit.accounting) or why
            reasons.setdefault(why, []).append(section.title)
    return [(", ".join(titles), f"{why}.") for why, titles in reasons.items()]


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
        sections=[_table(entries)],
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
    rows = [_dataset_row(entry) for entry in entries[:_MAX_DATASETS]]
    table = Table("Datasets", head, rows, frozenset({0, 1, 3}), more, narrow=True)
    lead = (
        "A dataset is decided at the worst of the seven places between its source and a batch; "
        "a bias is in standard deviations. Each valid dataset links to its own page."
    )
    return Part("datasets", "Datasets", lead, [table])


def _dataset_row(entry: Entry) -> Row:
    look = LOOKS[entry.level]
    answer = f"{look.mark} {entry.answer}"
    path, audit, tone = Sentence(entry.path), entry.audit, look.tone
    if audit is None:
        return Row((path, "-", "-", answer), tone, entry.why, entry.page)
    notes, account = [audit.answer.sentence], audit.accounting
    if entry.about is not None:
        rows = _stored_rows(account)
        notes += [f"{name}: {words}" for name, words in dataset_facts(entry.about, rows)]
    line = next((line for line in lines(audit) if line.decides), None)
    decided = ("-", "-") if line is None else (line.title, line.bias or "-")
    return Row((path, *decided, answer), tone, " ".join(notes), entry.page)
