"""What a page is made of: parts with a lead, pictures, tables and notes.

Between the charts and the template; knows no chart and no audit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from actds_validators.report.svg import Picture
from actds_validators.report.words import Sentence

__all__ = ["MAX_ROWS", "Absent", "Part", "Row", "Table", "first"]

MAX_ROWS = 50
"""Rows of a table or a chart; the result holds them all."""

Tone = Literal["", "good", "bad", "warn", "dim"]
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """A row of a table; the tone only repeats what the words say, a note stands below the cells."""

    cells: tuple[str, ...]
    tone: Tone = ""
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table with a caption; ``left`` names the columns of words."""

    caption: str
    head: tuple[str, ...]
    rows: Sequence[Row]
    left: frozenset[int] = frozenset({0})
    more: str = ""


@dataclass(frozen=True)
class Part:
    """A section of the page."""

    name: str
    title: str
    lead: Sentence
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[Sentence] = field(default_factory=list)


@dataclass(frozen=True)
class Absent:
    """A section that the result does not hold, and why in one sentence."""

    title: str
    why: Sentence


def first(items: Sequence[T], room: int = MAX_ROWS) -> tuple[list[T], str]:
    """Return the first items and a sentence on those left out, empty when none is."""
    left = len(items) - room
    return list(items[:room]), f"and {left:,} more, all in the result (--json)" if left > 0 else ""
