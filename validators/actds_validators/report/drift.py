"""The parts on drift: measures of two sets of rows beside their floors.

A family of charts of the report. Numeric drift (the same tokens computed twice) and population
shift (other tokens) are two parts with words of their own.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import islice

from actds.text import counted
from actds_validators.audit.result import Audit, Drift, DriftMeasure
from actds_validators.report.svg import WIDTH, Frame, Picture, axes, legend, span
from actds_validators.report.words import (
    Columns,
    Part,
    Sentence,
    count,
    number,
    or_dash,
    p_value,
    table_of,
)

_PAIRED = {
    "token": "paired token by token",
    "position": "paired by request and position",
    "unpaired": "weighted to equal tokens and positions",
}
_MAX_MEASURES, _MAX_HOOKS, _MAX_TABLE = 8, 8, 40
KINDS = {
    "numeric drift": (
        "Numeric drift",
        "The same tokens were computed twice, as {first} and as {second}: differences come from "
        "the arithmetic.",
    ),
    "population shift": (
        "Population shift",
        "The tokens of {first} and of {second} are different: differences come from the text that "
        "was served, and from the arithmetic only in part.",
    ),
}


def section_name(kind: str, n: int) -> str:
    """Return the name of the section on a comparison."""
    return f"{kind.replace(' ', '-')}-{n}"


def _comparison(audit: Audit, kind: str, n: int) -> Drift | None:
    return next(islice((d for d in audit.drift if d.kind == kind), n, None), None)


def _interval(one: DriftMeasure) -> str:
    if one.low is None or one.high is None:
        return "-"
    return f"{number(one.low)} to {number(one.high)}"


_MEASURES: Columns[DriftMeasure] = (
    ("hook", lambda m: m.hook),
    ("measure", lambda m: m.name),
    ("value", lambda m: number(m.value)),
    ("95 % interval", _interval),
    ("floor", lambda m: or_dash(m.floor, number)),
    ("limit", lambda m: or_dash(m.limit, number)),
    ("found", lambda m: m.outcome or "-"),
    ("adjusted p", lambda m: or_dash(m.adjusted_p, p_value)),
    ("sample", lambda m: f"{count(m.n)} {m.unit}"),
)


def drift_part(audit: Audit, kind: str, n: int) -> Part | None:
    """Return the words and measures of a comparison.

    Args:
        audit: the result.
        kind: of the comparison, a key of ``KINDS``.
        n: number among those of its kind, from 0.
    """
    section = _comparison(audit, kind, n)
    if section is None:
        return None
    title, words = KINDS[kind]
    first_words, second_words = section.first[:120], section.second[:120]
    lead = (
        f"{words.format(first=first_words, second=second_words)} {section.sentence} "
        f"{count(section.n_first)} against {counted(section.n_second, 'row')}, "
        f"{_PAIRED[section.pairing]}."
    )
    if section.measures:
        lead += " The floor is the same measure between halves of the first side"
        lead += ", or of tokens computed twice." if section.paired else "."
    common = _common([m.note for m in section.measures[:_MAX_TABLE]])
    tables = table_of(
        f"{title}: measures", _MEASURES, section.measures, frozenset({0, 1}),
        room=_MAX_TABLE, note=lambda m: "; ".join(w for w in m.note.split("; ") if w not in common),
    )  # fmt: skip
    notes = [Sentence(f"All measures: {'; '.join(common)}.")] if common else []
    return Part(section_name(kind, n), title, Sentence(lead), tables, notes)


def _common(notes: list[str]) -> list[str]:
    """Return what all notes say alike; nothing of a single one."""
    said = [note.split("; ") for note in notes]
    if len(said) < 2:
        return []
    return [word for word in dict.fromkeys(said[0]) if word and all(word in s for s in said)]


def drift_bars(audit: Audit, kind: str, n: int) -> Picture | None:
    """Return one panel per measure: the value and its floor, side by side per hook."""
    section = _comparison(audit, kind, n)
    if section is None or not section.measures:
        return None
    panels: dict[str, list[DriftMeasure]] = defaultdict(list)
    for measure in section.measures:
        panels[measure.name].append(measure)
    shown = [(label, members[:_MAX_HOOKS]) for label, members in panels.items()][:_MAX_MEASURES]
    tops, y = [], 40.0
    for _, members in shown:
        tops.append(y)
        y += 62 + 30 * len(members)
    p = Picture(
        f"{section_name(kind, n)}-bars",
        f"{section.kind.capitalize()} beside its floor",
        "Per measure and hook the value (striped) and below it the floor (plain).",
        WIDTH,
        y + 4,
    )
    legend(p, 170, 16, [("lost", "value"), ("floor", "floor")])
    for (label, members), top in zip(shown, tops, strict=True):
        values = [v for m in members for v in (m.value, m.floor) if v is not None]
        f = Frame(170, top + 16, 490, 30 * len(members), span(values), (0, 1))
        p.text(170, top + 6, label, kind="bold")
        axes(p, f, "", "", y_marks=[])
        for k, m in enumerate(members):
            at = f.top + 30 * k
            p.label(f.left - 10, at + 19, m.hook, 154)
            _bar(p, f, m.value, at + 4, "lost", f"{m.hook}, {label}: {number(m.value)}")
            if m.floor is not None:
                _bar(p, f, m.floor, at + 16, "floor", f"{m.hook}, floor: {number(m.floor)}")
            floor = "no floor" if m.floor is None else number(m.floor)
            p.text(f.right + 8, at + 19, f"{number(m.value)} / {floor}")
    return p


def _bar(p: Picture, f: Frame, value: float, y: float, kind: str, title: str) -> None:
    low, high = sorted((f.x(0), f.x(value)))
    p.box(low, y, max(high - low, 1.5 if value else 0), 10, kind, title)
