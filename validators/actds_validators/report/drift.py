"""The parts on drift: measures of two sets of rows beside their floors.

A family of charts of the report. Numeric drift (the same tokens computed twice) and population
shift (other tokens) are two parts with words of their own.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import islice

from actds_validators.audit.result import Audit, Drift, DriftMeasure
from actds_validators.report.svg import WIDTH, Frame, Picture, axes, legend, span
from actds_validators.report.words import (
    Part,
    Row,
    Sentence,
    Table,
    count,
    first,
    many,
    number,
    p_value,
)

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
    first_words, second_words = section.first[:200], section.second[:200]
    lead = (
        f"{words.format(first=first_words, second=second_words)} {section.sentence} "
        f"{count(section.n_first)} against {many(section.n_second, 'row')}, "
        f"{'paired token by token' if section.paired else 'not paired'}."
    )
    if section.measures:
        lead += " The floor is the same measure between halves of one side, split by request."
    some, more = first(section.measures, _MAX_TABLE)
    common, own = _common([m.note for m in some])
    rows = [
        Row(
            (
                m.hook,
                m.name,
                number(m.value),
                "-" if m.floor is None else number(m.floor),
                _above(m),
                "-" if m.p is None else p_value(m.p),
                "-" if m.adjusted_p is None else p_value(m.adjusted_p),
                f"{count(m.n)} {m.unit}",
            ),
            note=note,
        )
        for m, note in zip(some, own, strict=True)
    ]
    head = (
        "hook",
        "measure",
        "value",
        "floor",
        "value / floor",
        "p",
        "adjusted p",
        "sample",
    )
    table = Table(f"{title}: measures", head, rows, frozenset({0, 1}), more)
    notes = [Sentence(f"All measures: {common}.")] if common else []
    return Part(section_name(kind, n), title, Sentence(lead), [table] if rows else [], notes)


def _common(notes: list[str]) -> tuple[str, list[str]]:
    """Return what all notes say alike, and what is left of each."""
    if len(notes) < 2:
        return "", notes
    said = [note.split("; ") for note in notes]
    common = [word for word in dict.fromkeys(said[0]) if word and all(word in s for s in said)]
    return "; ".join(common), ["; ".join(w for w in s if w not in common) for s in said]


def _above(m: DriftMeasure) -> str:
    return "-" if not m.floor else f"{number(m.value / m.floor)} ×"


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
        "Per measure and hook the value (striped) and below it the floor (plain): a value up to "
        "its floor is no drift.",
        WIDTH,
        y + 4,
    )
    legend(p, 220, 16, [("lost", "value"), ("floor", "floor")])
    for (label, members), top in zip(shown, tops, strict=True):
        values = [v for m in members for v in (m.value, m.floor) if v is not None]
        f = Frame(220, top + 16, 440, 30 * len(members), span(values), (0, 1))
        p.text(220, top + 6, label, kind="bold")
        axes(p, f, "", "", y_marks=[])
        for k, m in enumerate(members):
            at = f.top + 30 * k
            p.text(f.left - 10, at + 19, m.hook, "end", room=206)
            _bar(p, f, m.value, at + 4, "lost", f"{m.hook}, {label}: {number(m.value)}")
            if m.floor is not None:
                _bar(p, f, m.floor, at + 16, "floor", f"{m.hook}, floor: {number(m.floor)}")
            floor = "no floor" if m.floor is None else number(m.floor)
            p.text(f.right + 8, at + 19, f"{number(m.value)} / {floor}")
    return p


def _bar(p: Picture, f: Frame, value: float, y: float, kind: str, title: str) -> None:
    low, high = sorted((f.x(0), f.x(value)))
    p.box(low, y, max(high - low, 1.5 if value else 0), 10, kind, title)
