"""The part on missingness: forest plot, loss per stratum as a heat map, the bound.

A family of charts of the report; from the result's section of the same name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from actds_validators.audits.result import (
    Bound,
    Covariate,
    Difference,
    Estimate,
    Limits,
    Missingness,
)
from actds_validators.report.axes import Frame, axes, ticks
from actds_validators.report.parts import Part, Row, Table, first
from actds_validators.report.shades import shade, shade_scale
from actds_validators.report.svg import Picture, text_width
from actds_validators.report.words import (
    GROUPS,
    Sentence,
    clean,
    count,
    estimate,
    number,
    percent,
    short,
)

__all__ = ["missingness_part", "worst_first"]

_MAX_FOREST, _MAX_HEAT, _MAX_STRATA = 40, 18, 10
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
        f"jackknife. Within ±{number(limits.equivalence)} two means count as equal. Stored rows "
        f"against all: that is their bias, and serious beyond ±{number(limits.serious)}."
    )
    pictures: list[Picture] = []
    if section.differences:
        pictures.append(forest(section.differences, limits))
    if any(d.strata for d in section.differences):
        pictures.append(heat_map(section.differences))
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


def forest(differences: list[Difference], limits: Limits) -> Picture:
    """Return the SMDs with their intervals, in groups, beside the limits."""
    shown, more = first(worst_first(differences), _MAX_FOREST)
    series = [s for s in _SERIES if any(getattr(d, s[0]) for d in shown)]
    groups = [(g, [d for d in shown if d.covariate.group == g]) for g in GROUPS]
    groups = [(g, members) for g, members in groups if members]
    line = 13.0 * len(series) + 11
    height = sum(24 + line * len(members) for _, members in groups)
    p = Picture(
        "forest",
        "Standardised mean differences, before and after weighting",
        "Per covariate a mark with its 95 % interval; the thicker part is the 90 % interval of the "
        "equivalence test. The shaded band counts as equal. An arrow: the interval goes on.",
        760,
        96 + height,
    )
    f = Frame(236, 44, 430, height, _forest_range(shown, limits), (0, 1))
    _forest_legend(p, series)
    low, high = f.x(-limits.equivalence), f.x(limits.equivalence)
    p.box(low, f.top, high - low, f.height, "band", f"±{number(limits.equivalence)}: equal")
    for value in ticks(*f.x_range, 6):
        p.line(f.x(value), f.top, f.x(value), f.bottom, "grid")
    for edge in (-limits.serious, limits.serious):
        said = f"serious for stored rows: {number(edge)}"
        p.line(f.x(edge), f.top, f.x(edge), f.bottom, "limit", said)
    p.line(f.x(0), f.top, f.x(0), f.bottom, "axis")
    label = f"SMD, standard deviations of all{'; ' + more if more else ''}"
    axes(p, f, label, "", y_marks=[])
    y = f.top
    for group, members in groups:
        p.text(12, y + 17, GROUPS[group], kind="bold")
        y += 24
        for d in members:
            p.text(f.left - 10, y + line / 2 + 4, d.covariate.label, "end", room=214)
            for k, (name, words, kind) in enumerate(series):
                found: Estimate | None = getattr(d, name)
                if found is not None:
                    inner = d.equivalence if name == "smd" else None
                    at = y + 12 + 13 * k
                    _whisker(p, f, at, found, inner, kind, f"{d.covariate.label}, {words}")
            y += line
    return p


def _forest_legend(p: Picture, series: Sequence[tuple[str, str, str]]) -> None:
    x = 236.0
    for _, words, kind in series:
        _mark(p, x + 6, 12, kind, "")
        p.text(x + 18, 16, words)
        x += 34 + text_width(words)
    p.box(236, 25, 14, 11, "band")
    p.text(256, 35, "counts as equal")
    p.line(392, 24, 392, 37, "limit")
    p.text(400, 35, "serious for stored rows")


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
        p.text(
            f.right + 12,
            y + 4,
            f"{value.value:+.3f}" if abs(value.value) < 100 else short(value.value),
        )


def _forest_range(differences: list[Difference], limits: Limits) -> tuple[float, float]:
    """Return a range that holds limits and marks; an interval of no information may leave it."""
    marks = [d.smd.value for d in differences]
    reach = max(limits.serious, limits.equivalence, *(abs(m) for m in marks)) * 1.15
    ends = [abs(e) for d in differences for e in (d.smd.low, d.smd.high)]
    reach = max(reach, min(max(ends), 3 * reach))
    return (-reach, reach)


def heat_map(differences: list[Difference]) -> Picture:
    """Return the loss rate per stratum, one row a covariate, shaded from none to the largest."""
    having = [d for d in worst_first(differences) if d.strata]
    shown, more = first(having, _MAX_HEAT)
    strata = [s for d in shown for s in d.strata[:_MAX_STRATA]]
    top = max([s.rate.value for s in strata], default=0.0)
    p = Picture(
        "heat-map",
        "Loss rate per stratum",
        "One row a covariate; each cell names its stratum and the share of its computed tokens "
        "that was lost. Darker cells lost less, lighter cells more; the numbers say the same.",
        760,
        62 + 42 * len(shown) + (18 if more else 0),
    )
    shade_scale(p, 220, top)
    for row, d in enumerate(shown):
        y = 48.0 + 42 * row
        p.text(210, y + 15, d.covariate.label, "end", room=206)
        p.text(210, y + 30, _unit(d.covariate), "end", "dim", room=206)
        columns = d.strata[:_MAX_STRATA]
        width = 536.0 / len(columns)
        for column, s in enumerate(columns):
            x = 220 + width * column
            step = shade(s.rate.value, top)
            title = (
                f"{clean(s.label, 50)}: {percent(s.rate.value)} of {count(s.n)} lost, interval "
                f"{percent(s.rate.low)} to {percent(s.rate.high)}"
            )
            p.box(x, y, width - 2, 38, f"shade{step}", title)
            ink = f"ink{step}"
            p.text(x + width / 2 - 1, y + 15, s.label, "middle", ink, room=width - 6)
            p.text(x + width / 2 - 1, y + 31, percent(s.rate.value), "middle", ink, room=width - 6)
    if more:
        p.text(380, p.height - 8, more, "middle", "dim")
    return p


def _unit(covariate: Covariate) -> str:
    return f"{covariate.group}, {covariate.unit}" if covariate.unit else covariate.group


def bound_curve(bound: Bound, limits: Limits) -> Picture:
    """Return the worst bias of any mean against the share lost, with the dataset's point."""
    p = Picture(
        "bound",
        "Worst-case bias of any mean over rows",
        "The bound sqrt(loss / (1 - loss)) in standard deviations of all rows against the share "
        "lost; both axes are logarithmic.",
        760,
        312,
    )
    points = sorted((c.loss_share, c.bias) for c in bound.curve if c.loss_share > 0 and c.bias > 0)
    here = (bound.loss_share, bound.bias)
    xs = [x for x, _ in [*points, here] if x > 0] + [1e-4, 0.5]
    ys = [y for _, y in [*points, here] if y > 0] + [limits.negligible_bias, 1.0]
    f = Frame(90, 24, 640, 228, _log_range(xs), _log_range(ys))
    axes(
        p,
        f,
        "share of computed tokens lost",
        "bias, standard deviations",
        x_marks=[(k, f"{100 * 10.0**k:g} %") for k in _decades(f.x_range)],
        y_marks=[(k, f"{10.0**k:g}") for k in _decades(f.y_range)],
        left=60,
    )
    p.path([(f.x(math.log10(x)), f.y(math.log10(y))) for x, y in _thinned(points)], "curve")
    y = f.y(math.log10(limits.negligible_bias))
    p.line(f.left, y, f.right, y, "limit", "negligible below")
    words = f"negligible below {number(limits.negligible_bias)}"
    p.text(f.right - 6, y + 15, words, "end", "dim halo")
    if limits.max_loss > 0:
        x = f.x(math.log10(limits.max_loss))
        p.line(x, f.top, x, f.bottom, "limit", "heavy loss beyond")
        p.text(x - 6, f.bottom - 8, f"heavy beyond {percent(limits.max_loss)}", "end", "dim halo")
    said = f"this dataset: {percent(bound.loss_share)} lost, bias at most {number(bound.bias)}"
    if bound.loss_share <= 0 or bound.bias <= 0:
        p.text(f.left + 8, f.top + 32, "this dataset: nothing lost, no bias", kind="bold")
        return p
    x, y = f.x(math.log10(bound.loss_share)), f.y(math.log10(bound.bias))
    p.dot(x, y, "mark lost-mark", said, 6)
    if x < f.left + f.width / 2:
        p.text(x + 12, min(y + 22, f.bottom - 6), said, kind="bold halo")
    else:
        p.text(x - 12, max(y - 12, f.top + 12), said, "end", "bold halo")
    return p


def _log_range(values: Sequence[float]) -> tuple[float, float]:
    low = math.floor(math.log10(max(min(values), 1e-12)))
    return (float(low), math.log10(max(values)) + 0.05)


def _decades(around: tuple[float, float]) -> list[float]:
    """Return whole powers of ten of a range, at most eight."""
    low, high = math.ceil(around[0]), math.floor(around[1])
    step = max(1, math.ceil((high - low + 1) / 8))
    return [float(k) for k in range(low, high + 1, step)]


def _thinned(points: list[tuple[float, float]], room: int = 200) -> list[tuple[float, float]]:
    step = max(1, math.ceil(len(points) / room))
    return [*points[:-1:step], *points[-1:]]
