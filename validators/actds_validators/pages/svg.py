"""Pictures by hand: shapes, scales, axes and shades, without markup, and the numbers behind them.

The template turns shapes into SVG and escapes them; the numbers are a link to CSV below a picture.
"""

from __future__ import annotations

import base64
import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import quote

from actds_validators.pages.words import clean, percent, short

Tag = Literal["line", "rect", "circle", "polyline", "polygon", "path", "text"]
Anchor = Literal["start", "middle", "end"]
Point = tuple[float, float]
WIDTH = 860.0
"""Of a picture, in pixels: what a page holds from a window of 900 pixels on."""
FONT_PX, SMALL_PX = 12.0, 10.0
MAX_TITLE = 140  # bytes
_MAX_NUMBER = 40  # letters; more are no number that anybody drew
# Widths of letters of the widest common sans serif (DejaVu Sans), in em, rounded up.
_WIDTHS = (
    (0.37, frozenset(" ijl.,'|")),
    (0.42, frozenset("tfrI:;!()[]-/\\`")),
    (0.52, frozenset("–")),
    (0.6, frozenset("ckvxyzs")),
    (0.64, frozenset("0123456789")),
    (0.9, frozenset("<>=+~#&GOQHNwDU±×")),
    (1.05, frozenset("@%MWm…")),
)
_LOWER, _OTHER, _FULL, _BOLD = 0.645, 0.74, 1.1, 1.13
# Digits with their signs, units of counts and e of powers: what is a number when nothing else is.
_NUMBER = re.compile(r"[\s\d.,+\-–<>≤≥×%/()±kMGe]*\d[\s\d.,+\-–<>≤≥×%/()±kMGe]*")
_CUT_NUMBER = re.compile(r"[+\-]?\d[\d.,–\-]*$")


Cell = str | int | float | None
# What a spreadsheet takes for a formula where a cell begins, also with the separators of other
# locales and in full width: owasp.org/www-community/attacks/CSV_Injection.
_FORMULA = re.compile(r"""(^|[,;"])(\s*)(?=[=+\-@＝＋－＠])""")
_SAFE = ",:;/()[]"  # of the characters of a URL that need no escape here


@dataclass
class FigureData:
    """What a figure draws: numbers at full precision, None for none; headings have their units."""

    header: tuple[str, ...]
    rows: list[tuple[Cell, ...]] = field(default_factory=list)

    def csv(self) -> str:
        """Return the rows below their header: RFC 4180, numbers as Python writes them.

        A text that a spreadsheet could take for a formula has an apostrophe before the sign.
        """
        text = io.StringIO()
        writer = csv.writer(text)  # quotes where it must, ends lines with CR LF
        writer.writerow(map(_cell, self.header))
        writer.writerows([_cell(cell) for cell in row] for row in self.rows)
        return text.getvalue()

    def url(self) -> str:
        """Return the CSV as a ``data:`` URL of ASCII without quotes or markup."""
        text = self.csv()
        plain = quote(text, safe=_SAFE)
        encoded = ";base64," + base64.b64encode(text.encode()).decode()
        return "data:text/csv;charset=utf-8" + min(f",{plain}", encoded, key=len)


def _cell(cell: Cell) -> Cell:
    return _FORMULA.sub(r"\1\2'", clean(cell)) if isinstance(cell, str) else cell


@dataclass(frozen=True)
class Shape:
    """An element of SVG: attributes are classes and numbers, text is anybody's."""

    tag: Tag
    attributes: tuple[tuple[str, float | str], ...]
    points: tuple[Point, ...] = ()
    text: str = ""
    title: str = ""


@dataclass
class Picture:
    """A drawing of ``width`` × ``height`` pixels with its title, description and numbers."""

    name: str
    title: str
    description: str
    width: float
    height: float
    data: FigureData
    shapes: list[Shape] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        anchor: Anchor = "start",
        kind: str = "",
        *,
        room: float | None = None,
        shorter: Sequence[str] = (),
    ) -> None:
        """Write words at a place, in the room that they have.

        Where they are wider they are written in the first shorter form that fits, in small type,
        or cut with an ellipsis, and the title holds them whole. A number is never cut: one that is
        too wide even in small type is squeezed.

        Args:
            x: where they start, end or have their middle, as the anchor says.
            y: of the base line.
            kind: classes; ``bold`` is wider.
            room: pixels; up to the edge of the picture by default.
            shorter: forms that say the same in less room, the longest first.
        """
        edge = {"start": self.width - x, "end": x, "middle": 2 * min(x, self.width - x)}[anchor]
        free = min(edge, room) if room is not None else edge
        forms, bold = [words, *shorter], "bold" in kind
        seen = next((f for f in forms if text_width(clean(f), bold=bold) <= free), None)
        place: tuple[tuple[str, float | str], ...] = (("x", x), ("y", y))
        place += (("text-anchor", anchor),) if anchor != "start" else ()
        if seen is None:
            kind, seen, squeezed = f"{kind} small".strip(), forms[-1], free * FONT_PX / SMALL_PX
            if text_width(clean(seen), bold=bold) > squeezed:
                if _is_number(seen):
                    place += (("textLength", free), ("lengthAdjust", "spacingAndGlyphs"))
                else:
                    seen = fit(seen, squeezed, bold=bold)
        title = words if seen != words else ""
        self._add("text", (*place, ("class", kind)), text=seen, title=title)

    def label(self, x: float, y: float, words: str, room: float) -> None:
        """Write words that end at a place, in two lines of small type where one is too wide.

        On a phone the column of labels is most of what a chart shows before it is scrolled.
        """
        words = clean(words)
        cuts = [(words[:k], words[k + 1 :]) for k, letter in enumerate(words) if letter == " "]
        if text_width(words) <= room or not cuts:
            self.text(x, y, words, "end", room=room)
            return
        place = (("x", x), ("text-anchor", "end"), ("class", "small"))
        lines = min(cuts, key=lambda cut: max(map(text_width, cut)))
        for line, at in zip(lines, (y - 5, y + 5), strict=True):
            seen = fit(line, room * FONT_PX / SMALL_PX)
            self._add("text", (*place, ("y", at)), text=seen, title=words if seen != line else "")

    def turned(self, x: float, y: float, words: str, room: float) -> None:
        """Write words from below to above, centred at a place."""
        move = f"translate({x:.1f} {y:.1f}) rotate(-90)"
        attributes = (("transform", move), ("text-anchor", "middle"))
        self._add("text", attributes, text=fit(words, room))

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str, title: str = "") -> None:
        at = (("x1", x1), ("y1", y1), ("x2", x2), ("y2", y2), ("class", kind))
        self._add("line", at, title=title)

    def box(
        self, x: float, y: float, width: float, height: float, kind: str, title: str = ""
    ) -> None:
        """Draw a box; one without an extent is left out."""
        if width <= 0 or height <= 0:
            return
        at = (("x", x), ("y", y), ("width", width), ("height", height), ("class", kind))
        self._add("rect", at, title=title)

    def dot(self, x: float, y: float, kind: str, title: str = "", radius: float = 4) -> None:
        at = (("cx", x), ("cy", y), ("r", radius), ("class", kind))
        self._add("circle", at, title=title)

    def square(self, x: float, y: float, kind: str, title: str = "") -> None:
        self.box(x - 4, y - 4, 8, 8, kind, title)

    def diamond(self, x: float, y: float, kind: str, title: str = "") -> None:
        self.polygon([(x, y - 5.5), (x + 5.5, y), (x, y + 5.5), (x - 5.5, y)], kind, title)

    def path(self, points: Sequence[Point], kind: str, title: str = "") -> None:
        if len(points) > 1:
            self._add("polyline", (("class", kind),), tuple(points), title=title)

    def strokes(self, points: Sequence[Point], kind: str) -> None:
        """Draw a stroke of 16 pixels down from each point."""
        self._add("path", (("class", kind),), tuple(points))

    def polygon(self, points: Sequence[Point], kind: str, title: str = "") -> None:
        self._add("polygon", (("class", kind),), tuple(points), title=title)

    def _add(
        self,
        tag: Tag,
        attributes: tuple[tuple[str, float | str], ...],
        points: tuple[Point, ...] = (),
        text: str = "",
        title: str = "",
    ) -> None:
        self.shapes.append(Shape(tag, attributes, points, text, clean(title, MAX_TITLE)))


def _is_number(words: str) -> bool:
    return len(words) <= _MAX_NUMBER and _NUMBER.fullmatch(words) is not None


def text_width(words: str, *, bold: bool = False) -> float:
    """Return about how wide words are in pixels, rather more than less."""
    return sum(_em(letter) for letter in words) * FONT_PX * (_BOLD if bold else 1)


def _em(letter: str) -> float:
    for width, letters in _WIDTHS:
        if letter in letters:
            return width
    if letter.islower() or letter in '_{}*$?"':
        return _LOWER
    return _FULL if ord(letter) > 0x2E80 else _OTHER


def fit(words: str, room: float, *, bold: bool = False) -> str:
    """Return printable words, cut with an ellipsis, before a number and never through it."""
    words = clean(words)
    if text_width(words, bold=bold) <= room:
        return words
    while words and text_width(words + "…", bold=bold) > room:
        words = words[:-1]
    words = _CUT_NUMBER.sub("", words).rstrip()
    return words + "…" if words else ""


def split_range(words: str, room: float) -> tuple[str, str]:
    """Return a range of two numbers as two lines where one of small type is wider than the room.

    The second is empty where one line is enough, and for words that are no such range.
    """
    if text_width(words) * SMALL_PX / FONT_PX <= room:
        return words, ""
    low, dash, high = words.partition("–")
    return (low + dash, high) if _is_number(low) and high[:1].isdigit() else (words, "")


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
        return self.left + self.width

    @property
    def bottom(self) -> float:
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


def span(values: Sequence[float], *, zero: bool = True) -> tuple[float, float]:
    """Return a range that holds the values with some room, and zero where asked."""
    ends = [*values, 0.0] if zero or not values else list(values)
    low, high = min(ends), max(ends)
    room = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
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
    # Adding zero turns the minus zero of floating point into a plain one.
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


_N_SHADES = 7
_SHADE_PX = 26


def shade(value: float, top: float) -> int:
    """Return the step of a value between zero and the top; 0 is the darkest."""
    return 0 if top <= 0 else max(0, min(_N_SHADES - 1, int(min(value / top, 1.0) * _N_SHADES)))


def shade_scale(p: Picture, x: float, top: float, *, beyond: bool = False) -> None:
    """Draw what the steps mean, from no loss to the top share, and whether some lie beyond."""
    p.text(x, 20, "share lost: 0 %")
    x += 110
    for step in range(_N_SHADES):
        p.box(x + _SHADE_PX * step, 9, _SHADE_PX, 13, f"shade{step}")
    p.text(x + _SHADE_PX * _N_SHADES + 8, 20, percent(top) + (" and more" if beyond else ""))
