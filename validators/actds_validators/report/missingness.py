"""The part on missingness: forest plots and the table of differences.

A family of charts of the report; from the result's section of the same name.
"""

from __future__ import annotations

from collections.abc import Sequence

from actds_validators.audits.result import (
    Difference,
    Estimate,
    Limits,
    Missingness,
)
from actds_validators.report.axes import Frame, axes, ticks
from actds_validators.report.bound import bound_curve
from actds_validators.report.parts import Part, Row, Table, first
from actds_validators.report.strata import heat_map
from actds_validators.report.svg import WIDTH, Picture, text_width
from actds_validators.report.words import (
    GROUPS,
    Sentence,
    estimate,
    number,
    short,
    signed,
)

__all__ = ["missingness_part", "worst_first"]

_MAX_FOREST = 960  # pixels of rows: a picture of so many fits on a printed page
_SERIES = (
    ("smd", "lost against all", "lost"),
    ("before_weighting", "stored against all", "stored"),
    ("after_weighting", "stored, weighted", "reused"),
)


def missingness_part(section: Missingness, limits: Limits) -> Part:
    """Return the part on missingness."""
    lead = (
        "Standardised mean differences (SMD): how far the mean of the lost tokens lies from the "
        "mean of all computed tokens, in standard deviations of all, with intervals from a block "
        f"jackknife. Within ±{number(limits.equivalence)} two means count as equal; beyond "
        f"±{number(limits.serious)} the difference is serious."
    )
    pictures: list[Picture] = []
    for group in GROUPS:
        members = [d for d in section.differences if d.covariate.group == group]
        if members:
            pictures.append(forest(group, members, limits))
    if any(d.strata for d in section.differences):
        pictures.append(heat_map(worst_first(section.differences)))
    pictures.append(bound_curve(section.bound, limits))
    notes = [
        *(Sentence(f"Could be asked: {question}") for question in section.could_ask[:20]),
        *(Sentence(f"Could not be asked: {question}") for question in section.could_not_ask[:20]),
    ]
    tables = [_table(section.differences)] if section.differences else []
    return Part("missingness", "Missingness", Sentence(lead), pictures, tables, notes)


def worst_first(differences: Sequence[Difference]) -> list[Difference]:
    """Return the differences, the largest first."""
    return sorted(differences, key=lambda d: -abs(d.smd.value))


def _table(differences: list[Difference]) -> Table:
    some, more = first(worst_first(differences))
    rows = [
        Row(
            (
                d.covariate.label,
                d.covariate.group,
                number(d.mean_all),
                number(d.mean_lost),
                d.covariate.unit or "-",
                estimate(d.smd),
                "-" if d.total_variation is None else number(d.total_variation),
                "-" if d.jensen_shannon is None else number(d.jensen_shannon),
            )
        )
        for d in some
    ]
    head = (
        "covariate",
        "kind",
        "mean of all",
        "mean of lost",
        "unit",
        "SMD [95 %]",
        "total variation",
        "Jensen–Shannon distance",
    )
    return Table("Differences, the largest first", head, rows, frozenset({0, 1, 4}), more)


def forest(group: str, differences: list[Difference], limits: Limits) -> Picture:
    """Return the SMDs of a group of covariates with their intervals, beside the limits.

    Args:
        group: of all the covariates, a key of ``GROUPS``.
        differences: of that group; the largest are drawn, as many as fit on a printed page.
        limits: settings.
    """
    series = [s for s in _SERIES if any(getattr(d, s[0]) for d in differences)]
    line = 13.0 * len(series) + 11
    shown, more = first(worst_first(differences), int(_MAX_FOREST / line))
    height = line * len(shown)
    p = Picture(
        f"forest-{group}",
        f"Standardised mean differences: {GROUPS[group]}",
        "Per covariate a mark with its 95 % interval; the thicker part is the 90 % interval of the "
        "equivalence test. The shaded band counts as equal. An arrow: the interval goes on. "
        "Each group of covariates has its own scale.",
        WIDTH,
        92 + height,
    )
    f = Frame(270, 44, 490, height, _forest_range(shown, limits), (0, 1))
    p.text(12, 35, GROUPS[group], kind="bold")
    _forest_legend(p, f, series)
    low, high = f.x(-limits.equivalence), f.x(limits.equivalence)
    p.box(low, f.top, high - low, f.height, "band", f"±{number(limits.equivalence)}: equal")
    marks = [(value, short(value)) for value in ticks(*f.x_range, 6)]
    for value, _ in marks:
        p.line(f.x(value), f.top, f.x(value), f.bottom, "grid")
    for edge in (-limits.serious, limits.serious):
        p.line(f.x(edge), f.top, f.x(edge), f.bottom, "limit", f"serious: {number(edge)}")
    p.line(f.x(0), f.top, f.x(0), f.bottom, "axis")
    label = f"SMD, standard deviations of all{'; ' + more if more else ''}"
    axes(p, f, label, "", x_marks=marks, y_marks=[])
    for row, d in enumerate(shown):
        y = f.top + line * row
        p.text(f.left - 10, y + line / 2 + 4, d.covariate.label, "end", room=256)
        for k, (name, words, kind) in enumerate(series):
            found: Estimate | None = getattr(d, name)
            if found is not None:
                inner = d.equivalence if name == "smd" else None
                at = y + 12 + 13 * k
                _whisker(p, f, at, found, inner, kind, f"{d.covariate.label}, {words}")
    return p


def _forest_legend(p: Picture, f: Frame, series: Sequence[tuple[str, str, str]]) -> None:
    x = f.left
    for _, words, kind in series:
        _mark(p, x + 6, 12, kind, "")
        p.text(x + 18, 16, words)
        x += 34 + text_width(words)
    x = f.left
    p.box(x, 25, 14, 11, "band")
    p.text(x + 20, 35, "counts as equal")
    p.line(x + 156, 24, x + 156, 37, "limit")
    p.text(x + 164, 35, "serious")
    p.text(f.right + 12, 35, "SMD of lost", kind="dim")


def _mark(p: Picture, x: float, y: float, kind: str, title: str) -> None:
    draw = {"lost": p.square, "stored": p.dot, "reused": p.diamond}[kind]
    draw(x, y, f"mark {kind}-mark", title)


def _whisker(
    p: Picture, f: Frame, y: float, value: Estimate, inner: Estimate | None, kind: str, place: str
) -> None:
    title = f"{place}: {estimate(value)}"
    low, high = f.x_range
    p.line(f.x(value.low), y, f.x(value.high), y, f"whisker {kind}-line")
    if inner is not None:
        p.line(f.x(inner.low), y, f.x(inner.high), y, f"thick {kind}-line")
    for end, beyond, step in ((f.left, value.low < low, 6), (f.right, value.high > high, -6)):
        if beyond:
            p.polygon([(end, y), (end + step, y - 4), (end + step, y + 4)], f"mark {kind}-mark")
    _mark(p, f.x(value.value), y, kind, title)
    if kind == "lost":
        p.text(f.right + 12, y + 4, signed(value.value))


def _forest_range(differences: list[Difference], limits: Limits) -> tuple[float, float]:
    """Return a range that holds limits and marks; an interval of no information may leave it."""
    marks = [d.smd.value for d in differences]
    reach = max(limits.serious, limits.equivalence, *(abs(m) for m in marks)) * 1.15
    ends = [abs(e) for d in differences for e in (d.smd.low, d.smd.high)]
    reach = max(reach, min(max(ends), 3 * reach))
    return (-reach, reach)
