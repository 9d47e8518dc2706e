"""Scales and axes: where a value stands in a picture, its grid, ticks and labels.

Between the shapes and the charts; knows numbers and labels only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actds_validators.report.svg import Picture, text_width
from actds_validators.report.words import short

__all__ = ["Frame", "axes", "legend", "span", "ticks"]

Mark = tuple[float, str]


@dataclass(frozen=True)
class Frame:
    """A plotting area; ``x`` and ``y`` map values to places."""

    left: float
    top: float
    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    @property
    def right(self) -> float:
        """Return the right edge."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """Return the lower edge."""
        return self.top + self.height

    def x(self, value: float) -> float:
        """Return the place of a value on the horizontal axis; the edge where it is outside."""
        return self.left + _share(value, self.x_range) * self.width

    def y(self, value: float) -> float:
        """Return the place of a value on the vertical axis; the edge where it is outside."""
        return self.bottom - _share(value, self.y_range) * self.height


def _share(value: float, around: tuple[float, float]) -> float:
    low, high = around
    # Halves: the width of a range of two large numbers may be no finite number.
    width = high / 2 - low / 2
    return min(1.0, max(0.0, (value / 2 - low / 2) / width)) if width > 0 else 0.0


def span(values: Sequence[float], *, zero: bool = True, pad: float = 0.06) -> tuple[float, float]:
    """Return a range that holds the values with some room, and nought where asked."""
    ends = [*values, 0.0] if zero or not values else list(values)
    low, high = min(ends), max(ends)
    room = (high - low) * pad or abs(high) * pad or 1.0
    return (low if zero and low == 0 else low - room, high if zero and high == 0 else high + room)


def ticks(low: float, high: float, n: int = 5) -> list[float]:
    """Return at most about ``n`` round numbers between two values."""
    raw = (high / 2 - low / 2) / max(n, 1) * 2
    if not math.isfinite(raw) or raw <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 2.5, 5) if m * power >= raw * 0.999), 10 * power)
    if step <= 0 or abs(low) / step > 1e12:
        return [low]
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    # Adding nought turns the minus zero of floating point into a plain one.
    return [
        round(k * step, 12 - math.floor(math.log10(step))) + 0.0 for k in range(first, last + 1)
    ]


def axes(
    p: Picture,
    f: Frame,
    x_label: str,
    y_label: str,
    *,
    x_text: Callable[[float], str] = short,
    y_text: Callable[[float], str] = short,
    x_marks: Sequence[Mark] | None = None,
    y_marks: Sequence[Mark] | None = None,
    left: float = 50,
) -> None:
    """Draw grid, axes, ticks and labels; empty marks leave an axis without ticks."""
    if y_marks is None:
        y_marks = [(v, y_text(v)) for v in ticks(*f.y_range, 4)]
    if x_marks is None:
        x_marks = [(v, x_text(v)) for v in ticks(*f.x_range, max(2, int(f.width // 90)))]
    for value, words in y_marks:
        p.line(f.left, f.y(value), f.right, f.y(value), "grid")
        p.text(f.left - 6, f.y(value) + 4, words, "end", "dim")
    for value, words in x_marks:
        p.line(f.x(value), f.bottom, f.x(value), f.bottom + 4, "axis")
        p.text(f.x(value), f.bottom + 17, words, "middle", "dim")
    p.line(f.left, f.bottom, f.right, f.bottom, "axis")
    p.line(f.left, f.top, f.left, f.bottom, "axis")
    if x_label:
        p.text(f.left + f.width / 2, f.bottom + 34, x_label, "middle")
    if y_label:
        p.turned(f.left - left, f.top + f.height / 2, y_label, max(f.height + 40, 60))


def legend(p: Picture, x: float, y: float, items: Sequence[tuple[str, str]]) -> None:
    """Write what classes mean: a sample box and words each, from left to right."""
    for kind, words in items:
        p.box(x, y - 10, 14, 11, kind)
        p.text(x + 20, y, words)
        x += 20 + text_width(words) + 14
