"""A picture by hand: shapes with numbers, classes and text, and no markup.

Under the charts; the template turns shapes into SVG and escapes them. Imports nothing but words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from actds_validators.report.words import clean

__all__ = ["WIDTH", "Anchor", "Picture", "Shape", "fit", "split_range", "text_width"]

Tag = Literal["line", "rect", "circle", "polyline", "polygon", "text"]
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
    """A drawing of ``width`` × ``height`` pixels with its title and description."""

    name: str
    title: str
    description: str
    width: float
    height: float
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
            words: anybody's.
            anchor: of the text.
            kind: classes; ``bold`` is wider.
            room: pixels; up to the edge of the picture by default.
            shorter: forms that say the same in less room, the longest first.
        """
        edge = {"start": self.width - x, "end": x, "middle": 2 * min(x, self.width - x)}[anchor]
        free = min(edge, room) if room is not None else edge
        forms, bold = [words, *shorter], "bold" in kind
        seen = next((f for f in forms if text_width(clean(f), bold=bold) <= free), None)
        place: tuple[tuple[str, float | str], ...] = (("x", x), ("y", y), ("text-anchor", anchor))
        if seen is None:
            kind, seen, squeezed = f"{kind} small".strip(), forms[-1], free * FONT_PX / SMALL_PX
            if text_width(clean(seen), bold=bold) > squeezed:
                if _is_number(seen):
                    place += (("textLength", free), ("lengthAdjust", "spacingAndGlyphs"))
                else:
                    seen = fit(seen, squeezed, bold=bold)
        title = words if seen != words else ""
        self._add("text", (*place, ("class", kind)), text=seen, title=title)

    def turned(self, x: float, y: float, words: str, room: float) -> None:
        """Write words from below to above, centred at a place."""
        move = f"translate({x:.1f} {y:.1f}) rotate(-90)"
        attributes = (("transform", move), ("text-anchor", "middle"))
        self._add("text", attributes, text=fit(words, room))

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str, title: str = "") -> None:
        """Draw a line."""
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
        """Draw a dot."""
        at = (("cx", x), ("cy", y), ("r", radius), ("class", kind))
        self._add("circle", at, title=title)

    def square(self, x: float, y: float, kind: str, title: str = "") -> None:
        """Draw a square mark."""
        self.box(x - 4, y - 4, 8, 8, kind, title)

    def diamond(self, x: float, y: float, kind: str, title: str = "") -> None:
        """Draw a diamond mark."""
        self.polygon([(x, y - 5.5), (x + 5.5, y), (x, y + 5.5), (x - 5.5, y)], kind, title)

    def path(self, points: Sequence[Point], kind: str, title: str = "") -> None:
        """Draw a line through points."""
        if len(points) > 1:
            self._add("polyline", (("class", kind),), tuple(points), title=title)

    def polygon(self, points: Sequence[Point], kind: str, title: str = "") -> None:
        """Draw an area."""
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
    """Return printable words, cut with an ellipsis where they are wider than the room.

    The cut goes before a number, never through it.
    """
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
