"""The first screen: may I train on this, how far off can a mean be, and what is this dataset.

With the sections that follow from the verdict alone: checks, limits of the evidence, settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from actds.text import Line, format_nbytes
from actds_validators.audit.place import TITLES, LeftOut, LengthBand, Place, SourceAccount
from actds_validators.audit.result import Audit, Limits, Number, Options
from actds_validators.pages.answer import dataset_facts
from actds_validators.pages.svg import WIDTH, FigureData, Frame, Picture, axes, legend
from actds_validators.pages.words import (
    LOOKS,
    Columns,
    Fact,
    Look,
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
    or_dash,
    percent,
    seconds,
    short,
    state_of,
    table_of,
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
_MAX_LENGTHS = 14
"""Bands of a chart, those of most tokens: it has to fit on a printed page."""


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
    return Part("places", "Seven places", Sentence(lead), [table])


def source_part(audit: Audit) -> Part | None:
    source = audit.source
    if source is None or source.records is None:
        return None
    left_out: Columns[LeftOut] = (
        ("records", lambda item: f"{item.what}: {item.reason}"),
        ("number", lambda item: count(item.n)),
        ("prompt tokens", lambda item: or_dash(item.n_tokens, count)),
    )
    bands: Columns[LengthBand] = (
        ("tokens of the prompt", _band),
        ("records", lambda item: count(item.records)),
        ("served", lambda item: count(item.served)),
        ("share served", lambda item: percent(item.served / item.records)),
        ("share of the source's tokens", lambda item: percent(item.tokens / source.tokens)),
        ("share of the served tokens", lambda item: _share(item, source)),
    )
    tables = table_of("Records that were never served", left_out, source.left_out)
    tables += table_of("Lengths of the prompts, source and served", bands, source.lengths)
    ended = (
        f" Ended before their source: {', '.join(source.interrupted[:5])}."
        if source.interrupted
        else ""
    )
    shift = ""
    if source.length_shift is not None:
        shift = (
            f" The length of the prompt that a token is of: served against source, total variation "
            f"{number(source.length_shift)}."
        )
    lead = (
        f"{count(source.records)} records were read, {count(source.served)} served: "
        f"{count(source.served_tokens)} of {count(source.tokens)} prompt tokens.{shift}{ended}"
    )
    return Part("source", "Source", Sentence(lead), tables)


def _band(band: LengthBand) -> str:
    return f"{band.low:,} to {band.high:,}" if band.high > band.low else f"{band.low:,}"


def _share(band: LengthBand, source: SourceAccount) -> str:
    return percent(band.served_tokens / source.served_tokens) if source.served_tokens else "-"


def lengths(audit: Audit) -> Picture | None:
    """Return the share of prompt tokens by length of the prompt: of the source, and as served."""
    source = audit.source
    if source is None or not source.lengths or not source.served_tokens:
        return None
    largest = sorted(source.lengths, key=lambda band: -band.tokens)[:_MAX_LENGTHS]
    bands, room = sorted(largest, key=lambda band: band.low), 26.0
    picture = Picture(
        "lengths",
        "Length of the prompt that a token is of, source and served",
        "Share of all prompt tokens in prompts of a length; a difference of the two bars is what "
        "skipping changed.",
        WIDTH,
        74 + 2 * room * len(bands),
        FigureData(
            ("tokens at least", "tokens at most", "tokens of the source", "served tokens"),
            [(b.low, b.high, b.tokens, b.served_tokens) for b in bands],
        ),
    )
    legend(picture, 170, 16, [("all", "source"), ("stored", "served")])
    shares = [
        (band, band.tokens / source.tokens, band.served_tokens / source.served_tokens)
        for band in bands
    ]
    most = max(max(a, b) for _, a, b in shares)
    frame = Frame(170, 30, 560, 2 * room * len(shares), (0, most), (0, 1))
    axes(picture, frame, "share of prompt tokens", "", x_text=lambda x: short(100 * x) + " %",
         y_marks=[])  # fmt: skip
    for k, (band, of_source, of_served) in enumerate(shares):
        top = frame.top + 2 * room * k
        picture.label(frame.left - 10, top + room, f"{_band(band)} tokens", 154)
        for row, (value, kind, name) in enumerate(
            ((of_source, "all", "source"), (of_served, "stored", "served"))
        ):
            width = frame.x(value) - frame.left
            words = f"{name}, {_band(band)} tokens: {percent(value)}"
            picture.box(frame.left, top + 4 + row * 22, width, 18, kind, words)
            picture.text(frame.left + width + 6, top + 18 + row * 22, percent(value))
    return picture


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
