"""Section on missingness: how what was lost differs from what was computed.

Forest plots, loss rate per stratum, the worst-case bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from actds.text import Line, counted
from actds_validators.audit.result import (
    Audit,
    Difference,
    Efficiency,
    Estimate,
    FeatureRates,
    Lane,
    Missingness,
    Stratum,
    StratumLoss,
)
from actds_validators.pages.answer import Part, SectionOf
from actds_validators.pages.svg import (
    WIDTH,
    FigureData,
    Frame,
    Picture,
    axes,
    shade,
    shade_scale,
    split_range,
    text_width,
    ticks,
)
from actds_validators.pages.words import (
    GROUPS,
    MAX_LIST,
    Columns,
    Row,
    Table,
    clean,
    count,
    estimate,
    first,
    number,
    or_dash,
    p_value,
    percent,
    short,
    signed,
    table_of,
)

_MAX_STRATA = 10


def missingness_part(audit: Audit) -> Part | None:
    section, limits = audit.missingness, audit.limits
    if section is None:
        return None
    lead = (
        "Standardised mean differences (SMD): the mean of the lost tokens minus the mean of all "
        "computed tokens, in SD, with confidence intervals from a block jackknife. The bias of the "
        "stored rows is the mean of the stored rows minus that of all, in SD; it is far smaller "
        f"where little is lost. Up to {number(limits.negligible_bias)} SD it is negligible; with a "
        f"rejected test, more than {number(limits.serious)} SD is serious."
    )
    whole = counted(section.whole_requests, "request")
    note = f"{whole} lost every computed token. One request is one loss event, however long."
    notes = [note] if section.whole_requests else []
    tables = _worst(section) if section.n_strata else []
    ordered, words = worst_first(section.differences), frozenset({0, 1, 7})
    caption = "Largest differences of the lost tokens from all"
    tables += table_of(caption, _DIFFERENCES, ordered, words, brief=(5, MAX_LIST))
    brief = [Line(f"  {note}")] if notes else []
    return Part("missingness", "Missingness", lead + _few(audit), tables, notes, brief)


_STRATA: Columns[StratumLoss] = (
    ("stratum", lambda s: s.kind),
    ("which", lambda s: s.label),
    ("lost", lambda s: percent(s.rate)),
    ("lost tokens", lambda s: count(s.n_lost)),
    ("of", lambda s: count(s.n)),
    ("run blocks", lambda s: count(s.n_blocks)),
    ("adjusted p", lambda s: p_value(s.adjusted_p)),
)
_DIFFERENCES: Columns[Difference] = (
    ("covariate", lambda d: d.covariate.label),
    ("group", lambda d: d.covariate.group),
    ("SMD [95 %]", lambda d: estimate(d.smd)),
    ("stored", lambda d: or_dash(d.before_weighting, lambda e: number(e.value))),
    ("stored, weighted", lambda d: or_dash(d.after_weighting, lambda e: number(e.value))),
    ("mean of all", lambda d: number(d.mean_all)),
    ("mean of lost", lambda d: number(d.mean_lost)),
    ("unit", lambda d: d.covariate.unit or "-"),
    ("total variation", lambda d: or_dash(d.total_variation, number)),
    ("Jensen–Shannon distance", lambda d: or_dash(d.jensen_shannon, number)),
)


def _worst(section: Missingness) -> list[Table]:
    caption = (
        f"Strata (kinds of token) with excess loss, beyond chance: "
        f"{count(len(section.worst_strata))} of {count(section.n_strata)} tested"
    )
    words = frozenset({0, 1})
    if not section.worst_strata:
        none = Row(("none", *[""] * (len(_STRATA) - 1)), "good")
        return [Table(caption, tuple(name for name, _ in _STRATA), [none], words)]
    worst = section.worst_strata
    return table_of(caption, _STRATA, worst, words, room=_MAX_STRATA, tone=lambda s: "bad")


_MAX_PIXELS = 960  # pixels of rows: a picture of so many fits on a printed page


@dataclass(frozen=True)
class _Series:
    """A mark in every row: a field of ``Difference``, what it is, its class."""

    name: str
    words: str
    kind: str

    def of(self, difference: Difference) -> Estimate | None:
        value: Estimate | None = getattr(difference, self.name)
        return value


_LOST = _Series("smd", "lost against all", "lost")
_STORED = _Series("before_weighting", "stored against all", "stored")
_WEIGHTED = _Series("after_weighting", "stored, weighted, against all", "reused")


def worst_first(differences: Sequence[Difference]) -> list[Difference]:
    return sorted(differences, key=lambda d: -abs(d.smd.value))


def _few(audit: Audit) -> str:
    if audit.mechanism is None or audit.mechanism.n_events >= audit.limits.min_events:
        return ""
    return (
        f" All losses are {counted(audit.mechanism.n_events, 'independent event')}: "
        f"with fewer than {count(audit.limits.min_events)} the intervals are too narrow."
    )


def _differences(audit: Audit) -> list[Difference]:
    return audit.missingness.differences if audit.missingness else []


def forest(audit: Audit, group: str) -> Picture | None:
    """Return the SMDs of a group of ``GROUPS`` with their intervals: the largest, as fit a page."""
    differences = [d for d in _differences(audit) if d.covariate.group == group]
    if not differences:
        return None
    p, f, shown, more = _frame(
        f"forest-{group}",
        f"Standardised mean differences of the lost tokens: {GROUPS[group]}",
        "One mark per covariate with its 95 % confidence interval. An arrow: the interval goes on. "
        f"Each group of covariates has its own scale.{_few(audit)}",
        worst_first(differences),
        [_LOST],
    )
    p.text(12, 35, GROUPS[group], kind="bold")
    p.text(f.right + 12, 35, "SMD", kind="dim")
    _rows(p, f, shown, [_LOST], f"SMD, SD{more}")
    return p


def stored_bias(audit: Audit) -> Picture | None:
    """Return the bias of the stored rows, before and after weighting, on a scale of its own."""
    limits = audit.limits
    having = [d for d in _differences(audit) if d.before_weighting]
    if not having:
        return None
    series = [s for s in (_STORED, _WEIGHTED) if any(s.of(d) for d in having)]
    order = list(GROUPS)
    p, f, shown, more = _frame(
        "stored-bias",
        "Bias of the stored rows, before and after weighting",
        "Per covariate the mean of the stored rows, and of the weighted ones, minus that of all, "
        "with its 95 % confidence interval; the thicker part is the 90 % interval of the "
        f"equivalence test, which passes within ±{number(limits.negligible_bias)} SD. An arrow: "
        f"the interval goes on. This plot has a scale of its own.{_few(audit)}",
        sorted(having, key=lambda d: -max(abs(e.value) for s in series if (e := s.of(d)))),
        series,
    )
    shown = sorted(shown, key=lambda d: order.index(d.covariate.group))
    if limits.serious <= f.x_range[1]:
        for edge in (-limits.serious, limits.serious):
            title = f"serious: {number(edge)}"
            p.line(f.x(edge), f.top, f.x(edge), f.bottom, "limit", title)
        p.line(f.left + 4, 24, f.left + 4, 37, "limit")
        p.text(f.left + 12, 35, f"serious, with a rejected test: ±{number(limits.serious)}")
    else:
        words = f"serious, with a rejected test: beyond ±{number(limits.serious)}, not in the plot"
        p.text(f.left, 35, words, kind="dim")
    p.text(f.right + 12, 35, "bias", kind="dim")
    _rows(p, f, shown, series, f"bias, SD{more}")
    return p


def _frame(
    name: str,
    title: str,
    description: str,
    differences: list[Difference],
    series: Sequence[_Series],
) -> tuple[Picture, Frame, list[Difference], str]:
    line = 13.0 * len(series) + 11
    shown, more = first(differences, int(_MAX_PIXELS / line))
    height = line * len(shown)
    data = FigureData(("covariate", "group", "mean of", "difference, SD", "low", "high", "level"))
    p = Picture(name, title, description, WIDTH, 92 + height, data)
    f = Frame(180, 44, 580, height, _reach(shown, series), (0, 1))
    x = f.left
    for mark in series:
        _mark(p, x + 6, 12, mark.kind, "")
        p.text(x + 18, 16, mark.words)
        x += 34 + text_width(mark.words)
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
        p.label(f.left - 10, y + line / 2 + 4, d.covariate.label, 166)
        for k, mark in enumerate(series):
            outer = mark.of(d)
            if outer is not None:
                inner = d.equivalence if mark is _STORED else None
                p.data.rows += [
                    (d.covariate.label, d.covariate.group, mark.words, e.value, e.low, e.high,
                     e.confidence)
                    for e in (outer, inner)
                    if e is not None
                ]  # fmt: skip
                at = y + 12 + 13 * k
                _whisker(p, f, at, outer, inner, mark.kind, f"{d.covariate.label}, {mark.words}")
                p.text(f.right + 12, at + 4, signed(outer.value, three=mark is not _LOST))


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


def _reach(differences: Sequence[Difference], series: Sequence[_Series]) -> tuple[float, float]:
    """Return a range that holds the marks; an interval of no information may leave it."""
    drawn = [e for d in differences for s in series if (e := s.of(d))]
    reach = max(1e-9, *(abs(e.value) for e in drawn)) * 1.15
    ends = [abs(end) for e in drawn for end in (e.low, e.high)]
    reach = max(reach, min(max(ends), 3 * reach))
    return (-reach, reach)


_MAX_COVARIATES, _MAX_CELLS, _MAX_POINTS = 18, 16, 200
_LEFT = 260.0
_ENOUGH, _ENOUGH_SHARE = 1000, 0.01


@dataclass(frozen=True)
class _Line:
    """A covariate with the strata that there is room for, and their words.

    Args:
        names: of the strata, in two lines; the second is empty where one does.
        shares: lost, all with the sign of per cent or all without.
        least: tokens of which a stratum's share is shaded.
    """

    difference: Difference
    strata: list[Stratum]
    left_out: list[Stratum]
    names: list[tuple[str, str]]
    shares: list[str]
    least: float

    @property
    def width(self) -> float:
        return (WIDTH - 2 - _LEFT) / len(self.strata)

    @property
    def height(self) -> float:
        n_lines = 2 + any(below for _, below in self.names) + any(map(self.is_few, self.strata))
        return 10.0 + 14 * max(n_lines, 3 if self.left_out else 2)

    def is_few(self, s: Stratum) -> bool:
        return s.n < self.least


def heat_map(audit: Audit) -> Picture | None:
    having = [d for d in worst_first(_differences(audit)) if d.strata]
    if not having:
        return None
    lines = [_line(d) for d in having[:_MAX_COVARIATES]]
    while sum(line.height + 4 for line in lines) > _MAX_PIXELS:
        lines.pop()
    _, more = first(having, len(lines))
    top, beyond = _scale(lines)
    p = Picture(
        "heat-map",
        "Loss rate per stratum",
        "One row per covariate; each cell names its stratum, in the unit of its row, and the share "
        "of its computed tokens that was lost, in per cent. Darker cells lost less, lighter cells "
        "more. The scale ends at the largest share of a stratum that holds at least "
        f"{percent(_ENOUGH_SHARE)} of the tokens. Cells without a shade hold few tokens (under "
        f"{percent(_ENOUGH_SHARE)}, and under {count(_ENOUGH)}), given below as n. The smallest "
        "strata are left out.",
        WIDTH,
        54 + sum(line.height + 4 for line in lines) + (18 if more else 0),
        FigureData(
            ("covariate", "unit", "stratum", "computed tokens", "lost tokens", "share lost", "low",
             "high"),
            [
                (line.difference.covariate.label, line.difference.covariate.unit, s.label, s.n,
                 s.n_lost, s.rate.value, s.rate.low, s.rate.high)
                for line in lines
                for s in line.strata
            ],
        ),
    )  # fmt: skip
    shade_scale(p, _LEFT, top, beyond=beyond)
    y, middle = 48.0, _LEFT - 10
    for line in lines:
        d = line.difference
        p.text(middle, y + 15, d.covariate.label, "end", room=250)
        p.text(middle, y + 30, _unit(d), "end", "dim", room=250)
        if line.left_out:
            p.text(middle, y + 45, _left_out(line), "end", "dim", room=250)
        for column in range(len(line.strata)):
            _stratum(p, _LEFT + line.width * column, y, line, column, top)
        y += line.height + 4
    if more:
        p.text(WIDTH / 2, p.height - 8, more, "middle", "dim")
    return p


def _line(d: Difference) -> _Line:
    order = sorted(range(len(d.strata)), key=lambda k: -d.strata[k].n)
    strata = [d.strata[k] for k in sorted(order[:_MAX_CELLS])]
    left_out = [d.strata[k] for k in order[_MAX_CELLS:]]
    room = (WIDTH - 2 - _LEFT) / len(strata) - 6
    names = [clean(s.label) for s in strata]
    if any(text_width(name) > room for name in names):
        unit = f" {d.covariate.unit}"
        names = [name.removesuffix(unit).replace(" to ", "–") for name in names]
    shares = [percent(s.rate.value) for s in strata]
    if any(text_width(share) > room for share in shares):
        shares = [share.removesuffix(" %") for share in shares]
    least = min(_ENOUGH, _ENOUGH_SHARE * sum(s.n for s in d.strata))
    return _Line(d, strata, left_out, [split_range(n, room) for n in names], shares, least)


def _scale(lines: list[_Line]) -> tuple[float, bool]:
    """Return where the shades end, and whether a shaded stratum lies beyond.

    A stratum of a small part of the tokens may lie far off by chance: it would leave one shade to
    all others.
    """
    shaded, large = [], []
    for line in lines:
        total = sum(s.n for s in line.difference.strata)
        shaded += [s.rate.value for s in line.strata if not line.is_few(s)]
        large += [s.rate.value for s in line.strata if s.n >= _ENOUGH_SHARE * total]
    top = max(large or shaded, default=0.0)
    return top, max(shaded, default=0.0) > top


def _stratum(p: Picture, x: float, y: float, line: _Line, column: int, top: float) -> None:
    s, (above, below), share = line.strata[column], line.names[column], line.shares[column]
    few, step = line.is_few(s), shade(s.rate.value, top)
    title = (
        f"{clean(s.label, 50)}: {percent(s.rate.value)} of {count(s.n)} lost, interval "
        f"{percent(s.rate.low)} to {percent(s.rate.high)}"
    )
    p.box(x, y, line.width - 2, line.height, "few" if few else f"shade{step}", title)
    middle, ink, room = x + line.width / 2 - 1, "" if few else f"ink{step}", line.width - 6
    written = [above, *([below] if below else []), share, *([f"n {count(s.n)}"] if few else [])]
    # In the middle of the cell, whose height is that of the row's fullest one.
    first_y = y + line.height / 2 + 4.5 - 7 * (len(written) - 1)
    for k, words in enumerate(written):
        p.text(middle, first_y + 14 * k, words, "middle", ink, room=room)


def _left_out(line: _Line) -> str:
    left = line.left_out
    most = max(s.rate.value for s in left)
    return f"{len(left)} left out, lost {percent(most)}{' at most' if len(left) > 1 else ''}"


def _unit(d: Difference) -> str:
    if not any(c.isdigit() for s in d.strata for c in s.label[:50]):
        return d.covariate.group
    # Lengths are compared on a logarithmic scale; their strata are named in tokens.
    unit = d.covariate.unit.removeprefix("log2 ")
    return f"{d.covariate.group}, {unit}" if unit else d.covariate.group


def bound_curve(audit: Audit) -> Picture | None:
    if audit.missingness is None:
        return None
    bound, limits = audit.missingness.bound, audit.limits
    p = Picture(
        "bound",
        "Worst-case bias of any mean over rows",
        "The bound sqrt(loss / (1 - loss)), in SD, against the share lost; both axes are "
        "logarithmic.",
        WIDTH,
        336,
        FigureData(
            ("what", "share lost", "worst-case bias, SD"),
            [
                ("this dataset", bound.loss_share, bound.bias),
                ("negligible below", None, limits.negligible_bias),
                ("heavy beyond", limits.max_loss, None),
            ],
        ),
    )
    pairs = [*((c.loss_share, c.bias) for c in bound.curve), (bound.loss_share, bound.bias)]
    points = sorted((x, y) for x, y in pairs if x > 0 and y > 0)
    p.data.rows += [("bound", x, y) for x, y in _thinned(points)]
    xs = [x for x, _ in pairs if x > 0] + [1e-4, 0.5]
    ys = [y for _, y in pairs if y > 0] + [limits.negligible_bias, 1.0]
    f = Frame(90, 48, 740, 228, _log_range(xs), _log_range(ys))
    axes(
        p,
        f,
        "share of computed tokens lost",
        "bias, SD",
        x_marks=[(k, f"{100 * 10.0**k:g} %") for k in _decades(f.x_range)],
        y_marks=[(k, f"{10.0**k:g}") for k in _decades(f.y_range)],
        left=60,
    )
    p.path([(f.x(math.log10(x)), f.y(math.log10(y))) for x, y in _thinned(points)], "curve")
    y = f.y(math.log10(limits.negligible_bias))
    p.line(f.left, y, f.right, y, "limit", "negligible below")
    words = f"negligible below {number(limits.negligible_bias)}"
    if limits.max_loss > 0:
        x = f.x(math.log10(limits.max_loss))
        p.line(x, f.top, x, f.bottom, "limit", "heavy loss beyond")
        words += f"; heavy beyond {percent(limits.max_loss)}"
    p.line(f.left, 30, f.left + 24, 30, "limit")
    p.text(f.left + 32, 34, words, kind="dim")
    label = "this dataset: no rows lost"
    if bound.loss_share > 0 and bound.bias > 0:
        lost, bias = percent(bound.loss_share), number(bound.bias)
        label = f"this dataset: {lost} lost, bias at most {bias} SD"
        x, y = f.x(math.log10(bound.loss_share)), f.y(math.log10(bound.bias))
        p.dot(x, y, "mark lost-mark", label, 6)
        p.dot(f.left + 12, 12, "mark lost-mark", radius=6)
    p.text(f.left + 32, 16, label, kind="bold")
    return p


def _log_range(values: Sequence[float]) -> tuple[float, float]:
    low = math.floor(math.log10(max(min(values), 1e-12)))
    return (float(low), math.log10(max(values)) + 0.05)


def _decades(around: tuple[float, float]) -> list[float]:
    low, high = math.ceil(around[0]), math.floor(around[1])
    step = max(1, math.ceil((high - low + 1) / 8))
    return [float(k) for k in range(low, high + 1, step)]


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    step = max(1, math.ceil(len(points) / _MAX_POINTS))
    return [*points[:-1:step], *points[-1:]]


def follow_up_part(audit: Audit) -> Part | None:
    section = audit.follow_up
    if section is None:
        return None
    lead = (
        f"{count(section.n_requests)} requests that lack a row were drawn, each with probability "
        f"{section.fraction:.3g} (seed {section.seed}); {count(section.n_answered)} of their "
        f"{count(section.n_drawn)} positions without a row were computed again, of "
        f"{count(section.n_missing)} in all. Of each hook, the mean that may be the farthest off."
    )
    names = ("hook", "means", "rows", "farthest", "bias, SD", "interval, all at once", "numerics")
    rows = [
        Row(
            (
                hook.hook,
                count(hook.n_channels + 1),
                count(hook.n_rows),
                hook.variable,
                f"{hook.bias.value:+.4f}",
                f"{hook.bias.low:+.4f} to {hook.bias.high:+.4f}",
                "not known" if hook.numerics is None else f"{hook.numerics:.4f}",
            )
        )
        for hook in section.hooks
    ]
    table = Table("Stored rows against all", names, rows, frozenset({0, 3}))
    return Part("follow-up", "Follow-up of the losses", lead, [table])


def sample_part(audit: Audit) -> Part | None:
    section = audit.sample
    if section is None:
        return None
    n = section.n_thinned + section.n_dropped
    lead = (
        f"{count(section.n_stored)} stored rows represent {count(n)} more that were not drawn, "
        f"each with a known probability of {section.minimum:.3g} at least (by "
        f"{' and '.join(section.units)}): weighted by 1/inclusion they are "
        f"{count(round(section.effective_rows))} effective rows. Of each hook, the mean that is "
        "known least; intervals hold for all means at once."
    )
    names = ("hook", "means", "rows", "known least", "± SD", "plain rows off most", "SD")
    rows = [
        Row(
            (
                hook.hook,
                count(hook.n_channels + 1),
                count(hook.n_rows),
                hook.variable,
                or_dash(hook.half_width, lambda half: f"{half:.4f}"),
                hook.plain_variable,
                or_dash(hook.plain, lambda e: f"{e.value:+.4f} ({e.low:+.4f} to {e.high:+.4f})"),
            )
        )
        for hook in section.hooks
    ]
    tables = [Table("Means over all rows, by the drawn ones", names, rows, frozenset({0, 3, 5}))]
    notes = []
    if (check := section.readouts) is not None:
        words = "lie where the drawn rows say" if check.agrees else "do not all fit the drawn rows"
        notes.append(
            f"The draw, checked end to end: the means of all {count(check.n_rows)} readouts "
            f"{words}. Of {count(check.n_values)}, the farthest ({check.variable}) by "
            f"{check.deviation:+.4f} SD, where {check.room:.4f} is allowed."
        )
    if section.lane is not None:
        tables += _lane_tables(section.lane)
    for features in section.features:
        tables += _feature_tables(features)
        notes.append(_features(features))
    brief = [Line(f"  {note}") for note in notes]
    return Part("sample", "Means by design", lead, tables, notes, brief)


_EFFICIENCY: Columns[Efficiency] = (
    ("kind", lambda point: point.kind),
    ("which", lambda point: point.label),
    ("rows of the lane", lambda point: count(point.n)),
    ("kept", lambda point: percent(point.kept.value)),
    ("95 %", lambda point: f"{percent(point.kept.low)} to {percent(point.kept.high)}"),
    ("", lambda point: "#" * round(30 * point.kept.value)),
)


def _lane_tables(lane: Lane) -> list[Table]:
    p = "; ".join(f"{kind}: p {p_value(value)}" for kind, value in lane.p.items())
    caption = (
        f"Efficiency: share of the lane ({count(lane.n_rows)} rows, each with probability "
        f"{lane.fraction:.3g}) whose step was kept whole. Whether all are kept alike: {p}"
    )
    features = [point for point in lane.points if point.kind.startswith("feature at ")]
    points = [point for point in lane.points if point not in features]
    of_features = (
        "Features with which rows of the lane were kept most unlike all; intervals hold for all "
        "features of the hook at once"
    )
    left = frozenset({0, 1, 5})
    return [
        *table_of(caption, _EFFICIENCY, points, left, brief=(12, MAX_LIST)),
        *table_of(of_features, _EFFICIENCY, features, left, brief=(12, MAX_LIST)),
    ]


@dataclass(frozen=True)
class _Feature:
    """One feature of a dictionary; ``plain``: its rate over the stored rows, each once."""

    number: int
    n_active: int
    rate: Estimate
    plain: float
    mean: float
    mean_half: float | None

    @property
    def off(self) -> float:
        rate, plain = self.rate, self.plain
        end = rate.high if plain > rate.value else rate.low
        return abs(plain - rate.value) / max(abs(end - rate.value), 1e-12)


_FEATURES: Columns[_Feature] = (
    ("feature", lambda of: str(of.number)),
    ("rows", lambda of: count(of.n_active)),
    ("rate over all", lambda of: _rate(of.rate.value)),
    ("95 % for all", lambda of: f"{_rate(of.rate.low)} to {_rate(of.rate.high)}"),
    ("stored rows, each once", lambda of: _rate(of.plain)),
    ("mean where active", lambda of: number(of.mean)),
    ("± for all", lambda of: or_dash(of.mean_half, number)),
)


def _rate(share: float) -> str:
    return f"{100 * share:.3g} %"


def _feature_tables(of: FeatureRates) -> list[Table]:
    ends = zip(of.rate, of.low, of.high, of.n_active, of.mean, of.mean_half, strict=True)
    features = [
        _Feature(
            nth,
            n,
            Estimate(value=rate, low=low, high=high, confidence=of.confidence),
            n / of.n_rows,
            mean,
            half,
        )
        for nth, (rate, low, high, n, mean, half) in enumerate(ends)
        if mean is not None
    ]
    caption = f"Features of {of.hook} whose rate the stored rows, each once, misstate most"
    features.sort(key=lambda feature: -feature.off)
    return table_of(caption, _FEATURES, features, brief=(7, MAX_LIST))


def _features(of: FeatureRates) -> str:
    never = [high for high, n in zip(of.high, of.n_active, strict=True) if not n]
    words = (
        f"{count(of.n_features)} features of {of.hook} ({clean(of.path)}), by {count(of.n_rows)} "
        f"stored rows: {count(of.n_features - len(never))} are active"
    )
    if never:
        words += f", {count(len(never))} in none of them, so in at most {_rate(max(never))} of all"
    return f"{words}. All rates, with intervals for all at once, are in the result."


SECTIONS = (
    SectionOf(
        missingness_part,
        (*(partial(forest, group=group) for group in GROUPS), stored_bias, heat_map, bound_curve),
        "Missingness",
        "no token was lost: there is none to compare with the stored ones",
        of_losses=True,
    ),
    SectionOf(follow_up_part),
    SectionOf(sample_part),
)
