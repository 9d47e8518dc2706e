"""Charts of regimes: gaps by decode step, hooks by position, rates of features, the numerics."""

from __future__ import annotations

import math
from collections.abc import Sequence

from actds_studies.regimes.conclusions import leading
from actds_studies.regimes.result import ContrastResult, Element, Quantiles, StudyResult, Value
from actds_validators.pages.svg import WIDTH, FigureData, Frame, Picture, axes, legend, shade, span
from actds_validators.pages.words import short

_MAX_PANELS, _MAX_HOOKS, _MAX_BANDS, _MAX_SCATTERS, _MAX_RUNGS = 6, 24, 10, 3, 24
_TOP = 4.0
"""Limits at which the shades end."""


def gap(contrast: ContrastResult, axis: str) -> list[Value]:
    """Return the leading measure in the strata of an axis, of those where it is estimated."""
    chosen = leading(contrast)
    return [
        value
        for value in contrast.values
        if (value.instrument, value.measure) == chosen
        and value.axis == axis
        and value.value is not None
    ]


def step_gaps(result: StudyResult) -> Picture | None:
    """Return the leading measure by decode step, a panel per contrast, with floor and limit."""
    panels = [(c, values) for c in result.contrasts if (values := gap(c, "decode step"))]
    if not panels:
        return None
    shown = panels[:_MAX_PANELS]
    height = 150.0
    tops = [70 + n * (height + 76) for n in range(len(shown))]
    p = Picture(
        "steps",
        "Gap by decode step",
        "The leading measure of each contrast at decode steps around 1, 8, 50 and 200: dot and "
        "95 % interval, dashed the limit up to which it counts as none, as a band the floor: by "
        "how much halves of the reference differ. Above 0 the first arm of the name has more.",
        WIDTH,
        tops[-1] + height + 44,
        _gaps("decode step", [(c.name, c.hook, v) for c, values in shown for v in values]),
    )
    keys = [("lost", "shifts"), ("stored", "carries over"), ("floor", "undecided")]
    legend(p, 150, 20, [*keys, ("band", "floor")])
    names = list(dict.fromkeys(v.stratum for _, values in shown for v in values))
    for (contrast, values), top in zip(shown, tops, strict=True):
        # One scale for a hook: its contrasts are parts of one another.
        alike = [
            near for c, near in shown if (c.hook, leading(c)) == (contrast.hook, leading(contrast))
        ]
        around = _range([value for near in alike for value in near])
        _panel(p, contrast, values, names, Frame(150, top, 600, height, (0, 1), around))
    return p


_ENDS = ("value", "low", "high", "floor", "limit")


def _gaps(axis: str, shown: Sequence[tuple[str, str, Value]]) -> FigureData:
    return FigureData(
        ("contrast", "hook", "measure", "unit", axis, *_ENDS, "verdict"),
        [
            (name, hook, v.measure, v.unit, v.stratum, *(getattr(v, k) for k in _ENDS), v.outcome)
            for name, hook, v in shown
        ],
    )


def _range(values: Sequence[Value]) -> tuple[float, float]:
    ends = [end for v in values for k in _ENDS if (end := getattr(v, k)) is not None]
    return span([*ends, *(-v for of in values for v in (of.floor, of.limit) if v is not None)])


def _panel(
    p: Picture, contrast: ContrastResult, values: Sequence[Value], names: list[str], f: Frame
) -> None:
    f = Frame(f.left, f.top, f.width, f.height, (-0.5, len(names) - 0.5), f.y_range)
    title = f"{contrast.name} at {contrast.hook}: {leading(contrast)[1]}"
    p.text(f.left, f.top - 12, title, kind="bold")
    for value in values:
        at = names.index(value.stratum)
        if value.floor is not None:
            left, right = f.x(at - 0.42), f.x(at + 0.42)
            top, bottom = f.y(value.floor), f.y(-value.floor)
            p.box(left, top, right - left, bottom - top, "band", f"floor {short(value.floor)}")
    marks = [(float(n), name.replace(" to ", "–")) for n, name in enumerate(names)]
    unit = values[0].unit.replace("standard deviations of the reference", "SD")
    axes(p, f, "decode step: generated tokens, the first is 1", unit, x_marks=marks, left=78)
    p.line(f.left, f.y(0), f.right, f.y(0), "axis")
    for side in (1, -1):
        limit = values[0].limit
        if limit is not None:
            p.line(f.left, f.y(side * limit), f.right, f.y(side * limit), "limit")
    for value in values:
        _point(p, f, value, f.x(names.index(value.stratum)))


_KINDS = {
    "shifts": ("lost-mark mark", "lost-line whisker"),
    "carries over": ("stored-mark mark", "stored-line whisker"),
}


def _point(p: Picture, f: Frame, value: Value, x: float) -> None:
    assert value.value is not None
    mark, whisker = _KINDS.get(value.outcome or "", ("floor mark", "axis whisker"))
    words = f"{short(value.value)}, {value.outcome or 'described'}"
    if value.low is not None and value.high is not None:
        p.line(x, f.y(value.low), x, f.y(value.high), whisker)
        words += f", {short(value.low)} to {short(value.high)}"
    p.dot(x, f.y(value.value), mark, f"step {value.stratum}: {words}", 5)
    p.text(x + 9, f.y(value.value) - 6, short(value.value), kind="halo")


def positions(result: StudyResult) -> Picture | None:
    """Return hooks by position: the leading measure over its limit, as shades; a block each."""
    blocks: dict[str, list[tuple[str, dict[str, Value]]]] = {}
    for contrast in result.contrasts:
        values = {v.stratum: v for v in gap(contrast, "position")}
        if values:
            blocks.setdefault(contrast.name, []).append((contrast.hook, values))
    if not blocks:
        return None
    blocks = {name: rows[:_MAX_HOOKS] for name, rows in list(blocks.items())[:_MAX_PANELS]}
    bands_known = dict.fromkeys(
        v.stratum for c in result.contrasts for v in c.values if v.axis == "position"
    )
    seen = {band for rows in blocks.values() for _, values in rows for band in values}
    bands = [band for band in bands_known if band in seen][:_MAX_BANDS]
    shown = [
        (name, hook, values[band])
        for name, rows in blocks.items()
        for hook, values in rows
        for band in bands
        if band in values
    ]
    cell, left, y = min(72.0, 660 / len(bands)), 150.0, 56.0
    height = y + sum(56 + 26 * len(rows) for rows in blocks.values())
    p = Picture(
        "positions",
        "Hook by position",
        "Each cell is the leading measure in a band of positions, with its number; the shade is "
        f"its size over the limit, from none (dark) to {_TOP:g} times the limit and more (light). "
        "Empty: no estimate there.",
        WIDTH,
        height,
        _gaps("position", shown),
    )
    p.text(left, 20, "0")
    for step in range(7):
        p.box(left + 20 + 26 * step, 9, 26, 13, f"shade{step}")
    p.text(left + 20 + 26 * 7 + 8, 20, f"{_TOP:g} × the limit and more")
    for name, rows in blocks.items():
        p.text(left, y, name, kind="bold")
        for k, band in enumerate(bands):
            words = band.replace(" to ", "–").replace(" and later", "+")
            p.text(left + cell * (k + 0.5), y + 18, words, "middle", "small dim", room=cell - 4)
        for n, (hook, values) in enumerate(rows):
            top = y + 24 + 26 * n
            p.label(left - 8, top + 16, hook, left - 16)
            for k, band in enumerate(bands):
                _cell(p, values.get(band), left + cell * k, top, cell)
        y += 56 + 26 * len(rows)
    return p


def _cell(p: Picture, value: Value | None, x: float, y: float, width: float) -> None:
    if value is None or value.value is None:
        p.box(x, y, width - 2, 22, "few")
        return
    step = shade(abs(value.value) / (value.limit or 1.0), _TOP)
    title = f"positions {value.stratum}: {short(value.value)}, {value.outcome or 'described'}"
    p.box(x, y, width - 2, 22, f"shade{step}", title)
    words = short(value.value, 2)
    p.text(x + width / 2 - 1, y + 15, words, "middle", f"ink{step}", room=width - 6)


def rates(result: StudyResult) -> list[Picture]:
    """Return the rates of features in one arm against the other, a picture per contrast.

    There is room for few: contrasts in which they shift come first.
    """
    points = [
        (contrast, value)
        for contrast in result.contrasts
        if (value := next((v for v in contrast.values if v.elements), None)) is not None
    ]
    points.sort(key=lambda pair: pair[1].outcome != "shifts")
    return [_scatter(*pair, n) for n, pair in enumerate(points[:_MAX_SCATTERS])]


def _scatter(contrast: ContrastResult, value: Value, n: int) -> Picture:
    points = [
        (element, math.log10(max(first, 1e-7)), math.log10(max(other, 1e-7)))
        for element in value.elements
        for first, other in ([element.arms] if element.arms is not None else [])
        if first is not None and other is not None
    ]
    arms = [f"rate in {name}" for name in contrast.names]
    ends = [end for _, x, y in points for end in (x, y)] or [-3.0, 0.0]
    around = (math.floor(min(ends)), max(math.ceil(max(ends)), math.floor(min(ends)) + 1))
    p = Picture(
        f"rates-{n}",
        f"Rates of features, {contrast.name} at {contrast.hook}",
        f"Each dot is a feature: the share of rows on which it is active in {contrast.first.name} "
        f"and in {contrast.second.name}, on logarithmic axes; {len(points):,} of "
        f"{value.n_elements:,} tested ones, the farthest among them. On the line nothing changes; "
        "a filled dot's 95 % interval lies beyond the limit.",
        WIDTH,
        430,
        FigureData(
            ("feature", *arms, "ln of the ratio", "standard error"),
            [(e.name, *(e.arms or ()), e.value, e.error) for e, _, _ in points],
        ),
    )
    f = Frame(150, 30, 340, 340, around, around)
    marks = [(float(k), f"1e{k}" if k else "1") for k in range(around[0], around[1] + 1)]
    axes(p, f, *arms, x_marks=marks, y_marks=marks, left=58)
    p.line(f.x(around[0]), f.y(around[0]), f.x(around[1]), f.y(around[1]), "axis")
    limit = value.limit or 0.0
    far: list[Element] = []
    for element, x, y in points:
        is_far = abs(element.value) - 1.96 * element.error > limit
        far += [element] if is_far else []
        words = f"feature {element.name}: ln of the ratio {short(element.value)}"
        p.dot(f.x(x), f.y(y), "lost-mark mark" if is_far else "few", words, 4 if is_far else 3)
    _farthest(p, far, f.right + 40, f.top + 12)
    return p


def _farthest(p: Picture, far: Sequence[Element], x: float, y: float) -> None:
    p.text(x, y, "beyond the limit" if far else "none beyond the limit", kind="bold")
    for k, value in enumerate(sorted(far, key=lambda e: -abs(e.value))[:12], 1):
        p.text(x, y + 22 * k, f"feature {value.name}: {math.exp(value.value):.2g} × as often")


def ladder(result: StudyResult) -> Picture | None:
    """Return how far equal tokens lie apart, a rung per contrast: 50, 90, 99 and 100 %."""
    rungs = [
        (f"{contrast.name} at {contrast.hook}", quantile)
        for contrast in result.contrasts
        for quantile in contrast.quantiles
        if quantile.axis == "all" and quantile.measure == "relative L2"
    ]
    if not rungs:
        return None
    shown = rungs[:_MAX_RUNGS]
    above = [v for _, q in shown for v in _four(q) if v > 0] or [1e-6]
    low, high = math.floor(math.log10(min(above))), math.ceil(math.log10(max(above)))
    # A logarithmic axis has no 0: equal rows have a place of their own, left of it.
    left = low - 1 if any(v == 0 for _, q in shown for v in _four(q)) else low
    f = Frame(220, 40, 560, 34.0 * len(shown), (left, max(high, low + 1)), (0, 1))
    p = Picture(
        "ladder",
        "Ladder of numerics",
        "The same tokens computed in both arms: relative L2 distance of their rows, median (dot), "
        "90 and 99 % (bars) and the largest (end of the line), on a logarithmic axis; 0: equal to "
        "the bit. Name a contrast for each rung: repeat, restart, batch, chunk, cache, kernels, "
        "dtype.",
        WIDTH,
        f.bottom + 48,
        FigureData(
            ("contrast and hook", *(f"relative L2, {name}" for name in _NAMES), "pairs"),
            [(words, *_four(quantile), quantile.n_pairs) for words, quantile in shown],
        ),
    )
    marks = [(float(k), f"1e{k}" if k else "1") for k in range(low, int(f.x_range[1]) + 1)]
    marks += [(float(left), "0")] if left < low else []
    axes(p, f, "relative L2 distance", "", x_marks=marks, y_marks=[])
    for n, (words, quantile) in enumerate(shown):
        y = f.top + 34 * n + 17
        p.label(f.left - 8, y + 4, words, 206)
        if quantile.p100 == 0:
            p.text(f.left + 8, y + 4, f"equal to the bit: {quantile.n_pairs:,} pairs")
            continue
        at = [f.x(math.log10(v)) if v > 0 else f.left for v in _four(quantile)]
        numbers = ", ".join(
            f"{name} {short(v)}" for name, v in zip(_NAMES, _four(quantile), strict=True)
        )
        p.line(at[0], y, at[3], y, "stored-line whisker")
        for x in at[1:3]:
            p.line(x, y - 7, x, y + 7, "stored-line whisker")
        p.dot(at[0], y, "stored-mark mark", f"{words}: {numbers}", 5)
    return p


_NAMES = ("50 %", "90 %", "99 %", "100 %")


def _four(quantiles: Quantiles) -> tuple[float, float, float, float]:
    return quantiles.p50, quantiles.p90, quantiles.p99, quantiles.p100
