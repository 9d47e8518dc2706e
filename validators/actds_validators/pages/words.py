"""What a page is made of: numbers as words, tables, sections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from actds.text import Style, printable
from actds_validators.audit.result import BOUND, EVIDENCE, Estimate, Level, Must, Number

Tone = Literal["", "good", "bad", "warn", "dim"]
T = TypeVar("T")
SIDES: dict[Must, str] = {"at most": "≤", "below": "<", "at least": "≥", "above": ">"}
GROUPS = {"system": "System", "content": "Content", "values": "Values"}
_MAX_DIGITS = 9
_MAX_WORD, _MAX_SENTENCE = 120, 1100  # bytes
_ESCAPED = frozenset("<>&\"'")


@dataclass(frozen=True)
class Look:
    """What repeats a level: a mark for readers without colour, the tone of a page, a style."""

    mark: str
    tone: Tone
    style: Style


LOOKS: dict[Level, Look] = {
    "PASS": Look("✓", "good", "good"),
    "WARN": Look("!", "warn", "warn"),
    "INCONCLUSIVE": Look("?", "dim", "title"),
    "FAIL": Look("✗", "bad", "bad"),
}


class Sentence(str):
    """Text that may be longer than a label."""

    __slots__ = ()


@dataclass(frozen=True)
class Fact:
    """A fact at the top of a page; where it is not known nothing is wrong with the data."""

    title: str
    value: str
    note: str
    is_known: bool = True


def clean(text: str, room: int | None = None) -> str:
    """Return text without control characters, cut where it is longer than any honest one.

    ``room`` is of bytes in the page, escaped; by default that of a label, or of a ``Sentence``.
    """
    if room is None:
        room = _MAX_SENTENCE if isinstance(text, Sentence) else _MAX_WORD
    # Cut first: a megabyte of control characters need not be spelt out.
    seen = printable(text[: room + 1])
    kept = used = 0
    for letter in seen:
        used += 5 if letter in _ESCAPED else len(letter.encode("utf-8", "replace"))
        kept += used <= room
    return seen if used <= room else seen[:kept] + "…"


def count(n: int) -> str:
    return f"{n:,}"


def number(value: float) -> str:
    """Return a number with four digits; a whole one as it is."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1e4:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3e}"
    return f"{value:.4g}"


def short(value: float, digits: int = 3) -> str:
    """Return a number in the room of a cell, with k, M or G."""
    if abs(value) >= 1e12:
        return f"{value:.{digits - 1}e}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # What rounds to 1,000 of one letter is one of the next; 0.9995 k is no letter's yet.
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.{digits}g}{letter}"
    return f"{value + 0.0:.{digits}g}"  # adding zero turns minus zero into a plain one


def apart(values: Sequence[float]) -> list[str]:
    """Return rising numbers as ``short`` does, with digits that tell neighbours apart."""
    words = []
    for k, value in enumerate(values):
        digits, near = 3, [*values[max(0, k - 1) : k], *values[k + 1 : k + 2]]
        while digits < _MAX_DIGITS and short(value, digits) in (short(v, digits) for v in near):
            digits += 1
        words.append(short(value, digits))
    return words


def percent(share: float) -> str:
    """Return a share in per cent; a part is never rounded to nothing or to all."""
    value = 100 * share + 0.0
    if 0 < value < 0.01:
        return "< 0.01 %"
    if -0.01 < value < 0:
        return "> -0.01 %"
    if 99.99 < value < 100:
        return "> 99.99 %"
    return f"{value:.2f} %" if 99.95 <= value < 100 else f"{value:.3g} %"


def p_value(p: float) -> str:
    return "< 0.0001" if p < 0.0001 else f"{p:.2g}"


def seconds(value: float) -> str:
    if value == 0:
        return "0 s"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"


def or_dash(value: T | None, say: Callable[[T], str]) -> str:
    return "-" if value is None else say(value)


def estimate(value: Estimate) -> str:
    return f"{thousandths(value.value)} {interval(value)}"


def interval(value: Estimate) -> str:
    return f"[{thousandths(value.low)}, {thousandths(value.high)}]"


def thousandths(value: float) -> str:
    """Return a number to a thousandth; a smaller one, or one from 100 on, with three digits."""
    if 0 < abs(value) < 0.001 or abs(value) >= 100:
        return short(value)
    return f"{value + 0.0:.3f}"


def signed(value: float, *, three: bool = False) -> str:
    """Return a number as ``thousandths`` does, or in three digits, with a sign but for zero."""
    words = short(value) if three else thousandths(value)
    return f"+{words}" if value > 0 else words


def measured(value: float | None, unit: str) -> str:
    """Return a value with its unit; shares in per cent, the p of a test as ``p_value``."""
    if value is None:
        return "-"
    if unit == "p":
        return p_value(value)
    if unit in ("share", "%"):
        return percent(value if unit == "share" else value / 100)
    return f"{number(value)} {unit}".rstrip()


def limit_of(judged: Number) -> str:
    limit = measured(judged.limit, judged.unit)
    return f"{SIDES[judged.must]} {limit}" if judged.must else limit


def against(judged: Number) -> str:
    return "no limit" if judged.limit is None else f"limit {limit_of(judged)}"


@dataclass(frozen=True)
class State:
    """What a number says beside its limit: a mark, a word, and a tone that repeats them."""

    mark: str
    words: str
    tone: Tone


def state_of(judged: Number, level: Level) -> State:
    """Return whether a number passes; too little evidence is no failure of the data.

    Under a verdict of PASS no number beyond its limit is a reason not to train.
    """
    if judged.ok is None:
        return State("-", "no limit", "dim")
    if judged.ok:
        return State("✓", "pass", "good")
    if judged.name.startswith(BOUND):
        return State("-", "above: the tests decide", "dim")
    if judged.name.startswith(EVIDENCE):
        return State("?", "too little evidence", "dim")
    if level == "PASS":
        return State("-", "outside, not decisive", "dim")
    return State("✗", "fail", "bad")


MAX_ROWS = 50
"""Rows of a table or a chart; the result holds them all."""
MAX_LIST = 8
"""Those on a terminal."""


@dataclass(frozen=True)
class Row:
    """A row of a table; the tone only repeats what the words say, a note is below the cells.

    The first cell is a link where ``href`` names a file beside the page.
    """

    cells: tuple[str, ...]
    tone: Tone = ""
    note: str = ""
    href: str = ""


@dataclass(frozen=True)
class Table:
    """A table with a caption; ``left`` names the columns of words.

    ``narrow`` tables wrap their words on a phone; all others of four columns or more keep their
    width there and scroll. ``brief``: how many columns and rows a terminal has.
    """

    caption: str
    head: tuple[str, ...]
    rows: Sequence[Row]
    left: frozenset[int] = frozenset({0})
    more: str = ""
    narrow: bool = False
    brief: tuple[int, int] | None = None

    @property
    def width(self) -> int:
        """Return the least width in pixels; 0 where it fits any window."""
        n = len(self.head)
        return 0 if self.narrow or n < 4 else 560 if n < 6 else 720 if n < 8 else 860


def first(items: Sequence[T], room: int = MAX_ROWS) -> tuple[list[T], str]:
    """Return the first items and a sentence on those left out, empty when none is."""
    left = len(items) - room
    return list(items[:room]), f"and {left:,} more, all in the result (--json)" if left > 0 else ""


Columns = Sequence[tuple[str, Callable[[T], str]]]
"""Headings, each with what its column says of an item."""


def table_of(
    caption: str,
    columns: Columns[T],
    items: Sequence[T],
    left: frozenset[int] = frozenset({0}),
    *,
    room: int = MAX_ROWS,
    tone: Callable[[T], Tone] = lambda item: "",
    note: Callable[[T], str] = lambda item: "",
    brief: tuple[int, int] | None = None,
    narrow: bool = False,
) -> list[Table]:
    """Return the table of the first items, a row each; nothing without one."""
    some, more = first(items, room)
    rows = [Row(tuple(say(item) for _, say in columns), tone(item), note(item)) for item in some]
    head = tuple(name for name, _ in columns)
    return [Table(caption, head, rows, left, more, narrow, brief)] if rows else []
