"""Forest plots: differences of the covariates with their intervals, one row each.

Charts of the part on missingness: what was lost against all, and what is stored, before and after
weighting, against all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actds_validators.audit.result import Difference, Estimate, Limits
from actds_validators.report.axes import Frame, axes, ticks
from actds_validators.report.parts import first
from actds_validators.report.svg import WIDTH, Picture, text_width
from actds_validators.report.words import GROUPS, estimate, number, short, signed

__all__ = ["forest", "stored_bias", "worst_first"]

_MAX_ROWS = 960  # pixels of rows: a picture of so many fits on a printed page


@dataclass(frozen=True)
class _Series:
    """A mark in every row: a field of ``Difference``, what it is, its class."""

    name: str
    words: str
    kind: str

    def of(self, difference: Difference) -> Estimate | None:
        found: Estimate | None = getattr(difference, self.name)
        return found


_LOST = _Series("smd", "lost against all", "lost")
_STORED = _Series("before_weighting", "stored against all", "stored")
_WEIGHTED = _Series("after_weighting", "stored, weighted, against all", "reused")


def worst_first(differences: Sequence[Difference]) -> list[Difference]:
    """Return the differences, the largest first."""
    return sorted(differences, key=lambda d: -abs(d.smd.value))


def forest(group: str, differences: Sequence[Difference], note: str = "") -> Picture:
    """Return the SMDs of a group of covariates with their intervals.

    Args:
        group: of all the covariates, a key of ``GROUPS``.
        differences: of that group; the largest are drawn, as many as fit on a printed page.
        note: what else the description says.
    """
    p, f, shown, more = _frame(
        f"forest-{group}",
        f"Standardised mean differences of the lost tokens: {GROUPS[group]}",
        "Per covariate a mark with its 95 % interval. An arrow: the interval goes on. "
        f"Each group of covariates has its own scale.{note}",
        worst_first(differences),
        [_LOST],
    )
    p.text(12, 35, GROUPS[group], kind="bold")
    p.text(f.right + 12, 35, "SMD", kind="dim")
    _rows(p, f, shown, [_LOST], f"SMD, standard deviations of all{more}")
    return p


def stored_bias(differences: Sequence[Difference], limits: Limits, note: str = "") -> Picture:
    """Return the bias of the stored rows, before and after weighting, on a scale of its own.

    Args:
        differences: of all groups, of which the largest are drawn, the first group first.
        limits: settings.
        note: what else the description says.
    """
    having = [d for d in differences if d.before_weighting]
    series = [s for s in (_STORED, _WEIGHTED) if any(s.of(d) for d in having)]
    order = list(GROUPS)
    p, f, shown, more = _frame(
        "stored-bias",
        "Bias of the stored rows, before and after weighting",
        "Per covariate how far the mean of the stored rows, and of the weighted ones, lies from "
        "that of all, with its 95 % interval; the thicker part is the 90 % interval of the "
        f"equivalence test, which has to lie within ±{number(limits.negligible_bias)}. An arrow: "
        f"the interval goes on. The scale is that of this plot alone.{note}",
        sorted(having, key=lambda d: -max(abs(e.value) for s in series if (e := s.of(d)))),
        series,
    )
    shown = sorted(shown, key=lambda d: order.index(d.covariate.group))
    if limits.serious <= f.x_range[1]:
        for edge in (-limits.serious, limits.serious):
            said = f"serious: {number(edge)}"
            p.line(f.x(edge), f.top, f.x(edge), f.bottom, "limit", said)
        p.line(f.left + 4, 24, f.left + 4, 37, "limit")
        p.text(f.left + 12, 35, f"serious, with a rejected test: ±{number(limits.serious)}")
    else:
        words = f"serious, with a rejected test: beyond ±{number(limits.serious)}, not in the plot"
        p.text(f.left, 35, words, kind="dim")
    p.text(f.right + 12, 35, "bias", kind="dim")
    _rows(p, f, shown, series, f"bias, standard deviations of all{more}")
    return p


def _frame(
    name: str,
    title: str,
    description: str,
    differences: list[Difference],
    series: Sequence[_Series],
) -> tuple[Picture, Frame, list[Difference], str]:
    """Return a picture with its legend, its frame, the rows that it has room for, and the rest."""
    line = 13.0 * len(series) + 11
    shown, more = first(differences, int(_MAX_ROWS / line))
    height = line * len(shown)
    p = Picture(name, title, description, WIDTH, 92 + height)
    f = Frame(270, 44, 490, height, _range(shown, series), (0, 1))
    x = f.left
    for one in series:
        _mark(p, x + 6, 12, one.kind, "")
        p.text(x + 18, 16, one.words)
        x += 34 + text_width(one.words)
    return p, f, shown, f"; {more}" if more else ""


def _rows(
    p: Picture, f: Frame, shown: Sequence[Difference], series: Sequence[_Series], label: str
) -> None:
    marks = [(value, short(value)) for value in ticks(*f.x_range, 6)]
    for value, _ in marks:
        p.line(f.x(value), f.top, f.x(value), f.bottom, "grid")
    p.line(f.x(0), f.top, f.x(0), f.bottom, "axis")
    axes(p, f, label, "", x_marks=marks, y_marks=[])
    line = f.height / max(1, len(shown))
    for row, d in enumerate(shown):
        y = f.top + line * row
        p.text(f.left - 10, y + line / 2 + 4, d.covariate.label, "end", room=256)
        for k, one in enumerate(series):
            found = one.of(d)
            if found is not None:
                inner = d.equivalence if one is _STORED else None
                at = y + 12 + 13 * k
                _whisker(p, f, at, found, inner, one.kind, f"{d.covariate.label}, {one.words}")
                p.text(f.right + 12, at + 4, signed(found.value, three=one is not _LOST))


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


def _range(differences: Sequence[Difference], series: Sequence[_Series]) -> tuple[float, float]:
    """Return a range that holds the marks; an interval of no information may leave it."""
    drawn = [e for d in differences for s in series if (e := s.of(d))]
    reach = max(1e-9, *(abs(e.value) for e in drawn)) * 1.15
    ends = [abs(end) for e in drawn for end in (e.low, e.high)]
    reach = max(reach, min(max(ends), 3 * reach))
    return (-reach, reach)
