"""Text for people: counts, sizes, times, and lines that no dataset can paint a terminal with."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

_LONG = re.compile(r"(\S{200})\S{100,}(\S{60})")

Style = Literal["title", "good", "bad", "warn", "dim", "plain"]


@dataclass(frozen=True)
class Line:
    """One line of a page, and its style on a terminal."""

    text: str
    style: Style = "plain"


def printable(text: str) -> str:
    """Return text without control characters: documents are untrusted, and terminals obey them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str) -> str:
    """Return text without the middle of words that are too long to be read."""
    return _LONG.sub(r"\1...\2", text)


def storable(text: str) -> str:
    """Return text that UTF-8 can hold: bytes of a path that are none stand as ``\\udcff``."""
    return text.encode("utf-8", "backslashreplace").decode()


def pairs(named: dict[str, str]) -> Iterable[Line]:
    """Yield one indented line per name and value, the values below each other."""
    width = max(len(key) for key in named)
    for key, value in named.items():
        yield Line(f"  {key.ljust(width)}  {value}")


def counted(n: int, noun: str) -> str:
    """Return a count with its noun: ``1 shard``, ``1,024 shards``."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def one_line(error: BaseException, limit: int) -> str:
    """Return what an error says in one line of at most ``limit`` characters, else its class."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


def format_nbytes(nbytes: float) -> str:
    """Return bytes in decimal units, three figures: ``834 B``, ``4.21 MB``, ``1.30 TB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.0f} B" if unit == "B" else f"{_three_figures(nbytes)} {unit}"
        nbytes /= 1000
    return f"{_three_figures(nbytes)} TB"


def _three_figures(value: float) -> str:
    return (
        f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    )


def format_rate(amount: float, seconds: float) -> str:
    """Return bytes per second, ``-`` for no time."""
    return f"{format_nbytes(amount / seconds)}/s" if seconds > 0 else "-"


def format_seconds(seconds: float) -> str:
    """Return a duration as people read it: ``8.4 s``, ``3:25``, ``2:03:25``."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def share(part: int, whole: int) -> str:
    """Return a share as a percentage; a part is never rounded to nothing or to all."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    if 0 < percent < 0.01:
        return "< 0.01 %"
    if 99.99 < percent < 100:
        return "> 99.99 %"
    return f"{percent:.2f} %"


def when(time_ns: int | None) -> str:
    """Return a wall clock time in UTC, to the second."""
    if time_ns is None:
        return "at an unknown time"
    try:
        stamp = datetime.fromtimestamp(time_ns // 10**9, UTC)
    except (OverflowError, ValueError):
        return f"at {time_ns} ns"
    return stamp.strftime("%Y-%m-%d %H:%M:%S UTC")
