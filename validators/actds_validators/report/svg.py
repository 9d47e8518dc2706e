"""A picture by hand: shapes with numbers, classes and text, and no markup.

Under the charts; the template turns shapes into SVG and escapes them. Imports nothing but words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from actds_validators.report.words import clean

__all__ = ["Picture", "Shape", "fit", "text_width"]

Tag = Literal["line", "rect", "circle", "polyline", "polygon", "text"]
Anchor = Literal["start", "middle", "end"]
Point = tuple[float, float]
FONT_PX = 12.0
_EM = 0.6  # mean width of a letter in the widest common sans serif


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
    ) -> None:
        """Write words at a place; cut with an ellipsis where they are wider than the room."""
        edge = {"start": self.width - x, "end": x, "middle": 2 * min(x, self.width - x)}[anchor]
        seen = fit(words, min(edge, room) if room is not None else edge)
        title = words if seen != words else ""
        place: tuple[tuple[str, float | str], ...] = (("x", x), ("y", y), ("text-anchor", anchor))
        self.shapes.append(Shape("text", (*place, ("class", kind)), text=seen, title=title))

    def turned(self, x: float, y: float, words: str, room: float) -> None:
        """Write words from below to above, centred at a place."""
        move = f"translate({x:.1f} {y:.1f}) rotate(-90)"
        attributes = (("transform", move), ("text-anchor", "middle"))
        self.shapes.append(Shape("text", attributes, text=fit(words, room)))

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str, title: str = "") -> None:
        """Draw a line."""
        at = (("x1", x1), ("y1", y1), ("x2", x2), ("y2", y2), ("class", kind))
        self.shapes.append(Shape("line", at, title=title))

    def box(
        self, x: float, y: float, width: float, height: float, kind: str, title: str = ""
    ) -> None:
        """Draw a box; one without an extent is left out."""
        if width <= 0 or height <= 0:
            return
        at = (("x", x), ("y", y), ("width", width), ("height", height), ("class", kind))
        self.shapes.append(Shape("rect", at, title=title))

    def dot(self, x: float, y: float, kind: str, title: str = "", radius: float = 4) -> None:
        """Draw a dot."""
        at = (("cx", x), ("cy", y), ("r", radius), ("class", kind))
        self.shapes.append(Shape("circle", at, title=title))

    def square(self, x: float, y: float, kind: str, title: str = "") -> None:
        """Draw a square mark."""
        self.box(x - 4, y - 4, 8, 8, kind, title)

    def diamond(self, x: float, y: float, kind: str, title: str = "") -> None:
        """Draw a diamond mark."""
        self.polygon([(x, y - 5.5), (x + 5.5, y), (x, y + 5.5), (x - 5.5, y)], kind, title)

    def path(self, points: Sequence[Point], kind: str, title: str = "") -> None:
        """Draw a line through points."""
        if len(points) > 1:
            self.shapes.append(Shape("polyline", (("class", kind),), tuple(points), title=title))

    def polygon(self, points: Sequence[Point], kind: str, title: str = "") -> None:
        """Draw an area."""
        self.shapes.append(Shape("polygon", (("class", kind),), tuple(points), title=title))


def text_width(words: str, size: float = FONT_PX) -> float:
    """Return about how wide words are in pixels, rather more than less."""
    return sum((1.1 if ord(letter) > 0x2E80 else _EM) * size for letter in words)


def fit(words: str, room: float) -> str:
    """Return printable words, cut with an ellipsis where they are wider than the room."""
    words = clean(words)
    if text_width(words) <= room:
        return words
    while words and text_width(words + "…") > room:
        words = words[:-1]
    return words.rstrip() + "…" if words else ""
