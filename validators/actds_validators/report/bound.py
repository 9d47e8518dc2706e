"""The bound on the bias of any mean against the share lost, with the dataset's point.

A chart of the report; from the result's section on missingness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from actds_validators.audit.result import Bound, Limits
from actds_validators.report.axes import Frame, axes
from actds_validators.report.svg import WIDTH, Anchor, Picture, text_width
from actds_validators.report.words import number, percent

__all__ = ["bound_curve"]

Box = tuple[float, float, float, float]


def bound_curve(bound: Bound, limits: Limits) -> Picture:
    """Return the worst bias of any mean against the share lost, with the dataset's point."""
    p = Picture(
        "bound",
        "Worst-case bias of any mean over rows",
        "The bound sqrt(loss / (1 - loss)) in standard deviations of all rows against the share "
        "lost; both axes are logarithmic.",
        WIDTH,
        312,
    )
    pairs = [*((c.loss_share, c.bias) for c in bound.curve), (bound.loss_share, bound.bias)]
    points = sorted((x, y) for x, y in pairs if x > 0 and y > 0)
    xs = [x for x, _ in pairs if x > 0] + [1e-4, 0.5]
    ys = [y for _, y in pairs if y > 0] + [limits.negligible_bias, 1.0]
    f = Frame(90, 24, 740, 228, _log_range(xs), _log_range(ys))
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
    words_at, lines_at = _limits(p, f, limits)
    if bound.loss_share <= 0 or bound.bias <= 0:
        p.text(f.left + 8, f.top + 32, "this dataset: nothing lost, no bias", kind="bold halo")
        return p
    said = (
        f"this dataset: {percent(bound.loss_share)} lost",
        f"bias at most {number(bound.bias)}",
    )
    x, y = f.x(math.log10(bound.loss_share)), f.y(math.log10(bound.bias))
    p.dot(x, y, "mark lost-mark", ", ".join(said), 6)
    width = max(text_width(words, bold=True) for words in said)
    curve = [(f.x(math.log10(x)), f.y(math.log10(y))) for x, y in points]
    pieces = [box for a, b in pairwise(curve) for box in _boxes(a, b)]
    at, low, anchor = _place(f, (x, y), width, ((words_at, 4), (pieces, 2), (lines_at, 1)))
    for n, words in enumerate(said):
        p.text(at, low + 15 * n, words, anchor, "bold halo")
    return p


def _place(
    f: Frame,
    point: tuple[float, float],
    width: float,
    covered: Sequence[tuple[Sequence[Box], int]],
) -> tuple[float, float, Anchor]:
    """Return where two lines of text beside a point cover the least of what is drawn.

    Args:
        f: the area that they stay in.
        point: that they belong to.
        width: of the wider line.
        covered: boxes of what is drawn, each kind with how much it matters.
    """
    x, y = point
    sides: tuple[tuple[float, Anchor], ...] = ((x + 12, "start"), (x - 12, "end"))
    best, least = (f.left + 8, f.top + 16, sides[0][1]), math.inf
    for step in range(22, 128, 15):
        for low in (y + step, y - step):
            for at, anchor in sides:
                box = _box(at, low, width, anchor)
                if box[0] < f.left or box[2] > f.right or box[1] < 2 or box[3] > f.bottom - 2:
                    continue
                cost = sum(k * any(_meet(box, b) for b in boxes) for boxes, k in covered)
                if cost < least:
                    best, least = (at, low, anchor), cost
    return best


def _limits(p: Picture, f: Frame, limits: Limits) -> tuple[list[Box], list[Box]]:
    """Draw the limits with their words; return the boxes of the words and of the lines."""
    y = f.y(math.log10(limits.negligible_bias))
    p.line(f.left, y, f.right, y, "limit", "negligible below")
    words = f"negligible below {number(limits.negligible_bias)}"
    low = y + 15 if y + 18 < f.bottom else y - 6
    p.text(f.right - 6, low, words, "end", "dim halo")
    words_at = [_box(f.right - 6, low, text_width(words), "end", lines=1)]
    lines_at = [(f.left, y, f.right, y)]
    if limits.max_loss > 0:
        x = f.x(math.log10(limits.max_loss))
        p.line(x, f.top, x, f.bottom, "limit", "heavy loss beyond")
        words = f"heavy beyond {percent(limits.max_loss)}"
        # Low down, where the curve is not, unless the other words are there.
        anchor: Anchor = "end" if x - f.left > text_width(words) + 12 else "start"
        at = x - 6 if anchor == "end" else x + 6
        heights = (f.bottom - 8, f.bottom - 24, f.bottom - 40)
        boxes = [(_box(at, h, text_width(words), anchor, lines=1), h) for h in heights]
        box, height = next((b for b in boxes if not _meet(b[0], words_at[0])), boxes[0])
        p.text(at, height, words, anchor, "dim halo")
        words_at.append(box)
        lines_at.append((x, f.top, x, f.bottom))
    return words_at, lines_at


def _boxes(a: tuple[float, float], b: tuple[float, float], n: int = 12) -> list[Box]:
    """Return boxes along a rising line, far smaller together than the box of the whole."""
    (left, low), (right, high) = a, b
    wide, tall = (right - left) / n, (high - low) / n
    return [
        (left + wide * k, low + tall * (k + 1), left + wide * (k + 1), low + tall * k)
        for k in range(n)
    ]


def _box(x: float, y: float, width: float, anchor: Anchor, lines: int = 2) -> Box:
    """Return the left, upper, right and lower edge of lines of text."""
    left = x if anchor == "start" else x - width
    return (left, y - 12, left + width, y + 4 + 15 * (lines - 1))


def _meet(a: Box, b: Box) -> bool:
    return a[0] <= b[2] and b[0] <= a[2] and a[1] <= b[3] and b[1] <= a[3]


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
